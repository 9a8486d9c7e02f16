"""What is known of a node after its answers and failures."""

from __future__ import annotations

import pytest

from llamasup.core.pool.catalog.v1_models import NodeListing, NodeModel
from llamasup.features.peers.nodes import (
    KnownNode,
    NodeState,
    Peer,
    ProbePolicy,
    Trouble,
    answered,
    failed,
    first_of_same,
    same_names,
)

POLICY = ProbePolicy(failures=3)
SILENCE = Trouble("no answer within 2 s")
DESK = KnownNode(Peer("desk", "http://127.0.0.1:1", key="secret"))


def listing(node: str = "n1", *models: NodeModel) -> NodeListing:
    return NodeListing(node, models)


@pytest.mark.check("X13")
def test_repr_of_a_peer_hides_its_key() -> None:
    assert repr(DESK.peer) == "<Peer desk at http://127.0.0.1:1>"


def test_node_that_answers_gets_requests() -> None:
    known = answered(DESK, listing(), "own")
    assert known.gets_requests
    assert known.keeps_requests
    assert known.restarts == 0


def test_answer_of_a_new_process_counts_as_a_restart() -> None:
    known = answered(answered(DESK, listing("n1"), "own"), listing("n2"), "own")
    assert known.restarts == 1


def test_node_with_our_own_id_is_this_node() -> None:
    known = answered(DESK, listing("own"), "own")
    assert known.state is NodeState.SELF
    assert known.listing is None
    assert not known.gets_requests


def test_silent_node_keeps_its_requests_until_it_counts_as_absent() -> None:
    known = failed(answered(DESK, listing(), "own"), SILENCE, POLICY)
    assert (known.state, known.gets_requests, known.keeps_requests) == (NodeState.SILENT, False, True)
    known = failed(known, SILENCE, POLICY)
    assert known.state is NodeState.SILENT
    known = failed(known, SILENCE, POLICY)
    assert (known.state, known.keeps_requests) == (NodeState.ABSENT, False)
    assert known.listing is not None  # its models are still known
    assert answered(known, listing(), "own").failures == 0


def test_node_where_nothing_listens_is_absent_at_once() -> None:
    ready = answered(DESK, listing(), "own")
    assert failed(ready, Trouble("refused", gone=True), POLICY).state is NodeState.ABSENT


def test_node_that_only_a_person_can_correct_is_refused() -> None:
    assert failed(DESK, Trouble("wrong key", final=True), POLICY).state is NodeState.REFUSED


def test_node_that_has_not_answered_yet_is_being_connected() -> None:
    assert failed(DESK, SILENCE, POLICY).state is NodeState.CONNECTING


def test_only_the_first_of_two_addresses_of_a_process_gets_requests() -> None:
    first = answered(DESK, listing("n1"), "own")
    second = answered(KnownNode(Peer("door", "http://127.0.0.1:2")), listing("n1"), "own")
    third = KnownNode(Peer("off", "http://127.0.0.1:3"))
    found = first_of_same((first, second, third))
    assert [known.state for known in found] == [NodeState.READY, NodeState.DUPLICATE, NodeState.CONNECTING]
    assert "'desk'" in found[1].reason


def test_a_change_of_the_load_alone_keeps_the_names() -> None:
    idle = answered(DESK, listing("n1", NodeModel("a")), "own")
    busy = answered(DESK, listing("n1", NodeModel("a", busy=1)), "own")
    other = answered(DESK, listing("n1", NodeModel("b")), "own")
    assert same_names(idle, busy)
    assert not same_names(idle, other)
    assert not same_names(DESK, idle)
    assert same_names(DESK, DESK)
