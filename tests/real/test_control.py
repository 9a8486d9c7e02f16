"""Control commands for a real model that serves requests."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from llamasup.errors import ModelUnknown
from tests.e2e.driver import PATIENCE_S, Llamasup, command, is_alive, llamasup, run_to_end

pytestmark = pytest.mark.one_runtime

BODY = {"prompt": "Once", "n_predict": 8, "temperature": 0}


@pytest.fixture
def running(runtime: str, tiny_model: Path) -> Iterator[Llamasup]:
    with llamasup(tiny_model, "--runtime", runtime) as running:
        running.wait_for("ready")
        yield running
        if running.process.poll() is None:
            assert running.stop() == 0


def completed(running: Llamasup) -> httpx.Response:
    return httpx.post(f"{running.url}/completion", json=BODY, timeout=PATIENCE_S)


def model(running: Llamasup) -> dict[str, object]:
    (shown,) = json.loads(run_to_end("ps", "--json", "--pid", str(running.pid)).stdout)["models"]
    return dict(shown)


def test_unload_frees_memory_and_load_gives_the_same_answers_again(running: Llamasup) -> None:
    before = completed(running).json()["content"]
    shown = model(running)
    assert shown["state"] == "ready"
    assert shown["slots_busy"] == 0
    pid = shown["pid"]
    assert isinstance(pid, int)
    server = psutil.Process(pid)

    assert run_to_end("unload").returncode == 0
    assert not (server.is_running() and is_alive(server))
    refused = completed(running)
    assert (refused.status_code, refused.json()["error"]["cause"]) == (503, "stopped")
    assert model(running)["memory"] == {"ram_bytes": None, "vram_bytes": None}

    assert run_to_end("load", "tiny").returncode == 0
    assert completed(running).json()["content"] == before
    assert model(running)["pid"] != pid


def test_requests_during_a_restart_are_answered(running: Llamasup) -> None:
    answers: list[int] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not over.is_set():
                answers.append(http.post(f"{running.url}/completion", json=BODY).status_code)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        for generation in (2, 3):
            done = run_to_end("restart", "tiny", "--json")
            assert json.loads(done.stdout)["generation"] == generation
    finally:
        over.set()
        for client in clients:
            client.join(PATIENCE_S)
    assert set(answers) == {200}
    print(f"{len(answers)} requests of 4 clients over 2 restarts, all answered")


def test_control_client_and_parent_program_see_the_same_restart_events(running: Llamasup) -> None:
    with ControlClient(ControlAddress(socket=select_running(discover(), running.pid).socket)) as client:
        events = client.events()
        first = next(events)
        assert (first["state"], first["generation"]) == ("ready", 1)
        client.restart("tiny", wait=False)
        states = []
        for event in events:
            if event["event"] == "state":
                states.append((event["state"], event["generation"]))
            if states and states[-1] == ("ready", 2):
                break
        assert states[:2] == [("draining", 1), ("stopping", 1)]
        assert states[-2:] == [("warming", 2), ("ready", 2)]
        running.wait_for("state", state="ready", generation=2)
        published = [(e["state"], e["generation"]) for e in running.events if e["event"] == "state"]
        assert published[-len(states) :] == states
        with pytest.raises(ModelUnknown):
            client.load("nosuch")
        client.shutdown()
        assert [event["event"] for event in events][-1] == "stopped"
    assert running.end() == 0


def test_followed_log_shows_lines_of_the_real_server(running: Llamasup) -> None:
    process = subprocess.Popen(
        command("logs", "-f", "-n", "1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip()  # the last line so far; the command now follows the log
        assert completed(running).status_code == 200
        while "print_timing" not in process.stdout.readline():
            pass
        assert run_to_end("stop", "--wait").returncode == 0
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert running.end() == 0


def test_stop_finishes_requests_and_stop_now_cuts_them(runtime: str, tiny_model: Path) -> None:
    for arguments, finishes in ((("--wait",), True), (("--wait", "--now"), False)):
        with llamasup(tiny_model, "--runtime", runtime, "--", "--context-shift") as running:
            url = running.url
            (server,) = [child for child in running.children() if "--host" in child.cmdline()]
            body = {**BODY, "n_predict": 400 if finishes else -1, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/completion", json=body, timeout=PATIENCE_S) as answer:
                lines = answer.iter_lines()
                next(lines)
                if finishes:
                    server.suspend()  # the stop arrives before the end of the answer
                stopping = subprocess.Popen(command("stop", *arguments))
                if finishes:
                    running.wait_for("state", state="draining")
                    server.resume()
                last = ""
                try:
                    for line in lines:
                        last = line or last
                except httpx.RemoteProtocolError:
                    assert not finishes
                assert ('"stop":true' in last) == finishes, last
            assert stopping.wait(PATIENCE_S) == 0
            assert running.end() == 0


def test_two_llamasups_with_equal_model_names_write_separate_logs(runtime: str, tiny_model: Path) -> None:
    """The log of each server contains only the folder of its own socket."""
    words = ("--runtime", runtime)
    with llamasup(tiny_model, *words) as first, llamasup(tiny_model, *words) as second:
        for supervisor in (first, second):
            supervisor.wait_for("ready")
        logs = [
            run_to_end("logs", "--pid", str(supervisor.pid), "tiny").stdout for supervisor in (first, second)
        ]
        for log, own, other in zip(logs, (first, second), (second, first), strict=True):
            assert f"/{own.pid}-" in log, log
            assert f"/{other.pid}-" not in log, log
        assert [first.stop(), second.stop()] == [0, 0]
