"""Every event in every reachable state of a model, and the changes that are easy to lose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_args

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool import model_states as states
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_states import (
    HOLDING,
    Announce,
    CancelSizing,
    Drop,
    Effect,
    EndLoads,
    EndRollout,
    Event,
    Model,
    ModelState,
    ProcessesStatus,
    Reload,
    RolloutStep,
    Size,
    Start,
    Stop,
    charged,
    needs_of,
    phase_of,
)
from llamasup.core.pool.model_table import TABLE, InvalidModelEvent, Place, advance_model, is_stale, place_of
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import LoadFailed
from llamasup.errors import DoesNotFit
from scripts import docs
from scripts.generated import pool_states
from scripts.generated.pool_states import ANSWER, ERROR, SPECS, UNPROVEN, Plan, reachable
from tests.kit.paths import ROOT

PROVEN_OR_NOT = (*SPECS, UNPROVEN)
BY_COMMAND = tuple(replace(spec, stay=Stay(by_command=True)) for spec in SPECS)
ONE, TWO = (Plan(spec, {"ram": number}) for number, spec in enumerate(SPECS, 1))


class Story:
    """A model, and the effects of the last event."""

    def __init__(self, *events: Event, spec: ModelSpec = SPECS[0]) -> None:
        self.model = Model(spec)
        self.effects: tuple[Effect, ...] = ()
        for event in events:
            self(event)

    def __call__(self, event: Event) -> tuple[Effect, ...]:
        self.model, self.effects = advance_model(self.model, event)
        return self.effects

    @property
    def ticket(self) -> int:
        assert self.model.sizing is not None
        return self.model.sizing.ticket

    @property
    def id(self) -> int:
        assert self.model.current is not None
        return self.model.current.id

    def load(self) -> Story:
        self(states.Wanted())
        self(states.Sized(self.ticket, ONE))
        self(states.LoadGranted())
        return self

    def serve(self) -> Story:
        self.load()(states.ProcessesServing(self.id))
        return self

    def change(self) -> Story:
        """The new spec is sized."""
        self(states.SpecChanged(SPECS[1]))
        self(states.Sized(self.ticket, TWO))
        return self


# --- the sweep


def violations(model: Model) -> Iterator[str]:
    holding = [
        processes
        for processes in (model.current, model.old)
        if processes is not None and processes.status in HOLDING
    ]
    state = model.state
    if holding and not charged(model):
        yield "processes without charged memory"
    if charged(model) and not holding and state is not ModelState.ROLLING_OUT:
        yield "charged memory without processes"
    if (model.old is None) is not (model.old_sized is None):
        yield "room of old processes that are gone"
    if model.old is not None and state not in {
        *(ModelState.ROLLING_OUT, ModelState.UNLOADING, ModelState.REMOVED)
    }:
        yield "old processes outside a rollout"
    if (model.sizing is not None and model.sizing.purpose == "load") is not (state is ModelState.SIZING):
        yield "a sizing for a load in another state"
    if (
        model.sizing is not None
        and model.sizing.purpose == "rollout"
        and (model.rollout is None or model.rollout.step is not RolloutStep.SIZING)
    ):
        yield "a sizing for no rollout"
    if model.rollout is not None and state not in {
        *(ModelState.LOADING, ModelState.RESIDENT, ModelState.CORDONED, ModelState.ROLLING_OUT)
    }:
        yield "a rollout without processes"
    if state is ModelState.RESIDENT and (
        model.current is None or model.current.status is not ProcessesStatus.SERVING
    ):
        yield "resident, and no process serves"
    if state is ModelState.FAILED and model.error is None:
        yield "failed without an error"


def broken(here: Model, event: Event, there: Model) -> Iterator[str]:
    """The faults of a transition."""
    yield from violations(there)
    if there.made < here.made:
        yield "a number was given twice"
    if isinstance(event, states.SpecChanged) and there.spec is not event.spec:
        yield "the latest command, a new spec, was lost"
    if isinstance(event, states.UnloadRequested) and phase_of(there) not in {Phase.ABSENT, Phase.UNLOADING}:
        yield "the latest command, to unload, was lost"


class Sweep(NamedTuple):
    """One walk over every transition."""

    length: int
    kinds: tuple[tuple[Model, Event, Model], ...]
    """The first transition of each kind of event from one place to another."""
    broken: list[tuple[str, Model, Event, Model]]


@cache
def sweep(specs: tuple[ModelSpec, ...]) -> Sweep:
    """Compute the walk once for all tests of this module: it passes 100,000 transitions in seconds."""
    length = 0
    kinds: dict[tuple[Place, Place, type[Event]], tuple[Model, Event, Model]] = {}
    found: list[tuple[str, Model, Event, Model]] = []
    for here, event, there in reachable(specs):
        length += 1
        kinds.setdefault((place_of(here), place_of(there), type(event)), (here, event, there))
        found += ((fault, here, event, there) for fault in broken(here, event, there))
    return Sweep(length, tuple(kinds.values()), found)


def test_every_event_is_a_row_or_impossible_in_every_state() -> None:
    """A pair without a row concerns a sizing or processes that the state does not have."""
    impossible = {
        (place, kind.__name__)
        for place, rows in TABLE.items()
        for kind in get_args(Event)
        if kind not in rows
    }
    tried = {(place_of(here), type(event).__name__) for here, event, _ in sweep(PROVEN_OR_NOT).kinds}
    assert not impossible & tried
    facts = ("Processes", "Siz", "Download", "Proven", "Disproven")
    assert all(kind.startswith(facts) for _, kind in impossible)
    assert {place for place, _ in tried} == set(TABLE)


@pytest.mark.parametrize("specs", [PROVEN_OR_NOT, BY_COMMAND], ids=["shared", "by command"])
def test_invariants_hold_in_every_reachable_state(specs: tuple[ModelSpec, ...]) -> None:
    assert sweep(specs).broken[:3] == []
    assert sweep(specs).length > 10_000


def test_diagram_in_docs_matches_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagram has an edge for each kind of transition."""
    monkeypatch.setattr(pool_states, "reachable", lambda specs: sweep(specs).kinds)
    assert docs.keep("pool-states", ROOT, check=True) == 0


