"""llamasup as another program's sidecar: one line to read, one pipe to hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.driver import (
    PATIENCE_S,
    Llamasup,
    adopted,
    command,
    on_terminal,
    run_to_end,
    seconds_until_gone,
)
from tests.kit.ports import free_port

ServerMaker = Callable[..., str]


@contextmanager
def sidecar(model: Path, *arguments: str, **options: Any) -> Iterator[Llamasup]:
    """``llamasup run MODEL --sidecar ARGUMENTS…`` with all three pipes."""
    process = subprocess.Popen(
        command("run", str(model), "--sidecar", *arguments),
        **{
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        },
    )
    try:
        with adopted(process) as running:
            yield running
    finally:
        if process.stdin is not None:
            process.stdin.close()


def end_stdin(running: Llamasup) -> None:
    assert running.process.stdin is not None
    running.process.stdin.close()


def test_sidecar_uses_a_free_port_prints_events_and_stops_with_stdin(
    tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    with sidecar(tiny_model, "--runtime", fake_server()) as running:
        ready = running.wait_for("ready")
        assert ready["port"] not in (0, 8080)
        assert httpx.get(f"{ready['url']}/health").status_code == 200
        children = running.children()
        end_stdin(running)
        assert running.end() == 0
        assert running.wait_for("stopped") == {"event": "stopped", "protocol": 1}
        assert "Standard input ended: stopping." in running.stderr_text
        seconds_until_gone(children)
    assert list((own_folders / "run" / "llamasup").iterdir()) == []


@pytest.mark.parametrize(
    ("cause", "code", "arguments"),
    [
        ("usage", 2, ["--bogus"]),
        ("usage", 2, ["--port", "seventy"]),
        ("usage", 2, ["--parent-pid", "0"]),
        ("unsafe_bind", 78, ["--host", "0.0.0.0"]),
        ("config_invalid", 78, ["--tls-cert", "nowhere.pem", "--tls-key", "nowhere.pem"]),
        ("runtime_broken", 69, ["--runtime", "/bin/true"]),
        ("usage", 2, ["--", "--no-such-flag"]),
        ("out_of_memory_host", 71, ["--runtime", "fake:out_of_memory=host"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_start_that_fails_has_one_event_with_its_exit_code(
    cause: str, code: int, arguments: list[str], tiny_model: Path, fake_server: ServerMaker
) -> None:
    runtime = [] if "--runtime" in arguments else ["--runtime", fake_server()]
    words = [fake_server(word[5:]) if word.startswith("fake:") else word for word in arguments]
    done = run_to_end("run", str(tiny_model), "--events=jsonl", "--port=0", *runtime, *words)
    assert done.returncode == code, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (failed,) = (event for event in events if event["event"] == "failed")
    assert (failed["model"], failed["cause"], failed["exit_code"]) == (None, cause, code)
    assert failed["message"]
    assert failed["remedy"]
    assert events[-1] == {"event": "stopped", "protocol": 1}
    assert [event["event"] for event in events].count("stopped") == 1


def test_failed_event_has_each_error_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("prt: 1\nhttp: {max_bdy: 1}\n")
    done = run_to_end("serve", "--config", str(config), "--events=jsonl")
    failed, stopped = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, failed["exit_code"], failed["message"]) == (78, 78, f"{config} has 2 errors.")
    assert [line.split(": ")[1] for line in failed["details"] if line.startswith(str(config))] == [
        "prt",
        "http.max_bdy",
    ]
    assert stopped["event"] == "stopped"


def test_chosen_port_is_used(tiny_model: Path, fake_server: ServerMaker) -> None:
    free = free_port()
    with sidecar(tiny_model, "--runtime", fake_server(), "--port", str(free)) as running:
        assert running.wait_for("ready")["port"] == free
        end_stdin(running)
        assert running.end() == 0


def test_input_from_the_parent_is_read_and_ignored(tiny_model: Path, fake_server: ServerMaker) -> None:
    with sidecar(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        assert running.process.stdin is not None
        running.process.stdin.write("words\n" * 50_000)  # several times what a pipe holds
        running.process.stdin.flush()
        assert httpx.get(f"{running.url}/health").status_code == 200
        end_stdin(running)
        assert running.end() == 0


def test_stdin_closed_before_the_start_is_a_stop(tiny_model: Path, fake_server: ServerMaker) -> None:
    """The parent died during the start of llamasup, so no model is loaded."""
    done = run_to_end("run", str(tiny_model), "--runtime", fake_server(), "--sidecar", input="")
    assert done.returncode == 0
    assert "Standard input ended: stopping." in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.parametrize("what", ["/dev/null", "a file"])
def test_stdin_without_a_parent_is_refused_with_a_remedy(
    what: str, tiny_model: Path, fake_server: ServerMaker
) -> None:
    """``stdio: 'ignore'`` of Node, Electron and Tauri is /dev/null."""
    with Path(os.devnull if what == "/dev/null" else tiny_model).open("rb") as stdin:
        done = run_to_end("run", str(tiny_model), "--runtime", fake_server(), "--sidecar", stdin=stdin)
    assert done.returncode == 2
    assert f"this is {what}" in done.stderr
    assert "--parent-pid" in done.stderr
    assert "pipe" in done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["failed", "stopped"]


def test_background_job_of_a_terminal_is_refused_instead_of_suspended(
    tiny_model: Path, fake_server: ServerMaker
) -> None:
    """``llamasup run … --sidecar &`` at a prompt: to read the terminal would stop llamasup (SIGTTIN)."""
    words = command("run", str(tiny_model), "--runtime", fake_server(), "--sidecar")
    # As a shell does it: the job has a group of its own, and the terminal is its parent's.
    shell = (
        "import fcntl, os, subprocess, sys, termios\n"
        "fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
        "os.dup2(1, 0)\n"
        "job = subprocess.Popen(sys.argv[1:], stderr=1, process_group=0)\n"
        "_, status = os.waitpid(job.pid, os.WUNTRACED)\n"
        "if os.WIFSTOPPED(status):\n"
        "    job.kill()\n"
        "print('stopped' if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))\n"
    )
    shown = on_terminal([sys.executable, "-c", shell, *words], 200, start_new_session=True)
    assert "this is a terminal, which a background job cannot read" in shown
    assert shown.endswith("\n2\n")


def test_stdin_may_be_dev_null_with_parent_pid(tiny_model: Path, fake_server: ServerMaker) -> None:
    with subprocess.Popen(["sleep", "600"]) as parent:
        words = ("--runtime", fake_server(), "--parent-pid", str(parent.pid))
        with sidecar(tiny_model, *words, stdin=subprocess.DEVNULL) as running:
            running.wait_for("ready")
            parent.kill()
            assert running.end() == 0
            assert "The parent ended: stopping." in running.stderr_text


def test_zombie_parent_counts_as_ended(tiny_model: Path, fake_server: ServerMaker) -> None:
    with subprocess.Popen(["sleep", "600"]) as parent:
        words = ("--runtime", fake_server(), "--parent-pid", str(parent.pid))
        with sidecar(tiny_model, *words) as running:
            running.wait_for("ready")
            os.kill(parent.pid, signal.SIGKILL)  # and it stays a zombie
            assert running.end() == 0
        again = run_to_end("run", str(tiny_model), *words)
        assert again.returncode == 2
        assert "no such process" in again.stderr


@pytest.mark.parametrize(
    ("number", "why"),
    [("0", "cannot be"), ("-5", "cannot be"), ("99999999999999999999", "no such process"), ("x", "x")],
)
def test_parent_pid_without_a_process_is_refused(
    number: str, why: str, tiny_model: Path, fake_server: ServerMaker
) -> None:
    done = run_to_end("run", str(tiny_model), "--runtime", fake_server(), f"--parent-pid={number}")
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_reused_parent_pid_is_refused(tiny_model: Path, fake_server: ServerMaker, tmp_path: Path) -> None:
    """A process that began after llamasup is not the one that started it. Here the shell is to become it."""
    a_tick_later = "sleep 0.05"  # the kernel counts in steps of 10 ms
    begin = f'{a_tick_later}; sleep 600 >/dev/null 2>&1 & echo $! >"$0"; exec "$@" --parent-pid $!'
    number = tmp_path / "number"
    words = command("run", str(tiny_model), "--runtime", fake_server(), "--port", "0")
    with subprocess.Popen(
        ["sh", "-c", begin, str(number), *words], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            sleeper = int(number.read_text())
            os.kill(sleeper, signal.SIGKILL)
    assert process.returncode == 2
    assert f"--parent-pid {sleeper}: that process started after llamasup" in stderr


def test_parent_that_closes_stdout_and_stderr_does_not_stop_llamasup(
    tiny_model: Path, fake_server: ServerMaker
) -> None:
    process = subprocess.Popen(
        command("run", str(tiny_model), "--sidecar", "--runtime", fake_server()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        url = next(event["url"] for line in process.stdout if (event := json.loads(line))["event"] == "ready")
        process.stdout.close()
        process.stderr.close()
        (child,) = psutil.Process(process.pid).children()
        child.kill()  # llamasup reports it to closed streams
        while [each.pid for each in psutil.Process(process.pid).children()] in ([], [child.pid]):
            assert process.poll() is None
        answer = httpx.post(f"{url}/completion", json={"prompt": "x"}, timeout=PATIENCE_S)
        assert answer.status_code == 200
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_stream_has_one_second_after_the_end_of_stdin_and_gets_an_error_event(
    tiny_model: Path, fake_server: ServerMaker
) -> None:
    """Standard input cannot end twice, so no message says to repeat it."""
    with sidecar(tiny_model, "--runtime", fake_server("stall_after=1"), "--no-warmup") as running:
        url = running.url
        with httpx.stream(
            "POST", f"{url}/completion", json={"prompt": "x", "stream": True}, timeout=PATIENCE_S
        ):
            end_stdin(running)
            assert running.end() == 0
    assert (
        "Standard input ended: stopping. 1 request in flight may finish within 1.0 s.\n"
        in running.stderr_text
    )


def test_end_of_the_parent_speeds_up_a_stop_by_sigterm(tiny_model: Path, fake_server: ServerMaker) -> None:
    """An application sends SIGTERM and exits. A stream in flight does not delay llamasup for 30 s."""
    with sidecar(tiny_model, "--runtime", fake_server("stall_after=1"), "--no-warmup") as running:
        url = running.url
        with httpx.Client(timeout=PATIENCE_S) as client:
            request = client.build_request("POST", f"{url}/completion", json={"prompt": "x", "stream": True})
            response = client.send(request, stream=True)
            running.send_signal(signal.SIGTERM)
            running.wait_for("state", state="draining")
            end_stdin(running)
            assert running.end() == 0
            response.close()
        assert running.stderr_text.count("stopping.") == 1
