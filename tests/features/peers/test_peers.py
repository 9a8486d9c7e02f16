"""The nodes as a whole: watched, listed, and used, with played nodes that answer over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, ResolvedModel
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.catalog.v1_models import NodeListing, NodeModel
from llamasup.core.queueing.endpoint import BUSY, Endpoint, Lease
from llamasup.core.queueing.request_queue import QueueEntry
from llamasup.features.peers.groups import ModelGroup
from llamasup.features.peers.nodes import ExpectedModel, NodeState, Peer, ProbePolicy, Trouble
from llamasup.features.peers.nodes_backend import NodesBackend
from llamasup.features.peers.peers import Peers
from llamasup.features.peers.remote_model import RemoteModel, SharedModel
from llamasup.features.peers.static import StaticMembership
from llamasup.features.peers.watch import NodeWatch, address_of, tls_of
from tests.core.pool.replicas.replica_sets import served_model
from tests.kit.async_tests import async_test
from tests.kit.backends import entries_of, entry_of, node_answer
from tests.kit.patience import PATIENCE_S

READY = NodeModel("tale", ("story",), "ready", slots=2, entry={"id": "tale", "meta": {"n_ctx": 1}})


class PlayedNode:
    """Answers ``/v1/models`` as the test says."""

    def __init__(self) -> None:
        self.id = "n1"
        self.models: tuple[NodeModel, ...] = (READY,)
        self.status = 200
        self.body: bytes | None = None
        self.lines = b""  # more header lines
        self.asked: list[bytes] = []
        self.silent = False
        self.url = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            if self.silent:
                await reader.read()
                return
            body = node_answer(self.id, self.models) if self.body is None else self.body
            head = b"HTTP/1.1 %d X\r\n%bConnection: close\r\nContent-Length: %d\r\n\r\n" % (
                self.status,
                self.lines,
                len(body),
            )
            writer.write(head + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class HereOnly:
    """The catalog of this node, with the models of ``here``."""

    node = "me"

    def __init__(self) -> None:
        self.here: dict[str, ResolvedModel] = {}
        self.pool = SimpleNamespace(managed_models={})

    def add(self, *names: str) -> None:
        self.here |= dict.fromkeys(names, ResolvedModel(names))
        self.pool.managed_models[names[0]] = SimpleNamespace(served=served_model())

    def model_named(self, name: str) -> ResolvedModel | None:
        return self.here.get(name)

    def is_exact(self, name: str) -> bool:
        return name in self.here

    def resolve(self, model: str | None, *, create: bool = False) -> Any:
        found = self.here.get(model or "")
        return (
            HttpError(404, "unknown")
            if found is None
            else SimpleNamespace(model=found, listed=lambda: self._listed(found.id))
        )

    def readiness(self) -> None:
        return None

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        return map(self._listed, dict.fromkeys(model.id for model in self.here.values()))

    def _listed(self, id_: str) -> ListedModel:
        return ListedModel(self.here[id_], lambda model: {"id": model.id, "llamasup": {"state": "stopped"}})


class Fleet:
    def __init__(self, peers: Peers, catalog: HereOnly, membership: StaticMembership) -> None:
        self.peers = peers
        self.catalog = catalog
        self.membership = membership
        self.backend = NodesBackend(cast("Catalog", catalog), peers)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.005)

    async def becomes(self, name: str, state: NodeState) -> None:
        await self.until(lambda: self.state(name) is state)

    def wait_less_for_answers(self) -> None:
        """From the next question on. Before, a node that answers late on a busy machine must not count."""
        for watch in self.peers._watches.values():
            watch._policy = msgspec.structs.replace(watch._policy, timeout_s=0.1)

    def state(self, name: str) -> NodeState:
        return next(known.state for known in self.peers.nodes if known.peer.name == name)

    def listed(self) -> dict[str, Any]:
        return {entry["id"]: entry for entry in entries_of(self.backend)}


@asynccontextmanager
async def fleet_of(
    *nodes: PlayedNode, here: tuple[str, ...] = (), timeout_s: float = 2.0, membership: Any = None
) -> AsyncIterator[Fleet]:
    for node in nodes:
        if not node.url:
            await node.start()
    catalog = HereOnly()
    if here:
        catalog.add(*here)
    static = StaticMembership(
        tuple(Peer(f"node{number}", node.url, key="secret") for number, node in enumerate(nodes))
    )
    peers = Peers(
        static if membership is None else membership,
        cast("Catalog", catalog),
        timeout_s=60.0,
        max_waiting=8,
        policy=ProbePolicy(interval_s=0.02, busy_interval_s=0.01, timeout_s=timeout_s, failures=2),
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peers.run())
        try:
            await peers.begun()
            yield Fleet(peers, catalog, static)
        finally:
            running.cancel()
    for node in nodes:
        await node.stop()


@async_test
async def test_models_of_a_node_are_listed_and_found_in_any_spelling() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        assert b"X-Llamasup-Node: me" in node.asked[0]
        assert b"Authorization: Bearer secret" in node.asked[0]
        for name in ("tale", "story", "TALE.gguf"):
            route = fleet.backend.resolve(name)
            assert not isinstance(route, HttpError)
            assert route.model.id == "tale"
        assert isinstance(fleet.backend.resolve("tale", local=True), HttpError)
        unnamed = fleet.backend.resolve(None)
        assert isinstance(unnamed, HttpError)
        assert unnamed.remedy == 'set "model" to tale'
        assert isinstance(fleet.backend.resolve("other"), HttpError)
        entry = fleet.listed()["tale"]
        assert entry["meta"] == {"n_ctx": 1}
        assert entry["status"] == {"value": "loaded"}
        assert entry["llamasup"] == {"default": False, "nodes": ["node0"]}
        assert entry_of(fleet.backend, "tale") == entry
        assert entries_of(fleet.backend, lambda model: False) == []
        (shown,) = fleet.peers.status()
        assert (shown["name"], shown["state"], shown["models"][0]["slots"]) == ("node0", "ready", 2)


@pytest.mark.check("X8")
@async_test
async def test_many_models_of_a_node_are_applied_while_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work for one model does not grow with their number, and between slices others have their turn."""
    updates: list[int] = []
    turns = 0
    update = RemoteModel.update

    def counted(model: RemoteModel, *args: Any) -> None:
        updates.append(turns)
        update(model, *args)

    monkeypatch.setattr(RemoteModel, "update", counted)
    node = PlayedNode()
    names = [f"m{number}" for number in range(950)]
    node.models = tuple(NodeModel(name, busy=1) for name in names)

    loop = asyncio.get_running_loop()
    turn = loop.call_soon(lambda: None)

    def take_turn() -> None:
        nonlocal turns, turn
        turns += 1
        turn = loop.call_soon(take_turn)

    turn = loop.call_soon(take_turn)
    async with fleet_of(node) as fleet:
        assert len(updates) == len(names)
        assert max(Counter(updates).values()) <= 100
        assert fleet.peers.nodes[0].requests == len(names)
        updates.clear()
        node.models = tuple(NodeModel(name, busy=2) for name in names)
        await fleet.until(lambda: len(updates) >= len(names))
        assert max(Counter(updates).values()) <= 100
        assert len(fleet.listed()) == len(names)
    turn.cancel()


