"""What a load with other settings would evict."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.core.pool.eviction_policy import ModelSnapshot, Phase, Snapshot
from llamasup.core.pool.what_if import Consequences, consequences, needed_and_free

NOW_S = 10_000.0


def resident(id_: str, needs: int, *, pinned: bool = False, in_flight: int = 0) -> ModelSnapshot:
    return ModelSnapshot(
        id_,
        {"ram": needs},
        Phase.RESIDENT,
        pinned=pinned,
        in_flight=in_flight,
        used_s=NOW_S - 600,
        resident_since_s=NOW_S - 600,
    )


def asked(needs: int, *models: ModelSnapshot, own: ModelSnapshot | None = None) -> Consequences:
    """Of a request for the model ``new``, in a budget of 10 bytes."""
    known: Mapping[str, ModelSnapshot] = {
        model.id: model for model in (*models, own or ModelSnapshot("new", {"ram": 1}))
    }
    return consequences(Snapshot(NOW_S, known, {"ram": 10}), "new", {"ram": needs})


def test_model_that_fits_evicts_no_other() -> None:
    assert asked(4, resident("a", 6)) == Consequences()


def test_idle_model_would_be_evicted() -> None:
    assert asked(5, resident("a", 6)) == Consequences(("a",))


def test_busy_model_would_be_evicted_after_a_wait() -> None:
    assert asked(5, resident("a", 6, in_flight=1)) == Consequences(("a",))


def test_model_in_its_time_slice_would_be_evicted_after_it() -> None:
    """A load that took long has a time slice as long."""
    loaded = ModelSnapshot(
        "a", {"ram": 6}, Phase.RESIDENT, load_s=60, used_s=NOW_S - 2, resident_since_s=NOW_S - 2
    )
    assert asked(5, loaded) == Consequences(("a",))
    assert asked(5, loaded, resident("b", 4, in_flight=1)) == Consequences(("a",))


def test_model_that_loads_would_be_evicted_after_its_load() -> None:
    assert asked(5, ModelSnapshot("a", {"ram": 6}, Phase.LOADING)) == Consequences(("a",))


def test_idle_model_is_evicted_rather_than_a_busy_one() -> None:
    assert asked(5, resident("a", 5, in_flight=1), resident("b", 5)) == Consequences(("b",))


def test_model_larger_than_the_budget_is_rejected_with_the_reason() -> None:
    found = asked(11)
    assert found.evicts == ()
    assert "the budget is 10 B" in found.rejected


def test_pinned_models_stay() -> None:
    found = asked(5, resident("a", 6, pinned=True))
    assert found.evicts == ()
    assert "(a)" in found.rejected


def test_memory_of_the_model_itself_is_free_for_its_other_settings() -> None:
    own = resident("new", 9, in_flight=3)
    assert asked(10, own=own) == Consequences()


def test_other_waiting_models_are_not_shown_as_consequences() -> None:
    waiting = ModelSnapshot("w", {"ram": 10}, waiting=1, waiting_since_s=NOW_S - 100)
    assert "w" not in asked(5, resident("a", 6), waiting).evicts


def test_needs_are_compared_with_the_free_memory_of_each_device() -> None:
    assert needed_and_free({"CUDA0": 5, "CUDA9": 1}, {"ram": 3, "CUDA0": 5}) == {
        "ram": {"needed_bytes": 0, "free_bytes": 3, "fits": True},
        "CUDA0": {"needed_bytes": 5, "free_bytes": 5, "fits": True},
        "CUDA9": {"needed_bytes": 1, "free_bytes": 0, "fits": False},
    }
