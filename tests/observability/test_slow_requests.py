from __future__ import annotations

from llamasup.observability.access_record import SlowLog, admit_slow, waiting_time_s


def test_waiting_time_ends_at_the_first_byte_or_at_the_end() -> None:
    assert waiting_time_s(0.2, 90.0) == 0.2
    assert waiting_time_s(None, 90.0) == 90.0


def test_burst_is_logged_and_then_one_line_in_five_seconds() -> None:
    log = SlowLog(0.0)
    told = 0
    for _ in range(100):
        log, tell = admit_slow(log, 0.0)
        told += tell
    assert (told, log.left_out) == (10, 90)
    log, tell = admit_slow(log, 4.9)
    assert (tell, log.left_out) == (False, 91)
    log, tell = admit_slow(log, 5.1)
    assert (tell, log.left_out) == (True, 0)


def test_idle_time_allows_only_one_burst() -> None:
    log, told = SlowLog(0.0), 0
    for _ in range(100):
        log, tell = admit_slow(log, 100_000.0)
        told += tell
    assert told == 10
