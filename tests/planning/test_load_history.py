"""What loads teach: measured sizes, and plans that were too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamasup.llama_server.plan_limits import PlanLimits
from llamasup.planning.load_history import (
    FailedPlan,
    LoadHistory,
    Measurement,
    Served,
    add_failed_plan,
    add_measurement,
    add_served,
    correction_for,
    forget_crashes,
    has_served,
    limits_from,
    runtime_id,
    validate,
)
from llamasup.planning.memory.estimate import ESTIMATED
from llamasup.planning.plan import LaunchPlan
from tests.planning.plans import GIB, NEW, bert, capabilities, planned

MIB = 1 << 20
RUNTIME = runtime_id(("/opt/llama/llama-server",), capabilities(NEW))


def taught(
    made: LaunchPlan,
    *,
    kv: float = 1.0,
    compute: float = 1.0,
    own: int = 0,
    earlier: LoadHistory | None = None,
) -> LoadHistory:
    """A load of ``made`` whose sizes were so many times the estimated ones."""
    sizes = {
        "weights_bytes": made.memory.weights_bytes,
        "kv_bytes": round(made.memory.kv_bytes * kv),
        "compute_bytes": round(made.memory.compute_bytes * compute),
    }
    return add_measurement(
        earlier or LoadHistory(),
        runtime=RUNTIME,
        key=made.key,
        estimated=made.memory,
        used=made.correction,
        resident_bytes=sum(sizes.values()) + own,
        **sizes,
    )


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "compute"), [(1.2, 1.5), (0.9, 0.25)])
def test_the_same_plan_is_estimated_at_what_was_measured_higher_or_lower(kv: float, compute: float) -> None:
    first = planned()
    second = planned(history=taught(first, kv=kv, compute=compute, own=300 * MIB))
    assert second.key == first.key
    assert second.memory.measured
    assert second.memory.kv_bytes == pytest.approx(first.memory.kv_bytes * kv, abs=first.layers)
    assert second.memory.compute_bytes == pytest.approx(first.memory.compute_bytes * compute, abs=1)
    (own,) = [part for part in second.memory.parts if part.kind == "runtime"]
    assert own.total_bytes == 300 * MIB


def test_another_plan_of_the_model_is_only_estimated_higher() -> None:
    lower = taught(planned(), kv=0.5, compute=0.5)
    other = planned(ctx_size=4096)
    assert planned(ctx_size=4096, history=lower).memory == other.memory
    higher = planned(ctx_size=4096, history=taught(planned(), kv=1.5, compute=2.0))
    assert not higher.memory.measured
    assert higher.memory.kv_bytes == pytest.approx(1.5 * other.memory.kv_bytes, rel=1e-6)
    assert higher.memory.compute_bytes == pytest.approx(2.0 * other.memory.compute_bytes, rel=1e-6)


def test_a_second_measurement_is_compared_with_the_first_estimate_not_with_the_corrected_one() -> None:
    first = planned()
    history = taught(first, kv=2.0)
    second = planned(history=history)
    history = taught(second, kv=1.0, earlier=history)  # as corrected, so exactly right
    assert len(history.measurements) == 1
    third = planned(history=history)
    assert third.memory.kv_bytes == pytest.approx(2 * first.memory.kv_bytes, abs=first.layers)


def test_another_build_has_to_be_measured_itself() -> None:
    history = taught(planned(), kv=3.0)
    assert correction_for(history, "another 1.0", planned().key) == ESTIMATED
    assert planned(command=("/opt/other/llama-server",), history=history).memory == planned().memory


def test_a_process_that_seems_to_take_less_than_nothing_takes_what_was_assumed() -> None:
    first = planned()
    assert planned(history=taught(first, own=-GIB)).memory.total_bytes == first.memory.total_bytes


def test_a_part_that_was_not_estimated_keeps_its_factor() -> None:
    first = planned(facts=bert())
    assert first.memory.kv_bytes == 0
    assert taught(first).measurements[0].kv == 1.0


def test_a_log_that_is_silent_about_the_cache_teaches_nothing() -> None:
    """A newer build may log it in other words: 0 bytes would be planned with from then on."""
    assert taught(planned(), kv=0.0) == LoadHistory()


def test_the_sizes_are_logged_until_the_plan_has_been_measured() -> None:
    first = planned()
    assert "--verbosity" in first.argv
    assert "--verbosity" not in planned(history=taught(first)).argv
    assert "--verbosity" in planned(ctx_size=4096, history=taught(first)).argv


def test_the_oldest_lessons_are_dropped() -> None:
    history = LoadHistory()
    for size in range(2048, 2048 + 40):
        history = taught(planned(ctx_size=size), earlier=history)
    assert len(history.measurements) == 16
    assert history.measurements[-1].key == planned(ctx_size=2048 + 39).key


# --- setbacks ------------------------------------------------------------------------------------

SETBACK = FailedPlan(
    RUNTIME,
    asked="a wish",
    bounds=PlanLimits(parallel=2),
    cause="out_of_memory_host",
    out_of_memory=True,
    date="2026-11-20",
    available_bytes=10 * GIB,
)
KNOWN = add_failed_plan(LoadHistory(), SETBACK)
TODAY = "2026-11-21"


def test_the_next_start_begins_where_the_ladder_ended_and_says_so() -> None:
    bounds = limits_from(KNOWN, RUNTIME, "a wish", 10 * GIB, TODAY)
    assert bounds == PlanLimits(parallel=2, why="a larger plan ran out of memory on 2026-11-20")
    assert limits_from(KNOWN, RUNTIME, "a wish", 5 * GIB, TODAY) == bounds


def test_with_half_as_much_memory_again_the_whole_plan_is_tried_again() -> None:
    assert limits_from(KNOWN, RUNTIME, "a wish", 15 * GIB - 1, TODAY) != PlanLimits()
    assert limits_from(KNOWN, RUNTIME, "a wish", 15 * GIB, TODAY) == PlanLimits()


CRASH = replace(
    SETBACK, bounds=PlanLimits(kv_type="f16"), cause="segfault", out_of_memory=False, failed="packed"
)
TWICE = add_failed_plan(add_failed_plan(LoadHistory(), CRASH), CRASH)


def test_a_crash_counts_when_it_is_seen_twice_and_whatever_memory_there_is() -> None:
    assert limits_from(add_failed_plan(LoadHistory(), CRASH), RUNTIME, "a wish", GIB, TODAY) == PlanLimits()
    bounds = limits_from(TWICE, RUNTIME, "a wish", 99 * GIB, TODAY)
    assert bounds == PlanLimits(
        kv_type="f16", why="a plan without this setting ended with segfault on 2026-11-20"
    )


def test_two_crashes_that_ask_for_different_things_are_each_seen_once() -> None:
    other = replace(CRASH, bounds=PlanLimits(kv_type="f16", flash_attn_off=True))
    assert limits_from(add_failed_plan(TWICE, other), RUNTIME, "a wish", GIB, TODAY) == PlanLimits()


def test_a_crash_of_a_plan_that_has_served_does_not_count() -> None:
    assert (
        limits_from(add_served(TWICE, RUNTIME, "packed", TODAY), RUNTIME, "a wish", GIB, TODAY)
        == PlanLimits()
    )
    for other in (("another 1.0", "packed"), (RUNTIME, "another")):
        assert limits_from(add_served(TWICE, *other, TODAY), RUNTIME, "a wish", GIB, TODAY).kv_type == "f16"


@pytest.mark.parametrize(
    ("today", "counts"), [("2026-11-10", True), ("2026-12-05", True), ("2026-12-06", False)]
)
def test_a_proof_expires_after_two_weeks_and_another_one_renews_it(today: str, counts: bool) -> None:
    once = add_served(LoadHistory(), RUNTIME, "packed", "2026-11-01")
    assert not has_served(once, RUNTIME, "packed", "2026-11-16")
    again = add_served(once, RUNTIME, "packed", TODAY)
    assert len(again.served) == 1
    assert has_served(again, RUNTIME, "packed", today) is counts


def test_crashes_count_once_the_proof_has_expired() -> None:
    served = add_served(LoadHistory(), RUNTIME, "packed", "2026-11-01")
    history = add_failed_plan(add_failed_plan(served, CRASH), CRASH)
    assert limits_from(history, RUNTIME, "a wish", GIB, "2026-11-15") == PlanLimits()
    assert limits_from(history, RUNTIME, "a wish", GIB, "2026-11-21").kv_type == "f16"


def test_a_proof_without_a_date_counts_as_expired() -> None:
    assert not has_served(LoadHistory(served=(Served(RUNTIME, "packed"),)), RUNTIME, "packed", TODAY)


@pytest.mark.parametrize("key", ["packed", "a wish"])
def test_a_start_without_a_crash_forgets_the_crashes_of_that_plan(key: str) -> None:
    once = add_failed_plan(LoadHistory(), CRASH)
    between = add_failed_plan(forget_crashes(once, RUNTIME, key), CRASH)
    assert limits_from(between, RUNTIME, "a wish", GIB, TODAY) == PlanLimits()
    assert limits_from(add_failed_plan(between, CRASH), RUNTIME, "a wish", GIB, TODAY).kv_type == "f16"


def test_a_start_without_a_crash_says_nothing_about_other_plans_builds_or_memory() -> None:
    assert forget_crashes(TWICE, RUNTIME, "another") == TWICE
    assert forget_crashes(TWICE, "another 1.0", "packed") == TWICE
    assert forget_crashes(KNOWN, RUNTIME, "a wish") == KNOWN


def test_the_plans_that_served_longest_ago_are_dropped() -> None:
    history = LoadHistory()
    for number in (*range(40), 39, 30):
        history = add_served(history, RUNTIME, str(number), TODAY)
    assert len(history.served) == 16
    assert has_served(history, RUNTIME, "30", TODAY)
    assert not has_served(history, RUNTIME, "23", TODAY)


@pytest.mark.parametrize(
    ("today", "counts"),
    [("2026-12-04", True), ("2026-12-05", False), ("2026-11-19", True), ("2026-10-01", False)],
)
@pytest.mark.parametrize("history", [KNOWN, TWICE], ids=["memory", "crash"])
def test_a_setback_is_forgotten_after_two_weeks(history: LoadHistory, today: str, counts: bool) -> None:
    assert (limits_from(history, RUNTIME, "a wish", GIB, today) != PlanLimits()) is counts


def test_two_crashes_far_apart_are_each_seen_once() -> None:
    late = add_failed_plan(TWICE, replace(CRASH, date="2027-01-01"))
    assert limits_from(late, RUNTIME, "a wish", GIB, "2027-01-01") == PlanLimits()


def test_an_invalid_date_counts_as_expired() -> None:
    assert (
        limits_from(add_failed_plan(LoadHistory(), replace(SETBACK, date="x")), RUNTIME, "a wish", GIB, TODAY)
        == PlanLimits()
    )


def test_a_lack_of_memory_and_a_crash_bound_together() -> None:
    both = add_failed_plan(
        TWICE, replace(SETBACK, bounds=PlanLimits(parallel=2, kv_type="q8_0", gpu_layers=3))
    )
    assert limits_from(both, RUNTIME, "a wish", GIB, TODAY) == PlanLimits(
        parallel=2,
        kv_type="f16",
        gpu_layers=3,
        why="a plan without this setting ended with segfault on 2026-11-20 "
        "and a larger plan ran out of memory on 2026-11-20",
    )


def test_bounds_are_told_apart_by_what_they_are_against() -> None:
    bounds = PlanLimits(parallel=2, ctx_size=2048, kv_type="f16", flash_attn_off=True, gpu_layers=1, why="so")
    assert bounds.against_memory == PlanLimits(parallel=2, ctx_size=2048, gpu_layers=1)
    assert bounds.against_crashes == PlanLimits(kv_type="f16", flash_attn_off=True)
    assert PlanLimits(kv_type="q8_0").against_memory == PlanLimits(kv_type="q8_0")
    assert PlanLimits(kv_type="q8_0").against_crashes == PlanLimits()


def test_another_build_and_another_wish_begin_at_the_top() -> None:
    assert limits_from(KNOWN, "another 1.0", "a wish", 10 * GIB, TODAY) == PlanLimits()
    assert limits_from(KNOWN, RUNTIME, "another wish", 10 * GIB, TODAY) == PlanLimits()
    assert limits_from(LoadHistory(), RUNTIME, "a wish", 10 * GIB, TODAY) == PlanLimits()


def test_the_latest_setback_of_a_wish_counts_and_those_of_other_wishes_stay() -> None:
    further = replace(SETBACK, bounds=PlanLimits(parallel=1))
    other = replace(SETBACK, asked="another wish", bounds=PlanLimits(ctx_size=2048))
    history = add_failed_plan(add_failed_plan(KNOWN, other), further)
    assert limits_from(history, RUNTIME, "a wish", GIB, TODAY).parallel == 1
    assert limits_from(history, RUNTIME, "another wish", GIB, TODAY).ctx_size == 2048
    for number in range(40):
        history = add_failed_plan(history, replace(SETBACK, asked=str(number)))
    assert len(history.failed_plans) == 16


# --- what a damaged file may say -----------------------------------------------------------------

LESSON = Measurement(RUNTIME, "a plan", 1.25, 0.0, 1 << 20, 1 << 30, 0)


def test_what_loads_can_teach_is_kept() -> None:
    learnt = LoadHistory((LESSON,), (SETBACK, replace(SETBACK, bounds=PlanLimits(1, 2048, "q8_0", True, 0))))
    assert validate(learnt) == learnt


@pytest.mark.parametrize(
    "changes",
    [
        {"kv": -1.0},
        {"kv": 1e300},
        {"compute": float("inf")},
        {"compute": -0.5},
        {"runtime_bytes": -1},
        {"runtime_bytes": 1 << 60},
    ],
    ids=str,
)
def test_a_lesson_that_no_load_can_have_taught_is_dropped(changes: dict[str, Any]) -> None:
    assert validate(LoadHistory((replace(LESSON, **changes), LESSON))) == LoadHistory((LESSON,))


@pytest.mark.parametrize(
    "bounds",
    [PlanLimits(parallel=0), PlanLimits(ctx_size=1), PlanLimits(gpu_layers=-1), PlanLimits(kv_type="banana")],
    ids=str,
)
def test_bounds_within_which_nothing_can_be_planned_are_dropped(bounds: PlanLimits) -> None:
    assert validate(LoadHistory((), (replace(SETBACK, bounds=bounds), SETBACK))) == LoadHistory(
        (), (SETBACK,)
    )
