"""S2: 0.5, 1, 2 … 30 s, ±20 %; the first restart of a server that was ready is immediate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.supervision.backoff import RestartPolicy, recent_crashes, restart_delay_s

POLICY = RestartPolicy()


def delays(*, was_ready: bool, roll: float = 0.5) -> list[float]:
    return [restart_delay_s(n, was_ready=was_ready, roll=roll, policy=POLICY) for n in range(1, 10)]


def test_server_that_never_became_ready_waits_after_its_first_crash() -> None:
    assert delays(was_ready=False) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_ready_server_restarts_at_once_after_its_first_crash() -> None:
    assert delays(was_ready=True) == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


@given(roll=st.floats(0, 1, exclude_max=True), crashes=st.integers(1, 10_000))
def test_jitter_stays_within_20_percent(roll: float, crashes: int) -> None:
    middle = restart_delay_s(crashes, was_ready=False, roll=0.5, policy=POLICY)
    jittered = restart_delay_s(crashes, was_ready=False, roll=roll, policy=POLICY)
    assert middle * 0.8 <= jittered <= middle * 1.2


@pytest.mark.parametrize(("now_s", "recent"), [(600.0, (1.0, 599.0)), (601.0, (599.0,)), (1199.0, ())])
def test_crashes_older_than_ten_minutes_do_not_count(now_s: float, recent: tuple[float, ...]) -> None:
    kept = recent_crashes(((0.0, 1), (1.0, 2), (599.0, 3)), now_s, POLICY)
    assert tuple(at_s for at_s, _ in kept) == recent
