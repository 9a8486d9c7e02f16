"""Liveness of a real llama-server: llamasup replaces a stopped server, but not a slow one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.settings.model import Settings
from llamasup.core.supervision.liveness import LivenessPolicy
from llamasup.core.supervision.states import State
from tests.e2e.service import PATIENCE_S, Serving, serving
from tests.kit.models import write_large_decoder

QUICK = LivenessPolicy(
    interval_s=0.25,
    health_timeout_s=1.0,
    stall_s=2.0,
    prefill_stall_s=0.5,
    busy_prefill_stall_s=120.0,
    token_timeout_s=0.5,
)
# On a busy machine, a process that computes a prompt gets little CPU time, and none for half a second at a
# time (seen at a load of 9 on two cores). A stall that ends before the test request times out is no hang.
BUSY_MACHINE = replace(
    QUICK, health_timeout_s=PATIENCE_S, prefill_stall_s=2.0, token_timeout_s=4.0, busy_cores=0.005
)
ONE_THREAD = 1  # as slow on many cores; two threads would wait for each other on a busy machine
PROMPT = "hello world " * 170  # some 2,000 tokens of the demo vocabulary
ONE_BATCH = Settings(ctx_size=32_768, parallel=1, threads=ONE_THREAD, extra=("--batch-size", "32768"))


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough on any core for a prompt of one batch to take more than a second."""
    return write_large_decoder(
        tmp_path_factory.mktemp("models") / "large.gguf", 100_000_000, quantization="F16"
    )


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_stopped_server_is_replaced_and_its_request_is_answered(runtime: str, tiny_model: Path) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=runtime, liveness=QUICK) as server:
            await server.reaches(State.READY, 1)
            assert (await server.complete()).status_code == 200
            first = server.pid
            os.kill(first, signal.SIGSTOP)
            answer = await server.complete()
            exited = await server.exit_of(1)
            assert exited.diagnosis.cause == "unresponsive"
            assert "the process is stopped" in exited.diagnosis.message
            assert exited.exit is None  # llamasup killed it
            assert answer.status_code == 200
            assert answer.json()["tokens_predicted"] == 4
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)

    run(test)


def test_stopped_idle_server_is_replaced_before_the_next_request(runtime: str, tiny_model: Path) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=runtime, liveness=QUICK) as server:
            await server.reaches(State.READY, 1)
            os.kill(server.pid, signal.SIGSTOP)
            await server.reaches(State.READY, 2)
            assert (await server.complete()).status_code == 200

    run(test)


async def prefills(server: Serving) -> AsyncIterator[float]:
    """The seconds of prompts of one batch, each twice as long as the one before. The server shows no progress
    during any of them.
    """
    prompt = PROMPT
    while True:
        answer = await server.complete(prompt=prompt, cache_prompt=False)
        assert answer.status_code == 200, server.notices
        timings = answer.json()["timings"]
        took_s = timings["prompt_ms"] / 1000
        print(f"{timings['prompt_n']} tokens in {took_s:.1f} s")
        yield took_s
        prompt *= 2


def test_long_prefill_is_no_hang(runtime: str, large_model: Path) -> None:
    async def test() -> None:
        async with serving(
            large_model,
            runtime=runtime,
            liveness=BUSY_MACHINE,
            settings=ONE_BATCH,
        ) as server:
            await server.reaches(State.READY, 1)
            async for took_s in prefills(server):
                if took_s > BUSY_MACHINE.prefill_stall_s + BUSY_MACHINE.token_timeout_s:
                    break
            assert server.runner.instance.generation == 1

    run(test)


def test_process_without_cpu_time_during_a_prompt_is_a_hang(llama_server: str, large_model: Path) -> None:
    """The same prefills with a policy that ignores CPU time.

    A build of August 2026 answers /slots only after the batch: a check must not wait for it until then. On a
    busy machine, some checks get no answer of /health in this time, and others do.
    """
    no_busy_process = replace(
        QUICK,
        busy_cores=1e9,
        busy_read_bytes_s=1e18,
        pause_factor=0.0,
        health_timeout_s=0.25,
        max_missed_checks=sys.maxsize,
    )

    async def test() -> None:
        async with serving(
            large_model, runtime=llama_server, liveness=no_busy_process, settings=ONE_BATCH
        ) as server:
            await server.reaches(State.READY, 1)

            async def requests() -> None:
                async for _ in prefills(server):
                    pass

            sending = asyncio.create_task(requests())  # noqa: TID251
            exited = await server.exit_of(1)
            assert exited.diagnosis.cause == "wedged"
            sending.cancel()

    run(test)


def test_slow_stream_is_never_interrupted(runtime: str, large_model: Path) -> None:
    """A token takes far less than the stall timeout, the whole stream far longer."""

    async def test() -> None:
        async with serving(
            large_model,
            runtime=runtime,
            liveness=replace(QUICK, stall_s=2.0, token_timeout_s=4.0, health_timeout_s=PATIENCE_S),
            settings=Settings(ctx_size=2048, parallel=2, threads=ONE_THREAD),
        ) as server:
            await server.reaches(State.READY, 1)
            plain = asyncio.create_task(server.complete(n_predict=400, ignore_eos=True))  # noqa: TID251
            async with server.client.stream(
                "POST",
                "/completion",
                json={"prompt": "Once", "n_predict": 400, "ignore_eos": True, "stream": True},
            ) as stream:
                text = (await stream.aread()).decode()
            assert '"tokens_predicted":400,' in text
            assert (await plain).json()["tokens_predicted"] == 400
            assert server.runner.instance.generation == 1

    run(test)
