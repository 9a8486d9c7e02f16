"""Requests to other llamasup nodes, whose part the test plays."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec.structs import replace

from llamasup._version import __version__
from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError, error_response
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.catalog.v1_models import NodeListing, NodeModel
from llamasup.core.queueing.endpoint import NodeLink, generation_ended
from llamasup.core.queueing.suspects import Suspects
from llamasup.features.peers.groups import ModelGroup
from llamasup.features.peers.nodes import KnownNode, NodeState, Peer
from llamasup.features.peers.peers import NodeRoute
from llamasup.features.peers.remote_model import NodeAddress, RemoteModel, SharedModel
from tests.core.pool.replicas.replica_sets import LOADING, Replica, served_model
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, error_of, eventually, field, post, status
from tests.kit.backends import Unlisted

NAMES = ("desk", "shelf")
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\n\r\nno!!"


class Backend(Unlisted):
    """One model on two nodes."""

    def __init__(self, folder: Path, *, slots: int = 1) -> None:
        self.folder = folder
        self.suspected: list[str] = []
        self.replaced = False
        self.served = RemoteModel(
            ModelGroup(ResolvedModel(("tiny",)), {}),
            timeout_s=60.0,
            max_waiting=8,
            on_wanted=lambda: None,
            on_idle=lambda: None,
        )
        self.model = ResolvedModel(("tiny",))
        self.states = dict.fromkeys(NAMES, NodeState.READY)
        self.listings = dict.fromkeys(NAMES, NodeModel("tiny", state="ready", slots=slots))
        self.update()

    def update(self) -> None:
        nodes = {
            name: KnownNode(Peer(name, "http://x"), self.states[name], listing=NodeListing(name))
            for name in NAMES
        }
        self.served.update(ModelGroup(self.model, self.listings), nodes, self._address)

    def _address(self, name: str) -> NodeAddress:
        link = NodeLink(
            name,
            f"{name}.test".encode(),
            b"front",
            lambda: self.suspected.append(name),
            replaced=self.replaced,
        )
        return NodeAddress(UnixAddress(str(self.folder / f"{name}.sock")), f"key of {name}", link)

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Self:
        return self


class Two:
    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.sockets = {name: rig.listen(str(folder / f"{name}.sock")) for name in NAMES}
        self.backend = rig.call(lambda: Backend(folder))
        rig.proxy.backend = self.backend

    def accept(self, name: str) -> Wire:
        return self.rig.keep(Wire(self.sockets[name].accept()[0]))

    def becomes(self, name: str, state: NodeState) -> None:
        def change() -> None:
            self.backend.states[name] = state
            self.backend.update()

        self.rig.call(change)

    def lists(self, name: str, model: NodeModel) -> None:
        def change() -> None:
            self.backend.listings = {**self.backend.listings, name: model}
            self.backend.update()

        self.rig.call(change)


@pytest.fixture
def two(rig: Rig, tmp_path: Path) -> Iterator[Two]:
    made = Two(rig, tmp_path)
    yield made
    for sock in made.sockets.values():
        sock.close()


def test_node_gets_its_own_key_our_id_and_the_id_of_the_request(two: Two) -> None:
    lines = b"Authorization: Bearer client", b"X-Request-Id: r1", b"X-Llamasup-Priority: low"
    client = two.rig.send(post(CHAT, b"{}", *lines))
    node = two.accept("desk")
    head, body = node.message()
    assert body == b"{}"
    assert field(head, b"authorization") == b"Bearer key of desk"
    assert head.count(b"uthorization") == 1
    assert field(head, b"host") == b"desk.test"
    assert field(head, b"x-request-id") == b"r1"
    assert field(head, b"x-llamasup-node") == b"front"
    assert field(head, b"x-llamasup-priority") == b"low"
    node.send(answer(b"from desk"))
    assert client.message()[1] == b"from desk"


def test_request_that_a_node_refuses_goes_to_another(two: Two) -> None:
    for refusal in (BUSY, REFUSED):
        client = two.rig.send(post(CHAT, b"{}"))
        first = two.accept("desk")
        first.message()
        first.send(refusal)
        second = two.accept("shelf")
        assert second.message()[1] == b"{}"
        second.send(answer(b"from shelf", b"Connection: close"))
        assert client.message()[1] == b"from shelf"
        assert two.rig.record().replayed
        two.becomes("desk", NodeState.ABSENT)  # a new endpoint forgets that this one refused
        two.becomes("desk", NodeState.READY)


def test_request_that_has_ended_servers_of_a_node_goes_to_no_other(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    error = Suspects(b"").refuse(b"", 0.0, generation_ended("it aborted"))
    node.send(error_response(error, close=False))
    assert error_of(client, 503)["cause"] == "poison_request"
    assert not two.rig.record().replayed


@pytest.fixture
def shared(two: Two, tmp_path: Path) -> Iterator[tuple[Two, Replica, Wire, socket.socket]]:
    """This node has the model too. Its only slot is busy with a request, whose child this is."""
    sock = two.rig.listen(str(tmp_path / "here.sock"))

    def share() -> Replica:
        here = served_model()
        replica = Replica(here, str(tmp_path / "here.sock"), max_concurrent=1)
        replica.becomes_ready()
        served = SharedModel(here, two.backend.served)
        two.rig.proxy.backend = Shared(two.backend, served)
        return replica

    two.becomes("shelf", NodeState.ABSENT)
    replica = two.rig.call(share)
    two.rig.send(post(CHAT, b"first"))
    child = two.rig.keep(Wire(sock.accept()[0]))
    child.message()
    yield two, replica, child, sock
    sock.close()


class Shared(Backend):
    def __init__(self, backend: Backend, served: SharedModel) -> None:
        self.model, self.shared = backend.model, served

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Any:
        return NodeRoute(self.model, self.shared, self.listed)


@pytest.mark.parametrize("loaded", [True, False])
def test_request_that_a_stopping_node_refuses_is_served_here(
    shared: tuple[Two, Replica, Wire, socket.socket], *, loaded: bool
) -> None:
    two, replica, child, here = shared
    client = two.rig.send(post(CHAT, b"second"))
    node = two.accept("desk")  # the slot here is busy
    assert node.message()[1] == b"second"
    if not loaded:
        child.send(answer(b"done"))
        two.rig.record()
        two.rig.call(lambda: replica.becomes(LOADING))
    stops = b'{"error":{"cause":"stopping"}}'
    node.send(answer(stops, code=b"503 Service Unavailable"))
    eventually(lambda: two.rig.call(lambda: len(replica.queue) == 1))
    if loaded:
        child.send(answer(b"done"))
    else:
        two.rig.call(replica.becomes_ready)
        child = two.rig.keep(Wire(here.accept()[0]))
    assert child.message()[1] == b"second"
    child.send(answer(b"by this node"))
    assert client.message()[1] == b"by this node"


def test_request_of_a_batch_that_a_node_refuses_goes_to_another(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}", b"X-Llamasup-Priority: batch"))
    first = two.accept("desk")
    first.message()
    first.send(BUSY)
    second = two.accept("shelf")
    second.message()
    second.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_batch_that_waits_for_clients_of_the_only_node_gave_way(two: Two) -> None:
    two.becomes("shelf", NodeState.ABSENT)
    client = two.rig.send(post(CHAT, b"{}", b"X-Llamasup-Priority: batch"))
    node = two.accept("desk")
    node.message()
    node.send(answer(b"waits", code=b"503 Service Unavailable"))
    assert client.message()[1] == b"waits"
    assert two.rig.record().outcome == "gave_way"


def test_refusal_of_the_only_node_is_for_the_client(two: Two) -> None:
    two.becomes("shelf", NodeState.ABSENT)
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    node.send(BUSY)
    head, body = client.message()
    assert (status(head), body) == (429, b"full")


def test_request_that_the_only_node_refuses_waits_for_the_node_that_replaces_it(two: Two) -> None:
    two.becomes("desk", NodeState.ABSENT)
    two.becomes("shelf", NodeState.ABSENT)
    two.backend.replaced = True
    two.becomes("desk", NodeState.READY)
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    node.send(BUSY)
    assert node.sees_the_end()
    assert two.backend.suspected == ["desk"]
    two.becomes("desk", NodeState.ABSENT)
    two.becomes("shelf", NodeState.READY)
    second = two.accept("shelf")
    second.message()
    second.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_wrong_key_for_the_only_node_is_no_fault_of_the_client(two: Two) -> None:
    two.becomes("shelf", NodeState.ABSENT)
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    node.send(REFUSED)
    head, body = client.message()
    assert status(head) == 502
    assert b"the node 'desk' does not accept our key" in body
    assert node.sees_the_end()


def test_error_that_is_no_refusal_is_passed_on(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    node.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nbad")
    head, body = client.message()
    assert (status(head), body) == (400, b"bad")


def test_node_that_dies_before_its_answer_is_suspected_and_replaced(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}"))
    first = two.accept("desk")
    first.message()
    first.close()
    second = two.accept("shelf")
    second.message()
    second.send(answer(b"from shelf"))
    assert client.message()[1] == b"from shelf"
    assert two.backend.suspected == ["desk"]


def test_node_that_closes_an_idle_connection_is_suspected(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}"))
    node = two.accept("desk")
    node.message()
    node.send(answer(b"from desk"))
    client.message()
    assert two.backend.suspected == []
    node.close()
    eventually(lambda: two.backend.suspected == ["desk"])


def test_node_that_cannot_be_reached_is_suspected_and_replaced(two: Two) -> None:
    two.sockets["desk"].close()
    client = two.rig.send(post(CHAT, b"{}"))
    second = two.accept("shelf")
    second.message()
    second.send(answer(b"from shelf"))
    assert client.message()[1] == b"from shelf"
    assert two.backend.suspected[0] == "desk"


def test_no_more_requests_are_sent_than_the_nodes_have_slots(two: Two) -> None:
    clients = [two.rig.send(post(CHAT, b"%d" % number)) for number in range(3)]
    nodes = [two.accept(name) for name in NAMES]
    for node in nodes:
        node.message()
    eventually(lambda: two.rig.call(lambda: len(two.backend.served.queue)) == 1)
    two.lists("desk", NodeModel("tiny", state="ready", slots=2))  # its config was changed
    third = two.accept("desk")
    assert third.message()[1] == b"2"
    for node in (*nodes, third):
        node.send(answer(b"done"))
    assert [client.message()[1] for client in clients] == [b"done"] * 3


def test_one_request_goes_to_a_node_that_has_to_load_the_model(two: Two) -> None:
    two.becomes("shelf", NodeState.ABSENT)
    two.lists("desk", NodeModel("tiny"))
    clients = [two.rig.send(post(CHAT, b"%d" % number)) for number in range(2)]
    first = two.accept("desk")
    assert first.message()[1] == b"0"
    eventually(lambda: two.rig.call(lambda: len(two.backend.served.queue)) == 1)
    assert two.rig.call(lambda: two.backend.served.awaits_load)
    two.lists("desk", NodeModel("tiny", state="loading", percent=40.0, eta_s=6.0))
    why = two.rig.call(two.backend.served.serving)
    assert isinstance(why, HttpError)
    assert (why.percent, why.eta_s) == (40.0, 6.0)
    two.lists("desk", NodeModel("tiny", state="ready", slots=2))
    second = two.accept("desk")
    assert second.message()[1] == b"1"
    for node, client in zip((first, second), clients, strict=True):
        node.send(answer(b"done"))
        assert client.message()[1] == b"done"


def test_waiting_request_survives_the_absence_of_every_node(two: Two) -> None:
    for name in NAMES:
        two.becomes(name, NodeState.ABSENT)
    client = two.rig.send(post(CHAT, b"{}"))
    eventually(lambda: two.rig.call(lambda: len(two.backend.served.queue)) == 1)
    two.becomes("shelf", NodeState.READY)
    node = two.accept("shelf")
    node.message()
    node.send(answer(b"back"))
    assert client.message()[1] == b"back"


def test_request_without_an_answer_moves_when_its_node_counts_as_absent(two: Two) -> None:
    client = two.rig.send(post(CHAT, b"{}"))
    two.accept("desk").message()
    two.becomes("desk", NodeState.SILENT)
    assert two.rig.call(lambda: two.backend.served.endpoints["desk"].in_flight) == 1
    two.becomes("desk", NodeState.ABSENT)
    second = two.accept("shelf")
    second.message()
    second.send(answer(b"from shelf"))
    assert client.message()[1] == b"from shelf"


def test_new_process_of_a_node_gets_new_connections(two: Two) -> None:
    before = two.rig.call(lambda: two.backend.served.endpoints["desk"])

    def restart() -> None:
        backend = two.backend
        nodes = {"desk": KnownNode(Peer("desk", "http://x"), NodeState.READY, restarts=1)}
        backend.served.update(
            ModelGroup(backend.model, {"desk": backend.listings["desk"]}), nodes, backend._address
        )

    two.rig.call(restart)
    assert before.closed
    assert two.rig.call(lambda: list(two.backend.served.endpoints)) == ["desk"]
    assert two.rig.call(lambda: not two.backend.served.endpoints["desk"].closed)


def test_node_without_an_address_gets_no_requests(two: Two) -> None:
    def lose() -> None:
        backend = two.backend
        backend.states = dict.fromkeys(NAMES, NodeState.ABSENT)
        backend.update()
        nodes = {"desk": KnownNode(Peer("desk", "http://x"), NodeState.READY)}
        backend.served.update(ModelGroup(backend.model, backend.listings), nodes, lambda name: None)

    two.rig.call(lose)
    assert two.rig.call(lambda: two.backend.served.endpoints) == {}


def test_context_of_the_node_is_known(two: Two) -> None:
    two.lists("desk", replace(two.backend.listings["desk"], ctx_size=512))
    window = two.rig.call(lambda: two.backend.served.endpoints["desk"].window)
    assert window is not None
    assert window.n_ctx == 512


def test_another_node_gets_the_models_of_this_one(two: Two) -> None:
    client = two.rig.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Llamasup-Node: other\r\n\r\n")
    head, body = client.message()
    assert (status(head), body) == (200, b'{"node":"me","models":[],"version":"%b"}' % __version__.encode())


def test_head_of_an_answer_for_another_node_repeats(rig: Rig) -> None:
    """So that node recognizes it without its parser."""
    heads = []
    client = rig.send(post(CHAT, b"{}", b"X-Llamasup-Node: other"))
    child = rig.accept()
    for number in range(2):
        if number:
            client.send(post(CHAT, b"{}", b"X-Llamasup-Node: other"))
        assert b"x-llamasup-node" not in child.message()[0].lower()
        child.send(answer(b"done"))
        heads.append(client.message()[0])
    assert heads[0] == heads[1]
    assert b"Request-Id" not in heads[0]