def test_event_without_row_is_an_error_that_names_both() -> None:
    story = Story(states.Wanted())
    stray = states.ProcessesReleased(1)
    assert is_stale(story.model, stray)
    assert story(stray) == ()
    story.load()
    with pytest.raises(InvalidModelEvent, match=r"'a': loading.*cannot get .*NoEvent"):
        story(NoEvent())  # type: ignore[arg-type]


class NoEvent:
    def __repr__(self) -> str:
        return "NoEvent"


# --- sizings


def test_change_during_a_sizing_never_serves_the_old_file() -> None:
    story = Story(states.Wanted())
    old = story.ticket
    assert story(states.SpecChanged(SPECS[1])) == (CancelSizing(old),)
    assert story(states.Wanted())[-1] == Size(old + 1, SPECS[1])
    assert story(states.Sized(old, ONE)) == ()
    story(states.Sized(story.ticket, TWO))
    assert story(states.LoadGranted()) == (Start(story.id, TWO),)


@pytest.mark.parametrize(
    "outcome", [states.Sized(1, ONE), states.SizingFailed(1, ERROR)], ids=["ok", "failed"]
)
def test_budget_change_during_a_sizing_sizes_again(outcome: Event) -> None:
    story = Story(states.Wanted(), states.BudgetChanged())
    assert story(outcome) == (Size(2, SPECS[0]),)
    assert story.model.state is ModelState.SIZING


def test_budget_change_sizes_a_waiting_rollout_again() -> None:
    story = Story().serve().change()
    assert story(states.BudgetChanged()) == (Size(story.ticket, SPECS[1]),)
    assert story(states.SwapGranted(fits=True)) == ()


def test_switch_back_during_a_sizing_ends_the_rollout() -> None:
    story = Story().serve()
    story(states.SpecChanged(SPECS[1]))
    ticket = story.ticket
    assert story(states.SpecChanged(SPECS[0])) == (CancelSizing(ticket), EndRollout())


# --- processes


