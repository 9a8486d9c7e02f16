"""The budget of requests that are sent again (S10)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.queueing.retry_budget import RetryBudget, RetryPolicy, spend

POLICY = RetryPolicy(share=0.2, floor=4.0, floor_window_s=60.0, most=10.0)
EMPTY = RetryBudget(0.0, at_s=0.0)


def grants(budget: RetryBudget, *, completed: int = 0, now_s: float = 0.0) -> int:
    """How many requests in a row may be sent again."""
    count = 0
    while True:
        budget, granted = spend(budget, POLICY, completed=completed, now_s=now_s)
        if not granted:
            return count
        completed = 0
        count += 1


def test_a_fifth_of_completed_requests_may_be_retried() -> None:
    assert grants(EMPTY, completed=20) == 4
    assert grants(EMPTY, completed=4) == 0
    assert grants(EMPTY, completed=5) == 1


def test_what_is_completed_is_added_to_what_is_left() -> None:
    budget, granted = spend(EMPTY, POLICY, completed=10, now_s=0.0)
    assert (granted, budget.left) == (True, 1.0)
    assert grants(budget, completed=10) == 1 + 2


@pytest.mark.parametrize(("after_s", "count"), [(0.0, 0), (14.9, 0), (15.1, 1), (60.1, 4), (6000.0, 4)])
def test_budget_recovers_to_the_floor_with_time(after_s: float, count: int) -> None:
    assert grants(EMPTY, now_s=after_s) == count


def test_time_takes_nothing_that_was_completed() -> None:
    assert grants(RetryBudget(9.0, at_s=0.0), now_s=600.0) == 9


def test_budget_is_limited_to_its_maximum() -> None:
    assert grants(EMPTY, completed=1_000_000) == 10


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(0, 100)),
        max_size=30,
    )
)
def test_budget_stays_between_zero_and_its_maximum(asks: list[tuple[int, float]]) -> None:
    budget, now_s = EMPTY, 0.0
    for completed, later_s in asks:
        now_s += later_s
        budget, _ = spend(budget, POLICY, completed=completed, now_s=now_s)
        assert 0.0 <= budget.left <= POLICY.most