@async_test
async def test_last_of_two_changes_at_once_is_applied_whole() -> None:
    node, other = PlayedNode(), PlayedNode()
    other.id = "n2"
    node.models = tuple(NodeModel(f"m{number}") for number in range(450))
    other.models = tuple(NodeModel(f"o{number}") for number in range(450))
    async with fleet_of(node, other) as fleet:
        assert len(fleet.peers.routes) == 900
        node.models, other.models = node.models[:1], other.models[:2]
        await fleet.until(lambda: len(fleet.peers.routes) == 3)
        fleet.peers.refresh()
        assert fleet.peers.routes.keys() == {"m0", "o0", "o1"}


@async_test
async def test_node_with_too_many_models_says_so() -> None:
    node = PlayedNode()
    node.models = tuple(NodeModel(f"m{number}") for number in range(1003))
    async with fleet_of(node) as fleet:
        (known,) = fleet.peers.nodes
        assert known.state is NodeState.READY
        assert known.reason == "It lists 3 models too many"


@async_test
async def test_model_of_a_node_that_is_away_is_listed_with_the_state_of_the_node() -> None:
    node = PlayedNode()
    told = {"status": {"value": "loaded"}, "llamasup": {"state": "ready", "context": 8}}
    node.models = (msgspec.structs.replace(READY, entry={**READY.entry, **told}),)
    async with fleet_of(node) as fleet:
        assert fleet.listed()["tale"]["llamasup"]["state"] == "ready"
        node.silent = True
        fleet.wait_less_for_answers()
        for state in (NodeState.SILENT, NodeState.ABSENT):
            await fleet.becomes("node0", state)
            entry = fleet.listed()["tale"]
            assert entry["status"] == {"value": "unloaded"}
            assert entry["llamasup"] == {
                "state": state.value,
                "context": 8,
                "default": False,
                "nodes": ["node0"],
            }
        node.silent = False
        await fleet.becomes("node0", NodeState.READY)
        assert fleet.listed()["tale"]["status"] == {"value": "loaded"}
        loading = {**told, "status": {"value": "loading"}}
        node.models = (NodeModel("tale", state="loading", entry=loading),)
        await fleet.until(lambda: fleet.listed()["tale"]["status"] == {"value": "loading"})
        fleet.peers.ask_stop(now=False)
        fleet.membership.replace(())
        await fleet.until(lambda: not fleet.peers.nodes)
        assert fleet.listed()["tale"]["llamasup"]["state"] == "absent"


