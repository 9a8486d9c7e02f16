"""Which models the nodes have together, and which node serves or loads one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from llamasup.core.http.routes import Work
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.catalog.v1_models import NodeListing, NodeModel
from llamasup.features.peers.groups import (
    ModelGroup,
    cold_choice,
    explain_nodes,
    groups_of,
    warm,
    why_not_served,
)
from llamasup.features.peers.nodes import ExpectedModel, KnownNode, NodeState, Peer, answered


def node(name: str, *models: NodeModel, state: NodeState = NodeState.READY, reason: str = "") -> KnownNode:
    listing = NodeListing(f"id of {name}", models)
    if state is NodeState.READY:
        return answered(KnownNode(Peer(name, f"http://{name}")), listing, "me")
    return KnownNode(
        Peer(name, f"http://{name}"), state, reason, "start it" if reason else "", listing=listing
    )


def ready(id_: str, *aliases: str, slots: int = 2, busy: int = 0) -> NodeModel:
    return NodeModel(id_, aliases, "ready", slots=slots, busy=busy)


def nothing_here(name: str) -> ResolvedModel | None:
    return None


def here(*models: ResolvedModel) -> Mapping[str, ResolvedModel]:
    return {name: model for model in models for name in model.names}


def names(groups: tuple[ModelGroup, ...]) -> list[tuple[str, ...]]:
    return [group.model.names for group in groups]


def test_models_with_one_id_are_one_model() -> None:
    (group,) = groups_of((node("desk", ready("a")), node("shelf", ready("a"))), (), nothing_here)
    assert list(group.nodes) == ["desk", "shelf"]
    assert not group.is_local


def test_an_alias_counts_if_all_nodes_with_the_model_know_it() -> None:
    found = groups_of((node("desk", ready("a", "x", "y")), node("shelf", ready("a", "y"))), (), nothing_here)
    assert names(found) == [("a", "y")]


def test_an_alias_that_is_another_id_or_was_taken_first_does_not_count() -> None:
    found = groups_of((node("desk", ready("a", "b", "x"), ready("b", "x")),), (), nothing_here)
    assert names(found) == [("a", "x"), ("b",)]


def test_a_name_of_this_node_leads_to_its_model() -> None:
    own = here(ResolvedModel(("own", "a"), (Work.TEXT,)), ResolvedModel(("b", "x"), (Work.EMBEDDINGS,)))
    found = groups_of((node("desk", ready("a"), ready("b", "x", "own"), ready("c", "own")),), (), own.get)
    assert names(found) == [("b", "x"), ("c",)]
    assert found[0].is_local
    assert found[0].model.works == (Work.EMBEDDINGS,)


def test_the_works_of_all_nodes_count() -> None:
    text, vector = NodeModel("a", works=(Work.TEXT,)), NodeModel("a", works=(Work.EMBEDDINGS,))
    (group,) = groups_of((node("desk", text), node("shelf", vector)), (), nothing_here)
    assert group.model.works == (Work.TEXT, Work.EMBEDDINGS)


def test_a_node_that_never_answered_and_a_second_address_add_nothing() -> None:
    silent = KnownNode(Peer("new", "http://new"))
    twice = node("twice", ready("b"), state=NodeState.DUPLICATE)
    assert groups_of((silent, twice), (), nothing_here) == ()


def test_an_expected_model_has_a_group_without_nodes() -> None:
    expected = ExpectedModel("big", ("large",), "No replica runs", eta_s=30.0)
    (group,) = groups_of((), (expected,), nothing_here)
    assert group.model.names == ("big", "large")
    assert group.model.works == tuple(Work)
    why = why_not_served(group, {})
    assert (why.message, why.queueable, why.eta_s, why.retry_after_s) == ("No replica runs", True, 30.0, 30.0)
    assert explain_nodes(group, {}, 2).sentences == (
        "No replica runs.",
        "2 requests wait for these nodes.",
    )


def group_of(*nodes: KnownNode) -> tuple[ModelGroup, dict[str, KnownNode]]:
    (group,) = groups_of(nodes, (), nothing_here)
    return group, {known.peer.name: known for known in nodes}


def test_warm_nodes_are_ready_and_have_the_model_loaded() -> None:
    group, nodes = group_of(
        node("desk", ready("a")),
        node("shelf", ready("a"), state=NodeState.SILENT),
        node("attic", NodeModel("a")),
    )
    assert warm(group, nodes) == ("desk",)
    assert warm(group, {}) == ()


def test_cold_model_loads_where_it_loads_already() -> None:
    group, nodes = group_of(
        node("desk", NodeModel("a")),
        node("shelf", NodeModel("a", state="loading", eta_s=9.0)),
        node("attic", NodeModel("a", state="loading", eta_s=5.0, percent=50.0)),
    )
    assert cold_choice(group, nodes) == "attic"
    why = why_not_served(group, nodes)
    assert (why.cause, why.queueable) == ("loading", True)


def test_cold_model_loads_on_the_node_with_the_fewest_requests() -> None:
    group, nodes = group_of(node("desk", NodeModel("a", queued=3)), node("shelf", NodeModel("a", busy=1)))
    assert cold_choice(group, nodes) == "shelf"
    group, nodes = group_of(node("desk", NodeModel("a", state="failed")), node("off", NodeModel("a")))
    assert cold_choice(group, {"desk": nodes["desk"]}) is None


def test_model_that_no_node_can_load_is_refused() -> None:
    group, nodes = group_of(node("desk", NodeModel("a", state="broken", problem="The file is truncated")))
    why = why_not_served(group, nodes)
    assert (why.message, why.queueable) == ("The file is truncated", False)
    assert explain_nodes(group, nodes, 0).sentences == (
        "The node 'desk' cannot load it: The file is truncated.",
    )
    group, nodes = group_of(node("desk", NodeModel("a", state="failed")))
    assert why_not_served(group, nodes).message == "The node 'desk' cannot load the model 'a'"


def test_requests_wait_for_a_node_that_may_come_back() -> None:
    group, nodes = group_of(node("desk", ready("a"), state=NodeState.ABSENT, reason="nothing listens there"))
    why = why_not_served(group, nodes)
    assert (why.cause, why.queueable, why.retry_after_s) == ("node_absent", True, 2.0)
    found = explain_nodes(group, nodes, 1)
    assert found.sentences == (
        "The node 'desk' has it, but gets no requests: nothing listens there.",
        "1 request waits for these nodes.",
    )
    assert found.change == ("Start it.",)


def test_requests_do_not_wait_for_nodes_that_refuse_us() -> None:
    group, nodes = group_of(node("desk", ready("a"), state=NodeState.REFUSED))
    why = why_not_served(group, nodes)
    assert (why.queueable, why.retry_after_s) == (False, None)
    assert explain_nodes(group, {}, 0).sentences == ("The node 'desk' has it, but gets no requests.",)


def test_request_for_a_model_of_a_removed_node_waits_for_one_that_has_not_answered_yet() -> None:
    group, nodes = group_of(node("desk", ready("a")))
    leaving = replace(nodes["desk"], peer=replace(nodes["desk"].peer, leaving=True))
    new = KnownNode(Peer("shelf", "http://shelf"))
    assert why_not_served(group, {"desk": leaving}).status == 404
    why = why_not_served(group, {"desk": leaving, "shelf": new})
    assert (why.status, why.queueable, why.retry_after_s) == (503, True, 2.0)
    why = why_not_served(group, {"desk": leaving, "shelf": replace(new, state=NodeState.ABSENT)})
    assert why.status == 404


def test_model_of_a_node_that_was_removed_does_not_exist() -> None:
    group, _ = group_of(node("desk", ready("a")))
    assert why_not_served(group, {}).status == 404


def test_sentences_say_how_busy_or_far_a_node_is() -> None:
    group, nodes = group_of(
        node("desk", ready("a", busy=1)), node("shelf", NodeModel("a", state="loading", percent=43.0))
    )
    assert explain_nodes(group, nodes, 0).sentences == (
        "The node 'desk' has it loaded: 1 of 2 slots are busy.",
        "On the node 'shelf' it is loading (43 %).",
    )
    group, nodes = group_of(node("desk", NodeModel("a")))
    assert explain_nodes(group, nodes, 0).sentences == ("On the node 'desk' it is stopped.",)
