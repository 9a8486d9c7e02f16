"""The history of loads: measured sizes, plans that failed, and accepted drafts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.measured.load_history import (
    DraftCounts,
    FailedPlan,
    LoadHistory,
    Measurement,
    Served,
    acceptance,
    add_counts,
    add_failed_plan,
    add_measurement,
    add_served,
    correction_for,
    counts_for,
    forget_crashes,
    has_served,
    is_low,
    limits_from,
    runtime_id,
    validate,
)
from llamasup.core.planning.memory.estimate import ESTIMATED
from llamasup.core.planning.plan import LaunchPlan
from tests.core.planning.plans import GIB, NEW, bert, capabilities, planned

MIB = 1 << 20
RUNTIME = runtime_id(("/opt/llama/llama-server",), capabilities(NEW))


def history_of(
    made: LaunchPlan,
    *,
    kv: float = 1.0,
    compute: float = 1.0,
    own: int = 0,
    earlier: LoadHistory | None = None,
) -> LoadHistory:
    """The history after a load of ``made`` whose sizes were these multiples of the estimate."""
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
def test_same_plan_uses_measured_sizes_whether_higher_or_lower(kv: float, compute: float) -> None:
    first = planned()
    second = planned(history=history_of(first, kv=kv, compute=compute, own=300 * MIB))
    assert second.key == first.key
    assert second.memory.measured
    assert second.memory.kv_bytes == pytest.approx(first.memory.kv_bytes * kv, abs=first.layers)
    assert second.memory.compute_bytes == pytest.approx(first.memory.compute_bytes * compute, abs=1)
    (own,) = [part for part in second.memory.parts if part.kind == "runtime"]
    assert own.total_bytes == 300 * MIB


def test_another_plan_of_the_model_is_only_estimated_higher() -> None:
    lower = history_of(planned(), kv=0.5, compute=0.5)
    other = planned(ctx_size=4096)
    assert planned(ctx_size=4096, history=lower).memory == other.memory
    higher = planned(ctx_size=4096, history=history_of(planned(), kv=1.5, compute=2.0))
    assert not higher.memory.measured
    assert higher.memory.kv_bytes == pytest.approx(1.5 * other.memory.kv_bytes, rel=1e-6)
    assert higher.memory.compute_bytes == pytest.approx(2.0 * other.memory.compute_bytes, rel=1e-6)


def test_a_second_measurement_is_compared_with_the_first_estimate_not_with_the_corrected_one() -> None:
    first = planned()
    history = history_of(first, kv=2.0)
    second = planned(history=history)
    history = history_of(second, kv=1.0, earlier=history)  # as corrected, so exactly right
    assert len(history.measurements) == 1
    third = planned(history=history)
    assert third.memory.kv_bytes == pytest.approx(2 * first.memory.kv_bytes, abs=first.layers)


def test_another_build_has_to_be_measured_itself() -> None:
    history = history_of(planned(), kv=3.0)
    assert correction_for(history, "another 1.0", planned().key) == ESTIMATED
    assert planned(command=("/opt/other/llama-server",), history=history).memory == planned().memory


def test_negative_memory_of_the_process_keeps_the_estimate() -> None:
    first = planned()
    assert planned(history=history_of(first, own=-GIB)).memory.total_bytes == first.memory.total_bytes


def test_a_part_that_was_not_estimated_keeps_its_factor() -> None:
    first = planned(facts=bert())
    assert first.memory.kv_bytes == 0
    assert history_of(first).measurements[0].kv == 1.0


def test_log_without_the_cache_size_is_ignored() -> None:
    """A newer build may log it in other words: 0 bytes would be planned with from then on."""
    assert history_of(planned(), kv=0.0) == LoadHistory()


def test_the_sizes_are_logged_until_the_plan_has_been_measured() -> None:
    first = planned()
    assert "--verbosity" in first.argv
    assert "--verbosity" not in planned(history=history_of(first)).argv
    assert "--verbosity" in planned(ctx_size=4096, history=history_of(first)).argv


def test_oldest_measurements_are_dropped() -> None:
    history = LoadHistory()
    for size in range(2048, 2048 + 40):
        history = history_of(planned(ctx_size=size), earlier=history)
    assert len(history.measurements) == 16
    assert history.measurements[-1].key == planned(ctx_size=2048 + 39).key


# --- failed plans --------------------------------------------------------------------------------

OOM = FailedPlan(
    RUNTIME,
    asked="a request",
    bounds=PlanLimits(parallel=2),
    cause="out_of_memory_host",
    out_of_memory=True,
    date="2026-11-20",
    available_bytes=10 * GIB,
)
KNOWN = add_failed_plan(LoadHistory(), OOM)
TODAY = "2026-11-21"


def limits(history: LoadHistory, *, free: int = GIB, today: str = TODAY) -> PlanLimits:
    """The limits for the request that failed."""
    return limits_from(history, RUNTIME, "a request", free, today)


def test_next_start_begins_with_the_plan_that_served_and_gives_the_reason() -> None:
    bounds = limits(KNOWN, free=10 * GIB)
    assert bounds == PlanLimits(parallel=2, why="a larger plan ran out of memory on 2026-11-20")
    assert limits(KNOWN, free=5 * GIB) == bounds


def test_full_plan_is_tried_again_with_one_and_a_half_times_the_memory() -> None:
    assert limits(KNOWN, free=15 * GIB - 1) != PlanLimits()
    assert limits(KNOWN, free=15 * GIB) == PlanLimits()


CRASH = replace(
    OOM,
    bounds=PlanLimits(kv_type="f16"),
    cause="segfault",
    out_of_memory=False,
    failed="packed",
)
TWICE = add_failed_plan(add_failed_plan(LoadHistory(), CRASH), CRASH)


def test_crash_counts_after_two_occurrences_for_any_free_memory() -> None:
    assert limits(add_failed_plan(LoadHistory(), CRASH)) == PlanLimits()
    bounds = limits(TWICE, free=99 * GIB)
    assert bounds == PlanLimits(
        kv_type="f16", why="a plan without this setting ended with segfault on 2026-11-20"
    )


def test_two_crashes_with_different_bounds_count_once_each() -> None:
    other = replace(CRASH, bounds=PlanLimits(kv_type="f16", flash_attn_off=True))
    assert limits(add_failed_plan(TWICE, other)) == PlanLimits()


def test_a_crash_of_a_plan_that_has_served_does_not_count() -> None:
    assert limits(add_served(TWICE, RUNTIME, "packed", TODAY)) == PlanLimits()
    for other in (("another 1.0", "packed"), (RUNTIME, "another")):
        assert limits(add_served(TWICE, *other, TODAY)).kv_type == "f16"


@pytest.mark.parametrize(
    ("today", "counts"), [("2026-11-10", True), ("2026-12-05", True), ("2026-12-06", False)]
)
def test_served_record_expires_after_two_weeks_unless_renewed(today: str, counts: bool) -> None:
    once = add_served(LoadHistory(), RUNTIME, "packed", "2026-11-01")
    assert not has_served(once, RUNTIME, "packed", "2026-11-16")
    again = add_served(once, RUNTIME, "packed", TODAY)
    assert len(again.served) == 1
    assert has_served(again, RUNTIME, "packed", today) is counts


def test_crashes_count_after_the_served_record_has_expired() -> None:
    served = add_served(LoadHistory(), RUNTIME, "packed", "2026-11-01")
    history = add_failed_plan(add_failed_plan(served, CRASH), CRASH)
    assert limits(history, today="2026-11-15") == PlanLimits()
    assert limits(history, today="2026-11-21").kv_type == "f16"


def test_served_record_without_a_date_counts_as_expired() -> None:
    assert not has_served(LoadHistory(served=(Served(RUNTIME, "packed"),)), RUNTIME, "packed", TODAY)


@pytest.mark.parametrize("key", ["packed", "a request"])
def test_start_without_a_crash_removes_the_crashes_of_that_plan(key: str) -> None:
    once = add_failed_plan(LoadHistory(), CRASH)
    between = add_failed_plan(forget_crashes(once, RUNTIME, key), CRASH)
    assert limits(between) == PlanLimits()
    assert limits(add_failed_plan(between, CRASH)).kv_type == "f16"


def test_start_without_a_crash_keeps_records_of_other_plans_builds_and_memory() -> None:
    assert forget_crashes(TWICE, RUNTIME, "another") == TWICE
    assert forget_crashes(TWICE, "another 1.0", "packed") == TWICE
    assert forget_crashes(KNOWN, RUNTIME, "a request") == KNOWN


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
def test_failed_plan_expires_after_two_weeks(history: LoadHistory, today: str, counts: bool) -> None:
    assert (limits(history, today=today) != PlanLimits()) is counts


def test_two_crashes_far_apart_are_each_seen_once() -> None:
    late = add_failed_plan(TWICE, replace(CRASH, date="2027-01-01"))
    assert limits(late, today="2027-01-01") == PlanLimits()


def test_an_invalid_date_counts_as_expired() -> None:
    assert limits(add_failed_plan(LoadHistory(), replace(OOM, date="x"))) == PlanLimits()


def test_a_lack_of_memory_and_a_crash_bound_together() -> None:
    both = add_failed_plan(TWICE, replace(OOM, bounds=PlanLimits(parallel=2, kv_type="q8_0", gpu_layers=3)))
    assert limits(both) == PlanLimits(
        parallel=2,
        kv_type="f16",
        gpu_layers=3,
        why="a plan without this setting ended with segfault on 2026-11-20 "
        "and a larger plan ran out of memory on 2026-11-20",
    )


def test_bounds_against_memory_and_against_crashes_are_separated() -> None:
    bounds = PlanLimits(parallel=2, ctx_size=2048, kv_type="f16", flash_attn_off=True, gpu_layers=1, why="so")
    assert bounds.against_memory == PlanLimits(parallel=2, ctx_size=2048, gpu_layers=1)
    assert bounds.against_crashes == PlanLimits(kv_type="f16", flash_attn_off=True)
    assert PlanLimits(kv_type="q8_0").against_memory == PlanLimits(kv_type="q8_0")
    assert PlanLimits(kv_type="q8_0").against_crashes == PlanLimits()


def test_another_build_and_another_request_begin_with_the_full_plan() -> None:
    assert limits_from(KNOWN, "another 1.0", "a request", 10 * GIB, TODAY) == PlanLimits()
    assert limits_from(KNOWN, RUNTIME, "another request", 10 * GIB, TODAY) == PlanLimits()
    assert limits(LoadHistory(), free=10 * GIB) == PlanLimits()


def test_latest_failure_of_a_request_counts_and_other_requests_keep_theirs() -> None:
    further = replace(OOM, bounds=PlanLimits(parallel=1))
    other = replace(OOM, asked="another request", bounds=PlanLimits(ctx_size=2048))
    history = add_failed_plan(add_failed_plan(KNOWN, other), further)
    assert limits(history).parallel == 1
    assert limits_from(history, RUNTIME, "another request", GIB, TODAY).ctx_size == 2048
    for number in range(40):
        history = add_failed_plan(history, replace(OOM, asked=str(number)))
    assert len(history.failed_plans) == 16


# --- damaged files -------------------------------------------------------------------------------

MEASUREMENT = Measurement(RUNTIME, "a plan", 1.25, 0.0, 1 << 20, 1 << 30, 0)


def test_possible_records_are_valid() -> None:
    possible = LoadHistory(
        (MEASUREMENT,),
        (OOM, replace(OOM, bounds=PlanLimits(1, 2048, "q8_0", True, 0))),
    )
    assert validate(possible) == possible


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
def test_impossible_measurement_is_dropped(changes: dict[str, Any]) -> None:
    assert validate(LoadHistory((replace(MEASUREMENT, **changes), MEASUREMENT))) == LoadHistory(
        (MEASUREMENT,)
    )


@pytest.mark.parametrize(
    "bounds",
    [PlanLimits(parallel=0), PlanLimits(ctx_size=1), PlanLimits(gpu_layers=-1), PlanLimits(kv_type="banana")],
    ids=str,
)
def test_impossible_bounds_are_dropped(bounds: PlanLimits) -> None:
    assert validate(LoadHistory((), (replace(OOM, bounds=bounds), OOM))) == LoadHistory((), (OOM,))


def test_impossible_draft_counts_are_dropped() -> None:
    possible = DraftCounts("runtime", "draft", 10, 10)
    drafts = (replace(possible, accepted=11), replace(possible, accepted=-1), possible)
    assert validate(LoadHistory(drafts=drafts)) == LoadHistory(drafts=(possible,))


# --- drafts

COUNTS = DraftCounts("build", "/m/draft.gguf", 100, 60)


def test_counts_of_one_draft_are_added() -> None:
    (sum_,) = add_counts(add_counts((), COUNTS), replace(COUNTS, proposed=50, accepted=10))
    assert sum_ == replace(COUNTS, proposed=150, accepted=70)


def test_counts_of_other_drafts_and_builds_are_kept_apart() -> None:
    records = (COUNTS, replace(COUNTS, draft="draft-mtp"), replace(COUNTS, runtime="other"))
    added = add_counts(records, COUNTS)
    assert added == (records[1], records[2], replace(COUNTS, proposed=200, accepted=120))
    assert counts_for(added, "build", "draft-mtp") == records[1]
    assert counts_for(added, "build", "none") is None


def test_old_counts_fade() -> None:
    """A draft that was trained again is judged by its own tokens."""
    records = (replace(COUNTS, proposed=20_000, accepted=1000),)
    (half,) = add_counts(records, replace(COUNTS, proposed=10_000, accepted=9000))
    assert (half.proposed, half.accepted) == (20_000, 9500)
    (whole,) = add_counts(records, replace(COUNTS, proposed=30_000, accepted=27_000))
    assert (whole.proposed, whole.accepted) == (30_000, 27_000)


def test_few_records_are_kept() -> None:
    records: tuple[DraftCounts, ...] = ()
    for number in range(20):
        records = add_counts(records, replace(COUNTS, draft=str(number)))
    assert [record.draft for record in records] == [str(number) for number in range(12, 20)]


@pytest.mark.parametrize(
    ("proposed", "accepted", "low"),
    [(999, 0, False), (1000, 0, True), (1000, 349, True), (1000, 350, False), (1000, 1000, False)],
)
def test_acceptance_is_low_only_if_enough_tokens_show_it(proposed: int, accepted: int, low: bool) -> None:
    assert is_low(proposed, accepted) is low
    assert acceptance(proposed, accepted).startswith("only ") is low
    assert f"{proposed:,} tokens that the draft proposed were accepted" in acceptance(proposed, accepted)