@async_test
async def test_own_model_is_shared_with_the_node_that_has_it_too() -> None:
    async with fleet_of(PlayedNode(), here=("tale", "mine")) as fleet:
        route = fleet.backend.resolve("tale")
        assert not isinstance(route, HttpError)
        assert isinstance(route.served, SharedModel)
        assert not isinstance(fleet.backend.resolve("mine"), HttpError)
        assert fleet.peers.routes.keys() == {"tale"}  # the aliases differ
        assert fleet.listed()["tale"]["llamasup"] == {"state": "stopped", "nodes": ["node0"]}
        assert entry_of(fleet.backend, "tale") == fleet.listed()["tale"]
        before = route.served
        fleet.peers.refresh()
        assert fleet.peers.routes["tale"].served is before
        remote = fleet.peers.find("tale")
        assert remote is not None
        before.lease(infers=True)
        why = fleet.peers.why(remote, {"model": "tale", "sentences": ["x"]})
        assert why["sentences"][0] == "x"
        assert "The last request went elsewhere" in why["sentences"][-1]


class Waits:
    """A request in the queue."""

    def __init__(self, model: RemoteModel, body: bytes) -> None:
        self.body = body
        self.at: Endpoint | None = None
        assert model.lease(infers=True, body=body) is BUSY
        assert model.queue.enter(QueueEntry(self, 0.0, len(body))) is None

    def served(self, lease: Lease) -> None:
        self.at = lease.endpoint

    def refused(self, why: HttpError) -> None:
        raise AssertionError(why)


def talk(*turns: str) -> bytes:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    return msgspec.json.encode({"model": "tale", "messages": messages})


