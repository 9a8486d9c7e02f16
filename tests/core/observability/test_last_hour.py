"""The last hour in steps of ten seconds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llamasup.core.observability.last_hour import STEP_S, STEPS, LastHour

BEGIN_S = 100_000.0
HOUR_S = float(STEPS * STEP_S)


def hour() -> LastHour:
    return LastHour(BEGIN_S)


def ended(
    it: LastHour,
    now_s: float,
    *,
    duration_s: float = 1.0,
    queue_s: float = 0.0,
    first_byte_s: float | None = 0.5,
    tokens: int = 0,
) -> None:
    it.add_request(now_s, duration_s=duration_s, queue_s=queue_s, first_byte_s=first_byte_s, tokens=tokens)


def last(it: LastHour, now_s: float, name: str, steps: int) -> Sequence[float | None]:
    return it.series(now_s)[name][-steps:]


def test_every_series_has_a_value_for_each_step_of_an_hour() -> None:
    series = hour().series(BEGIN_S + 5)
    assert {name: len(values) for name, values in series.items()} == dict.fromkeys(
        ("age_s", "tokens_per_s", "queued", "first_byte_s", "memory_bytes"), STEPS
    )
    assert series["age_s"][-2:] == [15.0, 5.0]
    assert set(series["first_byte_s"]) == {None}


def test_tokens_are_divided_among_the_steps_in_which_they_were_generated() -> None:
    it = hour()
    # 300 tokens in the 30 s after the first byte: 5 s of the first step, 10 s of two, 5 s of the last.
    ended(it, BEGIN_S + 35, duration_s=32, first_byte_s=2, tokens=300)
    assert last(it, BEGIN_S + 40, "tokens_per_s", 5) == [5.0, 10.0, 10.0, 5.0, 0.0]


def test_short_request_counts_in_its_step() -> None:
    it = hour()
    ended(it, BEGIN_S + 4, tokens=50)
    assert last(it, BEGIN_S + 10, "tokens_per_s", 2) == [5.0, 0.0]


def test_rate_of_the_current_step_counts_the_time_that_has_passed() -> None:
    it = hour()
    ended(it, BEGIN_S + 4, tokens=50)
    assert last(it, BEGIN_S + 5, "tokens_per_s", 1) == [10.0]
    ended(it, BEGIN_S + 20, duration_s=0, first_byte_s=0, tokens=7)
    assert last(it, BEGIN_S + 20, "tokens_per_s", 1) == [7.0]  # a second at least


def test_waiting_time_becomes_the_average_number_of_waiting_requests() -> None:
    it = hour()
    for _ in range(3):
        ended(it, BEGIN_S + 20, duration_s=20, queue_s=15)
    assert last(it, BEGIN_S + 20, "queued", 3) == [3.0, 1.5, 0.0]


def test_requests_that_wait_now_count_and_are_not_kept() -> None:
    it = hour()
    waiting = [BEGIN_S + 5] * 50
    assert it.series(BEGIN_S + 25, waiting)["queued"][-3:] == [25.0, 50.0, 50.0]
    assert last(it, BEGIN_S + 25, "queued", 3) == [0.0, 0.0, 0.0]
    ended(it, BEGIN_S + 30, duration_s=25, queue_s=20)  # one of them got a slot after 20 s
    assert last(it, BEGIN_S + 30, "queued", 4) == [0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("duration_s", [HOUR_S + STEP_S, 2 * HOUR_S + 3, 10 * HOUR_S])
def test_wait_before_the_last_hour_is_in_no_step(duration_s: float) -> None:
    it = hour()
    ended(it, BEGIN_S, duration_s=duration_s, queue_s=4)
    assert set(it.series(BEGIN_S)["queued"]) == {0.0}


def test_time_to_the_first_byte_is_the_average_of_the_answers() -> None:
    it = hour()
    ended(it, BEGIN_S + 1, first_byte_s=0.2)
    ended(it, BEGIN_S + 2, first_byte_s=0.4)
    ended(it, BEGIN_S + 3, first_byte_s=None)  # its client left before
    assert last(it, BEGIN_S + 3, "first_byte_s", 1) == [0.3]


def test_request_without_tokens_and_without_a_wait_changes_no_rate() -> None:
    it = hour()
    ended(it, BEGIN_S + 1)
    assert last(it, BEGIN_S + 10, "tokens_per_s", 2) == last(it, BEGIN_S + 10, "queued", 2) == [0.0, 0.0]


def test_memory_is_the_most_in_a_step_and_stays_until_it_changes() -> None:
    it = hour()
    it.note_memory(BEGIN_S + 1, 7)
    it.note_memory(BEGIN_S + 2, 3)
    it.note_memory(BEGIN_S + 31, 5)
    assert last(it, BEGIN_S + 40, "memory_bytes", 5) == [7, 3, 3, 5, 5]


@pytest.mark.parametrize("later_s", [HOUR_S, 5 * HOUR_S])
def test_values_older_than_an_hour_are_dropped(later_s: float) -> None:
    it = hour()
    ended(it, BEGIN_S + 1, queue_s=0.5, tokens=50)
    it.note_memory(BEGIN_S + 1, 7)
    series = it.series(BEGIN_S + later_s)
    assert set(series["tokens_per_s"]) == set(series["queued"]) == {0.0}
    assert set(series["first_byte_s"]) == {None}
    assert set(series["memory_bytes"]) == {7}


def test_request_longer_than_an_hour_counts_in_every_step() -> None:
    it = hour()
    ended(it, BEGIN_S + 2 * HOUR_S, duration_s=2 * HOUR_S, queue_s=2 * HOUR_S, first_byte_s=0, tokens=7200)
    series = it.series(BEGIN_S + 2 * HOUR_S)
    assert set(series["tokens_per_s"][:-1]) == {1.0}
    assert set(series["queued"][:-1]) == {1.0}
