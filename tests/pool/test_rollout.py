"""Rollouts and removals of models, as clients see them (S16)."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llamasup.errors import DoesNotFit, LlamasupError
from llamasup.models.spec import ModelOptions, ModelSpec, Stay
from llamasup.pool.eviction_policy import Phase
from llamasup.pool.model import policy_for
from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.events import StateChanged
from llamasup.supervision.states import Policy, State
from llamasup.testing.fake_server import install
from tests.pool.pools import (
    PATIENCE_S,
    HeldSizing,
    Pooled,
    async_test,
    file_of,
    pooled,
    server,
    spec_of,
    with_context,
)

pytestmark = pytest.mark.slow

Specs = dict[str, ModelSpec]
SOON = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2)


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> Specs:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


async def rollout_error(it: Pooled, name: str) -> LlamasupError | None:
    """Why its last change came to nothing."""
    rollout = it[name].rollout
    assert rollout is not None
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.shield(rollout)


def larger(spec: ModelSpec) -> ModelSpec:
    return with_context(spec, 600)


# --- what is not touched


@async_test
async def test_options_without_effect_on_the_process_keep_it(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        await it.load("b")
        before = it.pids("a", "b")
        patient = replace(specs["a"].options, wait_timeout_s=7.0)
        it.apply(replace(specs["a"], stay=Stay(pin=True), aliases=("gpt",), options=patient), specs["b"])

        assert await it.ask("gpt").served_by() == 1
        assert it.pids("a", "b") == before
        assert it["a"].snapshot().pinned
        assert it["a"].runners[0].policy.wait_timeout_s == 7.0


# --- one change after the other


@async_test
async def test_later_change_replaces_an_impossible_one(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, specs["a"]) as it:
        await it.load("a")
        old = it.pids("a")
        it.apply(replace(specs["a"], source=str(tmp_path / "gone.gguf")))
        await asyncio.sleep(0)  # it is looked at
        it.apply(larger(specs["a"]))
        assert await rollout_error(it, "a") is None

        assert it.pids("a") != old
        assert await it.ask("a").served_by() == 1


# --- with the old process still loaded


@async_test
async def test_changed_model_is_swapped_side_by_side_if_both_fit(tmp_path: Path, specs: Specs) -> None:
    """No request waits for it, none fails; what is in flight is finished by the old one."""
    specs["a"] = replace(specs["a"], options=ModelOptions(max_concurrent=4))
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("b")
        in_flight = it.ask("a")
        await in_flight.served_by()
        old, other = it.pids("a"), it.pids("b")
        it.apply(larger(specs["a"]), specs["b"])
        asked = 0
        while it["a"].old_replicas == [] or it["a"].runners[0].instance.state is not State.READY:
            request = it.ask("a")
            assert not request.waits
            assert request.why is None
            request.finish()
            asked += 1
            await asyncio.sleep(0.005)
        new = it.ask("a")

        assert await new.served_by() == 1
        assert it.pids("a") != old
        assert psutil.pid_exists(old["a"] or 0)
        assert in_flight.lease is not None
        assert not in_flight.lease.endpoint.closed
        in_flight.finish()
        await rollout_error(it, "a")
        assert it.pids("b") == other
        assert not psutil.pid_exists(old["a"] or 0)
        assert asked
        assert it["a"].sized is not None
        assert it["a"].sized.spec.settings.ctx_size == 600


@async_test
async def test_memory_of_both_generations_counts_during_a_swap(tmp_path: Path, specs: Specs) -> None:
    """The third model has to wait for the memory of the old one, and is then loaded in it."""
    async with pooled(tmp_path, *specs.values(), capacity=2.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        it.apply(larger(specs["a"]), specs["b"], specs["c"])
        await it.until(lambda: it["a"].old_replicas != [])
        new = it["a"].needs["ram"] - it["a"].old_needs["ram"]
        assert it.pool.remaining_for(it["a"]) == {
            "ram": it.pool.options.budget["ram"] - it["a"].old_needs["ram"]
        }
        other = it.ask("b")
        await it.until(lambda: it["a"].runners[0].instance.state is State.READY)
        assert other.waits

        in_flight.finish()
        await other.served_by()
        assert it["a"].needs["ram"] == new
        assert it.unloads() == []


@async_test
async def test_request_waits_for_memory_that_a_pinned_swap_frees(tmp_path: Path, specs: Specs) -> None:
    """While both of its processes run there is no memory for another model, but there will be."""
    a, b = replace(specs["a"], stay=Stay(pin=True)), specs["b"]
    async with pooled(tmp_path, a, b, capacity=2.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        it.apply(larger(a), b)
        await it.until(lambda: it["a"].old_replicas != [])
        other = it.ask("b")
        await it.until(lambda: it["b"].sized is not None)
        await it.reconciled()
        assert other.waits, other.why

        in_flight.finish()
        await other.served_by()


@async_test
async def test_failed_start_keeps_the_old_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    policy = Policy(restart=replace(SOON, half_open_s=1000.0))
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=policy) as it:
        await it.load("a")
        before = it.pids("a")
        it.apply(larger(specs["a"]), specs["b"])
        await it.until(lambda: it["a"].swapping)
        asked = asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        assert await rollout_error(it, "a") is not None

        await asyncio.wait_for(asked, PATIENCE_S)
        assert it.pids("a") == before
        request = it.ask("a")
        assert await request.served_by() == 1
        request.finish()
        assert it["a"].phase is Phase.RESIDENT
        # And is another one from its next load on.
        it.apply(with_context(specs["a"], 700), specs["b"])
        assert await rollout_error(it, "a") is None
        assert it.pids("a") != before


@async_test
async def test_change_that_does_not_fit_keeps_the_old_process(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        await it.load("a")
        before = it.pids("a")
        huge = replace(specs["a"], settings=replace(specs["a"].settings, ctx_size=1 << 22))
        it.apply(huge, specs["b"])
        assert isinstance(await rollout_error(it, "a"), DoesNotFit)

        assert it.pids("a") == before
        assert await it.ask("a").served_by() == 1


# --- after the old one


@async_test
async def test_queue_outlives_a_swap_in_turn(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        old = it.pids("a")
        it.apply(larger(specs["a"]), specs["b"])
        await it.until(lambda: it["a"].served.is_paused)
        queued = [it.ask("a") for _ in range(5)]
        await asyncio.sleep(0)
        assert all(request.waits for request in queued)
        in_flight.finish()

        for request in queued:
            assert await request.served_by() == 1
            request.finish()
        await rollout_error(it, "a")
        assert it.pids("a") != old
        assert it.unloads() == [("a", "changed", "")]


@async_test
async def test_loaded_model_is_loaded_again_after_a_swap_in_turn(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        await it.load("a")
        it.apply(larger(specs["a"]), specs["b"])
        await rollout_error(it, "a")

        assert it["a"].phase is Phase.RESIDENT
        assert it["a"].sized is not None
        assert not it["a"].is_outdated
        assert it.loads("a") == 2


@async_test
async def test_failed_swap_in_turn_restores_the_old_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(
        tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON), capacity=1.5
    ) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        it.apply(larger(specs["a"]), specs["b"])
        await it.until(lambda: it["a"].served.is_paused)
        queued = [it.ask("a") for _ in range(5)]
        other = it.ask("b")  # which may not have the memory in between
        in_flight.finish()

        for request in queued:
            assert await request.served_by() == 1
            request.finish()
        assert await rollout_error(it, "a") is not None
        assert it["a"].sized is not None
        assert it["a"].sized.spec is specs["a"]
        await other.served_by()
        assert it.unloads() == [("a", "changed", ""), ("a", "memory", "b")]


@async_test
async def test_queue_is_rejected_if_neither_process_starts(tmp_path: Path, specs: Specs) -> None:
    """The old one's server is gone, too, by the time that it is wanted again."""
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(tmp_path, specs["a"], runtime=runtime, policy=Policy(restart=SOON), capacity=1.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        it.apply(larger(specs["a"]))
        await it.until(lambda: it["a"].served.is_paused)
        queued = it.ask("a")
        install(tmp_path / "usual-server", "exit=load:1")
        in_flight.finish()

        refused = await queued.refusal()
        assert refused.status == 503
        await rollout_error(it, "a")
        assert it["a"].phase is Phase.FAILED


@async_test
async def test_larger_model_waits_for_an_eviction(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=2.0) as it:
        await it.load("a")
        await it.load("b")
        it.apply(larger(specs["a"]), specs["b"])
        await rollout_error(it, "a")

        assert it["a"].phase is Phase.RESIDENT
        assert not it["a"].is_outdated
        assert it.unloads() == [("a", "changed", ""), ("b", "memory", "a")]


@async_test
async def test_unload_during_a_swap_in_turn_wins(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, capacity=1.5) as it:
        await it.load("a")
        old = it.pids("a")["a"]
        it.apply(larger(specs["a"]))
        await it.until(lambda: bool(it["a"].runners) and it.pids("a")["a"] not in {None, old})
        await it.unload("a")
        assert await rollout_error(it, "a") is None

        await it.until_phase("a", Phase.ABSENT)
        assert not it["a"].served.is_paused
        assert it.pool.remaining_for(it["a"]) == it.pool.options.budget
        assert it.loads("a") == 1


@async_test
async def test_second_change_wins(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        it.apply(larger(specs["a"]))
        await it.until(lambda: it["a"].old_replicas != [])
        it.apply(with_context(specs["a"], 700))
        await rollout_error(it, "a")

        plan = it["a"].runners[0].plan
        assert plan is not None
        assert "700" in plan.argv
        assert it["a"].phase is Phase.RESIDENT


@async_test
async def test_change_of_an_unloaded_model_counts_at_its_next_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        await it.unload("a")
        it.apply(larger(specs["a"]))
        assert it["a"].phase is Phase.ABSENT
        await it.load("a")

        plan = it["a"].runners[0].plan
        assert plan is not None
        assert "600" in plan.argv


@async_test
async def test_measurement_of_the_old_process_does_not_size_the_new(tmp_path: Path, specs: Specs) -> None:
    """The change failed, and the old process crashes and comes back: it is still the old one."""
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON)) as it:
        await it.load("a")
        it.apply(larger(specs["a"]))
        await rollout_error(it, "a")
        os.kill(it.pids("a")["a"] or 0, 9)
        await it.until(lambda: it["a"].runners[0].instance.generation == 2 and it["a"].serves)
        await it.until(lambda: not it["a"].sizing)
        await asyncio.sleep(0.1)  # what is learnt of it is handed on by a thread

        assert it["a"].is_outdated