def test_start_is_complete_only_with_all_replicas() -> None:
    """The old processes are not stopped while a new replica still starts."""
    story = Story().serve().change()
    story(states.SwapGranted(fits=True))
    assert story(states.ProcessesServing(story.id, complete=False)) == ()
    assert story(states.ProcessesServing(story.id)) != ()


@pytest.mark.parametrize("old_has_worker", [True, False])
def test_processes_with_an_rpc_worker_are_replaced_in_turn(old_has_worker: bool) -> None:
    """A worker serves one llama-server."""
    both = Settings(rpc=("10.0.0.2:50052",)), Settings()
    settings = both if old_has_worker else both[::-1]
    old, new = (replace(spec, settings=each) for spec, each in zip(SPECS, settings, strict=True))
    story = Story(states.Wanted(), spec=old)
    story(states.Sized(story.ticket, Plan(old, {"ram": 1})))
    story(states.LoadGranted())
    story(states.ProcessesServing(story.id))
    story(states.SpecChanged(new))
    story(states.Sized(story.ticket, Plan(new, {"ram": 1})))
    story(states.SwapGranted(fits=True))
    assert story.model.rollout is not None
    assert story.model.rollout.step is RolloutStep.STOPPING
    story(states.ProcessesReleased(story.id))
    assert [type(effect) for effect in story(states.SwapGranted(fits=True))] == [Start]


def test_load_during_an_unload_waits_for_its_end() -> None:
    story = Story().serve()
    story(states.UnloadRequested())
    for event in (states.RetryRequested(), states.Wanted(), states.LoadGranted()):
        assert story(event) == ()
        assert story.model.state is ModelState.UNLOADING
    story(states.ProcessesReleased(story.id))
    assert story(states.LoadGranted()) == (Start(story.id, ONE),)


def test_failed_replica_that_tries_again_is_stopped_and_stays_charged() -> None:
    story = Story().load()
    failed = states.ProcessesFailed(story.id, ERROR, ANSWER, settled=False)
    assert story(failed) == (Stop(story.id, ONE), EndLoads(ERROR), Announce(LoadFailed(SPECS[0].id, ERROR)))
    assert (story.model.state, charged(story.model)) == (ModelState.FAILED, ONE.needs)
    assert story(states.RetryRequested()) == ()
    assert story.model.state is ModelState.UNLOADING
    story(states.ProcessesReleased(story.id))
    assert (story.model.state, charged(story.model)) == (ModelState.ABSENT, {})


def test_model_that_shares_no_memory_keeps_it_to_try_again() -> None:
    story = Story(spec=BY_COMMAND[0]).load()
    failed = states.ProcessesFailed(story.id, ERROR, ANSWER, settled=False)
    assert story(failed) == (EndLoads(ERROR),)
    assert phase_of(story.model) is Phase.LOADING
    assert story(states.ProcessesServing(story.id)) == (EndLoads(),)
    story(states.ProcessesFailed(story.id, ERROR, ANSWER))
    assert story.model.error is ERROR


def test_late_restart_has_no_process_without_an_owner() -> None:
    story = Story().serve()
    story(states.UnloadRequested())
    story(states.ProcessesReleased(story.id))
    assert story(states.ProcessesStarting(story.id)) == (Stop(story.id, ONE),)
    assert story.model.state is ModelState.UNLOADING


# --- swaps


def test_cut_rollout_frees_the_room_of_both_specs() -> None:
    story = Story().serve().change()
    story(states.SwapGranted(fits=True))
    old, new = story.id - 2, story.id
    assert needs_of(story.model) == {"ram": 3}
    assert [type(effect) for effect in story(states.UnloadRequested())][1:] == [EndRollout, Stop, Stop]
    assert story.model.old is not None
    old = story.model.old.id
    assert story(states.ProcessesReleased(old)) == (Drop(old),)
    assert charged(story.model) == TWO.needs
    story(states.ProcessesReleased(new))
    assert charged(story.model) == {}


