from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llamasup.fleet.directory_table import GONE_AFTER_S, ROOM_AFTER_S, DirectoryTable
from llamasup.fleet.messages import SETTLED_AFTER_S, FleetNode, ListedModel, NodeLoad, NodeReport, Poll

TINY = ListedModel("tiny", ("gpt-tiny",))
NODE = NodeReport("tiny@a", "https://192.0.2.1:1", "tiny")


def started(*models: ListedModel) -> DirectoryTable:
    return DirectoryTable(models or (TINY,), "PEM", now_s=0.0, first_version=100)


def settled() -> DirectoryTable:
    table = started()
    assert table.expire(SETTLED_AFTER_S)
    return table


def poll(table: DirectoryTable, now_s: float, front: str = "front", seen: int = 0, **waiting: int) -> bool:
    return table.poll(Poll(front, "nonce", seen, waiting), now_s)


def test_report_of_a_new_node_changes_the_snapshot_and_the_next_does_not() -> None:
    table = started()
    assert table.report(NODE, 1.0)
    assert not table.report(NODE, 2.0)
    assert table.snapshot(2.0).nodes == (FleetNode("tiny@a", "https://192.0.2.1:1", "tiny"),)
    assert table.snapshot(2.0).models == (TINY,)
    assert table.nodes() == ((NODE, False),)


def test_node_with_another_address_changes_the_snapshot() -> None:
    table = started()
    table.report(NODE, 1.0)
    assert table.report(NodeReport("tiny@a", "https://192.0.2.1:2", "tiny"), 2.0)


def test_snapshot_settles_once_all_nodes_had_time_to_report() -> None:
    table = started()
    assert not table.expire(SETTLED_AFTER_S - 0.1)
    assert not table.snapshot(1.0).settled
    assert table.expire(SETTLED_AFTER_S)
    assert not table.expire(SETTLED_AFTER_S + 1)
    assert table.snapshot(SETTLED_AFTER_S).settled


def test_node_without_reports_is_forgotten() -> None:
    table = settled()
    table.report(NODE, 10.0)
    assert not table.expire(10.0 + GONE_AFTER_S)
    assert table.expire(10.1 + GONE_AFTER_S)
    assert table.snapshot(50.0).nodes == ()


def test_leaving_node_stays_listed_until_it_has_ended() -> None:
    table = settled()
    table.report(NODE, 6.0)
    table.leave(NODE, 7.0)
    assert [node.leaving for node in table.snapshot(7.0).nodes] == [True]
    assert not table.report(NODE, 8.0), "its next report does not bring it back"
    assert [node.leaving for node in table.snapshot(8.0).nodes] == [True]
    assert table.end("tiny@a", 9.0)
    assert not table.end("tiny@a", 9.0)
    assert table.snapshot(9.0).nodes == ()


def test_directory_that_has_just_started_lists_a_node_that_leaves() -> None:
    table = started()
    table.leave(NODE, 1.0)
    assert [node.leaving for node in table.snapshot(1.0).nodes] == [True]
    assert not table.all_have_seen(table.version), "fronts that have not polled yet may send it requests"


def test_node_may_end_when_all_fronts_have_seen_that_it_leaves() -> None:
    table = settled()
    table.report(NODE, 6.0)
    poll(table, 6.0, "a", table.version)
    poll(table, 6.0, "b", table.version)
    table.leave(NODE, 7.0)
    poll(table, 7.1, "a", table.version)
    assert not table.all_have_seen(table.version)
    poll(table, 7.2, "b", table.version)
    assert table.all_have_seen(table.version)


def test_front_that_no_longer_polls_is_not_waited_for() -> None:
    table = settled()
    poll(table, 6.0, "a", 0)
    table.report(NODE, 50.0)
    table.expire(52.0)
    assert table.all_have_seen(table.version)


def test_models_without_nodes_are_wanted_by_the_sum_of_all_fronts() -> None:
    table = settled()
    poll(table, 6.0, "a", tiny=2, unknown=9)
    poll(table, 6.0, "b", tiny=1)
    assert table.wanted() == {"tiny": 3}
    table.report(NODE, 7.0)
    assert table.wanted() == {}
    table.leave(NODE, 8.0)
    assert table.wanted() == {"tiny": 3}


def test_time_of_the_last_start_from_zero_estimates_the_next() -> None:
    table = settled()
    poll(table, 10.0, tiny=1)
    assert table.snapshot(10.0).models[0].eta_s is None
    table.report(NODE, 14.0)
    table.end("tiny@a", 15.0)
    poll(table, 20.0, tiny=1)
    assert table.snapshot(21.0).models[0].eta_s == 3.0
    assert table.snapshot(30.0).models[0].eta_s is None


