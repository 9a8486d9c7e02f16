"""Models with a command: processes of another program, which work, crash, hang and leave others behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llamasup.core.config.config_keys import Config
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import LoadFailed, ServerExited, ServerWarned
from llamasup.core.supervision.liveness import LivenessPolicy
from llamasup.core.supervision.states import State
from llamasup.service.serve import ServeOptions
from tests.e2e.driver import run_to_end, seconds_until_gone, started
from tests.e2e.service import Serving, hosted
from tests.kit import fake_engine
from tests.kit.configs import load
from tests.kit.patience import PATIENCE_S, eventually

ROUTES = ["/v1/audio/speech", "/v1/audio/transcriptions", "/x/*"]
QUICK = LivenessPolicy(
    interval_s=0.05, health_timeout_s=0.3, prefill_stall_s=0.3, busy_prefill_stall_s=0.6, token_timeout_s=0.3
)
AT_ONCE = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, most_crashes=2)


def entry(*options: str, **keys: Any) -> dict[str, Any]:
    return {"command": fake_engine.command(*options), "health": "/health", "routes": ROUTES, **keys}


def config_of(folder: Path, **models: Mapping[str, Any]) -> Config:
    path = folder / "llamasup.yaml"
    path.write_text(json.dumps({"models": models, "memory": {"ram": "1GiB"}}))
    return load(path, os.environ)


def serving(
    folder: Path, options: Mapping[str, Any], /, **models: Any
) -> AbstractAsyncContextManager[Serving]:
    config = config_of(folder, **models)
    return hosted(partial(ServeOptions.of, lambda: config, **options))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


# --- requests ----------------------------------------------------------------------------------------


def test_each_kind_of_request_reaches_the_program_and_loads_it(tmp_path: Path) -> None:
    async def test() -> None:
        models = {"voice": entry("--delay", "0.2"), "other": {**entry(), "routes": ["/other"]}}
        async with serving(tmp_path, {}, **models) as server:
            client = server.client
            got = await client.get("/x/voices?lang=de")  # the first one loads it, without a name
            assert (got.status_code, got.json()["path"]) == (200, "/x/voices?lang=de")
            spoken = await client.post("/v1/audio/speech", json={"model": "voice", "input": "hi"})
            assert (spoken.content, spoken.headers["content-type"]) == (fake_engine.PNG, "audio/wav")
            image = await client.post("/x/image", content=b"cat")
            assert (image.content, image.headers["content-type"]) == (fake_engine.PNG, "image/png")
            files = {"file": ("a.wav", b"\0" * 300_000, "audio/wav")}
            for data in ({"model": "voice"}, {"language": "en"}):
                form = await client.post("/v1/audio/transcriptions", data=data, files=files)
                assert form.json()["bytes"] > 300_000
                assert form.json()["form"] == 2
            assert (await client.put("/x/settings", json={})).json()["path"] == "/x/settings"
            assert (await client.get("/other")).json()["path"] == "/other"

    run(test)


def test_websockets_are_refused_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {}, voice=entry()) as server:
            offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
            answer = await server.client.get("/x/live", headers=offer)
            assert (answer.status_code, answer.json()["error"]["cause"]) == (426, "websocket")

    run(test)


def test_requests_wait_in_the_queue_for_one_permit(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {}, voice=entry("--delay", "0.3", max_concurrent=1)) as server:
            asked = [server.client.post("/x/slow", json={"seconds": 0.02}) for _ in range(8)]
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
            assert server.runner_of("voice").instance.generation == 1

    run(test)


# --- starts ------------------------------------------------------------------------------------------


def test_start_that_writes_has_no_deadline_and_one_that_does_not_has(tmp_path: Path) -> None:
    async def test() -> None:
        options = {"stall_timeout_s": 2.0, "restart": RestartPolicy(most_crashes=0)}
        models = {"talks": entry("--delay", "3"), "is_silent": entry("--delay", "600", "--silent")}
        async with serving(tmp_path, options, **models) as server:
            talks = server.client.post("/x/y", json={"model": "talks"})
            silent = server.client.post("/x/y", json={"model": "is_silent"})
            assert [answer.status_code for answer in await asyncio.gather(talks, silent)] == [200, 503]
            failed = await server.wait_for_event(LoadFailed)
            assert "python made no progress for 2 s while starting" in str(failed.error)

    run(test)


def test_crash_loop_ends_with_the_last_lines_of_the_log(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {"restart": AT_ONCE}, voice=entry("--fails")) as server:
            answer = await server.client.post("/x/y", json={})
            assert (answer.status_code, answer.json()["error"]["cause"]) == (503, "unknown")
            failed = await server.wait_for_event(LoadFailed)
            assert failed.error.message.startswith("Gave up after 3 crashes of python.")
            assert failed.error.lines == ("engine: this GPU is not supported",)
            assert "llama-server" not in f"{failed.error.message}{failed.error.remedy}"

    run(test)


def test_missing_program_is_reported_with_its_name(tmp_path: Path) -> None:
    async def test() -> None:
        voice = {**entry(), "command": ["no-such-engine", "{port}"]}
        async with serving(tmp_path, {}, voice=voice) as server:
            answer = (await server.client.post("/x/y", json={})).json()["error"]
            assert answer["message"] == "Cannot execute 'no-such-engine': not found on PATH."
            assert answer["remedy"] == "Correct its `command` in the config."

    run(test)


@pytest.mark.parametrize(("path", "works"), [("/x/warm", True), ("/x/fail", False)])
def test_warm_up_proves_a_start(path: str, works: bool, tmp_path: Path) -> None:
    async def test() -> None:
        voice = entry(warmup={"path": path, "body": {"n": 1}})
        options = {"restart": RestartPolicy(most_crashes=0)}
        async with serving(tmp_path, options, voice=voice) as server:
            answer = await server.client.post("/x/y", json={})
            assert answer.status_code == (200 if works else 503)
            await server.reaches(State.WARMING, 1)
            assert works or answer.json()["error"]["cause"] == "warm_up_failed"

    run(test)


def test_program_gets_a_socket_a_folder_a_name_and_only_some_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = str(Path(fake_engine.__file__).relative_to("/"))
    words = [sys.executable, "-S", os.path.relpath(f"/{program}", tmp_path), "--socket", "{socket}"]
    voice = {**entry(), "command": [*words, "--model", "{folder}/{name}"], "environment": "HF_HOME"}

    async def test() -> None:
        async with serving(tmp_path, {}, **{"org/voice:1": voice}) as server:
            seen = (await server.client.get("/x/y")).json()
            assert seen["cwd"] == str(tmp_path)  # the folder of the config
            *_, socket, _, model = seen["argv"]
            assert Path(socket).parent == Path(model).parent
            assert Path(socket).parent.stat().st_mode & 0o777 == 0o700
            assert Path(model).name == "org-voice-1"
            assert seen["env"]["HF_HOME"] == "/cache"
            assert "HF_TOKEN" not in seen["env"]

    run(test)


# --- crashes and hangs -------------------------------------------------------------------------------


def test_next_process_serves_after_a_crash_and_after_a_kill(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {}, voice=entry("--has-child")) as server:
            first = (await server.client.get("/x/y")).json()["pid"]
            helpers = psutil.Process(first).children()
            crashed = await server.client.post("/x/crash", json={})
            assert crashed.status_code in (502, 503)
            second = (await server.client.get("/x/y")).json()["pid"]
            os.kill(second, signal.SIGKILL)
            assert (await server.client.get("/x/y")).json()["pid"] not in (first, second)
            assert len(helpers) == 1
            seconds_until_gone(helpers)
            exits = [notice for notice in server.notices if isinstance(notice, ServerExited)]
            assert [exited.diagnosis.cause for exited in exits] == ["aborted", "killed"]
            assert exits[1].diagnosis.message.startswith("python was killed (SIGKILL)")

    run(test)


def test_program_that_hangs_is_restarted(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {"liveness": QUICK}, voice=entry()) as server:
            assert (await server.client.post("/x/hang", json={})).status_code == 200
            exited = await server.wait_for_event(ServerExited)
            assert exited.diagnosis.cause == "unresponsive"
            assert "python did not answer" in exited.diagnosis.message
            assert (await server.client.get("/x/y")).status_code == 200

    run(test)


def test_program_that_hangs_during_a_request_is_restarted(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {"liveness": QUICK}, voice=entry()) as server:
            await server.client.get("/x/y")
            os.kill(server.runner_of("voice").pid or 0, signal.SIGSTOP)
            hung = await server.client.post("/x/y", json={})
            assert hung.status_code in (200, 502, 503)  # a known path may be sent again
            exited = await server.wait_for_event(ServerExited)
            assert exited.diagnosis.cause in ("wedged", "unresponsive")

    run(test)


@pytest.mark.parametrize("options", [(), ("--blocks",)])
def test_long_answer_without_bytes_is_no_hang(options: tuple[str, ...], tmp_path: Path) -> None:
    """Also of a program that answers no health check meanwhile."""

    async def test() -> None:
        policy = LivenessPolicy(interval_s=0.05, health_timeout_s=0.5)
        async with serving(tmp_path, {"liveness": policy}, voice=entry(*options)) as server:
            answer = await server.client.post("/x/slow", json={"seconds": 2.5})
            assert answer.status_code == 200
            assert server.runner_of("voice").instance.generation == 1

    run(test)


# --- ends --------------------------------------------------------------------------------------------


def test_program_that_ignores_sigterm_is_killed_after_its_requests(tmp_path: Path) -> None:
    async def test() -> None:
        options = {"stop_timeout_s": 0.5}
        async with serving(tmp_path, options, voice=entry("--ignores-term", "--has-child")) as server:
            pid = (await server.client.get("/x/y")).json()["pid"]
            family = [psutil.Process(pid), *psutil.Process(pid).children()]
            async with asyncio.TaskGroup() as tasks:
                last = tasks.create_task(server.client.post("/x/slow", json={"seconds": 1}))
                await asyncio.to_thread(eventually, lambda: server.runner_of("voice").in_flight)
                server.service.ask_stop()
            assert last.result().status_code == 200
            await asyncio.to_thread(seconds_until_gone, family)
            assert len(family) == 2

    run(test)


CONTAINER = """
import os, signal, subprocess, sys, time
from pathlib import Path
name, action, *command = sys.argv[1:]
if action == "stop":
    pid = int(Path(name).read_text())
    os.kill(pid, signal.SIGTERM)
    Path(name).unlink()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
