"""Loads, evictions, failures and stops of a pool, and what other clients notice of them.

The servers are real children of the fake llama-server; the clients take leases as the proxy does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamasup.errors import BrokenRuntime, Conflict, GaveUp, LlamasupError, ModelUnknown, Stopping
from llamasup.models.spec import ModelSpec, Stay
from llamasup.planning import attempts
from llamasup.pool import pool as pool_module
from llamasup.pool import sizing, unload
from llamasup.pool.eviction_policy import Phase
from llamasup.pool.model import SizedModel
from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.events import StateChanged
from llamasup.supervision.states import Policy, State
from tests.pool.pools import PATIENCE_S, HeldSizing, Pooled, async_test, file_of, pooled, server, spec_of

pytestmark = pytest.mark.slow

Specs = dict[str, ModelSpec]
SOON = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2)


@pytest.fixture
def specs(tmp_path: Path, tiny_model: Path) -> Specs:
    return {name: spec_of(file_of(tmp_path, name, tiny_model)) for name in "abc"}


def hide(spec: ModelSpec, *, back: bool = False) -> None:
    """Take its file away, or bring it back."""
    path = Path(spec.source)
    here, there = path, path.with_suffix(".elsewhere")
    (there if back else here).rename(here if back else there)


# --- loads and evictions


@async_test
async def test_each_concurrent_request_counts_as_use(tmp_path: Path, specs: Specs) -> None:
    """A spell of many at the same time ends once, and was many requests."""
    async with pooled(tmp_path, specs["a"]) as it:
        for request in [it.ask("a") for _ in range(3)]:
            await request.served_by()
            endpoint = it["a"].runners[0].endpoint
            assert endpoint is not None
            endpoint.count_answer(200, infers=True)
            request.finish()
        assert it["a"].use.count == pytest.approx(3)


@async_test
async def test_waiting_requests_share_one_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        requests = [it.ask("a") for _ in range(20)]
        loading = asyncio.gather(it.load("a"), it.load("a"))

        assert it["a"].phase is Phase.ABSENT
        for request in requests:
            assert await request.served_by() == 1
            request.finish()
        await loading

        assert it.loads("a") == 1
        assert not it["a"].load_waiters


@async_test
async def test_busy_model_is_cordoned_and_loaded_again_for_its_queue(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        first = it.ask("a")
        await first.served_by()
        other = it.ask("b")
        await it.until_phase("a", Phase.CORDONED)
        later = it.ask("a")

        assert later.waits
        assert other.waits
        first.finish()
        await other.served_by()
        assert later.waits
        other.finish()

        assert await later.served_by() == 2
        assert it.unloads() == [("a", "memory", "b"), ("b", "memory", "a")]


@async_test
async def test_cordoned_model_serves_again_when_the_client_leaves(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        first = it.ask("a")
        await first.served_by()
        other = it.ask("b")
        await it.until_phase("a", Phase.CORDONED)
        later, asked = it.ask("a"), asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        await asyncio.sleep(0)
        assert later.waits
        assert not asked.done()

        it.catalog.queue("b").leave(other.entry)

        await asyncio.wait_for(asked, PATIENCE_S)
        first.finish()
        assert await later.served_by() == 1
        assert it.unloads() == []


@async_test
async def test_failed_load_rejects_its_queue_and_no_other_model(tmp_path: Path, specs: Specs) -> None:
    """S17."""
    runtime = server(tmp_path, {"b.gguf": ["exit=load:1"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=SOON)) as it:
        await it.load("a")
        before = it.pids("a")
        requests = [it.ask("b") for _ in range(5)]
        with pytest.raises(GaveUp):
            await it.load("b")

        for request in requests:
            refused = await request.refusal()
            assert refused.status == 503
            assert refused.retry_after_s is not None
        again = await it.ask("b").refusal()
        assert (again.status, again.queueable) == (503, False)
        assert again.retry_after_s is not None
        assert it["b"].phase is Phase.FAILED
        assert it.pids("a") == before
        assert await it.ask("a").served_by() == 1


@async_test
async def test_lack_of_memory_is_retried_soon(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it served before: it is given up at once, and nothing is kept for it meanwhile."""
    really = attempts.__dict__["hardware"]
    async with pooled(tmp_path, specs["a"]) as it:
        for times in range(2):
            monkeypatch.setattr(attempts, "hardware", lambda: replace(really(), memory_available_bytes=1000))
            refused = await it.ask("a").refusal()
            assert (refused.cause, it["a"].phase) == ("does_not_fit", Phase.FAILED)
            assert refused.retry_after_s == pytest.approx(pool_module.RETRY_AFTER_MEMORY_S, abs=1.0)
            assert it["a"].runners[0].instance.restarts == 0
            monkeypatch.setattr(attempts, "hardware", really)
            await it.load("a")
            await it.unload("a")
            assert it.loads("a") == times + 1