def test_all_fronts_learn_that_a_start_has_begun_or_is_wanted_no_more() -> None:
    table = settled()
    assert not poll(table, 9.0, "b")
    before = table.version
    assert poll(table, 10.0, "a", tiny=1)
    assert table.version > before
    assert table.snapshot(10.0).models[0].starts
    assert not poll(table, 11.0, "b", tiny=1), "it is known already"
    assert not poll(table, 12.0, "a")
    assert poll(table, 13.0, "b")
    assert not table.snapshot(13.0).models[0].starts


def test_time_of_a_start_that_failed_before_is_not_known() -> None:
    table = settled()
    poll(table, 10.0, tiny=1)
    table.report(NODE, 14.0)
    table.end("tiny@a", 15.0)
    table.note_problem("tiny", "The file is missing.")
    assert table.snapshot(20.0).models[0].eta_s is None


def test_want_that_ends_does_not_count_as_a_start() -> None:
    table = settled()
    poll(table, 10.0, tiny=1)
    poll(table, 11.0)
    table.report(NODE, 100.0)
    assert table.snapshot(100.0).models[0].eta_s is None


def test_node_that_expires_while_it_leaves_is_forgotten() -> None:
    table = settled()
    table.leave(NODE, 6.0)
    assert table.expire(7.0 + GONE_AFTER_S)
    assert table.report(NODE, 60.0)
    assert [node.leaving for node in table.snapshot(60.0).nodes] == [False]


def test_demand_is_how_many_times_its_slots_a_node_would_need() -> None:
    assert NodeLoad(slots=4, busy=3, queued=3).demand == 1.5
    assert NodeLoad(slots=4, busy=4, waiting=36.0).demand == 10.0
    assert NodeLoad().demand == 0


def test_requests_that_wait_at_fronts_are_shared_by_the_nodes_of_their_model() -> None:
    table = settled()
    poll(table, 6.0, "a", tiny=6)
    poll(table, 6.0, "b", tiny=3)
    assert table.backlog("tiny@a") == 0.0, "it is not known"
    table.report(NODE, 7.0)
    assert table.backlog("tiny@a") == 9.0
    table.report(NodeReport("tiny@b", "https://192.0.2.2:1", "tiny"), 7.0)
    table.report(NodeReport("other@c", "https://192.0.2.3:1", "other"), 7.0)
    assert (table.backlog("tiny@a"), table.backlog("tiny@b")) == (4.5, 4.5)
    assert table.backlog("other@c") == 0.0
    table.leave(NODE, 8.0)
    assert (table.backlog("tiny@a"), table.backlog("tiny@b")) == (0.0, 9.0)


def test_poll_that_arrives_after_the_next_one_changes_nothing() -> None:
    table = settled()
    table.poll(Poll("a", "nonce", 0, {"tiny": 1}, number=2), 6.0)
    table.poll(Poll("a", "nonce", 0, {}, number=1), 6.1)
    assert table.wanted() == {"tiny": 1}
    table.expire(50.0)
    assert table.wanted() == {"tiny": 1}, "the front has polled"
    table.poll(Poll("a", "nonce", 0, {}, number=3), 50.0)
    assert table.wanted() == {}


def test_snapshot_says_why_the_last_start_failed_until_a_node_serves() -> None:
    table = settled()
    assert table.note_problem("tiny", "The file is missing.")
    assert not table.note_problem("tiny", "The file is missing."), "the fronts know it"
    assert table.snapshot(6.0).models[0].problem == "The file is missing."
    table.report(NODE, 7.0)
    assert table.snapshot(7.0).models[0].problem == ""
    assert not table.note_problem("tiny", "No memory."), "another node serves"


# --- room --------------------------------------------------------------------------------------------


def asleep(name: str, model: str = "tiny") -> NodeReport:
    return NodeReport(name, "https://192.0.2.1:1", model, NodeLoad(slots=4, asleep=True))


def with_sleeping(*nodes: str, min_replicas: Mapping[str, int] = MappingProxyType({})) -> DirectoryTable:
    """They fall asleep one after another."""
    table = DirectoryTable((TINY,), "PEM", now_s=0.0, first_version=100, min_replicas=min_replicas)
    for number, node in enumerate(nodes):
        table.report(asleep(node, node.partition("@")[0]), 10.0 + number)
    return table


def asked(table: DirectoryTable, now_s: float, **starting: int) -> list[str]:
    """The nodes that are to end, when each node has reported and the directory has looked at Serve."""
    for report, _ in table.nodes():
        table.report(report, now_s)
    table.note_starting(starting, now_s)
    return [report.name for report, _ in table.nodes() if table.makes_room(report.name, now_s)]


