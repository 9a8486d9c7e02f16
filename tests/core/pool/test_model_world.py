"""Random loads, unloads, crashes, changes, removals and budgets, with a driver that only remembers.

The world is a pool without a clock, a queue or a process: it takes steps of the models, asks the real
policy, and answers requests as the queue of a model would.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool import model_steps as steps
from llamasup.core.pool.answers import pause_of, reason_of
from llamasup.core.pool.driver import carry_out
from llamasup.core.pool.effects import EndLoads, EndRollout, Forget, Reload, Start, effects_of
from llamasup.core.pool.eviction_policy import (
    Action,
    ModelSnapshot,
    Phase,
    ResidencyPolicy,
    Snapshot,
    WakeAt,
    decide,
)
from llamasup.core.pool.model_states import (
    IN_TURN,
    Estimate,
    Model,
    ModelState,
    Place,
    Processes,
    ProcessesStatus,
    RolloutStep,
    charged,
    is_proof_under_way,
    needs_of,
    old_needs_of,
    phase_of,
)
from llamasup.core.pool.model_steps import Step
from llamasup.core.pool.rollout_steps import disprove, observe, prove, swap, turn_of
from scripts.generated.pool_states import ANSWER, ERROR, PLACES, Plan, name_of_step
from tests.kit.extent import examples

NAMES = st.sampled_from("abc")
FILES = {"one.gguf": 2, "two.gguf": 3, "large.gguf": 5}
POLICY = ResidencyPolicy(time_slice_s=0.0, idle_grace=0.0)
ROUNDS = 60


def plan_of(spec: ModelSpec) -> Plan:
    return Plan(spec, {"ram": FILES[spec.source]})


class FakeDriver:
    """A ``Driver`` that remembers what was asked of it."""

    def __init__(self) -> None:
        self.sizings: dict[int, ModelSpec] = {}
        self.running: dict[int, Estimate] = {}
        self.known: dict[int, Estimate] = {}
        self.stopping: set[int] = set()
        self.withheld: set[int] = set()
        self.proofs: set[int] = set()

    def size(self, ticket: int, spec: ModelSpec) -> None:
        self.sizings[ticket] = spec

    def cancel_sizing(self, ticket: int) -> None:
        self.sizings.pop(ticket, None)  # it may have ended

    def start(self, id_: int, sized: Estimate, *, withheld: bool) -> None:
        assert id_ not in self.running
        self.withheld.discard(id_)
        if withheld:
            self.withheld.add(id_)
        self.running[id_] = self.known[id_] = sized

    def prove(self, id_: int, old_id: int) -> None:
        assert {id_, old_id} <= self.known.keys()
        assert id_ in self.withheld
        self.proofs.add(id_)

    def admit(self, id_: int, sized: Estimate) -> None:
        self.withheld.remove(id_)

    def withdraw(self, id_: int) -> None:
        assert id_ in self.known

    def stop(self, id_: int, sized: Estimate | None, *, now: bool) -> None:
        assert id_ in self.known
        self.stopping.add(id_)

    def drop(self, id_: int) -> None:
        del self.known[id_]
        self.withheld.discard(id_)
        self.running.pop(id_, None)


class Managed:
    """A model of the world. ``requests`` and ``loads`` wait; ``unloaded``: by the latest command."""

    def __init__(self, spec: ModelSpec) -> None:
        self.model = Model(spec)
        self.driver = FakeDriver()
        self.requests = self.loads = self.in_flight = self.answered = 0
        self.unloaded = False
        self.rollouts = 0

    @property
    def wanted(self) -> bool:
        return bool(self.requests or self.loads)

    @property
    def serves(self) -> bool:
        return pause_of(self.model) is None and any(
            one.status is ProcessesStatus.SERVING for one in self.model.processes
        )


class World(RuleBasedStateMachine):
    steps = 0
    transitions: ClassVar[Counter[tuple[Place, str]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.budget = 6
        self.now_s = 1.0
        self.managed = {name: Managed(ModelSpec(name, "one.gguf")) for name in "abc"}
        self.removed: list[Managed] = []
        self.steps_to_take: deque[tuple[Managed, Step]] = deque()
        self.dispatching = False

    # --- the pool

    def post(self, managed: Managed, step: Step) -> None:
        self.steps_to_take.append((managed, step))
        if self.dispatching:
            return
        self.dispatching = True
        while self.steps_to_take:
            self.advance(*self.steps_to_take.popleft())
        self.dispatching = False

    def advance(self, managed: Managed, step: Step) -> None:
        before = managed.model
        after = managed.model = step(before)
        self.transitions[before.place, name_of_step(step)] += after is not before
        managed.rollouts += after.rollout is not None and before.rollout is None
        for effect in effects_of(before, after):
            if carry_out(effect, managed.driver):
                if isinstance(effect, Start) and name_of_step(step) in {"load", "swap"}:
                    assert self.charged <= self.budget, "started without memory"
                continue
            match effect:
                case EndLoads():
                    managed.loads = 0
                case EndRollout():
                    managed.rollouts -= 1
                case Reload():
                    managed.rollouts -= 1
                    self.load(managed)
                case Forget():
                    self.removed.remove(managed)
        self.answer(managed)

    def answer(self, managed: Managed) -> None:
        answer = pause_of(managed.model) or reason_of(managed.model)
        assert answer is not None
        if managed.serves or not answer.queueable:
            managed.requests = 0

    @property
    def all(self) -> list[Managed]:
        return [*self.managed.values(), *self.removed]

    @property
    def charged(self) -> int:
        return sum(charged(managed.model).get("ram", 0) for managed in self.all)

    def load(self, managed: Managed) -> None:
        managed.unloaded = False
        if managed.model.state is not ModelState.REMOVED:
            self.post(managed, steps.retry)
            managed.loads += 1

    def reconcile(self) -> None:
        self.now_s += 1.0
        for managed in self.managed.values():
            if managed.model.state is ModelState.RESIDENT:
                managed.loads = 0
            self.post(managed, steps.want if managed.wanted else steps.unwant)
        self.grant_swaps()
        snapshots = {
            f"{name}{number}": self.snapshot(f"{name}{number}", managed)
            for number, (name, managed) in enumerate(
                [*self.managed.items(), *(("removed", managed) for managed in self.removed)]
            )
            if managed.model.sized is not None
        }
        for action in decide(Snapshot(self.now_s, snapshots, {"ram": self.budget}, POLICY)):
            self.apply(action)

    def snapshot(self, key: str, managed: Managed) -> ModelSnapshot:
        return ModelSnapshot(
            key,
            needs_of(managed.model),
            phase=Phase.LOADING if is_proof_under_way(managed.model) else phase_of(managed.model),
            in_flight=managed.in_flight,
            waiting=managed.requests + managed.loads,
            waiting_since_s=0.0 if managed.wanted else float("inf"),
            old_replicas=old_needs_of(managed.model),
        )

    def grant_swaps(self) -> None:
        for managed in self.managed.values():
            others = [other.model for other in self.all if other is not managed]
            fits = turn_of(managed.model, others, {"ram": self.budget})
            if fits is not None:
                self.post(managed, partial(swap, fits=fits))

    def apply(self, action: Action) -> None:
        if not isinstance(action, WakeAt):
            self.post(self.managed[action.id[0]], steps.step_of(action))

    # --- users

    @rule(name=NAMES)
    def request(self, name: str) -> None:
        managed = self.managed[name]
        managed.unloaded = False
        managed.requests += 1
        self.answer(managed)

    @rule(name=NAMES)
    def load_command(self, name: str) -> None:
        self.load(self.managed[name])

    @rule(name=NAMES)
    def unload_command(self, name: str) -> None:
        managed = self.managed[name]
        managed.loads = managed.requests = 0
        managed.unloaded = True
        self.post(managed, steps.unload)
        assert phase_of(managed.model) in {Phase.ABSENT, Phase.UNLOADING}

    @rule(name=NAMES)
    def clients_leave(self, name: str) -> None:
        self.managed[name].requests = self.managed[name].loads = 0

    @rule(name=NAMES, busy=st.booleans())
    def work(self, name: str, busy: bool) -> None:
        self.managed[name].in_flight = int(busy and self.managed[name].serves)

    @rule(name=NAMES, file=st.sampled_from(sorted(FILES)), unproven=st.booleans())
    def change_file(self, name: str, file: str, unproven: bool) -> None:
        managed = self.managed[name]
        if managed.model.spec.source != file:
            self.post(managed, partial(steps.change_spec, spec=ModelSpec(name, file, unproven=unproven)))

    @rule(budget=st.integers(2, 12))
    def change_budget(self, budget: int) -> None:
        self.budget = budget
        for managed in self.managed.values():
            self.post(managed, steps.change_budget)

    @rule(name=NAMES)
    def remove_and_add(self, name: str) -> None:
        gone = self.managed[name]
        self.removed.append(gone)
        self.managed[name] = Managed(ModelSpec(name, "one.gguf"))
        self.post(gone, partial(steps.remove, answer=ANSWER, error=ERROR))
        assert not gone.wanted

    # --- the machine

    @rule(name=NAMES, works=st.booleans())
    def sizing_ends(self, name: str, works: bool) -> None:
        managed = self.managed[name]
        for ticket, spec in tuple(managed.driver.sizings.items()):
            del managed.driver.sizings[ticket]
            found = plan_of(spec) if works else ERROR
            self.post(managed, partial(steps.take_size, ticket=ticket, found=found))

    @rule(name=NAMES, outcome=st.sampled_from(["starting", "partly", "serving", "failed", "retrying"]))
    def processes_change(self, name: str, outcome: str) -> None:
        managed = self.managed[name]
        for id_ in tuple(managed.driver.running)[-1:]:
            self.process_changes(managed, id_, outcome)

    @rule(name=NAMES)
    def old_processes_crash(self, name: str) -> None:
        managed = self.managed[name]
        for id_ in tuple(managed.driver.running)[:1]:
            self.process_changes(managed, id_, "failed")

    def process_changes(self, managed: Managed, id_: int, outcome: str) -> None:
        if id_ in managed.driver.stopping:
            return
        match outcome:
            case "starting":
                seen = Processes(id_)
            case "failed" | "retrying":
                settled = outcome == "failed"
                seen = Processes(id_, ProcessesStatus.FAILED, error=ERROR, answer=ANSWER, settled=settled)
                if settled:
                    del managed.driver.running[id_]
            case _:
                seen = Processes(id_, ProcessesStatus.SERVING, outcome == "serving")
        self.observe(managed, seen)

    def observe(self, managed: Managed, seen: Processes) -> None:
        self.post(managed, partial(observe, seen=seen))

    @rule(name=NAMES, works=st.booleans())
    def proof_ends(self, name: str, works: bool) -> None:
        """It may end late, when its processes stop or are gone."""
        managed = self.managed[name]
        for id_ in tuple(managed.driver.proofs):
            managed.driver.proofs.remove(id_)
            refused = partial(disprove, id_=id_, error=ERROR)
            self.post(managed, partial(prove, id_=id_) if works else refused)

    @rule(name=NAMES)
    def late_restart(self, name: str) -> None:
        """A restart that was asked for before the processes stopped."""
        managed = self.managed[name]
        current = managed.model.current
        if current is not None and current.status is ProcessesStatus.STOPPED:
            assert managed.model.sized is not None
            managed.driver.running[current.id] = managed.model.sized
            self.observe(managed, Processes(current.id))

    @rule()
    def processes_end(self) -> None:
        for managed in self.all:
            self.end_processes(managed)

    def end_processes(self, managed: Managed) -> None:
        for id_ in tuple(managed.driver.stopping):
            managed.driver.stopping.discard(id_)
            managed.driver.running.pop(id_, None)
            self.observe(managed, Processes(id_, ProcessesStatus.STOPPED))

    @rule()
    def decide_again(self) -> None:
        self.reconcile()

    @rule(name=NAMES)
    def is_loaded(self, name: str) -> None:
        """A request, and all that happens until it is answered, if nothing goes wrong."""
        managed = self.managed[name]
        self.request(name)
        for _ in range(4):
            self.reconcile()
            self.sizing_ends(name, works=True)
            for id_ in tuple(managed.driver.running):
                self.process_changes(managed, id_, "serving")

    @rule(name=NAMES, file=st.sampled_from(sorted(FILES)), unproven=st.booleans())
    def swap_begins(self, name: str, file: str, unproven: bool) -> None:
        self.is_loaded(name)
        self.change_file(name, file, unproven)
        self.sizing_ends(name, works=True)
        self.reconcile()

    @rule(name=NAMES, file=st.sampled_from(sorted(FILES)))
    def proof_begins(self, name: str, file: str) -> None:
        self.swap_begins(name, file, unproven=True)
        for id_ in tuple(self.managed[name].driver.running):
            self.process_changes(self.managed[name], id_, "serving")

    @rule(name=NAMES)
    def processes_of_one_end(self, name: str) -> None:
        self.end_processes(self.managed[name])
        self.reconcile()

    # --- what always holds

    @invariant()
    def no_process_has_no_owner(self) -> None:
        World.steps += 1
        for managed in self.all:
            model = managed.model
            owned = {one.id for one in model.holding}
            assert set(managed.driver.running) <= owned, model
            assert managed.driver.stopping <= owned, model
            known = {one.id for one in model.processes}
            assert set(managed.driver.known) <= known, model

    @invariant()
    def memory_is_counted_once(self) -> None:
        for managed in self.all:
            model = managed.model
            held = sum(sized.needs["ram"] for sized in managed.driver.running.values())
            counted = charged(model).get("ram", 0)
            if model.rollout is not None and model.rollout.step in IN_TURN:
                both = [one.needs["ram"] for one in (model.rollout.before, model.sized) if one is not None]
                assert held <= counted <= max(both), model
            elif managed.driver.stopping:  # those that had failed before they were stopped hold nothing
                assert (
                    held
                    <= counted
                    <= held
                    + sum(
                        sized.needs["ram"]
                        for id_, sized in managed.driver.known.items()
                        if id_ not in managed.driver.running
                    )
                ), model
            else:
                assert held == counted, model

    @invariant()
    def processes_that_serve_get_requests(self) -> None:
        """Only those of a build that is not proven are withheld, and only beside others."""
        for managed in self.all:
            model = managed.model
            if model.current is not None and model.current.id in managed.driver.withheld:
                steps = {RolloutStep.BESIDE, RolloutStep.PROVING}
                stops = model.current.status not in {ProcessesStatus.STARTING, ProcessesStatus.SERVING}
                assert stops or model.place in steps, model

    @invariant()
    def sizings_and_rollouts_are_known(self) -> None:
        for managed in self.all:
            sizing = managed.model.sizing
            assert set(managed.driver.sizings) == (set() if sizing is None else {sizing.ticket})
            assert managed.rollouts == (managed.model.rollout is not None)

    def teardown(self) -> None:
        """Everything works from now on: each request is answered, and the latest commands have won."""
        for managed in self.managed.values():
            managed.in_flight = 0
        for _ in range(ROUNDS):
            for name, managed in self.managed.items():
                self.sizing_ends(name, works=True)
                self.proof_ends(name, works=True)
                for id_ in tuple(managed.driver.running):
                    self.process_changes(managed, id_, "serving")
            self.processes_end()
            self.reconcile()
        self.no_process_has_no_owner()
        assert self.removed == []
        for managed in self.managed.values():
            model = managed.model
            assert not managed.wanted, model
            assert model.rollout is None, model
            assert model.state in {ModelState.ABSENT, ModelState.RESIDENT, ModelState.FAILED}, model
            if managed.unloaded:
                assert model.state is ModelState.ABSENT, model
            assert self.charged <= max(self.budget, 0) or model.state is not ModelState.ABSENT


def run(examples: int, steps: int) -> int:
    World.steps = 0
    World.transitions.clear()
    run_state_machine_as_test(
        World, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
    return World.steps


def test_models_keep_their_promises_in_any_order_of_steps() -> None:
    assert run(examples(100), 50) > 30 * examples(100)


@pytest.mark.extended
def test_models_keep_their_promises_in_long_orders_of_steps() -> None:
    assert run(600, 100) > 30_000
    reached = places()
    for _ in range(10):  # a rare place may be in none of so many random orders
        if reached != set(PLACES):
            run(100, 100)
            reached |= places()
    assert reached == set(PLACES)


def places() -> set[Place]:
    """The places in which a step changed something, in the last run."""
    return {place for (place, _), count in World.transitions.items() if count}