@async_test
async def test_crash_loop_is_not_retried_without_a_request(tmp_path: Path, specs: Specs) -> None:
    """Another try is a load like all others: there has to be room for it, and somebody who asks."""
    runtime = server(tmp_path, {"b.gguf": ["exit=load:1"]})
    restart = replace(SOON, half_open_s=0.05)
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=restart)) as it:
        with pytest.raises(GaveUp):
            await it.load("b")
        starts = sum(
            isinstance(event, StateChanged) and event.state is State.STARTING for event in it.notices
        )
        await asyncio.sleep(0.3)  # six times as long as until the try

        assert starts == sum(
            isinstance(event, StateChanged) and event.state is State.STARTING for event in it.notices
        )
        assert it["b"].phase is Phase.FAILED


@async_test
async def test_error_is_forgotten_once_the_model_serves(tmp_path: Path, specs: Specs) -> None:
    hide(specs["b"])
    async with pooled(tmp_path, *specs.values(), policy=Policy(restart=SOON)) as it:
        with pytest.raises(LlamasupError, match=r"b\.gguf"):
            await it.load("b")
        refused = await it.ask("b").refusal()
        assert "b.gguf" in refused.message
        assert refused.retry_after_s is not None

        hide(specs["b"], back=True)
        await it.load("b")  # who asks by hand need not wait until it is tried again
        assert it["b"].error is None
        assert await it.ask("b").served_by() == 1


@async_test
async def test_missing_file_is_an_error_only_at_the_next_load(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), policy=Policy(restart=SOON)) as it:
        await it.load("a")
        hide(specs["a"])
        served = it.ask("a")
        assert await served.served_by() == 1
        served.finish()
        await it.unload("a")

        refused = await it.ask("a").refusal()
        assert refused.status == 503
        assert "a.gguf" in refused.message
        assert await it.ask("b").served_by() == 1


