from __future__ import annotations

from llamasup.observability.access_record import SlowLog, slow_after, tell_slow


def test_a_stream_is_as_slow_as_its_first_byte_and_what_had_none_as_all_of_it() -> None:
    assert slow_after(0.2, 90.0) == 0.2
    assert slow_after(None, 90.0) == 90.0


def test_a_burst_is_told_and_then_one_in_five_seconds_with_the_number_of_those_left_out() -> None:
    log = SlowLog(0.0)
    told = 0
    for _ in range(100):
        log, tell = tell_slow(log, 0.0)
        told += tell
    assert (told, log.left_out) == (10, 90)
    log, tell = tell_slow(log, 4.9)
    assert (tell, log.left_out) == (False, 91)
    log, tell = tell_slow(log, 5.1)
    assert (tell, log.left_out) == (True, 0)


def test_a_quiet_time_allows_no_more_than_one_burst() -> None:
    log, told = SlowLog(0.0), 0
    for _ in range(100):
        log, tell = tell_slow(log, 100_000.0)
        told += tell
    assert told == 10
