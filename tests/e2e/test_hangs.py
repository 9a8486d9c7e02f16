"""Servers that live and do not serve: fakes that really stop, wedge and stall, under a watch in a hurry."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.liveness import LivenessPolicy
from llamasup.supervision.states import State
from tests.e2e.driver import llamasup
from tests.e2e.service import serving

QUICK = LivenessPolicy(
    interval_s=0.1,
    health_timeout_s=1.0,
    stall_s=0.5,
    prefill_stall_s=0.5,
    busy_prefill_stall_s=2.0,
    token_timeout_s=1.0,
)
FakeServer = Callable[..., str]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_completions_that_never_move_are_a_hang_although_health_says_ok(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    async def test() -> None:
        runtime = fake_server("wedge", f"once={tmp_path / 'wedged'}", "ignore_sigterm")
        async with serving(tiny_model, runtime=runtime, liveness=QUICK, warm_up=False) as it:
            await it.reaches(State.READY, 1)
            asked = asyncio.gather(*(it.complete() for _ in range(3)))
            while it.runner.instance.generation == 1:
                # What needs no model is answered all the time, and says nothing.
                await it.client.get("/props")
                await asyncio.sleep(0.02)
            answers = await asked
            exited = await it.exit_of(1)
            assert exited.diagnosis.cause == "wedged"
            assert "have made no progress" in exited.diagnosis.message
            assert "a test request for one token got no answer" in exited.diagnosis.message
            assert [answer.status_code for answer in answers] == [200] * 3

    run(test)


def test_nothing_but_errors_is_a_hang_if_there_is_no_token_either(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    async def test() -> None:
        runtime = fake_server("status=500", f"once={tmp_path / 'failed'}")
        async with serving(tiny_model, runtime=runtime, liveness=QUICK, warm_up=False) as it:
            await it.reaches(State.READY, 1)
            statuses = [(await it.complete()).status_code for _ in range(3)]
            exited = await it.exit_of(1)
            assert statuses == [500] * 3
            assert exited.diagnosis.cause == "wedged"
            assert "its last 3 answers were errors, and /completion answered 500" in exited.diagnosis.message
            await it.reaches(State.READY, 2)
            assert (await it.complete()).status_code == 200

    run(test)


def test_errors_that_are_the_clients_own_cost_a_token_and_no_restart(
    tiny_model: Path, fake_server: FakeServer
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server(), liveness=QUICK) as it:
            await it.reaches(State.READY, 1)
            before = await decodes(it.runner.prober())
            for _ in range(3):
                assert (await it.client.post("/v1/embeddings", json={"input": "x"})).status_code == 501
            while await decodes(it.runner.prober()) == before:  # the proof  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert (await it.complete()).status_code == 200
            assert it.runner.instance.generation == 1

    run(test)


@pytest.mark.slow
def test_one_stuck_stream_does_not_end_a_server_that_works(tiny_model: Path, fake_server: FakeServer) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("stall_after=3"), liveness=QUICK) as it:
            await it.reaches(State.READY, 1)
            async with it.client.stream(
                "POST", "/completion", json={"prompt": "Once", "n_predict": 9, "stream": True}
            ) as stream:
                lines = stream.aiter_lines()
                while "w2" not in await anext(lines):
                    pass
                before = await decodes(it.runner.prober())
                while await decodes(it.runner.prober()) < before + 3:  # three proofs  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (it.runner.instance.state, it.runner.instance.generation) == (State.READY, 1)

    run(test)


@pytest.mark.slow
def test_no_token_is_requested_during_a_slow_stream(tiny_model: Path, fake_server: FakeServer) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("token_s=0.3"), liveness=QUICK) as it:
            await it.reaches(State.READY, 1)
            before = await decodes(it.runner.prober())
            plain = asyncio.create_task(it.complete(n_predict=10))  # noqa: TID251
            async with it.client.stream(
                "POST", "/completion", json={"prompt": "Once", "n_predict": 12, "stream": True}
            ) as stream:
                text = (await stream.aread()).decode()
            assert text.count('"content": " w') == 12
            assert (await plain).json()["tokens_predicted"] == 10
            assert await decodes(it.runner.prober()) == before + 22
            assert it.runner.instance.generation == 1

    run(test)


@pytest.mark.slow
def test_hang_ends_the_drain(tiny_model: Path, fake_server: FakeServer) -> None:
    async def test() -> None:
        async with serving(
            tiny_model, runtime=fake_server(), liveness=QUICK, drain_timeout_s=1000.0, stop_timeout_s=1000.0
        ) as it:
            await it.reaches(State.READY, 1)
            os.kill(it.pid, signal.SIGSTOP)
            asked = asyncio.create_task(it.complete())  # noqa: TID251
            while not it.runner.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            it.service.ask_stop()
            await it.reaches(State.STOPPED, 1)
            with pytest.raises(httpx.HTTPError):
                (await asked).raise_for_status()

    run(test)


@pytest.mark.slow
def test_a_crash_loop_ends_in_503_with_the_time_of_the_next_try_and_a_good_try_ends_it(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    mended, runtime = tmp_path / "mended", tmp_path / "llama-server"
    broken, sound = fake_server("signal=ready:SIGKILL"), fake_server()
    runtime.write_text(
        "#!/bin/sh\n"
        f'[ -e {shlex.quote(str(mended))} ] && exec {shlex.quote(sound)} "$@"\n'
        f'exec {shlex.quote(broken)} "$@"\n'
    )
    runtime.chmod(0o755)
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, most_crashes=2, half_open_s=2.0)

    async def test() -> None:
        async with serving(tiny_model, runtime=str(runtime), restart=policy, liveness=QUICK) as it:
            await it.reaches(State.FAILED, 3)
            refused = await it.complete()
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 3  # the next try, and its load
            assert refused.json()["error"]["cause"] == "killed"
            last = await it.exit_of(3)
            assert last.restart_in_s == 2.0
            await it.reaches(State.FAILED, 4)  # one try, and no more
            mended.touch()
            await it.reaches(State.READY, 5)
            assert (await it.complete()).status_code == 200

    run(test)


async def decodes(prober: Any) -> int:
    """How many tokens the fake has made, from its own counter."""
    async with prober:
        text = await prober.metrics()
    return int(text.split("\nllamacpp:n_decode_total ")[1].split()[0])


@pytest.mark.slow
def test_keep_trying_outlives_a_crash_loop_and_a_stop_ends_it_well(
    tiny_model: Path, fake_server: FakeServer
) -> None:
    """Six crashes: at once, then 0.5, 1, 2 and 4 s between them."""
    server = fake_server("signal=ready:SIGKILL", "after_s=0.5")
    with llamasup(tiny_model, "--runtime", server, "--no-warmup", "--keep-trying") as running:
        running.wait_for("state", state="failed")
        last = running.wait_for("exit", generation=6)
        assert (last["restart_in_s"], last["cause"]) == (300.0, "killed")
        refused = httpx.post(f"{running.url}/completion", json={"prompt": "Once"})
        assert refused.status_code == 503
        assert 200 < int(refused.headers["retry-after"]) <= 302  # the next try, and its load
        assert running.stop() == 0
    assert "Restarting in 5" in running.stderr_text
