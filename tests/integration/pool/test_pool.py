"""Loads, evictions, failures and stops of a pool, and what other clients notice of them.

The servers are real children of the fake llama-server; the clients take leases as the proxy does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.planning import planner
from llamasup.core.pool import driver, estimate
from llamasup.core.pool import model as pool_model
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import ModelUnloading, PublishedEvent, StateChanged
from llamasup.core.supervision.states import Policy, State
from llamasup.errors import BrokenRuntime, Conflict, GaveUp, LlamasupError, ModelUnknown, Stopping
from tests.core.pool.pools import PATIENCE_S, HeldSizing, Pooled, async_test, file_of, pooled, server, spec_of

Specs = dict[str, ModelSpec]
SOON = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2)


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> Specs:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


def hide(spec: ModelSpec, *, back: bool = False) -> None:
    """Move the model file away, or back."""
    path = Path(spec.source)
    here, there = path, path.with_suffix(".elsewhere")
    (there if back else here).rename(here if back else there)


# --- loads and evictions


@async_test
async def test_each_concurrent_request_counts_as_use(tmp_path: Path, specs: Specs) -> None:
    """The model becomes idle only once after concurrent requests, but each of them is a use."""
    async with pooled(tmp_path, specs["a"]) as models:
        for request in [models.ask("a") for _ in range(3)]:
            await request.served_by()
            endpoint = models["a"].runners[0].endpoint
            assert endpoint is not None
            endpoint.count_answer(200, infers=True)
            request.finish()
        assert models["a"].use.count == pytest.approx(3)


@async_test
async def test_waiting_requests_share_one_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        requests = [models.ask("a") for _ in range(20)]
        loading = asyncio.gather(models.load("a"), models.load("a"))

        assert models["a"].phase is Phase.ABSENT
        for request in requests:
            assert await request.served_by() == 1
            request.finish()
        await loading

        assert models.loads("a") == 1
        assert not models["a"].load_waiters


@async_test
async def test_busy_model_is_cordoned_and_loaded_again_for_its_queue(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        first = models.ask("a")
        await first.served_by()
        other = models.ask("b")
        await models.until_phase("a", Phase.CORDONED)
        later = models.ask("a")

        assert later.waits
        assert other.waits
        first.finish()
        await other.served_by()
        assert later.waits
        other.finish()

        assert await later.served_by() == 2
        assert models.unloads() == [("a", "memory", "b"), ("b", "memory", "a")]


@async_test
async def test_cordoned_model_serves_again_when_the_client_leaves(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        first = models.ask("a")
        await first.served_by()
        other = models.ask("b")
        await models.until_phase("a", Phase.CORDONED)
        later, load = models.ask("a"), asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        assert later.waits
        assert not load.done()

        models["b"].served.queue.leave(other.entry)

        await asyncio.wait_for(load, PATIENCE_S)
        first.finish()
        assert await later.served_by() == 1
        assert models.unloads() == []


@async_test
async def test_failed_load_rejects_its_queue_and_no_other_model(tmp_path: Path, specs: Specs) -> None:
    """S17."""
    runtime = server(tmp_path, {"b.gguf": ["exit=load:1"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON)) as models:
        await models.load("a")
        before = models.pids("a")
        requests = [models.ask("b") for _ in range(5)]
        with pytest.raises(GaveUp):
            await models.load("b")

        for request in requests:
            refused = await request.refusal()
            assert refused.status == 503
            assert refused.retry_after_s is not None
        again = await models.ask("b").refusal()
        assert (again.status, again.queueable) == (503, False)
        assert again.retry_after_s is not None
        assert models["b"].phase is Phase.FAILED
        assert models.pids("a") == before
        assert await models.ask("a").served_by() == 1


@async_test
async def test_lack_of_memory_is_retried_soon(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the model served before: the load fails at once, and reserves no memory until the next try."""
    really = planner.__dict__["hardware"]
    async with pooled(tmp_path, specs["a"]) as models:
        for times in range(2):
            monkeypatch.setattr(planner, "hardware", lambda: replace(really(), memory_available_bytes=1000))
            refused = await models.ask("a").refusal()
            assert (refused.cause, models["a"].phase) == ("does_not_fit", Phase.FAILED)
            assert refused.retry_after_s == pytest.approx(pool_model.RETRY_AFTER_MEMORY_S, abs=1.0)
            assert models["a"].runners[0].instance.restarts == 0
            monkeypatch.setattr(planner, "hardware", really)
            await models.load("a")
            await models.unload("a")
            assert models.loads("a") == times + 1


