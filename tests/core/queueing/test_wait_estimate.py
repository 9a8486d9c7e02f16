from __future__ import annotations

import pytest

from llamasup.core.queueing.wait_estimate import (
    HELD_WEIGHT,
    LONGEST_S,
    progress_text,
    retry_after_s,
    smoothed,
    until_loaded_s,
    until_served_s,
)
from llamasup.core.system.text import eta_text


def test_first_value_is_the_mean_and_later_ones_move_it() -> None:
    assert smoothed(None, 4.0, 0.1) == 4.0
    assert smoothed(4.0, 14.0, 0.1) == pytest.approx(5.0)


def test_mean_follows_a_change_within_twenty_requests() -> None:
    mean_s = 1.0
    for _ in range(22):
        mean_s = smoothed(mean_s, 11.0, HELD_WEIGHT)
    assert 9.9 < mean_s < 11.0


@pytest.mark.parametrize(
    ("position", "max_concurrent", "held_s", "wait_s"),
    [(1, 1, 10.0, 10.0), (1, 4, 10.0, 2.5), (257, 4, 2.0, 128.5), (3, 1, None, 0.0)],
)
def test_wait_follows_from_position_permits_and_hold_time(
    position: int, max_concurrent: int, held_s: float | None, wait_s: float
) -> None:
    assert until_served_s(position, max_concurrent, held_s) == wait_s


@pytest.mark.parametrize(
    ("load_s", "elapsed_s", "left_s"), [(30.0, 10.0, 20.0), (30.0, 40.0, 0.0), (None, 5.0, 0.0)]
)
def test_load_estimate_is_the_time_of_earlier_loads(
    load_s: float | None, elapsed_s: float, left_s: float
) -> None:
    assert until_loaded_s(load_s, elapsed_s) == left_s


@pytest.mark.parametrize(("wait_s", "told_s"), [(0.0, 1.0), (0.2, 1.0), (17.5, 17.5), (1e9, LONGEST_S)])
def test_retry_after_is_neither_zero_nor_unbounded(wait_s: float, told_s: float) -> None:
    assert retry_after_s(wait_s) == told_s


@pytest.mark.parametrize(
    ("eta_s", "text"),
    [
        (0.0, "1 s"),
        (12.4, "12 s"),
        (59.6, "1 min"),
        (120.2, "2 min"),
        (125.0, "2 min 5 s"),
        (3725.0, "62 min 5 s"),
    ],
)
def test_remaining_time_has_no_tenths(eta_s: float, text: str) -> None:
    assert eta_text(eta_s) == text


@pytest.mark.parametrize(
    ("percent", "eta_s", "text"),
    [(None, None, ""), (43.2, None, "43 %"), (None, 12.3, "12 s left"), (43.2, 12.3, "43 %, 12 s left")],
)
def test_progress_in_words(percent: float | None, eta_s: float | None, text: str) -> None:
    assert progress_text(percent, eta_s) == text
