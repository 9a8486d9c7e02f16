from __future__ import annotations

from llamasup.core.queueing.batch_lane import MAX_QUIET_S, MIN_QUIET_S, TURN_AFTER_S, TURN_SHARE, BatchLane


def test_lane_is_open_while_there_was_no_other_client() -> None:
    assert BatchLane().opens_in_s(5.0, others=0) == 0.0


def test_lane_is_closed_while_another_client_has_a_request() -> None:
    assert BatchLane().opens_in_s(5.0, others=1) >= MIN_QUIET_S


def test_lane_opens_a_moment_after_a_single_request() -> None:
    lane = BatchLane()
    lane.arrived(10.0)
    lane.ended(11.0)
    assert lane.opens_in_s(11.0, others=0) == MIN_QUIET_S
    assert lane.opens_in_s(11.0 + MIN_QUIET_S, others=0) == 0.0


def test_lane_stays_closed_for_several_usual_gaps() -> None:
    lane = BatchLane()
    for at_s in range(10):
        lane.arrived(float(at_s))
    assert lane.opens_in_s(9.0, others=0) == 4.0


def test_lane_never_stays_closed_for_long_after_the_last_request() -> None:
    lane = BatchLane()
    for at_s in (0.0, 25.0, 50.0):
        lane.arrived(at_s)
    assert lane.opens_in_s(50.0, others=0) == MAX_QUIET_S


def test_pause_is_no_gap() -> None:
    lane = BatchLane()
    for at_s in (0.0, 1.0, 1000.0, 1001.0):
        lane.arrived(at_s)
    assert lane.gap_s == 1.0


def test_waiting_batch_gets_a_turn_after_a_minute() -> None:
    lane = BatchLane()
    assert lane.turn_in_s(5.0) == TURN_AFTER_S
    assert lane.turn_in_s(5.0 + TURN_AFTER_S / 2) == TURN_AFTER_S / 2
    assert lane.turn_in_s(5.0 + TURN_AFTER_S) == 0.0


def test_turns_take_at_most_a_thirtieth_of_the_time() -> None:
    lane = BatchLane()
    now_s = busy_s = 0.0
    for took_s in (0.1, 2.0, 40.0, 300.0, 5.0, 60.0):
        now_s += lane.turn_in_s(now_s) + took_s
        busy_s += took_s
        lane.turn_ended(now_s, took_s)
    now_s += lane.turn_in_s(now_s)
    assert busy_s <= TURN_SHARE * now_s


def test_batch_that_was_served_waits_again_for_its_turn() -> None:
    lane = BatchLane()
    lane.turn_in_s(5.0)
    lane.served()
    assert lane.turn_in_s(5.0 + TURN_AFTER_S) == TURN_AFTER_S
