"""Rollouts and removals of models, as clients see them (S16)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model import policy_for
from llamasup.core.pool.model_states import ModelState, old_needs_of
from llamasup.core.settings.model import ModelSettings
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import StateChanged
from llamasup.core.supervision.states import Policy, State
from llamasup.errors import DoesNotFit, LlamasupError
from tests.core.pool.pools import (
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
from tests.kit.fake_server import install

Specs = dict[str, ModelSpec]
SOON = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2)


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> Specs:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


async def rollout_error(models: Pooled, name: str) -> LlamasupError | None:
    """The error of the last rollout of the model; None if it succeeded."""
    rollout = models[name].rollout
    assert rollout is not None
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.shield(rollout)


def larger(spec: ModelSpec) -> ModelSpec:
    return with_context(spec, 600)


# --- models without a change


@async_test
async def test_options_without_effect_on_the_process_keep_it(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        await models.load("b")
        before = models.pids("a", "b")
        patient = replace(specs["a"].options, wait_timeout_s=7.0)
        models.apply(replace(specs["a"], stay=Stay(pin=True), aliases=("gpt",), options=patient), specs["b"])

        assert await models.ask("gpt").served_by() == 1
        assert models.pids("a", "b") == before
        assert models["a"].snapshot().pinned
        assert models["a"].runners[0].policy.wait_timeout_s == 7.0


# --- one change after the other


@async_test
async def test_later_change_replaces_an_impossible_one(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, specs["a"]) as models:
        await models.load("a")
        old = models.pids("a")
        models.apply(replace(specs["a"], source=str(tmp_path / "gone.gguf")))
        await asyncio.sleep(0)  # the pool begins to size it
        models.apply(larger(specs["a"]))
        assert await rollout_error(models, "a") is None

        assert models.pids("a") != old
        assert await models.ask("a").served_by() == 1


# --- with the old process still loaded


@async_test
async def test_changed_model_is_swapped_side_by_side_if_both_fit(tmp_path: Path, specs: Specs) -> None:
    """No request waits or fails, and the old process finishes its requests in flight."""
    specs["a"] = replace(specs["a"], options=ModelSettings(max_concurrent=4))
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("b")
        in_flight = models.ask("a")
        await in_flight.served_by()
        old, other = models.pids("a"), models.pids("b")
        models.apply(larger(specs["a"]), specs["b"])
        answered = 0
        while models["a"].old_replicas == [] or models["a"].runners[0].instance.state is not State.READY:
            request = models.ask("a")
            assert not request.waits
            assert request.why is None
            request.finish()
            answered += 1
            await asyncio.sleep(0.005)
        new = models.ask("a")

        assert await new.served_by() == 1
        assert models.pids("a") != old
        assert psutil.pid_exists(old["a"] or 0)
        assert in_flight.lease is not None
        assert not in_flight.lease.endpoint.closed
        in_flight.finish()
        await rollout_error(models, "a")
        assert models.pids("b") == other
        assert not psutil.pid_exists(old["a"] or 0)
        assert answered
        assert models["a"].sized is not None
        assert models["a"].sized.spec.settings.ctx_size == 600


@async_test
async def test_memory_of_both_generations_counts_during_a_swap(tmp_path: Path, specs: Specs) -> None:
    """The third model waits until the old process has released its memory."""
    async with pooled(tmp_path, *specs.values(), capacity=2.5) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        models.apply(larger(specs["a"]), specs["b"], specs["c"])
        await models.until(lambda: models["a"].old_replicas != [])
        new = models["a"].needs["ram"] - old_needs_of(models["a"].model)["ram"]
        assert models.pool.remaining_for(models["a"]) == {
            "ram": models.pool.options.budget["ram"] - old_needs_of(models["a"].model)["ram"]
        }
        other = models.ask("b")
        await models.until(lambda: models["a"].runners[0].instance.state is State.READY)
        assert other.waits

        in_flight.finish()
        await other.served_by()
        assert models["a"].needs["ram"] == new
        assert models.unloads() == []


@async_test
async def test_request_waits_for_memory_that_a_pinned_swap_frees(tmp_path: Path, specs: Specs) -> None:
    """While both processes run, no memory is left for another model. The end of the old one frees it."""
    a, b = replace(specs["a"], stay=Stay(pin=True)), specs["b"]
    async with pooled(tmp_path, a, b, capacity=2.5) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        models.apply(larger(a), b)
        await models.until(lambda: models["a"].old_replicas != [])
        other = models.ask("b")
        await models.until(lambda: models["b"].sized is not None)
        await models.reconciled()
        assert other.waits, other.why

        in_flight.finish()
        await other.served_by()


@async_test
async def test_failed_start_keeps_the_old_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    policy = Policy(restart=replace(SOON, half_open_s=1000.0))
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=policy) as models:
        await models.load("a")
        before = models.pids("a")
        models.apply(larger(specs["a"]), specs["b"])
        await models.until(lambda: models["a"].state is ModelState.ROLLING_OUT)
        load = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        assert await rollout_error(models, "a") is not None

        await asyncio.wait_for(load, PATIENCE_S)
        assert models.pids("a") == before
        request = models.ask("a")
        assert await request.served_by() == 1
        request.finish()
        assert models["a"].phase is Phase.RESIDENT
        # The next change can succeed.
        models.apply(with_context(specs["a"], 700), specs["b"])
        assert await rollout_error(models, "a") is None
        assert models.pids("a") != before


@async_test
async def test_change_that_does_not_fit_keeps_the_old_process(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        await models.load("a")
        before = models.pids("a")
        huge = replace(specs["a"], settings=replace(specs["a"].settings, ctx_size=1 << 22))
        models.apply(huge, specs["b"])
        assert isinstance(await rollout_error(models, "a"), DoesNotFit)

        assert models.pids("a") == before
        assert await models.ask("a").served_by() == 1


# --- swaps in turn


@async_test
async def test_queue_outlives_a_swap_in_turn(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        old = models.pids("a")
        models.apply(larger(specs["a"]), specs["b"])
        await models.until(lambda: models["a"].served.is_paused)
        queued = [models.ask("a") for _ in range(5)]
        await asyncio.sleep(0)
        assert all(request.waits for request in queued)
        in_flight.finish()

        for request in queued:
            assert await request.served_by() == 1
            request.finish()
        await rollout_error(models, "a")
        assert models.pids("a") != old
        assert models.unloads() == [("a", "changed", "")]


@async_test
async def test_loaded_model_is_loaded_again_after_a_swap_in_turn(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        await models.load("a")
        models.apply(larger(specs["a"]), specs["b"])
        await rollout_error(models, "a")

        assert models["a"].phase is Phase.RESIDENT
        assert models["a"].sized is not None
        assert not models["a"].is_outdated
        assert models.loads("a") == 2


@async_test
async def test_failed_swap_in_turn_restores_the_old_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(
        tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON), capacity=1.5
    ) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        models.apply(larger(specs["a"]), specs["b"])
        await models.until(lambda: models["a"].served.is_paused)
        queued = [models.ask("a") for _ in range(5)]
        other = models.ask("b")  # must not get the memory between the two processes
        in_flight.finish()

        for request in queued:
            assert await request.served_by() == 1
            request.finish()
        assert await rollout_error(models, "a") is not None
        assert models["a"].sized is not None
        assert models["a"].sized.spec.started_as == specs["a"].started_as
        await other.served_by()
        assert models.unloads() == [("a", "changed", ""), ("a", "memory", "b")]


@async_test
async def test_queue_is_rejected_if_neither_process_starts(tmp_path: Path, specs: Specs) -> None:
    """The old process cannot start again, because its llama-server is missing."""
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(
        tmp_path, specs["a"], runtime=runtime, policy=Policy(restart=SOON), capacity=1.5
    ) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        models.apply(larger(specs["a"]))
        await models.until(lambda: models["a"].served.is_paused)
        queued = models.ask("a")
        install(tmp_path / "usual-server", "exit=load:1")
        in_flight.finish()

        refused = await queued.refusal()
        assert refused.status == 503
        await rollout_error(models, "a")
        assert models["a"].phase is Phase.FAILED


@async_test
async def test_larger_model_waits_for_an_eviction(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=2.0) as models:
        await models.load("a")
        await models.load("b")
        models.apply(larger(specs["a"]), specs["b"])
        await rollout_error(models, "a")

        assert models["a"].phase is Phase.RESIDENT
        assert not models["a"].is_outdated
        assert models.unloads() == [("a", "changed", ""), ("b", "memory", "a")]


@async_test
async def test_unload_during_a_swap_in_turn_wins(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, capacity=1.5) as models:
        await models.load("a")
        old = models.pids("a")["a"]
        models.apply(larger(specs["a"]))
        await models.until(lambda: bool(models["a"].runners) and models.pids("a")["a"] not in {None, old})
        await models.unload("a")
        assert await rollout_error(models, "a") is None

        await models.until_phase("a", Phase.ABSENT)
        assert not models["a"].served.is_paused
        assert models.pool.remaining_for(models["a"]) == models.pool.options.budget
        assert models.loads("a") == 1


@async_test
async def test_second_change_wins(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        models.apply(larger(specs["a"]))
        await models.until(lambda: models["a"].old_replicas != [])
        models.apply(with_context(specs["a"], 700))
        await rollout_error(models, "a")

        plan = models["a"].runners[0].plan
        assert plan is not None
        assert "700" in plan.argv
        assert models["a"].phase is Phase.RESIDENT


@async_test
async def test_change_of_an_unloaded_model_counts_at_its_next_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        await models.unload("a")
        models.apply(larger(specs["a"]))
        assert models["a"].phase is Phase.ABSENT
        await models.load("a")

        plan = models["a"].runners[0].plan
        assert plan is not None
        assert "600" in plan.argv


@async_test
async def test_measurement_of_the_old_process_does_not_size_the_new(tmp_path: Path, specs: Specs) -> None:
    """After a failed change, the old process crashes and restarts with its old settings."""
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON)) as models:
        await models.load("a")
        models.apply(larger(specs["a"]))
        await rollout_error(models, "a")
        os.kill(models.pids("a")["a"] or 0, 9)
        await models.until(lambda: models["a"].runners[0].instance.generation == 2 and models["a"].serves)
        await models.until(lambda: not models["a"].sizing)
        await asyncio.sleep(0.1)  # a thread reports the measurement

        assert models["a"].is_outdated


# --- other commands during a change


@async_test
async def test_unload_during_a_swap_side_by_side_stops_both(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as models:
        await models.load("a")
        models.apply(larger(specs["a"]))
        await models.until(lambda: models["a"].old_replicas != [] and models.pids("a")["a"] is not None)
        pids = [runner.pid for runner in models["a"].all_runners]
        await models.unload("a")
        assert await rollout_error(models, "a") is None

        assert not any(psutil.pid_exists(pid or 0) for pid in pids)
        await models.until_phase("a", Phase.ABSENT)
        assert models.pool.remaining_for(models["a"]) == models.pool.options.budget


@async_test
async def test_unload_while_the_old_process_stops_wins(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        models.apply(larger(specs["a"]))
        await models.until(lambda: models["a"].served.is_paused)
        unloading = asyncio.ensure_future(models.unload("a"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        in_flight.finish()
        await unloading
        await rollout_error(models, "a")

        await models.until_phase("a", Phase.ABSENT)
        assert models.loads("a") == 1


@async_test
async def test_model_can_be_removed_during_its_swap(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as models:
        await models.load("a")
        gone = models["a"]
        models.apply(larger(specs["a"]), specs["b"])
        await models.until(lambda: gone.old_replicas != [] and gone.runners[0].pid is not None)
        pids = [runner.pid for runner in gone.all_runners]
        models.apply(specs["b"])
        await models.until(lambda: gone.all_runners == ())

        assert not any(psutil.pid_exists(pid or 0) for pid in pids)
        await models.load("b")  # the pool still works


@async_test
async def test_model_can_be_removed_while_its_change_is_sized(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        gone = models["a"]
        await models.until(lambda: not gone.sizing)
        held = HeldSizing(monkeypatch)
        models.apply(larger(specs["a"]), specs["b"])
        await held.begun()
        models.apply(specs["b"])
        await models.until(lambda: gone.runners == [])
        held.go_on()
        await models.until(lambda: not gone.rolling_out)

        assert gone.all_runners == ()
        await models.load("b")


@async_test
async def test_stop_while_a_change_is_sized_starts_nothing(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        await models.until(lambda: not models["a"].sizing)
        held = HeldSizing(monkeypatch)
        models.apply(larger(specs["a"]), specs["b"])
        await held.begun()
        models.pool.ask_stop()
        await models.pool.ended()
        held.go_on()
        await models.until(lambda: not models["a"].rolling_out)

        starts = [
            request
            for request in models.notices
            if isinstance(request, StateChanged) and request.state is State.STARTING
        ]
        assert len(starts) == 1


# --- removed models


@async_test
async def test_removal_rejects_the_queue_and_finishes_requests(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        gone = models["a"]
        in_flight = models.ask("a")
        await in_flight.served_by()
        waiting = models.ask("b")
        loading = asyncio.ensure_future(models.load("b"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        models.apply(specs["c"])

        refused = await waiting.refusal()
        assert (refused.status, refused.cause) == (404, "model_not_found")
        with pytest.raises(LlamasupError, match="b"):
            await loading
        assert in_flight.lease is not None
        assert not in_flight.lease.endpoint.closed
        in_flight.finish()
        await models.until(lambda: gone.all_runners == ())
        assert (await models.ask("a").refusal()).status == 404


@async_test
async def test_re_added_model_waits_for_memory_of_the_removed_one(tmp_path: Path, specs: Specs) -> None:
    """Memory for one process: the new process of the same name starts after the end of the old one."""
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        in_flight = models.ask("a")
        await in_flight.served_by()
        old = models.pids("a")["a"]
        models.apply(specs["b"])
        models.apply(specs["a"], specs["b"])
        request = models.ask("a")
        other = models.ask("b")
        await models.until(lambda: models["a"].sized is not None and models["b"].sized is not None)
        await models.reconciled()

        assert request.waits
        assert other.waits
        assert models["a"].runners == []
        in_flight.finish()
        assert await request.served_by() == 1
        assert not psutil.pid_exists(old or 0)
        request.finish()
        await other.served_by()


@async_test
async def test_smaller_budget_evicts_idle_models(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=2.5) as models:
        busy = models.ask("a")
        await busy.served_by()
        await models.load("b")
        models.pool.apply_options(replace(models.pool.options, budget={"ram": int(models.needs_bytes * 1.5)}))

        await models.until_phase("b", Phase.ABSENT)
        assert models.unloads() == [("b", "memory", "")]
        assert busy.lease is not None
        assert not busy.lease.endpoint.closed


# --- limits


@async_test
async def test_limits_after_a_failure_apply_to_the_next_process(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["exit=load:1"]})
    async with pooled(tmp_path, specs["a"], runtime=runtime, policy=Policy(restart=SOON)) as models:
        with pytest.raises(LlamasupError):
            await models.load("a")
        limits = replace(specs["a"].options, max_concurrent=7, drain_timeout_s=77.0, wait_timeout_s=7.0)
        models.apply(replace(specs["a"], options=limits))
        server(tmp_path)
        await models.load("a")

        (runner,) = models["a"].runners
        assert runner.policy == policy_for(models["a"].spec, models.pool.options.policy)
        assert runner.endpoint is not None
        assert runner.endpoint.max_concurrent == 7


@async_test
async def test_limits_of_the_pool_apply_to_running_processes(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        less = replace(models.pool.options.policy, slots_disk_bytes=1 << 20)
        models.pool.apply_options(replace(models.pool.options, policy=less))

        assert models["a"].runners[0].policy.slots_disk_bytes == 1 << 20


@async_test
async def test_failed_change_restores_the_number_of_replicas(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"ctx-size 600": ["exit=load:1"]})
    policy = Policy(restart=SOON)
    async with pooled(tmp_path, specs["a"], runtime=runtime, policy=policy, capacity=2.5) as models:
        await models.load("a")
        models.apply(replace(larger(specs["a"]), replicas=2, options=ModelSettings(replicas=2)))
        assert await rollout_error(models, "a") is not None

        (runner,) = models["a"].runners
        assert runner.policy.restart.half_open_s is None
        assert await models.ask("a").served_by() == 1
