"""Random events among models with a memory budget. ``ModelWorld`` raises for an invalid action."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamasup.core.pool.eviction_policy import Action, Phase, ResidencyPolicy, WakeAt
from tests.kit.extent import examples
from tests.kit.residency_sim import Call, replay, simulate
from tests.kit.residency_world import Model, ModelWorld

BOTH = frozenset({"one"})
MODELS = (
    Model(id="chat", needs={"CUDA0": 6, "ram": 1}, load_s=6.0, slots=2),
    Model(id="code", needs={"CUDA0": 5, "ram": 1}, load_s=5.0, ttl_s=30.0),
    Model(id="draw", needs={"CUDA1": 4, "ram": 1}, load_s=4.0, groups=BOTH),
    Model(id="wide", needs={"CUDA0": 4, "CUDA1": 4}, load_s=8.0, groups=BOTH),
    Model(id="small", needs={"CUDA0": 2}, load_s=0.5, slots=4),
    Model(id="embed", needs={"ram": 2}, load_s=0.2, pinned=True),
    Model(id="cpu", needs={"ram": 5}, load_s=1.0, groups=frozenset({"slow"})),
    Model(id="other", needs={"ram": 4}, load_s=1.0, groups=frozenset({"slow"})),
    Model(id="huge", needs={"CUDA0": 30}),
)
BUDGET = {"CUDA0": 10, "CUDA1": 6, "ram": 8}
NAMES = st.sampled_from([model.id for model in MODELS])


class AnyWorld(RuleBasedStateMachine):
    """``ModelWorld`` holds the phases. ``settle`` does the work of the pool between two events."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ModelWorld(MODELS, BUDGET, ResidencyPolicy(time_slice_s=5.0, max_loaded=4))
        self.waiting: dict[int, str] = {}
        self.asked = self.ordered = self.events = 0

    def settle(self) -> list[Action]:
        done = self.world.settle()
        self.ordered += len(done)
        self.events += 1
        for request in (*self.world.began, *self.world.refused):
            self.waiting.pop(request)
        self.world.began.clear()
        self.world.refused.clear()
        return done

    def some(self, *phases: Phase) -> list[str]:
        return [id_ for id_, state in self.world.states.items() if state.phase in phases]

    def busy(self) -> list[str]:
        return [id_ for id_, state in self.world.states.items() if state.in_flight]

    @rule(name=NAMES)
    def a_request_comes(self, name: str) -> None:
        if self.world.states[name].phase is not Phase.FAILED:
            self.waiting[self.world.arrive(name)] = name
            self.asked += 1
            self.settle()

    @precondition(lambda self: self.waiting)
    @rule(nth=st.integers(0, 7))
    def one_that_waits_leaves(self, nth: int) -> None:
        request = sorted(self.waiting)[nth % len(self.waiting)]
        self.world.give_up(self.waiting.pop(request), request)
        self.settle()

    @precondition(lambda self: self.busy())
    @rule(nth=st.integers(0, 7))
    def a_request_is_answered(self, nth: int) -> None:
        busy = self.busy()
        self.world.finish(busy[nth % len(busy)])
        self.settle()

    @precondition(lambda self: self.some(Phase.LOADING))
    @rule(nth=st.integers(0, 7), works=st.sampled_from([True, True, True, False]))
    def a_load_ends(self, nth: int, works: bool) -> None:
        loading = self.some(Phase.LOADING)
        name = loading[nth % len(loading)]
        if works:
            self.world.loaded(name)
        else:
            for request in self.world.failed(name):
                self.waiting.pop(request)
        self.settle()

    @precondition(lambda self: self.some(Phase.UNLOADING))
    @rule(nth=st.integers(0, 7))
    def memory_is_free_again(self, nth: int) -> None:
        leaving = self.some(Phase.UNLOADING)
        self.world.unloaded(leaving[nth % len(leaving)])
        self.settle()

    @precondition(lambda self: self.some(Phase.FAILED))
    @rule()
    def a_failed_one_may_be_tried_again(self) -> None:
        self.world.retry_allowed(self.some(Phase.FAILED)[0])
        self.settle()

    @rule(after_s=st.floats(0.001, 60.0))
    def time_passes(self, after_s: float) -> None:
        self.world.now_s = min(self.world.now_s + after_s, max(self.world.wake_at_s, self.world.now_s))
        self.settle()

    @rule(device=st.sampled_from(["CUDA0", "CUDA1", "ram"]), size=st.integers(3, 12))
    def the_budget_changes(self, device: str, size: int) -> None:
        self.world.budget[device] = size
        self.settle()

    @invariant()
    def nothing_is_left_to_decide(self) -> None:
        actions = self.world.decide(self.world.snapshot())
        assert all(isinstance(action, WakeAt) for action in actions)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """If a request waits, a model is busy or changing, or the policy has a time to decide again."""
        on_the_way = self.some(Phase.LOADING, Phase.UNLOADING) or self.busy()
        assert not self.waiting or on_the_way or self.world.wake_at_s < float("inf")

    @invariant()
    def verdicts_are_bounded_by_what_happened(self) -> None:
        assert self.ordered <= 4 * (self.events + self.asked) + len(MODELS)

    def teardown(self) -> None:
        """Without new requests, every waiting request is served or rejected."""
        for _ in range(40 * (len(self.waiting) + len(MODELS))):
            if not self.waiting:
                return
            for name in self.some(Phase.LOADING):
                self.world.loaded(name)
            for name in self.some(Phase.UNLOADING):
                self.world.unloaded(name)
            for name in self.busy():
                self.world.finish(name)
            if not self.settle() and self.world.wake_at_s < float("inf"):
                self.world.now_s = self.world.wake_at_s
                self.settle()
        raise AssertionError(f"still waiting: {self.waiting}")


