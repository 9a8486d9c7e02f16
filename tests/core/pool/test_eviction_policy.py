"""The residency policy: snapshots and the actions for them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llamasup.core.pool.cheapest_set import HALF_LIFE_S, Resource, Use
from llamasup.core.pool.eviction_policy import (
    MAX_LOADS,
    RECHECK_S,
    Action,
    Cordon,
    Evict,
    Grounds,
    Load,
    ModelSnapshot,
    Phase,
    Reject,
    ResidencyPolicy,
    Snapshot,
    Uncordon,
    WakeAt,
    decide,
    decide_with_grounds,
    never_fits,
)

GIB = 1 << 30
NOW = 1000.0
LOOK_AGAIN = WakeAt(NOW + RECHECK_S)


def gpu(gib: float) -> dict[str, int]:
    return {"CUDA0": int(gib * GIB)}


def resident(id_: str, needs: Mapping[str, int], **facts: object) -> ModelSnapshot:
    """A model that was loaded long ago and, by default, is idle for a minute."""
    return ModelSnapshot(id_, needs, Phase.RESIDENT, **{"used_s": NOW - 60, **facts})  # type: ignore[arg-type]


def requested(id_: str, needs: Mapping[str, int], *, for_s: float = 0.0, **facts: object) -> ModelSnapshot:
    """An unloaded model with one request that has waited for ``for_s``."""
    return ModelSnapshot(id_, needs, waiting=1, waiting_since_s=NOW - for_s, **facts)  # type: ignore[arg-type]


def decided(
    *models: ModelSnapshot,
    budget: Mapping[str, int] | None = None,
    now_s: float = NOW,
    max_loaded: int | None = None,
    time_slice_s: float = 5.0,
    idle_grace: float = 0.1,
) -> tuple[Action, ...]:
    """The actions, by default for one device of 10 GiB."""
    policy = ResidencyPolicy(time_slice_s=time_slice_s, max_loaded=max_loaded, idle_grace=idle_grace)
    return decide(Snapshot(now_s, {model.id: model for model in models}, budget or gpu(10), policy))


def test_nothing_is_done_without_demand() -> None:
    assert decided(resident("a", gpu(6)), ModelSnapshot("b", gpu(6))) == ()


def test_model_that_fits_is_loaded() -> None:
    assert decided(resident("a", gpu(6)), requested("b", gpu(4))) == (Load("b"),)


def test_two_models_that_fit_are_loaded_at_once() -> None:
    assert decided(requested("a", gpu(6)), requested("b", gpu(4))) == (Load("a"), Load("b"))


def test_longer_wait_is_loaded_first() -> None:
    assert decided(requested("a", gpu(6), for_s=1), requested("b", gpu(6), for_s=2)) == (
        Load("b"),
        WakeAt(NOW + 4),
    )


def test_needs_must_fit_on_every_device() -> None:
    both = {"ram": GIB, "CUDA0": GIB}
    budget = {"ram": 2 * GIB, "CUDA0": 8 * GIB}
    assert decided(resident("a", {"ram": GIB}), requested("b", both), budget=budget) == (Load("b"),)
    full = decided(resident("a", {"ram": 2 * GIB}), requested("b", both), budget=budget)
    assert full == (Evict("a", "memory", "b"),)


def test_idle_model_is_evicted_and_its_memory_awaited() -> None:
    first = decided(resident("a", gpu(6)), requested("b", gpu(6)))
    assert first == (Evict("a", "memory", "b"),)
    leaving = ModelSnapshot("a", gpu(6), Phase.UNLOADING)
    assert decided(leaving, requested("b", gpu(6))) == ()
    assert decided(ModelSnapshot("a", gpu(6)), requested("b", gpu(6))) == (Load("b"),)


def test_loading_model_holds_its_memory() -> None:
    loading = ModelSnapshot("a", gpu(6), Phase.LOADING, waiting=1, waiting_since_s=NOW - 1)
    assert decided(loading, requested("b", gpu(6))) == (WakeAt(NOW + 5),)
    assert decided(loading, requested("b", gpu(4))) == (Load("b"),)


@pytest.mark.parametrize("phase", [Phase.ABSENT, Phase.FAILED])
def test_absent_and_failed_models_hold_no_memory(phase: Phase) -> None:
    assert decided(ModelSnapshot("a", gpu(10), phase), requested("b", gpu(10))) == (Load("b"),)


def test_failed_model_is_not_loaded() -> None:
    failed = ModelSnapshot("a", gpu(6), Phase.FAILED, waiting=3, waiting_since_s=NOW - 100)
    assert decided(failed) == ()


def test_model_that_shares_no_memory_is_loaded_at_once() -> None:
    assert decided(requested("a", {}, for_s=9), requested("b", gpu(1))) == (Load("a"), Load("b"))


# --- the choice of a model to evict


def test_least_recently_used_model_is_evicted() -> None:
    old, new = resident("old", gpu(5), used_s=NOW - 600), resident("new", gpu(5), used_s=NOW - 60)
    assert decided(new, old, requested("b", gpu(5))) == (Evict("old", "memory", "b"),)


def test_model_with_a_long_load_is_kept() -> None:
    dear = resident("dear", gpu(5), used_s=NOW - 600, load_s=60.0)
    cheap = resident("cheap", gpu(5), used_s=NOW - 300, load_s=2.0)
    assert decided(dear, cheap, requested("b", gpu(5))) == (Evict("cheap", "memory", "b"),)


def test_frequently_used_model_is_kept() -> None:
    often = resident("often", gpu(5), used_s=NOW - 600, use=Use(40, NOW - 600))
    once = resident("once", gpu(5), used_s=NOW - 300, use=Use(1, NOW - 300))
    assert decided(often, once, requested("b", gpu(5))) == (Evict("once", "memory", "b"),)


def test_use_counts_half_after_an_hour() -> None:
    use = Use().after(NOW, 8)
    assert use.at(NOW) == 8
    assert use.at(NOW + HALF_LIFE_S) == 4
    assert use.after(NOW + 2 * HALF_LIFE_S).at(NOW + 2 * HALF_LIFE_S) == 3


def test_one_model_is_evicted_rather_than_two() -> None:
    small = [resident(name, gpu(2), used_s=NOW - 100) for name in ("s1", "s2")]
    assert decided(*small, resident("big", gpu(6), used_s=NOW - 90), requested("b", gpu(4))) == (
        Evict("big", "memory", "b"),
    )


def test_two_old_models_are_evicted_rather_than_a_recent_one() -> None:
    small = [resident(name, gpu(3), used_s=NOW - 900) for name in ("s1", "s2")]
    assert set(decided(*small, resident("big", gpu(4), used_s=NOW - 2), requested("b", gpu(4)))) == {
        Evict("s1", "memory", "b"),
        Evict("s2", "memory", "b"),
    }


def test_model_on_another_device_is_kept() -> None:
    elsewhere = resident("elsewhere", {"CUDA1": 8 * GIB}, used_s=0.0)
    here = resident("here", gpu(8))
    budget = {"CUDA0": 10 * GIB, "CUDA1": 10 * GIB}
    assert decided(elsewhere, here, requested("b", gpu(8)), budget=budget) == (Evict("here", "memory", "b"),)


def test_nothing_is_evicted_if_it_is_not_enough() -> None:
    idle = resident("idle", gpu(2))
    busy = resident("busy", gpu(8), in_flight=1)
    assert decided(idle, busy, requested("b", gpu(9))) == (WakeAt(NOW + 5),)


def test_memory_of_unloading_models_counts_first() -> None:
    leaving = ModelSnapshot("leaving", gpu(3), Phase.UNLOADING)
    assert decided(leaving, resident("a", gpu(7)), requested("b", gpu(3))) == ()


def test_pinned_model_is_kept_and_what_cannot_fit_is_rejected() -> None:
    pinned = resident("embed", gpu(4), pinned=True, used_s=0.0)
    assert decided(pinned, requested("b", gpu(8))) == (
        Reject(
            "b",
            "it needs 8.0 GiB of CUDA0, and the budget is 10 GiB, of which pinned models hold 4.0 GiB"
            " (embed)",
        ),
    )
    assert decided(pinned, resident("a", gpu(6)), requested("b", gpu(6))) == (Evict("a", "memory", "b"),)


def test_model_over_the_budget_is_rejected_without_evictions() -> None:
    assert decided(resident("a", gpu(6)), requested("b", gpu(12), for_s=60)) == (
        Reject("b", "it needs 12 GiB of CUDA0, and the budget is 10 GiB"),
    )


def test_device_outside_the_budget_is_named() -> None:
    snapshot = Snapshot(NOW, {"b": ModelSnapshot("b", {"CUDA3": GIB, "ram": GIB})}, {"ram": 4 * GIB})
    assert never_fits("b", snapshot) == "it needs 1.0 GiB of CUDA3, and the budget is 0 B"


def test_request_that_waits_for_a_permit_keeps_its_model() -> None:
    assert decided(resident("a", gpu(6), waiting=1), requested("b", gpu(6))) == (WakeAt(NOW + 5),)


def test_idle_grace_delays_an_eviction() -> None:
    a = resident("a", gpu(6), used_s=NOW, load_s=3.0)
    assert decided(a, requested("b", gpu(6))) == (WakeAt(NOW + 0.1 * 3.0),)
    assert decided(a, requested("b", gpu(6)), now_s=NOW + 0.1 * 3.0) == (Evict("a", "memory", "b"),)


# --- turns


def test_busy_model_is_cordoned_for_an_overdue_request() -> None:
    a = resident("a", gpu(6), in_flight=2)
    assert decided(a, requested("b", gpu(6), for_s=4)) == (WakeAt(NOW + 1),)
    assert decided(a, requested("b", gpu(6), for_s=5)) == (Cordon("a", "b"), LOOK_AGAIN)
    yielding = ModelSnapshot("a", gpu(6), Phase.CORDONED, in_flight=1, waiting=7, waiting_since_s=NOW - 6)
    assert decided(yielding, requested("b", gpu(6), for_s=5)) == (LOOK_AGAIN,)
    done = ModelSnapshot("a", gpu(6), Phase.CORDONED, waiting=7, waiting_since_s=NOW - 6)
    assert decided(done, requested("b", gpu(6), for_s=5)) == (Evict("a", "memory", "b"),)


def test_model_between_requests_is_evicted_after_its_slice() -> None:
    a = resident("a", gpu(6), used_s=NOW, load_s=3.0)
    assert decided(a, requested("b", gpu(6), for_s=5)) == (Evict("a", "memory", "b"),)


def test_loaded_model_keeps_its_time_slice() -> None:
    a = resident("a", gpu(6), in_flight=1, resident_since_s=NOW - 2)
    assert decided(a, requested("b", gpu(6), for_s=30)) == (WakeAt(NOW + 3),)


def test_time_slice_is_at_least_as_long_as_the_load() -> None:
    a = resident("a", gpu(6), in_flight=1, resident_since_s=NOW - 20, load_s=30.0)
    assert decided(a, requested("b", gpu(6), for_s=30)) == (WakeAt(NOW + 10),)


def test_busy_model_with_the_longest_slice_is_cordoned() -> None:
    a = resident("a", gpu(5), in_flight=1, resident_since_s=NOW - 100)
    b = resident("b", gpu(5), in_flight=1, resident_since_s=NOW - 50)
    assert decided(a, b, requested("c", gpu(5), for_s=5)) == (Cordon("a", "c"), LOOK_AGAIN)


def test_idle_models_are_evicted_before_busy_ones() -> None:
    busy = resident("busy", gpu(5), in_flight=1, load_s=0.1)
    idle = resident("idle", gpu(5), load_s=100.0, used_s=NOW - 11)
    assert decided(busy, idle, requested("c", gpu(5), for_s=60)) == (Evict("idle", "memory", "c"),)


def test_busy_model_is_cordoned_and_idle_one_evicted_at_once() -> None:
    busy, idle = resident("busy", gpu(6), in_flight=1), resident("idle", gpu(4))
    assert set(decided(busy, idle, requested("c", gpu(10), for_s=5))) == {
        Cordon("busy", "c"),
        Evict("idle", "memory", "c"),
        LOOK_AGAIN,
    }


def test_model_is_uncordoned_without_demand() -> None:
    yielding = ModelSnapshot("a", gpu(6), Phase.CORDONED, in_flight=1)
    assert decided(yielding, ModelSnapshot("b", gpu(6))) == (Uncordon("a"),)


def test_model_is_uncordoned_if_an_idle_one_can_be_evicted() -> None:
    yielding = ModelSnapshot("a", gpu(5), Phase.CORDONED, in_flight=1)
    assert decided(yielding, resident("idle", gpu(5)), requested("c", gpu(5), for_s=9)) == (
        Uncordon("a"),
        Evict("idle", "memory", "c"),
    )


def test_no_second_model_is_cordoned_if_one_is_enough() -> None:
    yielding = ModelSnapshot("a", gpu(5), Phase.CORDONED, in_flight=1)
    busy = resident("b", gpu(5), in_flight=1)
    assert decided(yielding, busy, requested("c", gpu(5), for_s=9)) == (LOOK_AGAIN,)


# --- several models wait


def test_small_model_passes_a_large_one_that_must_wait() -> None:
    busy = resident("busy", gpu(6), in_flight=1)
    big, small = requested("big", gpu(8), for_s=3), requested("small", gpu(4), for_s=1)
    assert decided(busy, big, small) == (Load("small"), WakeAt(NOW + 2))


def test_small_model_does_not_pass_an_overdue_large_one() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    big, small = requested("big", gpu(8), for_s=6), requested("small", gpu(4), for_s=1)
    assert decided(busy, big, small) == (WakeAt(NOW + 4),)


def test_small_model_that_fits_with_the_large_one_is_loaded() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    big, small = requested("big", gpu(8), for_s=6), requested("small", gpu(2), for_s=1)
    assert decided(busy, big, small) == (Load("small"), WakeAt(NOW + 4))


def test_reserved_model_is_not_evicted_for_a_small_one() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    idle = resident("idle", gpu(4))
    big, small = requested("big", gpu(10), for_s=6), requested("small", gpu(4), for_s=1)
    assert Evict("idle", "memory", "small") not in decided(busy, idle, big, small)
    assert Evict("idle", "memory", "small") in decided(busy, idle, small)


def test_awaited_memory_is_not_given_to_a_later_request() -> None:
    leaving = ModelSnapshot("gone", gpu(6), Phase.UNLOADING)
    older, younger = requested("older", gpu(9), for_s=2), requested("younger", gpu(3), for_s=1)
    assert decided(leaving, older, younger) == (WakeAt(NOW + 4),)
    assert decided(leaving, older, requested("tiny", gpu(1), for_s=1)) == (Load("tiny"),)


def test_two_loads_evict_one_idle_model_each() -> None:
    idle = [resident("i1", gpu(5), used_s=NOW - 90), resident("i2", gpu(5), used_s=NOW - 60)]
    assert decided(*idle, requested("a", gpu(5), for_s=2), requested("b", gpu(5), for_s=1)) == (
        Evict("i1", "memory", "a"),
        Evict("i2", "memory", "b"),
    )


def test_rejected_model_does_not_delay_others() -> None:
    assert decided(requested("huge", gpu(20), for_s=9), requested("b", gpu(5))) == (
        Reject("huge", "it needs 20 GiB of CUDA0, and the budget is 10 GiB"),
        Load("b"),
    )


def test_only_the_longest_waits_are_considered() -> None:
    waiting = [requested(f"m{n:03}", gpu(0.01), for_s=n / 1000) for n in range(100)]
    first = decided(*waiting)
    assert first == tuple(Load(model.id) for model in reversed(waiting[-MAX_LOADS:]))
    loading = [ModelSnapshot(model.id, model.needs, Phase.LOADING) for model in waiting[-MAX_LOADS:]]
    assert Load("m000") not in decided(*waiting[:-MAX_LOADS], *loading)
    assert len(decided(*waiting[:-MAX_LOADS], *loading)) == MAX_LOADS


# --- time to live


def test_idle_model_is_evicted_after_its_ttl() -> None:
    a = resident("a", gpu(6), used_s=NOW - 60, ttl_s=90.0)
    assert decided(a) == (WakeAt(NOW + 30),)
    assert decided(a, now_s=NOW + 30) == (Evict("a", "ttl"),)


@pytest.mark.parametrize(
    "kept",
    [
        resident("a", gpu(6), ttl_s=1.0, pinned=True),
        resident("a", gpu(6), ttl_s=1.0, in_flight=1),
        resident("a", gpu(6), ttl_s=1.0, waiting=1),
        ModelSnapshot("a", gpu(6), Phase.LOADING, ttl_s=1.0),
        ModelSnapshot("a", gpu(6), Phase.UNLOADING, ttl_s=1.0),
    ],
    ids=["pinned", "busy", "waited for", "loading", "leaving"],
)
def test_ttl_does_not_evict(kept: ModelSnapshot) -> None:
    assert decided(kept) == ()


def test_expired_model_frees_memory_for_a_waiting_one() -> None:
    expired = resident("a", gpu(6), ttl_s=1.0)
    assert decided(expired, resident("b", gpu(4), used_s=0.0), requested("c", gpu(6))) == (Evict("a", "ttl"),)


# --- max_loaded, groups, and budgets that change


def test_max_loaded_limits_the_loaded_models() -> None:
    one = resident("a", gpu(1), used_s=NOW - 90), resident("b", gpu(1))
    assert decided(*one, requested("c", gpu(1)), max_loaded=2) == (Evict("a", "count", "c"),)
    assert decided(*one, requested("c", gpu(1)), max_loaded=3) == (Load("c"),)


def test_pinned_swap_rejects_only_what_never_fits() -> None:
    swapping = ModelSnapshot("embed", gpu(8), Phase.LOADING, pinned=True, old_replicas=gpu(4))
    assert decided(swapping, requested("b", gpu(6))) == (WakeAt(NOW + 5),)
    assert decided(swapping, requested("b", gpu(7))) == (
        Reject(
            "b",
            "it needs 7.0 GiB of CUDA0, and the budget is 10 GiB, of which pinned models hold 4.0 GiB"
            " (embed)",
        ),
    )


def test_pinned_models_at_max_loaded_reject_others() -> None:
    assert decided(resident("a", gpu(1), pinned=True), requested("b", gpu(1)), max_loaded=1) == (
        Reject("b", "max_loaded is 1, and pinned models use all of it (a)"),
    )


def test_group_allows_one_model_on_a_device() -> None:
    group = frozenset({"big"})
    a = resident("a", gpu(2), groups=group)
    assert decided(a, requested("b", gpu(2), groups=group)) == (Evict("a", "group", "b"),)
    assert decided(a, requested("b", gpu(2), groups=frozenset({"other"}))) == (Load("b"),)


def test_group_allows_models_on_different_devices() -> None:
    group = frozenset({"big"})
    budget = {"ram": 8 * GIB, "CUDA0": 8 * GIB, "CUDA1": 8 * GIB}
    a = resident("a", {"ram": GIB, "CUDA0": GIB}, groups=group)
    on_other = requested("b", {"ram": GIB, "CUDA1": GIB}, groups=group)
    assert decided(a, on_other, budget=budget) == (Load("b"),)
    on_cpu = requested("c", {"ram": GIB, "CUDA1": 0}, groups=group)
    assert decided(a, on_cpu, budget=budget) == (Load("c"),)
    cpu_too = resident("d", {"ram": GIB}, groups=group)
    assert decided(cpu_too, on_cpu, budget=budget) == (Evict("d", "group", "c"),)


def test_pinned_model_of_a_group_rejects_the_others() -> None:
    group = frozenset({"big"})
    a = resident("a", gpu(2), groups=group, pinned=True)
    assert decided(a, requested("b", gpu(2), groups=group)) == (
        Reject("b", "group big allows one model on CUDA0, and a is pinned there"),
    )


def test_one_waiting_model_of_a_group_is_loaded() -> None:
    group = frozenset({"big"})
    a, b = requested("a", gpu(2), for_s=2, groups=group), requested("b", gpu(2), for_s=1, groups=group)
    assert decided(a, b) == (Load("a"), WakeAt(NOW + 4))


def test_idle_models_over_a_smaller_budget_are_evicted() -> None:
    a, b = resident("a", gpu(4), used_s=NOW - 90), resident("b", gpu(4))
    assert decided(a, b, budget=gpu(6)) == (Evict("a", "memory"),)
    assert set(decided(a, b, budget=gpu(3))) == {Evict("a", "memory"), Evict("b", "memory")}


def test_busy_models_over_the_budget_wait_until_idle() -> None:
    busy, idle = resident("busy", gpu(8), in_flight=1), resident("idle", gpu(2))
    assert decided(busy, idle, budget=gpu(6)) == (Evict("idle", "memory"), LOOK_AGAIN)
    assert decided(busy, budget=gpu(6)) == (LOOK_AGAIN,)
    assert decided(resident("busy", gpu(8), pinned=True), budget=gpu(6)) == ()
    assert decided(resident("busy", gpu(8)), budget=gpu(6)) == (Evict("busy", "memory"),)


def test_loading_model_without_demand_is_not_evicted() -> None:
    loading = ModelSnapshot("a", gpu(8), Phase.LOADING)
    assert decided(loading, budget=gpu(6)) == (LOOK_AGAIN,)
    assert decided(loading, requested("b", gpu(6), for_s=9)) == ()


# --- the numbers behind a decision


def grounds_of(*models: ModelSnapshot) -> Mapping[str, Grounds]:
    snapshot = Snapshot(NOW, {model.id: model for model in models}, gpu(10))
    decided = decide_with_grounds(snapshot)
    assert decided.actions == decide(snapshot)
    return decided.grounds


MEMORY: Resource = ("memory", "CUDA0")


def test_eviction_has_the_numbers_of_the_model_that_needs_the_memory() -> None:
    grounds = grounds_of(resident("a", gpu(6)), requested("b", gpu(7)))["b"]
    assert grounds.wanted[MEMORY] == 7 * GIB
    assert grounds.free[MEMORY] == 4 * GIB
    assert grounds.lack == {MEMORY: 3 * GIB}
    assert [candidate.id for candidate in grounds.chosen] == ["a"]
    assert grounds.missing == (MEMORY,)
    assert grounds.overdue_at_s == NOW + 5
    assert grounds.idle_models_suffice


def test_wait_for_a_busy_model_chooses_none_within_its_time_slice() -> None:
    busy = resident("a", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    grounds = grounds_of(busy, requested("b", gpu(7), for_s=1))["b"]
    assert grounds.chosen == ()
    assert grounds.overdue_at_s == NOW + 4
    assert not grounds.idle_models_suffice


def test_wait_for_an_eviction_under_way_lacks_nothing() -> None:
    grounds = grounds_of(ModelSnapshot("a", gpu(6), Phase.UNLOADING), requested("b", gpu(7)))["b"]
    assert grounds.lack == {}
    assert grounds.missing == (MEMORY,)
    assert grounds.idle_models_suffice


def test_eviction_over_the_budget_has_the_excess() -> None:
    grounds = grounds_of(resident("a", gpu(6)), resident("b", gpu(6)))[""]
    assert grounds.lack == {MEMORY: 2 * GIB}
    assert len(grounds.chosen) == 1


def test_refused_model_has_no_numbers() -> None:
    assert grounds_of(requested("a", gpu(11))) == {}
