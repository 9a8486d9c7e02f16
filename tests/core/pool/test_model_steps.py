"""Every step of every reachable model, and the changes that are easy to lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool import model_steps as steps
from llamasup.core.pool.cheapest_set import Candidate, Demand
from llamasup.core.pool.effects import (
    Admit,
    Announce,
    CancelSizing,
    Drop,
    Effect,
    EndLoads,
    EndRollout,
    Prove,
    Reload,
    Size,
    Start,
    Stop,
    Withdraw,
    effects_of,
)
from llamasup.core.pool.eviction_policy import Cordon, Evict, Grounds, Load, Phase, Reject, Uncordon
from llamasup.core.pool.model_states import (
    Model,
    ModelState,
    Place,
    Processes,
    ProcessesStatus,
    RolloutStep,
    charged,
    needs_of,
    phase_of,
)
from llamasup.core.pool.model_steps import Step
from llamasup.core.pool.rollout_steps import disprove, follow, memory_needed, observe, prove, swap
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import LoadFailed
from llamasup.errors import DoesNotFit, LlamasupError
from scripts import docs
from scripts.generated import pool_states
from scripts.generated.pool_states import (
    ANSWER,
    ERROR,
    PLACES,
    SPECS,
    UNPROVEN,
    Plan,
    name_of_step,
    reachable,
)
from tests.kit.paths import ROOT

PROVEN_OR_NOT = (*SPECS, UNPROVEN)
BY_COMMAND = tuple(replace(spec, stay=Stay(by_command=True)) for spec in SPECS)
LIVE = {ProcessesStatus.STARTING, ProcessesStatus.SERVING}
ONE, TWO = (Plan(spec, {"ram": number}) for number, spec in enumerate(SPECS, 1))


class Story:
    """A model, and the effects of the last step."""

    def __init__(self, spec: ModelSpec = SPECS[0]) -> None:
        self.model = Model(spec)
        self.effects: tuple[Effect, ...] = ()

    def __call__(
        self, step: Callable[..., Model], *arguments: object, **options: object
    ) -> tuple[Effect, ...]:
        before, self.model = self.model, step(self.model, *arguments, **options)
        self.effects = tuple(effects_of(before, self.model))
        return self.effects

    def starting(self, id_: int) -> tuple[Effect, ...]:
        return self(observe, Processes(id_))

    def serving(self, id_: int, *, complete: bool = True) -> tuple[Effect, ...]:
        return self(observe, Processes(id_, ProcessesStatus.SERVING, complete))

    def failed(self, id_: int, *, settled: bool = True) -> tuple[Effect, ...]:
        report = Processes(id_, ProcessesStatus.FAILED, error=ERROR, answer=ANSWER, settled=settled)
        return self(observe, report)

    def stopped(self, id_: int) -> tuple[Effect, ...]:
        return self(observe, Processes(id_, ProcessesStatus.STOPPED))

    @property
    def ticket(self) -> int:
        assert self.model.sizing is not None
        return self.model.sizing.ticket

    @property
    def id(self) -> int:
        assert self.model.current is not None
        return self.model.current.id

    def load(self) -> Story:
        self(steps.want)
        self(steps.take_size, self.ticket, ONE)
        self(steps.load)
        return self

    def serve(self) -> Story:
        self.load().serving(self.id)
        return self

    def change(self, spec: ModelSpec = SPECS[1]) -> Story:
        """The new spec is sized."""
        self(steps.change_spec, spec)
        self(steps.take_size, self.ticket, Plan(spec, {"ram": 2}))
        return self


# --- the sweep


def violations(model: Model) -> Iterator[str]:
    state = model.state
    if model.holding and not charged(model):
        yield "processes without charged memory"
    if charged(model) and not model.holding and state is not ModelState.ROLLING_OUT:
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
    if state is ModelState.FAILED and model.current is not None and model.current.status in LIVE:
        yield "failed, and processes start or serve"
    if state is ModelState.REMOVED and any(each.status in LIVE for each in model.processes):
        yield "removed, and processes start or serve"


def broken(here: Model, step: Step, there: Model) -> Iterator[str]:
    """The faults of a transition."""
    yield from violations(there)
    name = name_of_step(step)
    if there.made < here.made:
        yield "a number was given twice"
    if isinstance(step, partial) and name == "change_spec" and there.spec is not step.keywords["spec"]:
        yield "the latest command, a new spec, was lost"
    if name == "unload" and phase_of(there) not in {Phase.ABSENT, Phase.UNLOADING}:
        yield "the latest command, to unload, was lost"
    if name in set(ProcessesStatus) and there is not here and follow(there) != there:
        yield "the reports led to less than they should"


class Sweep(NamedTuple):
    """One walk over every transition."""

    length: int
    kinds: tuple[tuple[Model, Step, Model], ...]
    """The first transition of each kind of step from one place to another."""
    broken: list[tuple[str, Model, Step, Model]]


@cache
def sweep(specs: tuple[ModelSpec, ...]) -> Sweep:
    """Compute the walk once for all tests of this module: it passes 100,000 transitions in seconds."""
    length = 0
    kinds: dict[tuple[Place, Place, str], tuple[Model, Step, Model]] = {}
    found: list[tuple[str, Model, Step, Model]] = []
    for here, step, there in reachable(specs):
        length += 1
        kinds.setdefault((here.place, there.place, name_of_step(step)), (here, step, there))
        found += ((fault, here, step, there) for fault in broken(here, step, there))
    return Sweep(length, tuple(kinds.values()), found)


@pytest.mark.parametrize("specs", [PROVEN_OR_NOT, BY_COMMAND], ids=["shared", "by command"])
def test_invariants_hold_in_every_reachable_state(specs: tuple[ModelSpec, ...]) -> None:
    assert sweep(specs).broken[:3] == []
    assert sweep(specs).length > 10_000
    proofs = {RolloutStep.PROVING} if specs is BY_COMMAND else set()
    assert {here.place for here, _, _ in sweep(specs).kinds} == set(PLACES) - proofs


def test_diagram_in_docs_matches_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagram has an edge for each kind of transition."""
    monkeypatch.setattr(pool_states, "reachable", lambda specs: sweep(specs).kinds)
    assert docs.keep("pool-states", ROOT, check=True) == 0