else:
    server = subprocess.Popen(command, env={}, start_new_session=True)
    Path(name).write_text(str(server.pid))
    sys.exit(server.wait())
"""
"""As docker does: what serves is no child of the command in a way that llamasup sees."""


def contained(folder: Path) -> dict[str, Any]:
    script = folder / "container.py"
    script.write_text(CONTAINER)
    docker = [sys.executable, "-S", "container.py", "{name}.pid"]
    return entry(command=[*docker, "run", *fake_engine.command()], stop=[*docker, "stop"], drain_timeout="1s")


def test_stop_command_ends_what_the_command_has_started_elsewhere(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, {}, voice=contained(tmp_path)) as server:
            served = psutil.Process((await server.client.get("/x/y")).json()["pid"])
            os.kill(server.runner_of("voice").pid or 0, signal.SIGKILL)  # only the client of the container
            second = psutil.Process((await server.client.get("/x/y")).json()["pid"])
            await asyncio.to_thread(seconds_until_gone, [served])
        await asyncio.to_thread(seconds_until_gone, [second])
        assert not (tmp_path / "voice.pid").exists()

    run(test)


def test_stop_command_that_fails_is_followed_by_sigterm(tmp_path: Path) -> None:
    async def test() -> None:
        voice = entry(stop=[sys.executable, "-S", "-c", "import sys; sys.exit('no such container')"])
        async with serving(tmp_path, {}, voice=voice) as server:
            served = psutil.Process((await server.client.get("/x/y")).json()["pid"])
            server.service.ask_stop()
            warned = await server.wait_for_event(ServerWarned, lambda event: "stop command" in event.message)
            assert "exit code 1 (no such container)" in warned.message
            await asyncio.to_thread(seconds_until_gone, [served])

    run(test)


def test_nothing_is_left_when_llamasup_is_killed(tmp_path: Path) -> None:
    models = {"voice": entry("--has-child"), "box": {**contained(tmp_path), "routes": ["/box"]}}
    config_of(tmp_path, **models)
    options = ("--config", str(tmp_path / "llamasup.yaml"), "--port", "0")
    with started("serve", *options) as running:
        pids = [
            httpx.get(f"{running.url}/{path}", timeout=PATIENCE_S).json()["pid"] for path in ("x/y", "box")
        ]
        family = [psutil.Process(pids[0]), *psutil.Process(pids[0]).children()]
        contained_server = psutil.Process(pids[1])
        running.send_signal(signal.SIGKILL)
        running.end()
    assert len(family) == 2
    seconds_until_gone(family)
    with started("serve", *options) as running:  # its start stops the container that was left
        assert httpx.get(f"{running.url}/box", timeout=PATIENCE_S).json()["pid"] != pids[1]
        seconds_until_gone([contained_server])
        assert running.stop() == 0


# --- what is shown -----------------------------------------------------------------------------------


def test_commands_show_the_model(tmp_path: Path) -> None:
    config_of(tmp_path, voice=entry("--bytes", "60000000"))
    with started("serve", "--config", str(tmp_path / "llamasup.yaml"), "--port", "0") as running:
        listed = httpx.get(f"{running.url}/v1/models").json()["data"][0]
        assert (listed["llamasup"]["kind"], listed["llamasup"]["routes"]) == ("command", ROUTES)
        httpx.get(f"{running.url}/x/y", timeout=PATIENCE_S)
        warned = running.wait_for("warning", model="voice")
        assert "The memory of 'voice' is not known" in warned["message"]
        url = ("--url", running.url)
        eventually(lambda: "60" in run_to_end("ps", *url).stdout or "MiB" in run_to_end("ps", *url).stdout)
        assert "voice" in run_to_end("why", "voice", *url).stdout
        assert "engine: listening" in run_to_end("logs", "voice", *url).stdout
        plan = run_to_end("plan", "voice", env={**os.environ, "LLAMASUP_CONFIG": f"{tmp_path}/llamasup.yaml"})
        assert "llamasup plans only llama-server" in plan.stderr
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'route="command"' in metrics
        assert running.stop() == 0
    with started("serve", "--config", str(tmp_path / "llamasup.yaml"), "--port", "0") as running:
        httpx.get(f"{running.url}/x/y", timeout=PATIENCE_S)  # now its memory is known
        assert not [event for event in running.events if event["event"] == "warning"]


def test_model_is_replaced_when_its_command_changes_and_untouched_otherwise(tmp_path: Path) -> None:
    config_of(tmp_path, voice=entry())
    with started("serve", "--config", str(tmp_path / "llamasup.yaml"), "--port", "0") as running:
        pid = httpx.get(f"{running.url}/x/y", timeout=PATIENCE_S).json()["pid"]
        config_of(tmp_path, voice=entry(aliases=["tts"]))
        running.send_signal(signal.SIGHUP)
        running.wait_for("models")
        assert httpx.get(f"{running.url}/x/y?model=tts", timeout=PATIENCE_S).json()["pid"] == pid
        config_of(tmp_path, voice=entry("--bytes", "10", aliases=["tts"]))
        running.send_signal(signal.SIGHUP)
        eventually(lambda: httpx.get(f"{running.url}/x/y", timeout=PATIENCE_S).json()["pid"] != pid)
