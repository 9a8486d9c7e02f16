"""Who is loaded, who goes and who waits: situations, and what is decided in them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llamasup.pool.eviction import HALF_LIFE_S, Use
from llamasup.pool.policy import (
    MAX_LOADS,
    RECHECK_S,
    Action,
    Cordon,
    Evict,
    Load,
    ModelSnapshot,
    Phase,
    Reject,
    ResidencyPolicy,
    Snapshot,
    Uncordon,
    WakeAt,
    decide,
    never_fits,
)

GIB = 1 << 30
NOW = 1000.0
LOOK_AGAIN = WakeAt(NOW + RECHECK_S)


def gpu(gib: float) -> dict[str, int]:
    return {"CUDA0": int(gib * GIB)}


def resident(id_: str, needs: Mapping[str, int], **facts: object) -> ModelSnapshot:
    """Loaded long ago, and idle for a minute unless said otherwise."""
    return ModelSnapshot(id_, needs, Phase.RESIDENT, **{"used_s": NOW - 60, **facts})  # type: ignore[arg-type]


def wanted(id_: str, needs: Mapping[str, int], *, for_s: float = 0.0, **facts: object) -> ModelSnapshot:
    """Not loaded, and somebody has waited for it for so long."""
    return ModelSnapshot(id_, needs, waiting=1, waiting_since_s=NOW - for_s, **facts)  # type: ignore[arg-type]


def decided(
    *models: ModelSnapshot,
    budget: Mapping[str, int] | None = None,
    now_s: float = NOW,
    max_loaded: int | None = None,
    time_slice_s: float = 5.0,
    idle_grace: float = 0.1,
) -> tuple[Action, ...]:
    """With 10 GiB on one device unless said otherwise."""
    policy = ResidencyPolicy(time_slice_s=time_slice_s, max_loaded=max_loaded, idle_grace=idle_grace)
    return decide(Snapshot(now_s, {each.id: each for each in models}, budget or gpu(10), policy))


def test_nobody_waits_and_nothing_is_due_so_nothing_is_done() -> None:
    assert decided(resident("a", gpu(6)), ModelSnapshot("b", gpu(6))) == ()


def test_what_fits_beside_what_is_loaded_is_loaded() -> None:
    assert decided(resident("a", gpu(6)), wanted("b", gpu(4))) == (Load("b"),)


def test_two_that_fit_together_are_loaded_at_once() -> None:
    assert decided(wanted("a", gpu(6)), wanted("b", gpu(4))) == (Load("a"), Load("b"))


def test_of_two_that_do_not_fit_together_the_one_that_waited_longer_is_loaded() -> None:
    assert decided(wanted("a", gpu(6), for_s=1), wanted("b", gpu(6), for_s=2)) == (Load("b"), WakeAt(NOW + 4))


def test_what_is_needed_on_a_device_and_in_ram_has_to_be_free_in_both() -> None:
    both = {"ram": GIB, "CUDA0": GIB}
    budget = {"ram": 2 * GIB, "CUDA0": 8 * GIB}
    assert decided(resident("a", {"ram": GIB}), wanted("b", both), budget=budget) == (Load("b"),)
    full = decided(resident("a", {"ram": 2 * GIB}), wanted("b", both), budget=budget)
    assert full == (Evict("a", "memory", "b"),)


def test_an_idle_model_goes_for_one_that_is_wanted_and_its_memory_is_awaited() -> None:
    first = decided(resident("a", gpu(6)), wanted("b", gpu(6)))
    assert first == (Evict("a", "memory", "b"),)
    leaving = ModelSnapshot("a", gpu(6), Phase.UNLOADING)
    assert decided(leaving, wanted("b", gpu(6))) == ()
    assert decided(ModelSnapshot("a", gpu(6)), wanted("b", gpu(6))) == (Load("b"),)


def test_what_loads_holds_its_memory_already() -> None:
    loading = ModelSnapshot("a", gpu(6), Phase.LOADING, waiting=1, waiting_since_s=NOW - 1)
    assert decided(loading, wanted("b", gpu(6))) == (WakeAt(NOW + 5),)
    assert decided(loading, wanted("b", gpu(4))) == (Load("b"),)


@pytest.mark.parametrize("phase", [Phase.ABSENT, Phase.FAILED])
def test_what_is_absent_or_failed_holds_nothing(phase: Phase) -> None:
    assert decided(ModelSnapshot("a", gpu(10), phase), wanted("b", gpu(10))) == (Load("b"),)


def test_what_has_failed_is_not_loaded_again_by_itself() -> None:
    failed = ModelSnapshot("a", gpu(6), Phase.FAILED, waiting=3, waiting_since_s=NOW - 100)
    assert decided(failed) == ()


def test_one_whose_needs_are_not_known_yet_is_passed_over() -> None:
    assert decided(wanted("a", {}, for_s=9), wanted("b", gpu(1))) == (Load("b"),)


# --- who goes


def test_the_one_that_was_used_longest_ago_goes() -> None:
    old, new = resident("old", gpu(5), used_s=NOW - 600), resident("new", gpu(5), used_s=NOW - 60)
    assert decided(new, old, wanted("b", gpu(5))) == (Evict("old", "memory", "b"),)


def test_what_takes_long_to_load_stays_although_it_was_used_longer_ago() -> None:
    dear = resident("dear", gpu(5), used_s=NOW - 600, load_s=60.0)
    cheap = resident("cheap", gpu(5), used_s=NOW - 300, load_s=2.0)
    assert decided(dear, cheap, wanted("b", gpu(5))) == (Evict("cheap", "memory", "b"),)


def test_what_was_used_often_stays_although_it_was_used_longer_ago() -> None:
    often = resident("often", gpu(5), used_s=NOW - 600, use=Use(40, NOW - 600))
    once = resident("once", gpu(5), used_s=NOW - 300, use=Use(1, NOW - 300))
    assert decided(often, once, wanted("b", gpu(5))) == (Evict("once", "memory", "b"),)


def test_use_counts_half_after_an_hour() -> None:
    use = Use().after(NOW, 8)
    assert use.at(NOW) == 8
    assert use.at(NOW + HALF_LIFE_S) == 4
    assert use.after(NOW + 2 * HALF_LIFE_S).at(NOW + 2 * HALF_LIFE_S) == 3


def test_one_that_is_enough_goes_rather_than_two() -> None:
    small = [resident(name, gpu(2), used_s=NOW - 100) for name in ("s1", "s2")]
    assert decided(*small, resident("big", gpu(6), used_s=NOW - 90), wanted("b", gpu(4))) == (
        Evict("big", "memory", "b"),
    )


def test_two_old_ones_go_rather_than_one_in_use() -> None:
    small = [resident(name, gpu(3), used_s=NOW - 900) for name in ("s1", "s2")]
    assert set(decided(*small, resident("big", gpu(4), used_s=NOW - 2), wanted("b", gpu(4)))) == {
        Evict("s1", "memory", "b"),
        Evict("s2", "memory", "b"),
    }


def test_what_is_on_another_device_stays() -> None:
    elsewhere = resident("elsewhere", {"CUDA1": 8 * GIB}, used_s=0.0)
    here = resident("here", gpu(8))
    budget = {"CUDA0": 10 * GIB, "CUDA1": 10 * GIB}
    assert decided(elsewhere, here, wanted("b", gpu(8)), budget=budget) == (Evict("here", "memory", "b"),)


def test_what_would_not_be_enough_stays() -> None:
    idle = resident("idle", gpu(2))
    busy = resident("busy", gpu(8), in_flight=1)
    assert decided(idle, busy, wanted("b", gpu(9))) == (WakeAt(NOW + 5),)


def test_what_is_going_anyway_is_counted_before_another_is_sent_away() -> None:
    leaving = ModelSnapshot("leaving", gpu(3), Phase.UNLOADING)
    assert decided(leaving, resident("a", gpu(7)), wanted("b", gpu(3))) == ()


def test_what_is_pinned_stays_and_who_cannot_be_loaded_beside_it_is_refused() -> None:
    pinned = resident("embed", gpu(4), pinned=True, used_s=0.0)
    assert decided(pinned, wanted("b", gpu(8))) == (
        Reject(
            "b",
            "it needs 8.0 GiB of CUDA0, and the budget is 10 GiB, of which pinned models hold 4.0 GiB"
            " (embed)",
        ),
    )
    assert decided(pinned, resident("a", gpu(6)), wanted("b", gpu(6))) == (Evict("a", "memory", "b"),)


def test_what_is_larger_than_the_budget_is_refused_and_nobody_goes_for_it() -> None:
    assert decided(resident("a", gpu(6)), wanted("b", gpu(12), for_s=60)) == (
        Reject("b", "it needs 12 GiB of CUDA0, and the budget is 10 GiB"),
    )


def test_a_device_that_the_budget_does_not_have_is_told() -> None:
    snapshot = Snapshot(NOW, {"b": ModelSnapshot("b", {"CUDA3": GIB, "ram": GIB})}, {"ram": 4 * GIB})
    assert never_fits("b", snapshot) == "it needs 1.0 GiB of CUDA3, and the budget is 0 B"


def test_a_request_that_waits_for_a_place_keeps_its_model() -> None:
    assert decided(resident("a", gpu(6), waiting=1), wanted("b", gpu(6))) == (WakeAt(NOW + 5),)


def test_a_model_that_has_just_answered_is_left_a_moment_for_the_next_request() -> None:
    a = resident("a", gpu(6), used_s=NOW, load_s=3.0)
    assert decided(a, wanted("b", gpu(6))) == (WakeAt(NOW + 0.1 * 3.0),)
    assert decided(a, wanted("b", gpu(6)), now_s=NOW + 0.1 * 3.0) == (Evict("a", "memory", "b"),)


# --- turns


def test_busy_models_give_way_to_who_has_waited_for_a_turn() -> None:
    a = resident("a", gpu(6), in_flight=2)
    assert decided(a, wanted("b", gpu(6), for_s=4)) == (WakeAt(NOW + 1),)
    assert decided(a, wanted("b", gpu(6), for_s=5)) == (Cordon("a", "b"), LOOK_AGAIN)
    yielding = ModelSnapshot("a", gpu(6), Phase.CORDONED, in_flight=1, waiting=7, waiting_since_s=NOW - 6)
    assert decided(yielding, wanted("b", gpu(6), for_s=5)) == (LOOK_AGAIN,)
    done = ModelSnapshot("a", gpu(6), Phase.CORDONED, waiting=7, waiting_since_s=NOW - 6)
    assert decided(done, wanted("b", gpu(6), for_s=5)) == (Evict("a", "memory", "b"),)


def test_a_busy_model_between_two_requests_goes_at_once_when_its_turn_is_over() -> None:
    a = resident("a", gpu(6), used_s=NOW, load_s=3.0)
    assert decided(a, wanted("b", gpu(6), for_s=5)) == (Evict("a", "memory", "b"),)


def test_a_model_that_has_just_been_loaded_has_its_turn_first() -> None:
    a = resident("a", gpu(6), in_flight=1, resident_since_s=NOW - 2)
    assert decided(a, wanted("b", gpu(6), for_s=30)) == (WakeAt(NOW + 3),)


def test_a_turn_is_at_least_as_long_as_the_load_was() -> None:
    a = resident("a", gpu(6), in_flight=1, resident_since_s=NOW - 20, load_s=30.0)
    assert decided(a, wanted("b", gpu(6), for_s=30)) == (WakeAt(NOW + 10),)


def test_of_busy_models_the_one_with_the_longest_turn_goes() -> None:
    a = resident("a", gpu(5), in_flight=1, resident_since_s=NOW - 100)
    b = resident("b", gpu(5), in_flight=1, resident_since_s=NOW - 50)
    assert decided(a, b, wanted("c", gpu(5), for_s=5)) == (Cordon("a", "c"), LOOK_AGAIN)


def test_idle_ones_go_before_a_busy_one_however_dear() -> None:
    busy = resident("busy", gpu(5), in_flight=1, load_s=0.1)
    idle = resident("idle", gpu(5), load_s=100.0, used_s=NOW - 11)
    assert decided(busy, idle, wanted("c", gpu(5), for_s=60)) == (Evict("idle", "memory", "c"),)


def test_one_yields_and_the_idle_one_that_is_needed_too_goes_at_once() -> None:
    busy, idle = resident("busy", gpu(6), in_flight=1), resident("idle", gpu(4))
    assert set(decided(busy, idle, wanted("c", gpu(10), for_s=5))) == {
        Cordon("busy", "c"),
        Evict("idle", "memory", "c"),
        LOOK_AGAIN,
    }


def test_a_model_serves_again_when_nobody_waits_for_its_memory_any_more() -> None:
    yielding = ModelSnapshot("a", gpu(6), Phase.CORDONED, in_flight=1)
    assert decided(yielding, ModelSnapshot("b", gpu(6))) == (Uncordon("a"),)


def test_a_model_serves_again_when_an_idle_one_can_go_instead() -> None:
    yielding = ModelSnapshot("a", gpu(5), Phase.CORDONED, in_flight=1)
    assert decided(yielding, resident("idle", gpu(5)), wanted("c", gpu(5), for_s=9)) == (
        Uncordon("a"),
        Evict("idle", "memory", "c"),
    )


def test_no_second_one_yields_while_one_that_is_enough_does() -> None:
    yielding = ModelSnapshot("a", gpu(5), Phase.CORDONED, in_flight=1)
    busy = resident("b", gpu(5), in_flight=1)
    assert decided(yielding, busy, wanted("c", gpu(5), for_s=9)) == (LOOK_AGAIN,)


# --- several wait


def test_a_small_one_passes_a_big_one_that_cannot_be_served_yet() -> None:
    busy = resident("busy", gpu(6), in_flight=1)
    big, small = wanted("big", gpu(8), for_s=3), wanted("small", gpu(4), for_s=1)
    assert decided(busy, big, small) == (Load("small"), WakeAt(NOW + 2))


def test_a_small_one_does_not_take_what_a_big_one_has_waited_for_too_long() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    big, small = wanted("big", gpu(8), for_s=6), wanted("small", gpu(4), for_s=1)
    assert decided(busy, big, small) == (WakeAt(NOW + 4),)


def test_a_small_one_that_will_fit_beside_the_big_one_is_loaded_meanwhile() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    big, small = wanted("big", gpu(8), for_s=6), wanted("small", gpu(2), for_s=1)
    assert decided(busy, big, small) == (Load("small"), WakeAt(NOW + 4))


def test_an_idle_model_that_a_big_one_will_take_does_not_go_for_a_small_one() -> None:
    busy = resident("busy", gpu(6), in_flight=1, resident_since_s=NOW - 1)
    idle = resident("idle", gpu(4))
    big, small = wanted("big", gpu(10), for_s=6), wanted("small", gpu(4), for_s=1)
    assert Evict("idle", "memory", "small") not in decided(busy, idle, big, small)
    assert Evict("idle", "memory", "small") in decided(busy, idle, small)


def test_memory_that_an_older_one_awaits_is_not_given_to_a_younger_one() -> None:
    leaving = ModelSnapshot("gone", gpu(6), Phase.UNLOADING)
    older, younger = wanted("older", gpu(9), for_s=2), wanted("younger", gpu(3), for_s=1)
    assert decided(leaving, older, younger) == (WakeAt(NOW + 4),)
    assert decided(leaving, older, wanted("tiny", gpu(1), for_s=1)) == (Load("tiny"),)


def test_each_of_two_gets_an_idle_model_of_its_own() -> None:
    idle = [resident("i1", gpu(5), used_s=NOW - 90), resident("i2", gpu(5), used_s=NOW - 60)]
    assert decided(*idle, wanted("a", gpu(5), for_s=2), wanted("b", gpu(5), for_s=1)) == (
        Evict("i1", "memory", "a"),
        Evict("i2", "memory", "b"),
    )


def test_one_that_never_fits_does_not_hold_up_the_others() -> None:
    assert decided(wanted("huge", gpu(20), for_s=9), wanted("b", gpu(5))) == (
        Reject("huge", "it needs 20 GiB of CUDA0, and the budget is 10 GiB"),
        Load("b"),
    )


def test_of_very_many_that_wait_those_are_looked_at_who_have_waited_longest() -> None:
    waiting = [wanted(f"m{n:03}", gpu(0.01), for_s=n / 1000) for n in range(100)]
    first = decided(*waiting)
    assert first == tuple(Load(each.id) for each in reversed(waiting[-MAX_LOADS:]))
    loading = [ModelSnapshot(each.id, each.needs, Phase.LOADING) for each in waiting[-MAX_LOADS:]]
    assert Load("m000") not in decided(*waiting[:-MAX_LOADS], *loading)
    assert len(decided(*waiting[:-MAX_LOADS], *loading)) == MAX_LOADS


# --- time to live


def test_an_idle_model_goes_when_its_time_is_over_though_nobody_needs_its_memory() -> None:
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
def test_whose_time_never_ends(kept: ModelSnapshot) -> None:
    assert decided(kept) == ()


def test_what_goes_by_its_time_leaves_room_for_who_waits() -> None:
    expired = resident("a", gpu(6), ttl_s=1.0)
    assert decided(expired, resident("b", gpu(4), used_s=0.0), wanted("c", gpu(6))) == (Evict("a", "ttl"),)


# --- max_loaded, groups, and budgets that change


def test_no_more_are_loaded_than_max_loaded() -> None:
    one = resident("a", gpu(1), used_s=NOW - 90), resident("b", gpu(1))
    assert decided(*one, wanted("c", gpu(1)), max_loaded=2) == (Evict("a", "count", "c"),)
    assert decided(*one, wanted("c", gpu(1)), max_loaded=3) == (Load("c"),)


def test_a_pinned_model_that_is_changed_refuses_only_what_does_not_fit_afterwards() -> None:
    swapping = ModelSnapshot("embed", gpu(8), Phase.LOADING, pinned=True, old_replicas=gpu(4))
    assert decided(swapping, wanted("b", gpu(6))) == (WakeAt(NOW + 5),)
    assert decided(swapping, wanted("b", gpu(7))) == (
        Reject(
            "b",
            "it needs 7.0 GiB of CUDA0, and the budget is 10 GiB, of which pinned models hold 4.0 GiB"
            " (embed)",
        ),
    )


def test_max_loaded_that_pinned_models_fill_refuses_the_rest() -> None:
    assert decided(resident("a", gpu(1), pinned=True), wanted("b", gpu(1)), max_loaded=1) == (
        Reject("b", "max_loaded is 1, and pinned models use all of it (a)"),
    )


def test_of_a_group_one_is_on_a_device_at_a_time() -> None:
    group = frozenset({"big"})
    a = resident("a", gpu(2), groups=group)
    assert decided(a, wanted("b", gpu(2), groups=group)) == (Evict("a", "group", "b"),)
    assert decided(a, wanted("b", gpu(2), groups=frozenset({"other"}))) == (Load("b"),)


def test_of_a_group_two_may_be_on_two_devices_though_both_use_ram() -> None:
    group = frozenset({"big"})
    budget = {"ram": 8 * GIB, "CUDA0": 8 * GIB, "CUDA1": 8 * GIB}
    a = resident("a", {"ram": GIB, "CUDA0": GIB}, groups=group)
    on_other = wanted("b", {"ram": GIB, "CUDA1": GIB}, groups=group)
    assert decided(a, on_other, budget=budget) == (Load("b"),)
    on_cpu = wanted("c", {"ram": GIB, "CUDA1": 0}, groups=group)
    assert decided(a, on_cpu, budget=budget) == (Load("c"),)
    cpu_too = resident("d", {"ram": GIB}, groups=group)
    assert decided(cpu_too, on_cpu, budget=budget) == (Evict("d", "group", "c"),)


def test_a_group_whose_place_a_pinned_model_has_refuses_the_others() -> None:
    group = frozenset({"big"})
    a = resident("a", gpu(2), groups=group, pinned=True)
    assert decided(a, wanted("b", gpu(2), groups=group)) == (
        Reject("b", "group big allows one model on CUDA0, and a is pinned there"),
    )


def test_of_two_that_are_waited_for_one_of_a_group_is_loaded() -> None:
    group = frozenset({"big"})
    a, b = wanted("a", gpu(2), for_s=2, groups=group), wanted("b", gpu(2), for_s=1, groups=group)
    assert decided(a, b) == (Load("a"), WakeAt(NOW + 4))


def test_when_the_budget_has_become_less_idle_models_go_until_it_is_kept() -> None:
    a, b = resident("a", gpu(4), used_s=NOW - 90), resident("b", gpu(4))
    assert decided(a, b, budget=gpu(6)) == (Evict("a", "memory"),)
    assert set(decided(a, b, budget=gpu(3))) == {Evict("a", "memory"), Evict("b", "memory")}


def test_busy_models_that_are_too_much_go_when_they_are_idle() -> None:
    busy, idle = resident("busy", gpu(8), in_flight=1), resident("idle", gpu(2))
    assert decided(busy, idle, budget=gpu(6)) == (Evict("idle", "memory"), LOOK_AGAIN)
    assert decided(busy, budget=gpu(6)) == (LOOK_AGAIN,)
    assert decided(resident("busy", gpu(8), pinned=True), budget=gpu(6)) == ()
    assert decided(resident("busy", gpu(8)), budget=gpu(6)) == (Evict("busy", "memory"),)


def test_what_loads_for_nobody_any_more_is_not_idle() -> None:
    loading = ModelSnapshot("a", gpu(8), Phase.LOADING)
    assert decided(loading, budget=gpu(6)) == (LOOK_AGAIN,)
    assert decided(loading, wanted("b", gpu(6), for_s=9)) == ()