def test_nothing_has_to_be_done_for_a_model_that_stays_the_same() -> None:
    """Facts about another sizing or other processes, and reports that tell nothing new, change nothing."""
    story = Story().serve().change()
    story(swap, fits=True)
    before = story.model
    for late in (
        *(
            partial(steps.take_size, ticket=9, found=ONE),
            partial(steps.note_download, ticket=9, answer=ANSWER),
        ),
        *(partial(observe, seen=Processes(9)), partial(observe, seen=Processes(story.id))),
        *(partial(prove, id_=9), partial(disprove, id_=9, error=ERROR), partial(steps.measure, id_=9)),
        *(steps.want, steps.unwant, steps.retry, steps.load, steps.uncordon, partial(swap, fits=True)),
        *(partial(steps.cordon, for_id="b"), partial(steps.refuse, error=ERROR)),
    ):
        assert story(late) == ()
        assert story.model is before


def test_model_is_shown_with_its_state_and_its_processes() -> None:
    shown = repr(Story().serve().change().model)
    assert shown.startswith("<Model 'a': resident, rollout waiting, Processes(")


@pytest.mark.parametrize(
    ("before", "action", "state"),
    [
        ([], Load("a"), ModelState.LOADING),
        ([], Reject("a", "it is too large"), ModelState.FAILED),
        ([Load("a")], Evict("a", "ttl"), ModelState.UNLOADING),
        ([Load("a")], Cordon("a", "b"), ModelState.CORDONED),
        ([Load("a"), Cordon("a", "b")], Uncordon("a"), ModelState.RESIDENT),
    ],
)
def test_actions_of_the_policy_are_steps(
    before: list[Load | Cordon], action: Load | Evict | Cordon | Uncordon | Reject, state: ModelState
) -> None:
    story = Story()
    story(steps.want)
    story(steps.take_size, story.ticket, ONE)
    for earlier in before:
        story(steps.step_of(earlier))
        story.serving(story.id)
    story(steps.step_of(action))
    assert story.model.state is state


# --- sizings


