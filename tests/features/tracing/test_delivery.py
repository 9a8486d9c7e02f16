"""The meaning of a collector's answers."""

from __future__ import annotations

import pytest

from llamasup.features.tracing.delivery import (
    LONGEST_DELAY_S,
    Delivered,
    Failed,
    delay_s,
    delivery_of,
)


def test_success_is_delivered() -> None:
    assert delivery_of(200, None) == delivery_of(202, "5") == Delivered()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_busy_collector_is_asked_again(status: int) -> None:
    assert delivery_of(status, None) == Failed(f"it answers {status}", retries=True)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 500, 501])
def test_refusal_is_final(status: int) -> None:
    assert delivery_of(status, None) == Failed(f"it answers {status}", retries=False)


@pytest.mark.parametrize(
    ("header", "after_s"),
    [("7", 7.0), ("0", 0.0), ("99999999999", LONGEST_DELAY_S), ("soon", None), ("²", None)],
)
def test_the_collector_says_when_to_come_again(header: str, after_s: float | None) -> None:
    assert delivery_of(503, header) == Failed("it answers 503", retries=True, after_s=after_s)


def test_delays_double_up_to_a_limit_and_vary_by_half() -> None:
    assert [delay_s(attempt, None, 1.0) for attempt in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert delay_s(3, None, 0.0) == 2.0
    assert delay_s(9**9, None, 0.0) == LONGEST_DELAY_S / 2
    assert delay_s(3, 7.0, 0.5) == 7.0