def test_swap_in_turn_keeps_room_to_restore_the_old_spec() -> None:
    story = Story(states.SpecUpdated(SPECS[1]), states.Wanted())
    story(states.Sized(story.ticket, TWO))
    story(states.LoadGranted())
    story(states.ProcessesServing(story.id))
    story(states.SpecChanged(SPECS[0]))
    story(states.Sized(story.ticket, ONE))
    story(states.SwapGranted(fits=False))
    story(states.ProcessesReleased(story.id))
    assert charged(story.model) == TWO.needs
    story(states.SwapGranted(fits=True))
    assert charged(story.model) == TWO.needs
    story(states.ProcessesFailed(story.id, ERROR, ANSWER))
    assert story.effects[-1] == Start(story.id, TWO)
    assert story(states.ProcessesServing(story.id)) == (EndLoads(), EndRollout(ERROR))


def test_change_while_the_old_spec_stops_loads_the_newest() -> None:
    story = Story().serve().change()
    story(states.SwapGranted(fits=False))
    story(states.SpecChanged(SPECS[0]))
    story(states.ProcessesReleased(story.id))
    assert story(states.SwapGranted(fits=True)) == (Reload(),)
    assert story.model.sized is None


def test_crash_of_an_outdated_process_loads_the_newest_spec() -> None:
    story = Story().serve()
    story(states.SpecChanged(SPECS[1]))
    story(states.ProcessesFailed(story.id, ERROR, ANSWER))
    assert EndLoads(ERROR) not in story.effects
    assert isinstance(story(states.Wanted())[-1], Size)


# --- proofs of a build


def proving() -> Story:
    """The processes of an unproven build are ready beside the old ones."""
    story = Story().serve()
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    story(states.SwapGranted(fits=True))
    assert story.effects == (Start(story.id, Plan(UNPROVEN, {"ram": 2}), withheld=True),)
    story(states.ProcessesServing(story.id))
    return story


def old_id(story: Story) -> int:
    assert story.model.old is not None
    return story.model.old.id


def test_unproven_build_is_compared_before_it_gets_requests() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story.effects == (states.Prove(new, old),)
    assert place_of(story.model) is RolloutStep.PROVING
    story(states.Proven(new))
    assert [type(effect) for effect in story.effects] == [states.Admit, states.Withdraw, Stop]
    assert story(states.ProcessesReleased(old))[-1] == EndRollout()
    assert place_of(story.model) is ModelState.RESIDENT
    assert story.id == new


def test_refused_build_stops_and_the_old_processes_stay() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert [type(effect) for effect in story(states.Disproven(new, ERROR))] == [Stop]
    story(states.ProcessesReleased(new))
    assert story.effects == (Drop(new), EndLoads(), EndRollout(ERROR))
    assert (story.model.state, story.id, story.model.sized) == (ModelState.RESIDENT, old, ONE)


def test_crash_during_the_proof_keeps_the_old_processes() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    story(states.ProcessesFailed(new, ERROR, ANSWER))
    assert story.effects == (Drop(new), EndLoads(), EndRollout(ERROR))
    assert story.id == old
    assert story(states.Proven(new)) == ()  # it comes too late
    assert story(states.Disproven(new, ERROR)) == ()


def test_refused_build_ends_with_old_processes_that_have_failed() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story(states.ProcessesFailed(old, ERROR, ANSWER)) == (Stop(old, ONE),)
    assert [type(effect) for effect in story(states.Disproven(new, ERROR))] == [EndRollout, Stop, Stop]
    assert story.model.state is ModelState.UNLOADING


def test_proven_build_serves_if_the_old_processes_have_failed() -> None:
    story = proving()
    story(states.ProcessesFailed(old_id(story), ERROR, ANSWER))
    story(states.ProcessesReleased(old_id(story)))
    assert story(states.Proven(story.id))[0] == states.Admit(story.id, Plan(UNPROVEN, {"ram": 2}))
    assert story.model.state is ModelState.RESIDENT


def test_unproven_build_ends_if_there_is_nothing_to_compare_with() -> None:
    """The old processes fail for good while those of the unproven build still start."""
    story = Story().serve()
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    story(states.SwapGranted(fits=True))
    story(states.ProcessesFailed(old_id(story), ERROR, ANSWER))
    ended = story(states.ProcessesServing(story.id))
    assert [type(effect) for effect in ended] == [EndRollout, Stop, Stop]
    assert "the running processes have ended" in str(ended[0])
    assert story.model.state is ModelState.UNLOADING