def test_change_during_a_sizing_never_serves_the_old_file() -> None:
    story = Story()
    story(steps.want)
    old = story.ticket
    assert story(steps.change_spec, SPECS[1]) == (CancelSizing(old),)
    assert story(steps.want)[-1] == Size(old + 1, SPECS[1])
    assert story(steps.take_size, old, ONE) == ()
    story(steps.take_size, story.ticket, TWO)
    assert story(steps.load) == (Start(story.id, TWO),)


@pytest.mark.parametrize("outcome", [ONE, ERROR], ids=["ok", "failed"])
def test_budget_change_during_a_sizing_sizes_again(outcome: Plan | LlamasupError) -> None:
    story = Story()
    story(steps.want)
    story(steps.change_budget)
    assert story(steps.take_size, 1, outcome)[-1] == Size(2, SPECS[0])
    assert story.model.state is ModelState.SIZING


def test_budget_change_sizes_a_waiting_rollout_again() -> None:
    story = Story().serve().change()
    assert story(steps.change_budget) == (Size(story.ticket, SPECS[1]),)
    assert story(swap, fits=True) == ()


def test_switch_back_during_a_sizing_ends_the_rollout() -> None:
    story = Story().serve()
    story(steps.change_spec, SPECS[1])
    ticket = story.ticket
    assert story(steps.change_spec, SPECS[0]) == (CancelSizing(ticket), EndRollout())


# --- processes


def test_start_is_complete_only_with_all_replicas() -> None:
    """The old processes are not stopped while a new replica still starts."""
    story = Story().serve().change()
    story(swap, fits=True)
    assert story.serving(story.id, complete=False) == ()
    assert story.serving(story.id) != ()


@pytest.mark.parametrize("old_has_worker", [True, False])
def test_processes_with_an_rpc_worker_are_replaced_in_turn(old_has_worker: bool) -> None:
    """A worker serves one llama-server."""
    both = Settings(rpc=("10.0.0.2:50052",)), Settings()
    settings = both if old_has_worker else both[::-1]
    old, new = (replace(spec, settings=each) for spec, each in zip(SPECS, settings, strict=True))
    story = Story(old)
    story(steps.want)
    story(steps.take_size, story.ticket, Plan(old, {"ram": 1}))
    story(steps.load)
    story.serving(story.id)
    story(steps.change_spec, new)
    story(steps.take_size, story.ticket, Plan(new, {"ram": 1}))
    story(swap, fits=True)
    assert story.model.rollout is not None
    assert story.model.rollout.step is RolloutStep.STOPPING
    story.stopped(story.id)
    assert [type(effect) for effect in story(swap, fits=True)] == [Start]


def test_load_during_an_unload_waits_for_its_end() -> None:
    story = Story().serve()
    story(steps.unload)
    for event in (steps.retry, steps.want, steps.load):
        assert story(event) == ()
        assert story.model.state is ModelState.UNLOADING
    story.stopped(story.id)
    assert story(steps.load) == (Start(story.id, ONE),)


def test_failed_replica_that_tries_again_is_stopped_and_stays_charged() -> None:
    story = Story().load()
    assert story.failed(story.id, settled=False) == (
        Stop(story.id, ONE),
        EndLoads(ERROR),
        Announce(LoadFailed(SPECS[0].id, ERROR)),
    )
    assert (story.model.state, charged(story.model)) == (ModelState.FAILED, ONE.needs)
    assert story(steps.retry) == ()
    assert story.model.state is ModelState.UNLOADING
    story.stopped(story.id)
    assert (story.model.state, charged(story.model)) == (ModelState.ABSENT, {})


def test_model_that_shares_no_memory_keeps_it_to_try_again() -> None:
    story = Story(BY_COMMAND[0]).load()
    assert story.failed(story.id, settled=False) == (EndLoads(ERROR),)
    assert phase_of(story.model) is Phase.LOADING
    assert story.serving(story.id) == (EndLoads(),)
    story.failed(story.id)
    assert story.model.error is ERROR


def test_late_restart_has_no_process_without_an_owner() -> None:
    story = Story().serve()
    story(steps.unload)
    story.stopped(story.id)
    assert story.starting(story.id) == (Stop(story.id, ONE),)
    assert story.model.state is ModelState.UNLOADING


# --- swaps