def ends(table: DirectoryTable, node: str, leaves_s: float, ends_s: float) -> None:
    table.leave(asleep(node, node.partition("@")[0]), leaves_s)
    table.end(node, ends_s)


def test_node_that_has_slept_longest_makes_room_for_a_replica_without_a_place() -> None:
    table = with_sleeping("tiny@b", "tiny@a")
    assert table.has_sleeping
    assert asked(table, 20.0) == [], "all replicas have a place"
    assert asked(table, 20.0, other=1) == []
    assert table.lacks_room
    assert asked(table, 19.0 + ROOM_AFTER_S, other=1) == [], "Ray may be placing it"
    assert asked(table, 20.0 + ROOM_AFTER_S, other=1) == ["tiny@b"]
    assert asked(table, 22.0 + ROOM_AFTER_S, other=1) == ["tiny@b"], "one is enough"


def test_next_node_makes_room_if_the_place_of_the_first_was_not_enough() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    assert asked(table, 20.0, other=1) == []
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    ends(table, "tiny@a", 32.0, 32.5)
    assert asked(table, 32.0 + ROOM_AFTER_S, other=1) == [], "Ray has just got the place"
    assert asked(table, 32.5 + ROOM_AFTER_S, other=1) == ["tiny@b"]


def test_node_that_takes_long_to_end_keeps_its_neighbour_asleep() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    table.leave(asleep("tiny@a"), 45.0)
    assert asked(table, 53.9, other=1) == ["tiny@a"], "it still leaves"
    table.end("tiny@a", 54.0)
    assert asked(table, 53.0 + ROOM_AFTER_S, other=1) == [], "Ray has just got the place"
    assert asked(table, 64.0, other=1) == ["tiny@b"]


def test_node_that_works_while_it_leaves_keeps_no_other_from_making_room() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    table.leave(asleep("tiny@a"), 32.0)
    table.report(NODE, 33.0)
    assert asked(table, 49.0, other=1) == ["tiny@a"]
    assert asked(table, 50.0, other=1) == ["tiny@a", "tiny@b"]


def test_node_that_does_not_begin_to_leave_keeps_no_other_from_making_room() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    assert asked(table, 45.0, other=1) == ["tiny@a"]
    assert asked(table, 50.0, other=1) == ["tiny@a", "tiny@b"]


def test_no_node_makes_room_any_more_once_each_replica_has_a_place() -> None:
    table = with_sleeping("tiny@a", "tiny@b", "tiny@c")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    assert asked(table, 50.0, other=1) == ["tiny@a", "tiny@b"]
    table.leave(asleep("tiny@b"), 51.0)
    assert asked(table, 52.0) == ["tiny@b"], "it leaves already"


def test_only_a_node_above_the_least_number_of_its_model_makes_room() -> None:
    table = with_sleeping("kept@a", "tiny@a", "tiny@b", min_replicas={"kept": 1, "tiny": 1})
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    assert asked(table, 49.0, other=1) == ["tiny@a"]
    ends(table, "tiny@a", 49.0, 49.5)
    assert asked(table, 60.0, other=1) == [], "the last one of its model stays"


def test_node_without_a_late_report_is_not_waited_for() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    table.note_starting({"other": 1}, 20.0)
    table.report(asleep("tiny@b"), 30.0)
    assert table.makes_room("tiny@b", 30.0)


def test_replica_of_a_model_that_sleeps_ends_no_replica_of_it() -> None:
    table = with_sleeping("tiny@a", "other@a")
    asked(table, 20.0, tiny=1)
    assert asked(table, 30.0, tiny=1) == ["other@a"]


def test_replica_that_fits_nowhere_ends_each_sleeping_node_once() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    ends(table, "tiny@a", 31.0, 32.0)
    assert asked(table, 42.0, other=1) == ["tiny@b"]
    ends(table, "tiny@b", 43.0, 44.0)
    assert asked(table, 54.0, other=1) == []
    table.report(asleep("tiny@c"), 60.0)
    assert asked(table, 90.0, other=1) == [], "the round is over"
    assert asked(table, 91.0, other=1, third=1) == []
    assert asked(table, 101.0, other=1, third=1) == ["tiny@c"], "another model needs room"
    assert asked(table, 653.9, other=1) == []
    assert asked(table, 654.0, other=1) == ["tiny@c"], "the next round"


def test_round_that_ends_asks_no_node_any_more() -> None:
    table = with_sleeping("tiny@a")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    assert asked(table, 49.0, other=1) == ["tiny@a"]
    assert asked(table, 50.0, other=1) == [], "it does not end, and no other can"