def test_unproven_build_ends_if_the_old_processes_restart_meanwhile() -> None:
    story = Story().serve()
    old = story.id
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    story(states.SwapGranted(fits=True))
    story(states.ProcessesStarting(old))
    assert [type(effect) for effect in story(states.ProcessesServing(story.id))] == [Stop]
    assert story.id == old


def change(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, source="three.gguf", **changes)


@pytest.mark.parametrize("crashes", [False, True])
def test_change_during_the_proof_is_rolled_out_with_the_old_build_if_it_is_refused(crashes: bool) -> None:
    story = proving()
    new = story.id
    story(states.SpecChanged(change(UNPROVEN)))
    if crashes:
        story(states.ProcessesFailed(new, ERROR, ANSWER))
    else:
        story(states.Disproven(new, ERROR))
        story(states.ProcessesReleased(new))
    assert story.effects[-1] == Size(story.ticket, change(UNPROVEN, runtime="", unproven=False))


def test_change_during_the_proof_is_rolled_out_without_another_proof() -> None:
    story = proving()
    old = old_id(story)
    story(states.SpecChanged(change(UNPROVEN)))
    story(states.Proven(story.id))
    story(states.ProcessesReleased(old))
    assert story.effects[-1] == Size(story.ticket, change(UNPROVEN, unproven=False))


def test_proof_ends_while_the_new_processes_start() -> None:
    """A replica has failed, or another model needs the memory."""
    story = Story().serve()
    old = story.id
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    story(states.SwapGranted(fits=True))
    new = story.id
    assert story(states.Disproven(new, ERROR)) == (Stop(new, Plan(UNPROVEN, {"ram": 2})),)
    assert story(states.ProcessesReleased(new))[-1] == EndRollout(ERROR)
    assert story.id == old


def test_restart_of_the_old_processes_ends_the_proof() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story(states.ProcessesStarting(new)) == ()
    assert [type(effect) for effect in story(states.ProcessesStarting(old))] == [Stop]
    story(states.ProcessesServing(old))
    ended = story(states.ProcessesReleased(new))[-1]
    assert "the running processes have ended" in str(ended)
    assert (story.model.state, story.id) == (ModelState.RESIDENT, old)


def test_model_is_loaded_during_a_proof() -> None:
    story = proving()
    assert phase_of(story.model) is Phase.RESIDENT
    story(states.ProcessesFailed(old_id(story), ERROR, ANSWER))
    assert phase_of(story.model) is Phase.LOADING


def test_build_is_not_proven_without_room_beside_the_old_processes() -> None:
    story = Story().serve()
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    (ended,) = story(states.SwapGranted(fits=False))
    assert isinstance(ended, EndRollout)
    assert isinstance(ended.error, DoesNotFit)
    assert story.model.state is ModelState.RESIDENT


def test_proof_waits_until_the_old_processes_serve() -> None:
    story = Story().serve()
    story(states.SpecChanged(UNPROVEN))
    story(states.Sized(story.ticket, Plan(UNPROVEN, {"ram": 2})))
    story(states.ProcessesStarting(story.id))
    assert story(states.SwapGranted(fits=True)) == ()
    story(states.ProcessesServing(story.id))
    assert [type(effect) for effect in story(states.SwapGranted(fits=True))] == [Start]


def test_later_failure_restores_the_proven_build_with_requests() -> None:
    story = proving()
    new = story.id
    story(states.Proven(new))
    story(states.ProcessesReleased(old_id(story)))
    story(states.SpecChanged(SPECS[0]))
    story(states.Sized(story.ticket, ONE))
    story(states.SwapGranted(fits=False))
    story(states.ProcessesReleased(new))
    story(states.SwapGranted(fits=True))
    story(states.ProcessesFailed(story.id, ERROR, ANSWER))
    assert story.effects[-1] == Start(story.id, Plan(UNPROVEN, {"ram": 2}))
