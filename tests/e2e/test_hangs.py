"""Servers that live and do not serve: fakes that really stop, wedge and stall, under a watch in a hurry."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import PublishedEvent, StateChanged
from llamasup.core.supervision.liveness import LivenessPolicy
from llamasup.core.supervision.states import State
from tests.e2e.driver import llamasup
from tests.e2e.service import serving
from tests.kit.patience import PATIENCE_S

QUICK = LivenessPolicy(
    interval_s=0.1,
    health_timeout_s=1.0,
    stall_s=0.5,
    prefill_stall_s=0.5,
    busy_prefill_stall_s=2.0,
    token_timeout_s=1.0,
)
# For servers that do not hang: on a busy machine, each answer may take longer.
SLOW_ANSWERS = replace(QUICK, health_timeout_s=PATIENCE_S, token_timeout_s=PATIENCE_S)
NO_STALLS = replace(SLOW_ANSWERS, stall_s=PATIENCE_S, prefill_stall_s=PATIENCE_S)
DECODES = re.compile(r"^llamacpp:n_decode_total (\d+)", re.M)
FakeServer = Callable[..., str]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_stalled_completions_are_a_hang_even_if_health_answers_ok(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    async def test() -> None:
        runtime = fake_server("wedge", f"once={tmp_path / 'wedged'}", "ignore_sigterm")
        stalls = replace(QUICK, health_timeout_s=PATIENCE_S)  # however late it says that it is healthy
        async with serving(tiny_model, runtime=runtime, liveness=stalls, warm_up=False) as server:
            await server.reaches(State.READY, 1)
            asked = asyncio.gather(*(server.complete() for _ in range(3)))
            while server.runner.instance.generation == 1:
                # Requests that need no model are answered all the time, and prove nothing.
                await server.client.get("/props")
                await asyncio.sleep(0.02)
            answers = await asked
            exited = await server.exit_of(1)
            assert exited.diagnosis.cause == "wedged"
            assert "have made no progress" in exited.diagnosis.message
            assert "a test request for one token got no answer" in exited.diagnosis.message
            assert [answer.status_code for answer in answers] == [200] * 3

    run(test)


def test_errors_are_a_hang_if_the_token_probe_fails_too(
    tiny_model: Path, fake_server: FakeServer, tmp_path: Path
) -> None:
    async def test() -> None:
        runtime = fake_server("status=500", f"once={tmp_path / 'failed'}")
        async with serving(tiny_model, runtime=runtime, liveness=NO_STALLS, warm_up=False) as server:
            await server.reaches(State.READY, 1)
            statuses = [(await server.complete()).status_code for _ in range(3)]
            exited = await server.exit_of(1)
            assert statuses == [500] * 3
            assert exited.diagnosis.cause == "wedged"
            assert "its last 3 answers were errors, and /completion answered 500" in exited.diagnosis.message
            await server.reaches(State.READY, 2)
            assert (await server.complete()).status_code == 200

    run(test)


def test_client_errors_lead_to_a_token_probe_and_no_restart(
    tiny_model: Path, fake_server: FakeServer
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server(), liveness=SLOW_ANSWERS) as server:
            await server.reaches(State.READY, 1)
            before = await decodes(server.runner.prober())
            for _ in range(3):
                assert (await server.client.post("/v1/embeddings", json={"input": "x"})).status_code == 501
            while await decodes(server.runner.prober()) == before:  # the proof  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert (await server.complete()).status_code == 200
            assert server.runner.instance.generation == 1

    run(test)


def test_one_stuck_stream_does_not_restart_a_working_server(
    tiny_model: Path, fake_server: FakeServer
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server("stall_after=3"), liveness=SLOW_ANSWERS) as server:
            await server.reaches(State.READY, 1)
            async with server.client.stream(
                "POST", "/completion", json={"prompt": "Once", "n_predict": 9, "stream": True}
            ) as stream:
                lines = stream.aiter_lines()
                while "w2" not in await anext(lines):
                    pass
                before = await decodes(server.runner.prober())
                while await decodes(server.runner.prober()) < before + 3:  # three proofs  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (server.runner.instance.state, server.runner.instance.generation) == (State.READY, 1)

    run(test)


@pytest.mark.extended
def test_no_token_is_requested_during_a_slow_stream(tiny_model: Path, fake_server: FakeServer) -> None:
    async def test() -> None:
        patient = replace(SLOW_ANSWERS, stall_s=6.0, prefill_stall_s=6.0)  # a busy machine may lose seconds
        async with serving(tiny_model, runtime=fake_server("token_s=1.0"), liveness=patient) as server:
            await server.reaches(State.READY, 1)
            before = await decodes(server.runner.prober())
            plain = asyncio.create_task(server.complete(n_predict=10))  # noqa: TID251
            async with server.client.stream(
                "POST", "/completion", json={"prompt": "Once", "n_predict": 12, "stream": True}
            ) as stream:
                text = (await stream.aread()).decode()
            assert text.count('"content": " w') == 12
            assert (await plain).json()["tokens_predicted"] == 10
            assert await decodes(server.runner.prober()) == before + 22
            assert server.runner.instance.generation == 1

    run(test)


def test_hang_ends_the_drain(tiny_model: Path, fake_server: FakeServer) -> None:
    async def test() -> None:
        async with serving(
            tiny_model, runtime=fake_server(), liveness=QUICK, drain_timeout_s=1000.0, stop_timeout_s=1000.0
        ) as server:
            await server.reaches(State.READY, 1)
            os.kill(server.pid, signal.SIGSTOP)
            asked = asyncio.create_task(server.complete())  # noqa: TID251
            while not server.runner.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.service.ask_stop()
            await server.reaches(State.STOPPED, 1)
            with pytest.raises(httpx.HTTPError):
                (await asked).raise_for_status()

    run(test)


def test_crash_loop_answers_503_with_retry_after_until_a_try_succeeds(
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
        def mend(event: PublishedEvent) -> None:
            """As a listener: before the next try, however long this test waits for its turn."""
            if isinstance(event, StateChanged) and (event.state, event.generation) == (State.FAILED, 4):
                mended.touch()

        async with serving(tiny_model, runtime=str(runtime), restart=policy, liveness=SLOW_ANSWERS) as server:
            server.bus.listen(mend)
            await server.reaches(State.FAILED, 3)
            refused = await server.complete()
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 3  # the next try, and its load
            assert refused.json()["error"]["cause"] == "killed"
            last = await server.exit_of(3)
            assert last.restart_in_s == 2.0
            await server.reaches(State.FAILED, 4)  # one try, and no more
            await server.reaches(State.READY, 5)
            assert (await server.complete()).status_code == 200

    run(test)


async def decodes(prober: Any) -> int:
    """How many tokens the fake has made, from its own counter."""
    async with prober:
        while not (found := DECODES.search(await prober.metrics() or "")):  # it did not answer in time
            pass
    return int(found[1])


@pytest.mark.extended
def test_keep_trying_survives_a_crash_loop_and_stops_with_0(
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