TestAnyWorld = AnyWorld.TestCase
TestAnyWorld.settings = settings(max_examples=examples(30), stateful_step_count=30)

calls = st.builds(Call, NAMES, st.floats(0.0, 8.0), st.floats(0.0, 3.0))


@settings(max_examples=examples(40))
@given(st.lists(st.lists(calls, max_size=12), min_size=1, max_size=6))
def test_every_request_ends_within_a_bound(clients: list[list[Call]]) -> None:
    outcome = simulate(MODELS, clients, BUDGET)
    requested = [call.model for client in clients for call in client]
    assert outcome.refused == requested.count("huge")
    assert outcome.answered == len(requested) - outcome.refused
    # at most one request of each client is before it, each with a load, a time slice, an answer and a wait
    assert max(outcome.waits_s, default=0.0) <= len(clients) * (8.0 + 8.0 + 8.0 + 5.0)
    assert len(outcome.log) <= 8 * len(requested)


@pytest.mark.parametrize("streams", [1, 3])
def test_two_busy_models_take_turns(streams: int) -> None:
    """Only one fits into memory: neither starves, and each has at least its time slice."""
    models = [Model(id=name, needs={"ram": 1}, load_s=1.0, slots=2) for name in ("a", "b")]
    clients = [[Call(name, 0.5)] * 100 for name in ("a", "b") for _ in range(streams)]
    outcome = simulate(models, clients, {"ram": 1}, ResidencyPolicy(time_slice_s=5.0))
    assert outcome.answered == 200 * streams
    turns = outcome.ended_s / sum(outcome.loads.values())
    assert 5.0 <= turns <= 9.0
    # at most the other's time slice, its request in flight, the load, and the own request before
    assert max(outcome.waits_s) <= 5.0 + 0.5 + 1.0 + 0.5 + 5.0


def test_small_models_do_not_starve_a_large_one() -> None:
    small = [Model(id=f"s{n}", needs={"ram": 3}, load_s=0.5) for n in range(6)]
    big = Model(id="big", needs={"ram": 10}, load_s=3.0)
    clients = [[Call(model.id, 2.0, 0.1)] * 15 for model in small]
    outcome = simulate([*small, big], [*clients, [Call("big", 1.0, 10.0)] * 2], {"ram": 10})
    assert outcome.loads["big"] == 2
    assert outcome.answered == 92
    assert max(outcome.waits_s) < 60


def test_idle_grace_keeps_a_model_between_two_requests() -> None:
    models = [Model(id=name, needs={"ram": 1}, load_s=3.0) for name in ("a", "b")]
    clients = [[Call(name, 0.2, 0.01)] * 100 for name in ("a", "b")]
    lingering = simulate(models, clients, {"ram": 1}, ResidencyPolicy(idle_grace=0.1))
    at_once = simulate(models, clients, {"ram": 1}, ResidencyPolicy(idle_grace=0.0))
    assert sum(at_once.loads.values()) > 190
    assert sum(lingering.loads.values()) < 20


def test_replay_of_a_run_has_the_same_loads() -> None:
    """A trace is enough to compare a real run with the simulation."""
    models = [model for model in MODELS if model.id != "huge"]
    clients = [
        [
            Call(models[(client * 3 + nth * nth) % len(models)].id, 0.5 + nth % 3, 0.2 * client)
            for nth in range(20)
        ]
        for client in range(4)
    ]
    run = simulate(MODELS, clients, BUDGET)
    again = replay(MODELS, run.trace, BUDGET)
    assert (again.answered, again.refused) == (80, 0)
    assert again.loads == run.loads
    assert sum(again.waits_s) == pytest.approx(sum(run.waits_s))
