from __future__ import annotations

from llamasup.fleet.directory_table import GONE_AFTER_S, SETTLED_AFTER_S, DirectoryTable
from llamasup.fleet.messages import FleetNode, ListedModel, NodeLoad, NodeReport, Poll

TINY = ListedModel("tiny", ("gpt-tiny",))
NODE = NodeReport("tiny@a", "https://192.0.2.1:1", "tiny")


def started(*models: ListedModel) -> DirectoryTable:
    return DirectoryTable(models or (TINY,), "PEM", now_s=0.0, first_version=100)


def settled() -> DirectoryTable:
    table = started()
    assert table.expire(SETTLED_AFTER_S)
    return table


def poll(table: DirectoryTable, now_s: float, front: str = "front", seen: int = 0, **wanted: int) -> None:
    table.poll(Poll(front, "nonce", seen, wanted), now_s)


def test_report_of_a_new_node_changes_the_snapshot_and_the_next_does_not() -> None:
    table = started()
    assert table.report(NODE, 1.0)
    assert not table.report(NODE, 2.0)
    assert table.snapshot(2.0).nodes == (FleetNode("tiny@a", "https://192.0.2.1:1", "tiny"),)
    assert table.snapshot(2.0).models == (TINY,)
    assert table.reports() == (NODE,)


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
    assert table.end("tiny@a")
    assert not table.end("tiny@a")
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
    table.end("tiny@a")
    poll(table, 20.0, tiny=1)
    assert table.snapshot(21.0).models[0].eta_s == 3.0
    assert table.snapshot(30.0).models[0].eta_s == 0.0


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


def test_load_is_the_part_of_its_slots_that_a_node_would_need() -> None:
    assert NodeLoad(slots=4, busy=3, queued=3).part == 1.5
    assert NodeLoad().part == 0