@async_test
async def test_crash_loop_is_not_retried_without_a_request(tmp_path: Path, specs: Specs) -> None:
    """A retry is an ordinary load, which needs memory and a request."""
    runtime = server(tmp_path, {"b.gguf": ["exit=load:1"]})
    restart = replace(SOON, half_open_s=0.05)
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=restart)) as models:
        with pytest.raises(GaveUp):
            await models.load("b")
        starts = sum(
            isinstance(event, StateChanged) and event.state is State.STARTING for event in models.notices
        )
        await asyncio.sleep(0.3)  # six times the delay before a retry

        assert starts == sum(
            isinstance(event, StateChanged) and event.state is State.STARTING for event in models.notices
        )
        assert models["b"].phase is Phase.FAILED


@async_test
async def test_error_is_forgotten_once_the_model_serves(tmp_path: Path, specs: Specs) -> None:
    hide(specs["b"])
    async with pooled(tmp_path, *specs.values(), policy=Policy(restart=SOON)) as models:
        with pytest.raises(LlamasupError, match=r"b\.gguf"):
            await models.load("b")
        refused = await models.ask("b").refusal()
        assert "b.gguf" in refused.message
        assert refused.retry_after_s is not None

        hide(specs["b"], back=True)
        await models.load("b")  # a load command does not wait for the retry time
        assert models["b"].error is None
        assert await models.ask("b").served_by() == 1


@async_test
async def test_missing_file_is_an_error_only_at_the_next_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), policy=Policy(restart=SOON)) as models:
        await models.load("a")
        hide(specs["a"])
        served = models.ask("a")
        assert await served.served_by() == 1
        served.finish()
        await models.unload("a")

        refused = await models.ask("a").refusal()
        assert refused.status == 503
        assert "a.gguf" in refused.message
        assert await models.ask("b").served_by() == 1