def test_replica_that_loads_has_its_place() -> None:
    table = with_sleeping("tiny@a")
    table.starts(NodeReport("other@x", "", "other"), 19.0)
    assert asked(table, 20.0, other=1) == []
    assert asked(table, 60.0, other=1) == []
    assert asked(table, 61.0, other=2) == []
    assert asked(table, 61.0 + ROOM_AFTER_S, other=2) == ["tiny@a"]


def test_replica_that_starts_and_dies_is_without_a_place_again() -> None:
    for died in (True, False):
        table = with_sleeping("tiny@a")
        table.starts(NodeReport("other@x", "", "other"), 19.0)
        if died:
            assert not table.end("other@x", 19.1), "no front knows it"
        else:
            table.report(asleep("tiny@a"), 19.1 + GONE_AFTER_S)
            table.expire(19.1 + GONE_AFTER_S)
        assert asked(table, 60.0, other=1) == []
        assert asked(table, 60.0 + ROOM_AFTER_S, other=1) == ["tiny@a"]


def test_word_of_a_start_that_comes_late_changes_nothing() -> None:
    table = with_sleeping("tiny@a")
    table.starts(NodeReport("tiny@a", "", "tiny"), 12.0)
    assert not table.end("other@x", 13.0)
    table.starts(NodeReport("other@x", "", "other"), 14.0)
    assert asked(table, 20.0, tiny=1, other=1) == []
    assert asked(table, 20.0 + ROOM_AFTER_S, tiny=1, other=1) == ["tiny@a"]
    table.expire(14.0 + GONE_AFTER_S)
    table.starts(NodeReport("other@x", "", "other"), 45.0)
    assert asked(table, 46.0, other=1) == []
    assert not table.lacks_room


def test_node_that_wakes_makes_no_room() -> None:
    table = with_sleeping("tiny@a")
    asked(table, 20.0, other=1)
    assert asked(table, 30.0, other=1) == ["tiny@a"]
    table.report(NODE, 31.0)
    assert not table.has_sleeping
    assert asked(table, 40.0, other=1) == []
    table.report(asleep("tiny@a"), 42.0)
    assert asked(table, 60.0) == []


def test_node_that_is_forgotten_sleeps_no_more() -> None:
    table = with_sleeping("tiny@a")
    assert table.expire(10.1 + GONE_AFTER_S)
    assert not table.has_sleeping


def test_sleeping_node_wakes_if_the_awake_ones_have_too_few_slots() -> None:
    table = with_sleeping("tiny@a", "tiny@b")
    poll(table, 20.0, tiny=1)
    assert not table.should_wake("tiny@a", 20.0), "the front wakes the first one"
    assert not table.should_wake("tiny@x", 20.0), "it is not known"
    table.report(NodeReport("tiny@b", "https://192.0.2.1:1", "tiny", NodeLoad(slots=4, busy=3)), 21.0)
    assert not table.should_wake("tiny@a", 21.0), "one slot is free"
    poll(table, 22.0, tiny=2)
    assert table.should_wake("tiny@a", 22.0)
    assert not table.should_wake("tiny@b", 22.0), "it is awake"
    table.leave(asleep("tiny@b"), 23.0)
    assert not table.should_wake("tiny@a", 23.0)


def test_only_as_many_nodes_wake_as_the_requests_need() -> None:
    table = with_sleeping("tiny@a", "tiny@b", "tiny@c", "tiny@d")
    for name in "abc":
        table.report(asleep(f"tiny@{name}"), 22.0)
    table.report(NodeReport("tiny@d", "https://192.0.2.1:1", "tiny", NodeLoad(slots=4, busy=4)), 21.0)
    for waiting, woken in ((0, ""), (1, "c"), (4, "c"), (5, "bc"), (8, "bc"), (9, "abc"), (90, "abc")):
        assert wakes(table, 22.0, waiting) == woken, waiting
    assert wakes(table, 26.9, 4) == "c"
    assert wakes(table, 27.1, 4) == "abc", "none has woken within 5 s"
    table.report(asleep("tiny@a"), 30.0)
    table.report(NodeReport("tiny@b", "https://192.0.2.1:1", "tiny", NodeLoad(slots=4, ready=False)), 30.0)
    table.report(asleep("tiny@b"), 40.0)
    assert wakes(table, 40.0, 4) == "b", "it has slept again"
    assert wakes(table, 40.0, 5) == "abc", "c has not reported"


def wakes(table: DirectoryTable, now_s: float, waiting: int) -> str:
    """Which of the nodes should wake for so many requests."""
    poll(table, now_s, tiny=waiting)
    return "".join(name for name in "abcd" if table.should_wake(f"tiny@{name}", now_s))