def test_cut_rollout_frees_the_room_of_both_specs() -> None:
    story = Story().serve().change()
    story(swap, fits=True)
    old, new = story.id - 2, story.id
    assert needs_of(story.model) == {"ram": 3}
    assert [type(effect) for effect in story(steps.unload)][1:] == [Stop, Stop, EndRollout]
    assert story.model.old is not None
    old = story.model.old.id
    assert story.stopped(old) == (Drop(old),)
    assert charged(story.model) == TWO.needs
    story.stopped(new)
    assert charged(story.model) == {}


def test_swap_in_turn_keeps_room_to_restore_the_old_spec() -> None:
    story = Story(SPECS[1])
    story(steps.want)
    story(steps.take_size, story.ticket, TWO)
    story(steps.load)
    story.serving(story.id)
    story(steps.change_spec, SPECS[0])
    story(steps.take_size, story.ticket, ONE)
    story(swap, fits=False)
    story.stopped(story.id)
    assert charged(story.model) == TWO.needs
    story(swap, fits=True)
    assert charged(story.model) == TWO.needs
    story.failed(story.id)
    assert story.effects[-1] == Start(story.id, TWO)
    assert story.serving(story.id) == (EndLoads(), EndRollout(ERROR))


def test_change_while_the_old_spec_stops_loads_the_newest() -> None:
    story = Story().serve().change()
    story(swap, fits=False)
    story(steps.change_spec, SPECS[0])
    story.stopped(story.id)
    assert story(swap, fits=True) == (Reload(),)
    assert story.model.sized is None


def test_crash_of_an_outdated_process_loads_the_newest_spec() -> None:
    story = Story().serve()
    story(steps.change_spec, SPECS[1])
    story.failed(story.id)
    assert EndLoads(ERROR) not in story.effects
    assert isinstance(story(steps.want)[-1], Size)


# --- proofs of a build


def proving() -> Story:
    """The processes of an unproven build are ready beside the old ones."""
    story = Story().serve().change(UNPROVEN)
    story(swap, fits=True)
    assert story.effects == (Start(story.id, Plan(UNPROVEN, {"ram": 2}), withheld=True),)
    story.serving(story.id)
    return story


def old_id(story: Story) -> int:
    assert story.model.old is not None
    return story.model.old.id


def test_unproven_build_is_compared_before_it_gets_requests() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story.effects == (Prove(new, old),)
    story(prove, new)
    assert [type(effect) for effect in story.effects] == [Admit, Withdraw, Stop]
    assert story.stopped(old)[-1] == EndRollout()
    assert (story.model.state, story.id) == (ModelState.RESIDENT, new)


def test_refused_build_stops_and_the_old_processes_stay() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert [type(effect) for effect in story(disprove, new, ERROR)] == [Stop]
    story.stopped(new)
    assert story.effects == (Drop(new), EndLoads(), EndRollout(ERROR))
    assert (story.model.state, story.id, story.model.sized) == (ModelState.RESIDENT, old, ONE)


def test_crash_during_the_proof_keeps_the_old_processes() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    story.failed(new)
    assert story.effects == (Drop(new), EndLoads(), EndRollout(ERROR))
    assert story.id == old
    assert story(prove, new) == ()  # it comes too late
    assert story(disprove, new, ERROR) == ()


def test_refused_build_ends_with_old_processes_that_have_failed() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story.failed(old) == (Stop(old, ONE),)
    assert [type(effect) for effect in story(disprove, new, ERROR)] == [Stop, EndRollout]
    assert story.model.state is ModelState.UNLOADING


def test_proven_build_serves_if_the_old_processes_have_failed() -> None:
    story = proving()
    story.failed(old_id(story))
    story.stopped(old_id(story))
    assert story(prove, story.id)[0] == Admit(story.id, Plan(UNPROVEN, {"ram": 2}))
    assert story.model.state is ModelState.RESIDENT


def test_unproven_build_ends_if_there_is_nothing_to_compare_with() -> None:
    """The old processes fail for good while those of the unproven build still start."""
    story = Story().serve().change(UNPROVEN)
    story(swap, fits=True)
    story.failed(old_id(story))
    ended = story.serving(story.id)
    assert [type(effect) for effect in ended] == [Stop, EndRollout]
    assert "the running processes have exited" in str(ended[-1])
    assert story.model.state is ModelState.UNLOADING