# --- a change meets something else


@async_test
async def test_unload_during_a_swap_side_by_side_stops_both(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as it:
        await it.load("a")
        it.apply(larger(specs["a"]))
        await it.until(lambda: it["a"].old_replicas != [] and it.pids("a")["a"] is not None)
        pids = [runner.pid for runner in it["a"].all_runners]
        await it.unload("a")
        assert await rollout_error(it, "a") is None

        assert not any(psutil.pid_exists(pid or 0) for pid in pids)
        await it.until_phase("a", Phase.ABSENT)
        assert it.pool.remaining_for(it["a"]) == it.pool.options.budget


@async_test
async def test_unload_while_the_old_process_stops_wins(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        it.apply(larger(specs["a"]))
        await it.until(lambda: it["a"].served.is_paused)
        unloading = asyncio.ensure_future(it.unload("a"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        in_flight.finish()
        await unloading
        await rollout_error(it, "a")

        await it.until_phase("a", Phase.ABSENT)
        assert it.loads("a") == 1


@async_test
async def test_model_can_be_removed_during_its_swap(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as it:
        await it.load("a")
        gone = it["a"]
        it.apply(larger(specs["a"]), specs["b"])
        await it.until(lambda: gone.old_replicas != [] and gone.runners[0].pid is not None)
        pids = [runner.pid for runner in gone.all_runners]
        it.apply(specs["b"])
        await it.until(lambda: gone.all_runners == ())

        assert not any(psutil.pid_exists(pid or 0) for pid in pids)
        await it.load("b")  # the pool lives


@async_test
async def test_model_can_be_removed_while_its_change_is_sized(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        gone = it["a"]
        await it.until(lambda: not gone.sizing)
        held = HeldSizing(monkeypatch)
        it.apply(larger(specs["a"]), specs["b"])
        await held.begun()
        it.apply(specs["b"])
        await it.until(lambda: gone.runners == [])
        held.go_on()
        await it.until(lambda: not gone.rolling_out)

        assert gone.all_runners == ()
        await it.load("b")


@async_test
async def test_stop_while_a_change_is_sized_starts_nothing(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        await it.until(lambda: not it["a"].sizing)
        held = HeldSizing(monkeypatch)
        it.apply(larger(specs["a"]), specs["b"])
        await held.begun()
        it.pool.ask_stop()
        await it.pool.ended()
        held.go_on()
        await it.until(lambda: not it["a"].rolling_out)

        starts = [
            request
            for request in it.notices
            if isinstance(request, StateChanged) and request.state is State.STARTING
        ]
        assert len(starts) == 1


# --- models that go


@async_test
async def test_removal_rejects_the_queue_and_finishes_requests(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        gone = it["a"]
        in_flight = it.ask("a")
        await in_flight.served_by()
        waiting = it.ask("b")
        loading = asyncio.ensure_future(it.load("b"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        it.apply(specs["c"])

        refused = await waiting.refusal()
        assert (refused.status, refused.cause) == (404, "model_not_found")
        with pytest.raises(LlamasupError, match="b"):
            await loading
        assert in_flight.lease is not None
        assert not in_flight.lease.endpoint.closed
        in_flight.finish()
        await it.until(lambda: gone.all_runners == ())
        assert (await it.ask("a").refusal()).status == 404


@async_test
async def test_re_added_model_waits_for_memory_of_the_removed_one(tmp_path: Path, specs: Specs) -> None:
    """Two processes of one name, and room for one: what the first holds is held until it has ended."""
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        in_flight = it.ask("a")
        await in_flight.served_by()
        old = it.pids("a")["a"]
        it.apply(specs["b"])
        it.apply(specs["a"], specs["b"])
        request = it.ask("a")
        other = it.ask("b")
        await it.until(lambda: it["a"].sized is not None and it["b"].sized is not None)
        await it.reconciled()

        assert request.waits
        assert other.waits
        assert it["a"].runners == []
        in_flight.finish()
        assert await request.served_by() == 1
        assert not psutil.pid_exists(old or 0)
        request.finish()
        await other.served_by()


@async_test
async def test_smaller_budget_evicts_idle_models(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=2.5) as it:
        busy = it.ask("a")
        await busy.served_by()
        await it.load("b")
        it.pool.apply_options(replace(it.pool.options, budget={"ram": int(it.needs_bytes * 1.5)}))

        await it.until_phase("b", Phase.ABSENT)
        assert it.unloads() == [("b", "memory", "")]
        assert busy.lease is not None
        assert not busy.lease.endpoint.closed


# --- limits


@async_test
async def test_limits_after_a_failure_apply_to_the_next_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["exit=load:1"]})
    async with pooled(tmp_path, specs["a"], runtime=runtime, policy=Policy(restart=SOON)) as it:
        with pytest.raises(LlamasupError):
            await it.load("a")
        limits = replace(specs["a"].options, max_concurrent=7, drain_timeout_s=77.0, wait_timeout_s=7.0)
        it.apply(replace(specs["a"], options=limits))
        server(tmp_path)
        await it.load("a")

        (runner,) = it["a"].runners
        assert runner.policy == policy_for(it["a"].spec, it.pool.options.policy)
        assert runner.endpoint is not None
        assert runner.endpoint.max_concurrent == 7


@async_test
async def test_limits_of_the_pool_apply_to_running_processes(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        less = replace(it.pool.options.policy, slots_disk_bytes=1 << 20)
        it.pool.apply_options(replace(it.pool.options, policy=less))

        assert it["a"].runners[0].policy.slots_disk_bytes == 1 << 20


@async_test
async def test_failed_change_restores_the_number_of_replicas(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    policy = Policy(restart=SOON)
    async with pooled(tmp_path, specs["a"], runtime=runtime, policy=policy, capacity=2.5) as it:
        await it.load("a")
        it.apply(replace(larger(specs["a"]), replicas=2, options=ModelOptions(replicas=2)))
        assert await rollout_error(it, "a") is not None

        (runner,) = it["a"].runners
        assert runner.policy.restart.half_open_s is None
        assert await it.ask("a").served_by() == 1
