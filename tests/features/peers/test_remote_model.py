"""Whether this node or another gets a request for a model that both have."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.catalog.v1_models import NodeModel
from llamasup.core.queueing.endpoint import BUSY, Lease, NodeLink
from llamasup.core.queueing.request_queue import QueueEntry
from llamasup.core.queueing.wait_estimate import ServedLoad
from llamasup.core.settings.model import NO_REPAIRS, Repairs
from llamasup.core.supervision.states import Policy
from llamasup.features.peers.groups import ModelGroup, Where, choose_side
from llamasup.features.peers.nodes import KnownNode, NodeState, Peer
from llamasup.features.peers.remote_model import NodeAddress, RemoteModel, SharedModel
from tests.core.pool.replicas.replica_sets import LOADING, Replica, served_model
from tests.kit.async_tests import async_test

WARM, COLD = NodeModel("tiny", state="ready", slots=1), NodeModel("tiny")


class Both:
    """This node with one process, and the node ``desk``."""

    def __init__(self, listed: NodeModel = WARM) -> None:
        self.here = served_model()
        self.replica = Replica(self.here, max_concurrent=1)
        self.elsewhere = RemoteModel(
            ModelGroup(ResolvedModel(("tiny",)), {}),
            timeout_s=60.0,
            max_waiting=8,
            on_wanted=lambda: None,
            on_idle=lambda: None,
        )
        self.served = SharedModel(self.here, self.elsewhere)
        self.lists(listed)

    def lists(self, listed: NodeModel, state: NodeState = NodeState.READY) -> None:
        link = NodeLink("desk", b"desk", b"me", lambda: None)
        nodes = {"desk": KnownNode(Peer("desk", "http://x"), state)}
        self.elsewhere.update(
            ModelGroup(ResolvedModel(("tiny",)), {"desk": listed}, is_local=True),
            nodes,
            lambda name: NodeAddress(UnixAddress("/nowhere"), "", link),
        )
        self.served.reconsider()

    def where(self, body: bytes = b"") -> Where | HttpError:
        lease = self.served.lease(infers=True, body=body)
        if isinstance(lease, HttpError):
            return lease
        return Where.HERE if lease.endpoint.node is None else Where.ELSEWHERE


class Waits:
    body = b"{}"

    def __init__(self) -> None:
        self.lease: Lease | None = None

    def served(self, lease: Lease) -> None:
        self.lease = lease

    def refused(self, why: HttpError) -> None:
        raise AssertionError(why)


def said(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


@async_test
async def test_this_node_goes_first_then_the_other_then_the_shorter_queue() -> None:
    both = Both()
    both.replica.becomes_ready()
    assert [both.where() for _ in range(3)] == [Where.HERE, Where.ELSEWHERE, BUSY]
    assert both.served.queue is both.here.queue
    assert both.served.last is not None


@async_test
async def test_requests_for_both_sides_are_repaired_as_this_node_says() -> None:
    both = Both()
    assert both.served.repairs is NO_REPAIRS
    both.here.apply_policy(Policy(repairs=Repairs(tool_calls=True)))
    assert [both.where(), both.served.repairs] == [Where.ELSEWHERE, Repairs(tool_calls=True)]
    assert both.elsewhere.repairs is NO_REPAIRS


@async_test
async def test_full_queue_takes_no_more_requests_unless_a_slot_is_free() -> None:
    both = Both()
    for side in (both.here, both.elsewhere):
        side.queue.set_limits(timeout_s=60.0, max_waiting=0)
    assert not both.here.load().can_serve
    both.replica.becomes_ready()
    assert both.here.load().can_serve
    assert both.elsewhere.load().can_serve
    assert [both.where() for _ in range(2)] == [Where.HERE, Where.ELSEWHERE]
    assert not both.here.load().can_serve
    assert not both.elsewhere.load().can_serve
    both.here.queue.set_limits(timeout_s=60.0, max_waiting=1)
    assert both.here.load().can_serve


@async_test
async def test_full_queue_for_a_node_that_loads_takes_no_more_requests() -> None:
    both = Both(COLD)
    both.elsewhere.queue.set_limits(timeout_s=60.0, max_waiting=1)
    assert both.elsewhere.load().can_serve
    lease = both.elsewhere.lease(infers=True)
    assert isinstance(lease, Lease)
    assert both.elsewhere.load().can_serve
    both.elsewhere.queue.set_limits(timeout_s=60.0, max_waiting=0)
    assert not both.elsewhere.load().can_serve


@async_test
async def test_conversation_goes_back_to_the_node_that_has_it_in_its_cache() -> None:
    both = Both()
    both.replica.becomes_ready()
    text = said("a long story " * 20)
    lease = both.elsewhere.lease(infers=True, body=text)
    assert isinstance(lease, Lease)
    lease.release()
    assert both.where(text) is Where.ELSEWHERE
    assert both.served.last is not None
    assert "cache" in both.served.last.reason


@async_test
async def test_request_without_a_permit_stays_here() -> None:
    both = Both()
    both.replica.becomes_ready()
    lease = both.served.lease()
    assert isinstance(lease, Lease)
    assert lease.endpoint.node is None


@async_test
async def test_loaded_model_elsewhere_is_used_while_this_node_loads_it() -> None:
    both = Both()
    both.replica.why = LOADING
    assert both.where() is Where.ELSEWHERE


@async_test
async def test_cold_model_is_loaded_here() -> None:
    both = Both(COLD)
    both.here.remove(both.replica)
    both.here.explain(LOADING)
    assert both.where() is LOADING
    assert both.served.queue is both.here.queue


@async_test
async def test_model_that_cannot_be_loaded_here_is_loaded_elsewhere() -> None:
    both = Both(COLD)
    both.here.remove(both.replica)
    both.here.explain(HttpError(503, "it does not fit"))
    assert both.where() is Where.ELSEWHERE  # one request loads it there
    both.lists(NodeModel("tiny", state="loading", eta_s=3.0))
    why = both.where()
    assert isinstance(why, HttpError)
    assert why.eta_s == 3.0
    assert both.served.queue is both.elsewhere.queue


@async_test
async def test_requests_that_wait_for_a_lost_node_wait_here() -> None:
    both = Both()
    waits = Waits()
    held = both.elsewhere.lease(infers=True)
    assert isinstance(held, Lease)
    entry = QueueEntry(waits, 0.0, 2)
    assert both.elsewhere.queue.enter(entry) is None
    both.lists(WARM, NodeState.ABSENT)
    assert (len(both.elsewhere.queue), len(both.here.queue)) == (0, 1)
    assert both.elsewhere.queue.outlook(entry).position == 1  # where it waits now
    both.replica.becomes_ready()
    assert waits.lease is not None
    assert waits.lease.endpoint.node is None


@async_test
async def test_client_that_leaves_leaves_the_queue_that_it_was_moved_to() -> None:
    both = Both()
    assert isinstance(both.elsewhere.lease(infers=True), Lease)
    entry = QueueEntry(Waits(), 0.0, 2)
    both.elsewhere.queue.enter(entry)
    both.lists(WARM, NodeState.ABSENT)
    both.elsewhere.queue.leave(entry)
    assert len(both.here.queue) == 0


@async_test
async def test_node_that_just_broke_a_request_does_not_count() -> None:
    both = Both()
    both.replica.becomes_ready()
    assert both.where() is Where.HERE
    both.elsewhere.endpoints["desk"].ejected_until_s = float("inf")
    assert both.where() is BUSY
    assert both.served.queue is both.here.queue


@async_test
async def test_load_is_that_of_the_side_where_a_request_would_go() -> None:
    both = Both()
    assert both.served.load() == both.elsewhere.load() == ServedLoad(1, 1)
    both.replica.becomes_ready()
    assert both.served.load() == both.here.load()
    assert both.here.load().free == 1
    assert both.where() is Where.HERE
    assert both.served.load() == ServedLoad(1, 1)  # the other node
    both.lists(COLD)
    assert both.elsewhere.load() == ServedLoad()
    assert both.served.load() == both.here.load()
    assert both.here.load().free == 0


@async_test
async def test_load_says_whether_a_model_is_being_loaded_or_cannot_serve() -> None:
    both = Both(COLD)
    both.replica.why = LOADING
    assert both.here.load().loads
    both.lists(COLD, NodeState.ABSENT)
    assert not both.elsewhere.load().slots
    assert not both.elsewhere.load().loads


HERE, ELSEWHERE = Where.HERE, Where.ELSEWHERE
AWAY = ServedLoad()


@pytest.mark.parametrize(
    ("here", "elsewhere", "where"),
    [
        (ServedLoad(2, 1), ServedLoad(8, 8), HERE),  # a free slot here
        (ServedLoad(2, 0), ServedLoad(2, 1), ELSEWHERE),
        (AWAY, ServedLoad(2, 1), ELSEWHERE),  # loaded elsewhere
        (
            ServedLoad(2, 0, waiting=3),
            ServedLoad(4, 0, waiting=3),
            ELSEWHERE,
        ),  # the shorter queue for each slot
        (ServedLoad(2, 0, waiting=1), ServedLoad(2, 0, waiting=1), HERE),
        (ServedLoad(2, 0, waiting=9), AWAY, HERE),  # only here
        (AWAY, ServedLoad(2, 0, waiting=9), ELSEWHERE),
        (ServedLoad(can_serve=False), AWAY, ELSEWHERE),
        (ServedLoad(can_serve=False), ServedLoad(can_serve=False), HERE),
        (ServedLoad(loads=True, eta_s=9.0), ServedLoad(loads=True, eta_s=3.0), ELSEWHERE),
        (ServedLoad(loads=True), ServedLoad(loads=True, eta_s=3.0), HERE),
        (ServedLoad(loads=True, eta_s=3.0), ServedLoad(loads=True), HERE),
        (AWAY, ServedLoad(loads=True), ELSEWHERE),
        (AWAY, ServedLoad(loads=True, can_serve=False), HERE),
        (ServedLoad(loads=True), AWAY, HERE),
        (AWAY, AWAY, HERE),
        (
            ServedLoad(2, 0, waiting=4, can_serve=False),
            ServedLoad(1, 0, waiting=4),
            ELSEWHERE,
        ),  # a full queue
        (ServedLoad(1, 0, waiting=4), ServedLoad(2, 0, waiting=4, can_serve=False), HERE),
        (ServedLoad(2, 0, can_serve=False), AWAY, ELSEWHERE),
    ],
)
def test_request_goes_where_it_is_served_first(here: ServedLoad, elsewhere: ServedLoad, where: Where) -> None:
    choice = choose_side(here, elsewhere)
    assert choice.where is where
    assert choice.reason