def test_unproven_build_ends_if_the_old_processes_restart_meanwhile() -> None:
    story = Story().serve()
    old = story.id
    story.change(UNPROVEN)
    story(swap, fits=True)
    story.starting(old)
    assert [type(effect) for effect in story.serving(story.id)] == [Stop]
    assert story.id == old


def change(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, source="three.gguf", **changes)


@pytest.mark.parametrize("crashes", [False, True])
def test_change_during_the_proof_is_rolled_out_with_the_old_build_if_it_is_refused(crashes: bool) -> None:
    story = proving()
    new = story.id
    story(steps.change_spec, change(UNPROVEN))
    if crashes:
        story.failed(new)
    else:
        story(disprove, new, ERROR)
        story.stopped(new)
    assert story.effects[-1] == Size(story.ticket, change(UNPROVEN, runtime="", unproven=False))


def test_change_during_the_proof_is_rolled_out_without_another_proof() -> None:
    story = proving()
    old = old_id(story)
    story(steps.change_spec, change(UNPROVEN))
    story(prove, story.id)
    story.stopped(old)
    assert story.effects[-1] == Size(story.ticket, change(UNPROVEN, unproven=False))


def test_proof_ends_while_the_new_processes_start() -> None:
    """A replica has failed, or another model needs the memory."""
    story = Story().serve()
    old = story.id
    story.change(UNPROVEN)
    story(swap, fits=True)
    new = story.id
    assert story(disprove, new, ERROR) == (Stop(new, Plan(UNPROVEN, {"ram": 2})),)
    assert story.stopped(new)[-1] == EndRollout(ERROR)
    assert story.id == old


def test_restart_of_the_old_processes_ends_the_proof() -> None:
    story = proving()
    new, old = story.id, old_id(story)
    assert story.starting(new) == ()
    assert [type(effect) for effect in story.starting(old)] == [Stop]
    story.serving(old)
    ended = story.stopped(new)[-1]
    assert "the running processes have exited" in str(ended)
    assert (story.model.state, story.id) == (ModelState.RESIDENT, old)


@pytest.mark.parametrize(
    ("device", "candidates", "purpose"),
    [
        ("ram", (), "for 'b'"),
        ("ram", (Candidate("c", {}, (0, 0, 1.0)),), None),
        ("CUDA0", (), None),
    ],
    ids=["needed", "idle models suffice", "another device"],
)
def test_proof_ends_if_a_wanted_model_needs_its_memory(
    device: str, candidates: tuple[Candidate, ...], purpose: str | None
) -> None:
    lack: Demand = {("memory", device): 1}
    grounds = Grounds(lack, {}, lack, candidates, 0.0)
    needed = memory_needed(proving().model, {"b": grounds})
    assert (None if needed is None else needed.message) == (
        None if purpose is None else f"The memory of the proof with 'a' was needed {purpose}."
    )
    assert memory_needed(Story().serve().model, {"b": grounds}) is None
    if purpose is not None:
        assert "to stay within the budget" in str(memory_needed(proving().model, {"": grounds}))


def test_model_is_loaded_during_a_proof() -> None:
    story = proving()
    assert phase_of(story.model) is Phase.RESIDENT
    story.failed(old_id(story))
    assert phase_of(story.model) is Phase.LOADING


def test_build_is_not_proven_without_room_beside_the_old_processes() -> None:
    story = Story().serve().change(UNPROVEN)
    (ended,) = story(swap, fits=False)
    assert isinstance(ended, EndRollout)
    assert isinstance(ended.error, DoesNotFit)
    assert story.model.state is ModelState.RESIDENT


def test_proof_waits_until_the_old_processes_serve() -> None:
    story = Story().serve().change(UNPROVEN)
    story.starting(story.id)
    assert story(swap, fits=True) == ()
    story.serving(story.id)
    assert [type(effect) for effect in story(swap, fits=True)] == [Start]


def test_later_failure_restores_the_proven_build_with_requests() -> None:
    story = proving()
    new = story.id
    story(prove, new)
    story.stopped(old_id(story))
    story(steps.change_spec, SPECS[0])
    story(steps.take_size, story.ticket, ONE)
    story(swap, fits=False)
    story.stopped(new)
    story(swap, fits=True)
    story.failed(story.id)
    assert story.effects[-1] == Start(story.id, Plan(UNPROVEN, {"ram": 2}))