@async_test
async def test_waiting_request_goes_to_the_node_that_has_its_conversation() -> None:
    first, second = PlayedNode(), PlayedNode()
    second.id = "n2"
    for node in (first, second):
        node.models = (msgspec.structs.replace(READY, slots=1),)
    async with fleet_of(first, second) as fleet:
        model = fleet.peers.find("tale")
        assert model is not None
        await fleet.until(lambda: len(model.warm) == 2)
        one, other = (model.lease(infers=True, body=talk(name, "x")) for name in ("one", "other"))
        assert isinstance(one, Lease)
        assert isinstance(other, Lease)
        of_other, of_one = Waits(model, talk("other", "x", "y")), Waits(model, talk("one", "x", "y"))
        one.release()
        assert (of_other.at, of_one.at) == (None, one.endpoint)
        other.release()
        assert of_other.at is other.endpoint


@async_test
async def test_load_of_a_node_changes_its_permits() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        model = fleet.peers.find("tale")
        assert model is not None
        (endpoint,) = model.endpoints.values()
        node.models = (msgspec.structs.replace(READY, slots=5),)
        await fleet.until(lambda: endpoint.max_concurrent == 5)
        assert not endpoint.closed
        lease = model.lease(infers=True)
        assert isinstance(lease, Lease)
        assert fleet.peers.in_flight == 1
        gauges = fleet.peers.gauges()
        assert (gauges.states, gauges.in_flight) == ({"node0": "ready"}, {"node0": 1})
        assert gauges.queued == {"tale": 0}
        fleet.peers.ask_stop(now=False)
        assert isinstance(model.lease(infers=True), HttpError)
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(fleet.peers.drained(PATIENCE_S))
            await asyncio.sleep(0)
            assert not drained.done()
            lease.release()
        await fleet.peers.drained(PATIENCE_S)


@async_test
async def test_stop_at_once_ends_the_requests_on_other_nodes() -> None:
    async with fleet_of(PlayedNode()) as fleet:
        model = fleet.peers.find("tale")
        assert model is not None
        lease = model.lease(infers=True)
        assert isinstance(lease, Lease)
        ended: list[HttpError] = []
        lease.on_revoked(ended.append)
        await fleet.peers.drained(0.0)  # the time is over, and a warning says so
        fleet.peers.ask_stop(now=True)
        assert len(ended) == 1


@async_test
async def test_new_process_of_a_node_gets_new_connections() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        model = fleet.peers.find("tale")
        assert model is not None
        (before,) = model.endpoints.values()
        node.id = "n2"
        await fleet.until(lambda: before.closed)
        (after,) = model.endpoints.values()
        assert after.generation > before.generation


@async_test
async def test_model_that_a_node_no_longer_has_is_unknown() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        node.models = ()
        await fleet.until(lambda: isinstance(fleet.backend.resolve("tale"), HttpError))
        assert fleet.peers.find("tale") is None


@async_test
async def test_own_pause_is_no_silence_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = NodeListing("n1", (READY,))
    asked = 0

    async def ask(_client: object) -> NodeListing:
        nonlocal asked
        asked += 1
        if asked == 1:
            time.sleep(0.5)  # noqa: ASYNC251 - this process, far beyond the time for the answer
            await asyncio.sleep(PATIENCE_S)
        return listing

    monkeypatch.setattr("llamasup.features.peers.watch._ask", ask)
    listings: asyncio.Queue[NodeListing] = asyncio.Queue()
    troubles: list[Trouble] = []
    watch = NodeWatch(
        Peer("desk", "http://127.0.0.1:1"),
        "me",
        ProbePolicy(interval_s=PATIENCE_S, timeout_s=0.05),
        on_listing=listings.put,
        on_trouble=troubles.append,
        is_urgent=lambda: False,
    )
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(PATIENCE_S):
        watching = tasks.create_task(watch.run())
        assert await listings.get() == listing
        watching.cancel()
    assert (troubles, asked) == ([], 2)


