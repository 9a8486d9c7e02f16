"""The division of the measured energy among requests."""

from __future__ import annotations

import pytest

from llamasup.features.usage.attribution import MAX_INTERVAL_S, Counter, Reading, divided, energy_between
from llamasup.features.usage.ledger import Group, Work

A, B = Group("2026-03-01", "a", ""), Group("2026-03-01", "b", "")


def reading(at_s: float, **values_uj: int) -> Reading:
    return Reading(at_s, {name: Counter(value) for name, value in values_uj.items()})


def test_energy_is_the_difference_of_all_counters() -> None:
    assert energy_between(reading(0.0, cpu=100, gpu=1000), reading(10.0, cpu=150, gpu=3000)) == 2050


def test_counter_that_only_one_reading_has_does_not_count() -> None:
    assert energy_between(reading(0.0, cpu=100, old=1), reading(10.0, cpu=150, new=9)) == 50
    assert energy_between(reading(0.0, old=1), reading(10.0, new=9)) is None


def test_counter_that_wraps_around_continues() -> None:
    before, after = Reading(0.0, {"cpu": Counter(950, 1000)}), Reading(1.0, {"cpu": Counter(30, 1000)})
    assert energy_between(before, after) == 80


def test_counter_without_a_range_that_falls_was_reset() -> None:
    assert energy_between(reading(0.0, gpu=950), reading(1.0, gpu=30)) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_INTERVAL_S + 0.1])
def test_readings_too_far_apart_are_not_compared(seconds: float) -> None:
    assert energy_between(reading(0.0, cpu=1), reading(seconds, cpu=2)) is None


def test_busy_time_is_divided_by_slot_seconds() -> None:
    work = [Work(A, 0.0, 4.0, 1.0), Work(B, 2.0, 5.0, 4.0)]  # b has four slots
    assert divided(1000, 0.0, 10.0, work) == {A: 125, B: 375}  # 5 of 10 s are busy


def test_time_between_requests_is_not_busy() -> None:
    work = [Work(A, 6.0, 7.0, 1.0), Work(A, 0.0, 3.0, 1.0), Work(A, 1.0, 2.0, 1.0)]
    assert divided(1000, 0.0, 10.0, work) == {A: 400}


def test_only_the_part_of_a_request_in_the_interval_counts() -> None:
    work = [Work(A, -10.0, 10.0, 1.0), Work(B, 5.0, 10.0, 1.0), Work(B, -3.0, -1.0, 1.0)]
    assert divided(1500, 0.0, 10.0, work) == {A: 1000, B: 500}


def test_request_in_flight_counts_until_the_end_of_the_interval() -> None:
    work = [Work(A, -50.0, float("inf"), 1.0), Work(B, 8.0, 9.0, 1.0)]
    assert divided(1100, 0.0, 10.0, work) == {A: 1000, B: 100}


def test_energy_without_work_belongs_to_no_request() -> None:
    assert divided(1000, 0.0, 10.0, []) == {}
    assert divided(1000, 0.0, 10.0, [Work(A, 1.0, 1.0, 0.0)]) == {}