@async_test
async def test_bug_while_sizing_a_model_does_not_end_the_others(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    really = estimate.__dict__["estimate_model"]

    def estimate_model(spec: ModelSpec, *rest: Any) -> SizedModel:
        if spec.id == "b":
            raise ZeroDivisionError
        found = really(spec, *rest)
        assert isinstance(found, SizedModel)
        return found

    monkeypatch.setattr(estimate, "estimate_model", estimate_model)
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        with pytest.raises(LlamasupError) as raised:
            await models.load("b")
        assert raised.value.exit_code == 70
        assert "ZeroDivisionError" in caplog.text
        assert await models.ask("a").served_by() == 1


@async_test
async def test_silent_driver_does_not_block_an_unload(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end of a model, llamasup asks the driver whether its memory is free."""

    def devices_now(*_: object) -> tuple[()]:
        raise BrokenRuntime("the driver does not answer")

    monkeypatch.setattr(driver, "devices_now", devices_now)
    budget = {"ram": 1 << 40, "CUDA0": 1 << 40}
    async with pooled(tmp_path, *specs.values(), budget=budget) as models:
        await models.load("a")
        sized = models["a"].sized
        assert sized is not None
        models["a"].model = replace(models["a"].model, sized=replace(sized, needs={"ram": 1, "CUDA0": 1}))
        await models.unload("a")

        assert models["a"].phase is Phase.ABSENT
        await models.load("b")


# --- requests that may not wait


@pytest.mark.parametrize("said", [{"wait_timeout_s": 0.0}, {"max_queued": 0}], ids=str)
@async_test
async def test_request_that_may_not_wait_starts_the_load(
    said: dict[str, Any], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_model, "DEMAND_TTL_S", 3600.0)  # the load ends the demand, not this time
    spec = spec_of(file_of(tmp_path, "a", tiny_model), **said)
    other = spec_of(file_of(tmp_path, "b", tiny_model))
    async with pooled(tmp_path, spec, other, capacity=1.5) as models:
        await models.load("b")
        refused = await models.ask("a").refusal()
        assert refused.status == 503
        assert refused.retry_after_s is not None

        await models.until_phase("a", Phase.RESIDENT)
        assert models.unloads() == [("b", "memory", "a")]
        assert await models.ask("a").served_by() == 1
        await models.until(lambda: not models["a"].wanted)


@async_test
async def test_expired_demand_loads_no_model(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_model, "DEMAND_TTL_S", 1.0)
    spec = spec_of(file_of(tmp_path, "a", tiny_model), wait_timeout_s=0.0)
    other = spec_of(file_of(tmp_path, "b", tiny_model), stay=Stay())
    async with pooled(tmp_path, spec, other, capacity=1.5) as models:
        busy = models.ask("b")
        await busy.served_by()
        refused = models.ask("a")
        assert models["a"].wanted
        await refused.refusal()
        await models.until(lambda: not models["a"].wanted)
        await models.until_phase("b", Phase.RESIDENT)
        assert models.loads("a") == 0


# --- load and unload commands


@async_test
async def test_load_is_cancelled_with_its_last_caller(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        busy = models.ask("a")
        await busy.served_by()
        loading = [asyncio.ensure_future(models.load("b")) for _ in range(2)]  # noqa: TID251 (owned right here)
        await models.until_phase("a", Phase.CORDONED)
        loading[0].cancel()
        await asyncio.sleep(0)
        assert models["b"].wanted
        loading[1].cancel()
        await models.until(lambda: not models["b"].wanted)

        await models.until_phase("a", Phase.RESIDENT)
        busy.finish()
        assert await models.ask("a").served_by() == 1
        assert models.loads("b") == 0


@async_test
async def test_loading_model_can_be_unloaded(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as models:
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await models.until(lambda: bool(models["a"].runners) and models["a"].runners[0].pid is not None)
        await models.unload("a")

        with pytest.raises(Conflict, match="unloaded while it was loading"):
            await loading
        assert models["a"].phase is Phase.ABSENT
        assert models.pids("a") == {"a": None}


@async_test
async def test_model_in_backoff_can_be_unloaded(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["exit=load:1"]})
    restart = RestartPolicy(first_delay_s=100.0, longest_delay_s=100.0)
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=restart)) as models:
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await models.until(
            lambda: bool(models["a"].runners) and models["a"].runners[0].instance.state is State.BACKOFF
        )
        await models.unload("a")

        with pytest.raises(Conflict):
            await loading
        assert models["a"].phase is Phase.ABSENT


@async_test
async def test_removed_model_cannot_be_loaded(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        gone = models["a"]
        models.apply(specs["b"])

        with pytest.raises(ModelUnknown):
            await asyncio.wait_for(models.pool.load(gone), PATIENCE_S)


# --- time to live


@async_test
async def test_idle_model_is_evicted_after_its_ttl_and_a_busy_one_is_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(ttl_s=0.2))
    async with pooled(tmp_path, spec) as models:
        loop = asyncio.get_running_loop()
        request = models.ask("a")
        await request.served_by()
        await asyncio.sleep(0.5)
        assert models["a"].phase is Phase.RESIDENT
        request.finish()
        ended_s = loop.time()

        await models.until(lambda: models.unloads() == [("a", "ttl", "")])
        assert loop.time() - ended_s >= 0.2
        await models.until_phase("a", Phase.ABSENT)

        late = models.ask("a")  # loads the model again
        await late.served_by()


@async_test
async def test_ttl_of_a_request_counts_until_the_next_load(tmp_path: Path, tiny_model: Path) -> None:
    async with pooled(tmp_path, spec_of(file_of(tmp_path, "a", tiny_model))) as models:
        pool, a = models.pool, models["a"]
        request = models.ask("a")
        await request.served_by()
        assert a.ttl_s == float("inf")
        assert pool.keep(a, 0.05, own=1) == "kept"
        assert a.snapshot().ttl_s == 0.05
        request.finish()
        await models.until_phase("a", Phase.ABSENT)
        assert models.unloads() == [("a", "ttl", "")]
        again = models.ask("a")
        await again.served_by()
        assert a.ttl_s == float("inf")
        assert pool.keep(a, 3600.0, own=1) == "kept"
        assert pool.keep(a, None, own=1) == "kept"
        assert a.ttl_s == float("inf")


@async_test
async def test_ttl_of_zero_unloads_only_what_no_other_request_uses(tmp_path: Path, tiny_model: Path) -> None:
    async with pooled(tmp_path, spec_of(file_of(tmp_path, "a", tiny_model))) as models:
        pool, a = models.pool, models["a"]
        first = models.ask("a")
        await first.served_by()
        assert pool.keep(a, 3600.0, own=1) == "kept"
        second = models.ask("a")
        assert pool.keep(a, 0.0, own=1) == "in_use"  # the second waits
        assert a.ttl_s == 3600.0  # as another client has asked
        first.finish()
        await second.served_by()
        assert pool.keep(a, 0.0) == "in_use"  # of a request that only unloads
        assert a.ttl_s == 3600.0
        assert pool.keep(a, 0.0, own=1) == "kept"
        third = models.ask("a")  # comes meanwhile
        for request in (second, third):
            await request.served_by()
            assert request.lease is not None
            request.lease.endpoint.count_answer(200, infers=True)
            request.finish()
        assert a.ttl_s == float("inf")
        alone = models.ask("a")
        await alone.served_by()
        assert models.unloads() == []
        assert pool.keep(a, 0.0, own=1) == "kept"
        alone.finish()
        await models.until_phase("a", Phase.ABSENT)
        assert pool.keep(a, 0.0) == "kept"  # not loaded


@async_test
async def test_ttl_of_zero_does_not_unload_what_a_command_loads(tmp_path: Path, tiny_model: Path) -> None:
    async with pooled(tmp_path, spec_of(file_of(tmp_path, "a", tiny_model))) as models:
        loading = models.pool.begin_load(models["a"])
        assert models.pool.keep(models["a"], 0.0) == "in_use"
        assert models["a"].kept_s is None
        await asyncio.wait_for(loading, PATIENCE_S)
        assert models["a"].serves


@async_test
async def test_pinned_model_keeps_no_other_ttl(tmp_path: Path, tiny_model: Path) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(pin=True))
    async with pooled(tmp_path, spec) as models:
        assert models.pool.keep(models["a"], 0.0) == "fixed"
        assert models["a"].kept_s is None


@async_test
async def test_request_at_the_end_of_the_ttl_is_served(tmp_path: Path, tiny_model: Path) -> None:
    """The process that is there serves it, or a new load does."""
    spec = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(ttl_s=0.05))
    async with pooled(tmp_path, spec) as models:
        for number in range(12):
            request = models.ask("a")
            await request.served_by()
            request.finish()
            await asyncio.sleep(0.044 + number / 1000)
        assert models.unloads()


@async_test
async def test_new_budget_counts_for_a_sizing_under_way(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=0.5) as models:
        held = HeldSizing(monkeypatch)
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await held.begun()
        models.pool.apply_options(replace(models.pool.options, budget={"ram": models.needs_bytes * 2}))
        held.go_on()

        await loading
        assert models["a"].phase is Phase.RESIDENT


# --- the end


@async_test
async def test_stopping_pool_starts_no_model(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as models:
        held = HeldSizing(monkeypatch)
        request = models.ask("a")
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        await held.begun()
        models.pool.ask_stop()
        held.go_on()

        with pytest.raises(Stopping):
            await loading
        assert (await request.refusal()).cause == "stopping"
        await models.pool.ended()
        await models.until(lambda: not models["a"].sizing)
        assert models["a"].runners == []


@async_test
async def test_second_stop_does_not_wait_for_requests(tmp_path: Path, specs: Specs) -> None:
    """Also for a removed model that still finishes its requests."""
    async with pooled(tmp_path, *specs.values(), policy=Policy(drain_timeout_s=1000.0)) as models:
        requests = [models.ask(name) for name in "ab"]
        for request in requests:
            await request.served_by()
        pids = models.pids("a", "b")
        models.apply(specs["b"])
        models.pool.ask_stop()
        await asyncio.sleep(0.1)
        assert all(psutil.pid_exists(pid) for pid in pids.values() if pid is not None)
        models.pool.ask_stop(now=True)

        async with asyncio.timeout(PATIENCE_S):
            await models.pool.ended()
        assert not any(psutil.pid_exists(pid) for pid in pids.values() if pid is not None)


@async_test
async def test_stop_after_the_end_changes_nothing(tmp_path: Path, specs: Specs) -> None:
    """Its own tasks end by then, and kill the processes."""
    async with pooled(tmp_path, *specs.values()) as models:
        request = models.ask("a")
        await request.served_by()
        (pid,) = models.pids("a").values()
        (running,) = (task for task in asyncio.all_tasks() if task.get_name() == "pool")
        running.cancel()
        await asyncio.sleep(0)  # the pool is told
        models.pool.ask_stop(now=True)

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([running])
            await models.pool.ended()
        assert pid is not None
        assert not psutil.pid_exists(pid)


# --- resources


@pytest.mark.extended
@async_test
async def test_hundred_evictions_leak_nothing(tmp_path: Path, specs: Specs) -> None:
    """S18: no tasks, threads, descriptors, files of the run folder, or children are left."""

    def resources() -> tuple[int, ...]:
        return (
            len(asyncio.all_tasks()),
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(list((tmp_path / "run").iterdir())),
        )

    async def swap(models: Pooled, times: int) -> None:
        for number in range(times):
            request = models.ask("abc"[number % 3])
            await request.served_by()
            request.finish()

    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        await swap(models, 3)
        # Starts all threads of the pool for blocking calls, and lets the delayed work of a load end.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(40)))
        before = resources()
        await swap(models, 99)
        assert sum(models.loads(name) for name in "abc") == 102
        await models.until(
            lambda: all(late <= early for early, late in zip(before, resources(), strict=True))
        )


# --- crashes


@async_test
async def test_crashed_model_restarts_in_its_own_memory(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as models:
        await models.load("a")
        pid = models.pids("a")["a"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await models.until(lambda: models["a"].phase is Phase.LOADING)
        waiting = models.ask("a")

        assert await waiting.served_by() == 2
        assert models.unloads() == []


# --- commands in any order


@async_test
async def test_load_during_the_drain_of_an_unload_waits(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, specs["a"]) as models:
        busy = models.ask("a")
        await busy.served_by()
        unloading = asyncio.ensure_future(models.unload("a"))  # noqa: TID251 (owned right here)
        await models.until_phase("a", Phase.UNLOADING)
        loading = asyncio.ensure_future(models.load("a"))  # noqa: TID251 (owned right here)
        request = models.ask("a")
        await models.reconciled()
        assert request.waits
        assert not loading.done()

        busy.finish()
        await unloading
        await loading
        assert await request.served_by() == 2


@async_test
async def test_event_that_an_effect_raises_waits_for_the_other_effects(tmp_path: Path, specs: Specs) -> None:
    """A listener of the unload removes the model in the middle of its effects."""
    async with pooled(tmp_path, *specs.values()) as models:
        await models.load("a")
        gone = models["a"]
        seen: list[Phase] = []

        def remove(event: PublishedEvent) -> None:
            if isinstance(event, ModelUnloading) and event.reason == "asked":
                models.pool.remove(gone)
                seen.append(gone.phase)

        models.pool.bus.listen(remove)
        await models.unload("a")

        assert seen == [Phase.UNLOADING]
        await models.until(lambda: gone.all_runners == ())
        assert gone.removed
        assert "a" not in models.pool.managed_models