@async_test
async def test_silent_node_is_left_out_and_comes_back() -> None:
    node = PlayedNode()
    async with fleet_of(node, timeout_s=0.2) as fleet:
        await fleet.becomes("node0", NodeState.READY)
        node.silent = True
        await fleet.becomes("node0", NodeState.ABSENT)
        why = fleet.peers.find("tale")
        assert why is not None
        refused = why.lease(infers=True)
        assert isinstance(refused, HttpError)
        assert (refused.cause, refused.queueable) == ("node_absent", True)
        (shown,) = fleet.peers.status()
        assert shown["models"][0]["state"] == "absent"
        node.silent = False
        await fleet.becomes("node0", NodeState.READY)


@async_test
async def test_addresses_of_this_node_and_of_a_known_one_get_no_requests() -> None:
    first, again, me = PlayedNode(), PlayedNode(), PlayedNode()
    me.id = "me"
    async with fleet_of(first, again, me) as fleet:
        assert [known.state for known in fleet.peers.nodes] == [
            NodeState.READY,
            NodeState.DUPLICATE,
            NodeState.SELF,
        ]


@pytest.mark.parametrize(
    ("status", "body", "state", "reason"),
    [
        (401, b"{}", NodeState.REFUSED, "does not accept our key"),
        (200, b'{"object":"list"}', NodeState.REFUSED, "does not answer like a llamasup node"),
        (500, b"", NodeState.ABSENT, "it answers 500"),
    ],
)
def test_other_answers_are_no_listing(status: int, body: bytes, state: NodeState, reason: str) -> None:
    @async_test
    async def run() -> None:
        node = PlayedNode()
        node.status, node.body = status, body
        async with fleet_of(node) as fleet:
            await fleet.becomes("node0", state)
            (known,) = fleet.peers.nodes
            assert reason in known.reason

    run()


@async_test
async def test_large_and_broken_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.features.peers.watch._MAX_BYTES", 10)
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        await fleet.becomes("node0", NodeState.REFUSED)
        assert "more than" in fleet.peers.nodes[0].reason


@pytest.mark.check("X8")
@async_test
async def test_compressed_list_is_no_listing() -> None:
    node = PlayedNode()
    node.body = gzip.compress(b'{"node": "n"}')
    node.lines = b"Content-Encoding: gzip\r\n"
    async with fleet_of(node) as fleet:
        await fleet.becomes("node0", NodeState.REFUSED)
        assert "does not answer like a llamasup node" in fleet.peers.nodes[0].reason


@pytest.mark.check("X8")
@async_test
async def test_list_in_many_tiny_pieces_is_refused() -> None:
    node = PlayedNode()
    content = node_answer("n1", (READY,)) + b" " * 400
    node.body = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    node.lines = b"Transfer-Encoding: chunked\r\n"
    async with fleet_of(node) as fleet:
        await fleet.becomes("node0", NodeState.REFUSED)
        assert "too many pieces" in fleet.peers.nodes[0].reason


@async_test
async def test_list_in_pieces_is_read() -> None:
    node = PlayedNode()
    content = node_answer("n1", (READY,))
    node.body = b"".join(b"1\r\n%c\r\n" % byte for byte in content[:256]) + b"0\r\n\r\n"
    assert len(content) <= 256
    node.lines = b"Transfer-Encoding: chunked\r\n"
    async with fleet_of(node) as fleet:
        await fleet.becomes("node0", NodeState.READY)


@async_test
async def test_membership_may_change_at_any_time() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        fleet.membership.replace(())
        await fleet.until(lambda: not fleet.peers.nodes)
        assert fleet.peers.routes == {}
        fleet.membership.replace((Peer("again", node.url), Peer("off", "http://127.0.0.1:1")))
        await fleet.until(lambda: len(fleet.peers.nodes) == 2)
        await fleet.becomes("again", NodeState.READY)
        await fleet.becomes("off", NodeState.ABSENT)
        assert "nothing listens" in fleet.peers.nodes[1].reason


class OnDemand(StaticMembership):
    """Starts a node for ``big`` when it is wanted."""

    def __init__(self) -> None:
        super().__init__(())
        self.asked: list[tuple[str, int]] = []

    def expected(self) -> tuple[ExpectedModel, ...]:
        return (ExpectedModel("big", message="No replica runs"),)

    def wanted(self, model: str, waiting: int) -> None:
        self.asked.append((model, waiting))