@async_test
async def test_bug_while_sizing_a_model_does_not_end_the_others(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    really = sizing.__dict__["estimate_model"]

    def estimate_model(spec: ModelSpec, *rest: Any) -> SizedModel:
        if spec.id == "b":
            raise ZeroDivisionError
        found = really(spec, *rest)
        assert isinstance(found, SizedModel)
        return found

    monkeypatch.setattr(sizing, "estimate_model", estimate_model)
    async with pooled(tmp_path, *specs.values()) as it:
        await it.load("a")
        with pytest.raises(LlamasupError) as raised:
            await it.load("b")
        assert raised.value.exit_code == 70
        assert "ZeroDivisionError" in caplog.text
        assert await it.ask("a").served_by() == 1


@async_test
async def test_silent_driver_does_not_block_an_unload(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether memory is free again is asked for at the end of a model: who cannot tell, cannot hold it up."""

    def devices_now(*_: object) -> tuple[()]:
        raise BrokenRuntime("the driver does not answer")

    monkeypatch.setattr(unload, "devices_now", devices_now)
    budget = {"ram": 1 << 40, "CUDA0": 1 << 40}
    async with pooled(tmp_path, *specs.values(), budget=budget) as it:
        await it.load("a")
        sized = it["a"].sized
        assert sized is not None
        it["a"].sized = replace(sized, needs={"ram": 1, "CUDA0": 1})
        await it.unload("a")

        assert it["a"].phase is Phase.ABSENT
        await it.load("b")


# --- those who may not wait


@pytest.mark.parametrize("said", [{"wait_timeout_s": 0.0}, {"max_queued": 0}], ids=str)
@async_test
async def test_request_that_may_not_wait_starts_the_load(
    said: dict[str, Any], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "DEMAND_TTL_S", 3600.0)  # it ends by being fulfilled
    spec = spec_of(file_of(tmp_path, "a", tiny_model), **said)
    other = spec_of(file_of(tmp_path, "b", tiny_model))
    async with pooled(tmp_path, spec, other, capacity=1.5) as it:
        await it.load("b")
        refused = await it.ask("a").refusal()
        assert refused.status == 503
        assert refused.retry_after_s is not None

        await it.until_phase("a", Phase.RESIDENT)
        assert it.unloads() == [("b", "memory", "a")]
        assert await it.ask("a").served_by() == 1
        await it.until(lambda: not it["a"].wanted)


@async_test
async def test_expired_demand_loads_no_model(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "DEMAND_TTL_S", 0.1)
    spec = spec_of(file_of(tmp_path, "a", tiny_model), wait_timeout_s=0.0)
    other = spec_of(file_of(tmp_path, "b", tiny_model), stay=Stay())
    async with pooled(tmp_path, spec, other, capacity=1.5) as it:
        busy = it.ask("b")
        await busy.served_by()
        await it.ask("a").refusal()
        await it.until(lambda: it["a"].wanted)
        await it.until(lambda: not it["a"].wanted)
        await it.until_phase("b", Phase.RESIDENT)
        assert it.loads("a") == 0


# --- load and unload by hand


@async_test
async def test_load_is_cancelled_with_its_last_caller(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        busy = it.ask("a")
        await busy.served_by()
        loading = [asyncio.ensure_future(it.load("b")) for _ in range(2)]  # noqa: TID251 (owned right here)
        await it.until_phase("a", Phase.CORDONED)
        loading[0].cancel()
        await asyncio.sleep(0)
        assert it["b"].wanted
        loading[1].cancel()
        await it.until(lambda: not it["b"].wanted)

        await it.until_phase("a", Phase.RESIDENT)
        busy.finish()
        assert await it.ask("a").served_by() == 1
        assert it.loads("b") == 0


@async_test
async def test_loading_model_can_be_unloaded(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["load_s=60"]})
    async with pooled(tmp_path, *specs.values(), runtime=runtime) as it:
        loading = asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        await it.until(lambda: bool(it["a"].runners) and it["a"].runners[0].pid is not None)
        await it.unload("a")

        with pytest.raises(Conflict, match="unloaded while it was loading"):
            await loading
        assert it["a"].phase is Phase.ABSENT
        assert it.pids("a") == {"a": None}


@async_test
async def test_model_in_backoff_can_be_unloaded(tmp_path: Path, specs: Specs) -> None:
    runtime = server(tmp_path, {"a.gguf": ["exit=load:1"]})
    restart = RestartPolicy(first_delay_s=100.0, longest_delay_s=100.0)
    async with pooled(tmp_path, *specs.values(), runtime=runtime, policy=Policy(restart=restart)) as it:
        loading = asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        await it.until(lambda: bool(it["a"].runners) and it["a"].runners[0].instance.state is State.BACKOFF)
        await it.unload("a")

        with pytest.raises(Conflict):
            await loading
        assert it["a"].phase is Phase.ABSENT


@async_test
async def test_removed_model_cannot_be_loaded(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        gone = it["a"]
        it.apply(specs["b"])

        with pytest.raises(ModelUnknown):
            await asyncio.wait_for(it.pool.load(gone), PATIENCE_S)


# --- time to live


@async_test
async def test_idle_model_is_evicted_after_its_ttl_and_a_busy_one_is_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(ttl_s=0.2))
    async with pooled(tmp_path, spec) as it:
        loop = asyncio.get_running_loop()
        request = it.ask("a")
        await request.served_by()
        await asyncio.sleep(0.5)
        assert it["a"].phase is Phase.RESIDENT
        request.finish()
        ended_s = loop.time()

        await it.until(lambda: it.unloads() == [("a", "ttl", "")])
        assert loop.time() - ended_s >= 0.2
        await it.until_phase("a", Phase.ABSENT)

        late = it.ask("a")  # and comes back for the next
        await late.served_by()


@async_test
async def test_request_at_the_end_of_the_ttl_is_served(tmp_path: Path, tiny_model: Path) -> None:
    """However the two meet: by what is there, or by what is loaded for it."""
    spec = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(ttl_s=0.05))
    async with pooled(tmp_path, spec) as it:
        for number in range(12):
            request = it.ask("a")
            await request.served_by()
            request.finish()
            await asyncio.sleep(0.044 + number / 1000)
        assert it.unloads()


@async_test
async def test_new_budget_counts_for_a_sizing_under_way(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=0.5) as it:
        held = HeldSizing(monkeypatch)
        loading = asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        await held.begun()
        it.pool.apply_options(replace(it.pool.options, budget={"ram": it.needs_bytes * 2}))
        held.go_on()

        await loading
        assert it["a"].phase is Phase.RESIDENT


# --- the end


@async_test
async def test_stopping_pool_starts_no_model(
    tmp_path: Path, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pooled(tmp_path, *specs.values()) as it:
        held = HeldSizing(monkeypatch)
        request = it.ask("a")
        loading = asyncio.ensure_future(it.load("a"))  # noqa: TID251 (owned right here)
        await held.begun()
        it.pool.ask_stop()
        held.go_on()

        with pytest.raises(Stopping):
            await loading
        assert (await request.refusal()).cause == "stopping"
        await it.pool.ended()
        await it.until(lambda: not it["a"].sizing)
        assert it["a"].runners == []


@async_test
async def test_second_stop_does_not_wait_for_requests(tmp_path: Path, specs: Specs) -> None:
    """Not even with a model that is in the config no more and still finishes what it began."""
    async with pooled(tmp_path, *specs.values(), policy=Policy(drain_timeout_s=1000.0)) as it:
        requests = [it.ask(name) for name in "ab"]
        for request in requests:
            await request.served_by()
        pids = it.pids("a", "b")
        it.apply(specs["b"])
        it.pool.ask_stop()
        await asyncio.sleep(0.1)
        assert all(psutil.pid_exists(pid) for pid in pids.values() if pid is not None)
        it.pool.ask_stop(now=True)

        async with asyncio.timeout(PATIENCE_S):
            await it.pool.ended()
        assert not any(psutil.pid_exists(pid) for pid in pids.values() if pid is not None)


# --- what is left behind


@async_test
async def test_hundred_evictions_leak_nothing(tmp_path: Path, specs: Specs) -> None:
    """S18: tasks, threads, descriptors, files of the run folder, children."""

    def seen() -> tuple[int, ...]:
        return (
            len(asyncio.all_tasks()),
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(list((tmp_path / "run").iterdir())),
        )

    async def swap(it: Pooled, times: int) -> None:
        for number in range(times):
            request = it.ask("abc"[number % 3])
            await request.served_by()
            request.finish()

    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        await swap(it, 3)
        # All threads that there may be for what blocks; and what a load leaves to be done is over.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(40)))
        before = seen()
        await swap(it, 99)
        assert sum(it.loads(name) for name in "abc") == 102
        await it.until(lambda: all(late <= early for early, late in zip(before, seen(), strict=True)))


# --- crashes


@async_test
async def test_crashed_model_restarts_in_its_own_memory(tmp_path: Path, specs: Specs) -> None:
    async with pooled(tmp_path, *specs.values(), capacity=1.5) as it:
        await it.load("a")
        pid = it.pids("a")["a"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await it.until(lambda: it["a"].phase is Phase.LOADING)
        waiting = it.ask("a")

        assert await waiting.served_by() == 2
        assert it.unloads() == []