@async_test
@pytest.mark.parametrize("membership", [None, OnDemand])
async def test_node_that_is_replaced_by_another_needs_no_start_by_hand(
    membership: Callable[[], OnDemand] | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = None if membership is None else membership()
    node = PlayedNode()
    async with fleet_of(node, membership=source) as fleet:
        if source is not None:
            source.replace((Peer("node0", node.url),))
        await fleet.until(lambda: fleet.peers.nodes)
        await fleet.becomes("node0", NodeState.READY)
        await node.stop()
        await fleet.until(lambda: "gets no requests: nothing listens there." in caplog.text)
    assert ("Start llamasup on that node" in caplog.text) is (membership is None)


@async_test
async def test_request_for_an_expected_model_is_reported_to_the_membership() -> None:
    from llamasup.core.queueing.request_queue import QueueEntry
    from tests.features.peers.test_remote_model import Waits

    membership = OnDemand()
    async with fleet_of(membership=membership) as fleet:
        assert fleet.listed()["big"]["status"] == {"value": "unloaded"}
        model = fleet.peers.find("big")
        assert model is not None
        entry = QueueEntry(Waits(), 0.0, 2)
        assert model.queue.enter(entry) is None
        assert membership.asked == [("big", 1)]
        model.queue.leave(entry)
        assert membership.asked[-1] == ("big", 0)
        assert fleet.peers.why(model, None)["sentences"] == ["No replica runs."]


def test_waiting_time_for_a_node_that_starts_passes() -> None:
    now_s = 100.0
    model = RemoteModel(
        ModelGroup(ResolvedModel(("big",)), {}),
        timeout_s=60.0,
        max_waiting=8,
        on_wanted=lambda: None,
        on_idle=lambda: None,
        clock=lambda: now_s,
    )

    def eta_s(expected: ExpectedModel) -> float | None:
        model.update(ModelGroup(ResolvedModel(("big",)), {}, expected=expected), {}, lambda _: None)
        state = model.serving()
        assert isinstance(state, HttpError)
        assert state.retry_after_s is not None
        assert state.retry_after_s >= 1.0
        return state.eta_s

    starts = ExpectedModel("big", eta_s=6.0, ready_at_s=106.0)
    assert eta_s(ExpectedModel("big", eta_s=6.0)) == 6.0
    assert eta_s(starts) == 6.0
    now_s = 104.0
    assert eta_s(starts) == 2.0
    now_s = 110.0
    assert eta_s(starts) is None, "it takes longer than the last start"
    assert eta_s(ExpectedModel("big", eta_s=6.0)) == 6.0
    now_s = 104.0
    assert eta_s(starts) == 2.0
    model.close(HttpError(404, "The model 'big' does not exist any more"))
    state = model.serving()
    assert isinstance(state, HttpError)
    assert (state.status, state.retry_after_s, state.eta_s) == (404, None, None)


def test_url_of_a_node_has_its_port() -> None:
    assert address_of(Peer("a", "https://desk.example.net")).authority == "desk.example.net:443"
    assert address_of(Peer("a", "http://[::1]:8080")).authority == "[::1]:8080"
    with pytest.raises(ValueError, match="not the URL of a node"):
        address_of(Peer("a", "ftp://x"))


def test_only_https_has_a_context() -> None:
    assert tls_of(Peer("a", "http://[::1]:8080")) is None
    assert tls_of(Peer("a", "https://desk.example.net")) is not None


@async_test
async def test_same_number_of_waiting_requests_is_reported_once() -> None:
    from llamasup.core.queueing.request_queue import QueueEntry
    from tests.features.peers.test_remote_model import Waits

    membership = OnDemand()
    async with fleet_of(membership=membership) as fleet:
        model = fleet.peers.find("big")
        assert model is not None
        entry = QueueEntry(Waits(), 0.0, 2)
        assert model.queue.enter(entry) is None
        fleet.peers.refresh()
        assert membership.asked == [("big", 1)]
        model.queue.leave(entry)


async def busy_model(fleet: Fleet) -> tuple[RemoteModel, Lease]:
    """The model of ``node0``, which has a request."""
    await fleet.becomes("node0", NodeState.READY)
    model = fleet.peers.find("tale")
    assert model is not None
    lease = model.lease(infers=True)
    assert isinstance(lease, Lease)
    return model, lease


@async_test
async def test_leaving_node_gets_no_new_request_and_keeps_those_it_has() -> None:
    async with fleet_of(PlayedNode()) as fleet:
        model, lease = await busy_model(fleet)
        (peer,) = fleet.membership.current()
        fleet.membership.replace((msgspec.structs.replace(peer, leaving=True),))
        await fleet.until(lambda: not model.is_warm)
        assert isinstance(model.lease(infers=True), HttpError)
        assert not lease.endpoint.closed
        lease.release()


@async_test
async def test_node_that_is_no_longer_listed_finishes_its_requests_and_is_forgotten() -> None:
    async with fleet_of(PlayedNode()) as fleet:
        model, lease = await busy_model(fleet)
        fleet.membership.replace(())
        await fleet.until(lambda: not model.is_warm)
        why = model.lease(infers=True)
        assert isinstance(why, HttpError)
        assert (why.status, why.queueable) == (404, False)
        assert not lease.endpoint.closed
        (status,) = fleet.peers.status()
        assert (status["state"], status["models"][0]["state"]) == ("leaving", "leaving")
        assert fleet.peers.gauges().states == {"node0": "leaving"}
        lease.release()
        await fleet.until(lambda: not fleet.peers.nodes)
        assert fleet.peers.find("tale") is None


@async_test
async def test_node_that_is_no_longer_listed_and_does_not_answer_loses_its_requests() -> None:
    node = PlayedNode()
    async with fleet_of(node) as fleet:
        model, lease = await busy_model(fleet)
        fleet.membership.replace(())
        await fleet.until(lambda: not model.is_warm)
        node.silent = True
        fleet.wait_less_for_answers()
        await fleet.until(lambda: not fleet.peers.nodes)
        assert lease.endpoint.closed


@async_test
async def test_node_that_is_listed_again_gets_requests_again() -> None:
    async with fleet_of(PlayedNode()) as fleet:
        model, lease = await busy_model(fleet)
        peers = fleet.membership.current()
        fleet.membership.replace(())
        await fleet.until(lambda: not model.is_warm)
        fleet.membership.replace(peers)
        await fleet.until(lambda: model.is_warm)
        lease.release()
        assert [known.peer.leaving for known in fleet.peers.nodes] == [False]


@async_test
async def test_requests_that_wait_for_a_busy_node_are_reported_too() -> None:
    from llamasup.core.queueing.request_queue import QueueEntry
    from tests.features.peers.test_remote_model import Waits

    node = PlayedNode()
    await node.start()
    membership = OnDemand()
    async with fleet_of(node, membership=membership) as fleet:
        node.models = (msgspec.structs.replace(READY, id="big", aliases=()),)
        membership.replace((Peer("node0", node.url),))
        await fleet.until(lambda: (big := fleet.peers.find("big")) is not None and big.is_warm)
        model = fleet.peers.find("big")
        assert model is not None
        leases = [model.lease(infers=True), model.lease(infers=True)]
        entry = QueueEntry(Waits(), 0.0, 2)
        assert model.queue.enter(entry) is None
        await fleet.until(lambda: membership.asked[-1:] == [("big", 1)])
        model.queue.leave(entry)
        await fleet.until(lambda: membership.asked[-1:] == [("big", 0)])
        for lease in leases:
            assert isinstance(lease, Lease)
            lease.release()
