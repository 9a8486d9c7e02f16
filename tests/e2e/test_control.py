"""The commands that talk to a running llamasup, as processes: what they print, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llamasup.core.control.interface import shown
from llamasup.core.models.spec import Changes
from tests.e2e.driver import (
    NEW_INTERPRETER,
    PATIENCE_S,
    Llamasup,
    command,
    is_alive,
    llamasup,
    on_terminal,
    run_to_end,
    wrapped,
)
from tests.kit.patience import eventually

HEADINGS = ("NAME", "STATE", "SIZE", "DEVICE", "CONTEXT", "SLOTS", "MEMORY", "UNTIL", "RESTARTS")
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def running(tiny_model: Path, fake_server: Callable[..., str]) -> Iterator[Llamasup]:
    with llamasup(tiny_model, "--alias", "tiny,small", "--runtime", fake_server()) as running:
        running.wait_for("ready")
        yield running
        if running.process.poll() is None:
            assert running.stop() == 0


def stderr_of(done: Done) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr


@contextmanager
def follower(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """``llamasup logs -f``, ended afterwards."""
    process = subprocess.Popen(
        command("logs", "-f", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


# --- looking -----------------------------------------------------------------------------------------


def test_ps_and_status_show_the_models(running: Llamasup) -> None:
    shown = run_to_end("ps")
    assert (shown.returncode, stderr_of(shown)) == (0, "")
    headings, row = shown.stdout.splitlines()
    assert tuple(headings.split()) == HEADINGS
    assert row.split()[:4] == ["tiny", "ready", "660", "KiB"]

    summary = run_to_end("status")
    assert summary.returncode == 0
    assert f"(process {running.pid}) at {running.url}, up " in summary.stdout

    for name in ("ps", "status"):
        status = json.loads(run_to_end(name, "--json").stdout)
        assert set(status) >= {"version", "pid", "url", "uptime_s", "models"}
        (model,) = status["models"]
        assert (model["id"], model["aliases"], model["state"]) == ("tiny", ["small"], "ready")
        assert set(model) >= {
            *("generation", "pid", "restarts", "in_flight", "queued", "slots", "ctx_size", "memory"),
            *("until", "last_exit", "size_bytes", "class", "device", "slots_busy", "pinned"),
        }
        assert (model["class"], model["device"], model["slots_busy"]) == ("decoder", "CPU", 0)
        assert model["size_bytes"] == 676_160


def test_status_reports_a_failed_model(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("exit=load:1"), "--keep-trying") as running:

        def is_reported() -> bool:
            failed = run_to_end("status")
            return failed.returncode == 1 and "exit code 1" in failed.stdout

        running.wait_for("state", state="backoff", generation=2)
        eventually(is_reported, "the failure in the status", every_s=0.1)
        assert running.stop() == 0


def test_logs_show_the_end_of_the_servers_log(running: Llamasup) -> None:
    done = run_to_end("logs", "-n", "3", "tiny")
    assert (done.returncode, stderr_of(done)) == (0, "")
    assert len(done.stdout.splitlines()) == 3
    everything = run_to_end("logs", "--lines", "10000").stdout
    assert everything.endswith(done.stdout)
    assert "listening on" in everything
    assert run_to_end("logs", "-n", "0").stdout == ""


def test_own_log_has_the_lines_of_llamasup(running: Llamasup) -> None:
    own = run_to_end("logs", "--own").stdout
    assert re.search(r"(?m)^\d{4}-\d\d-\d\dT[\d:]{8}[+-]\d\d:\d\d info: .*http://127\.0\.0\.1:\d+", own), own
    assert run_to_end("logs", "--own", "-n", "1").stdout == own.splitlines(keepends=True)[-1]


# --- changing ----------------------------------------------------------------------------------------


def test_model_is_unloaded_loaded_restarted_and_reloaded(running: Llamasup) -> None:
    unloaded = run_to_end("unload", "small")
    assert (unloaded.returncode, unloaded.stdout, stderr_of(unloaded)) == (0, "", "small is unloaded\n")
    assert [child.cmdline() for child in running.children() if "--host" in child.cmdline()] == []
    assert json.loads(run_to_end("ps", "--json").stdout)["models"][0]["state"] == "stopped"

    loaded = run_to_end("load", "--json")
    assert stderr_of(loaded) == "tiny is ready\n"
    assert (json.loads(loaded.stdout)["state"], json.loads(loaded.stdout)["generation"]) == ("ready", 2)

    assert stderr_of(run_to_end("restart")) == "tiny is ready again\n"
    reloaded = run_to_end("reload", "--json")
    assert json.loads(reloaded.stdout) == shown(Changes(changed=("tiny",)))
    running.wait_for("state", state="ready", generation=4)
    for what in ("unload", "load", "restart", "reload"):
        assert f"llamasup {what}: " in running.stderr_text


def test_failed_load_gives_the_command_the_exit_code_of_the_service(
    tiny_model: Path, tmp_path: Path, fake_server: Callable[..., str]
) -> None:
    server = Path(fake_server())
    with llamasup(tiny_model, "--runtime", str(server)) as running:
        running.wait_for("ready")
        assert run_to_end("unload").returncode == 0
        server.write_text("#!/bin/sh\necho 'error: invalid argument: --nope'; exit 1\n")
        failed = run_to_end("load")
        assert failed.returncode == 2
        assert "does not know the argument '--nope'" in stderr_of(failed)
        assert running.end() == 2


def test_stop_is_reported_and_waited_for(running: Llamasup) -> None:
    children = running.children()
    done = run_to_end("stop", "--wait", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"pid": running.pid, "in_flight": 0, "ended": True}
    assert stderr_of(done) == f"llamasup (process {running.pid}) is stopping\nllamasup has exited\n"
    with suppress(psutil.NoSuchProcess):
        assert not is_alive(psutil.Process(running.pid))
    assert running.end() == 0
    assert not [child for child in children if is_alive(child)]
    assert "llamasup stop: stopping." in running.stderr_text


def test_stop_ends_a_wrapped_command(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    server = (fake_server(), "--model", str(tiny_model), "--host", "127.0.0.1", "--port", "0")
    with wrapped(*server) as running:
        running.wait_for("ready")
        assert run_to_end("restart").returncode == 0
        assert run_to_end("logs", "-n", "1").returncode == 0
        assert run_to_end("stop", "--now", "--wait").returncode == 0
        assert running.end() == 0


# --- which one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("ps",),
        ("status",),
        ("load", "x"),
        ("unload",),
        ("restart",),
        ("reload",),
        ("stop", "--wait"),
        ("logs", "-f"),
    ],
)
def test_every_command_reports_that_no_llamasup_runs(arguments: tuple[str, ...]) -> None:
    done = run_to_end(*arguments)
    assert (done.returncode, done.stdout) == (69, "")
    assert (
        "No llamasup is running on this machine for this user.\n  → Start one: llamasup run MODEL"
        in stderr_of(done)
    )


def test_command_with_two_running_llamasups_requires_a_choice(
    running: Llamasup, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    with llamasup(tiny_model, "--alias", "other", "--runtime", fake_server()) as other:
        other.wait_for("ready")
        unclear = run_to_end("stop")
        assert unclear.returncode == 2
        for llamasup_process, name in ((running, "tiny"), (other, "other")):
            assert f"--pid {llamasup_process.pid}  {llamasup_process.url}  {name} (ready)" in stderr_of(
                unclear
            )
        assert run_to_end("ps", "--pid", str(other.pid)).stdout.splitlines()[1].startswith("other ")
        everyone = run_to_end("ps").stdout
        for llamasup_process, name in ((running, "tiny"), (other, "other")):
            assert f"--pid {llamasup_process.pid}  {llamasup_process.url}\n" in everyone
            assert f"\n{name} " in everyone
        together = json.loads(run_to_end("ps", "--json").stdout)
        shown = {(model["pid"], model["id"]) for model in together["models"]}
        assert shown == {(running.pid, "tiny"), (other.pid, "other")}
        assert {each["url"] for each in together["llamasups"]} == {running.url, other.url}
        wrong = run_to_end("ps", "--pid", str(os.getpid()))
        assert wrong.returncode == 69
        assert f"with process ID {os.getpid()}" in stderr_of(wrong)
        assert f"--pid {running.pid} " in stderr_of(wrong)
        assert run_to_end("stop", "--wait", "--pid", str(other.pid)).returncode == 0
        assert run_to_end("ps").returncode == 0  # one is left


@pytest.mark.parametrize("form", ["{}", "http://127.0.0.1:{}/v1", "localhost:{}/", "http://[::1]:{}"])
def test_url_of_a_local_llamasup_needs_no_key(form: str, running: Llamasup) -> None:
    port = running.url.rpartition(":")[2]
    url = form.format(port) if form != "{}" else running.url
    done = run_to_end("unload", "--url", url)
    assert done.returncode == 0, done.stderr
    assert run_to_end("ps", env={**os.environ, "LLAMASUP_URL": url}).returncode == 0


def test_top_says_that_llamasup_has_ended(running: Llamasup) -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    options: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("top", "--pid", str(running.pid)), **options) as top:
        os.close(slave)
        assert os.read(master, 65_536)  # the first screen
        assert running.stop() == 0
        with suppress(OSError):  # EIO: top has closed its terminal
            while os.read(master, 65_536):
                pass
        _, said = top.communicate(timeout=PATIENCE_S)
    os.close(master)
    assert (top.returncode, said) == (0, "llamasup has ended.\n")


def test_killed_llamasup_does_not_count_as_running(running: Llamasup) -> None:
    os.kill(running.pid, signal.SIGKILL)
    running.end()
    done = run_to_end("ps")
    assert done.returncode == 69
    assert "No llamasup is running on this machine for this user." in stderr_of(done)


def test_suspended_llamasup_does_not_block_commands_forever(running: Llamasup) -> None:
    os.kill(running.pid, signal.SIGSTOP)
    try:
        done = run_to_end("ps", prefix=NEW_INTERPRETER)  # with the patience of a user
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert done.returncode == 69
    assert f"llamasup (process {running.pid}) does not answer." in stderr_of(done)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("load", "tinny"), 66, "No model 'tinny' is served here.\n  → The nearest is 'tiny'."),
        (("logs", "nosuch"), 66, "No model 'nosuch'"),
        (("logs", "--own", "tiny"), 2, "--own shows the lines of llamasup itself"),
        (("logs", "-n", "-1"), 2, "-1 is less than 0"),
        (("logs", "-n", "10001"), 2, "10001 is more than 10000"),
        (("ps", "--pid", "x"), 2, "'x' is not a whole number"),
        (("ps", "--pid", "1", "--url", "http://localhost"), 2, "exclude each other"),
        (("ps", "--api-key-file", "/dev/null"), 2, "--api-key-file needs --url"),
        (("ps", "--url", "ftp://x"), 2, "is not a valid URL of a llamasup"),
        (("ps", "--url", "http://"), 2, "is not a valid URL of a llamasup"),
        (("ps", "--url", "127.0.0.1:1"), 69, "No llamasup answers at http://127.0.0.1:1"),
        (("ps", "--url", "http://127.0.0.1:1", "--api-key-file", "MISSING"), 78, "cannot be read"),
    ],
)
def test_impossible_commands_are_explained_in_one_sentence(
    running: Llamasup, arguments: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    done = run_to_end(*(missing if word == "MISSING" else word for word in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert says in stderr_of(done)


def test_control_over_tcp_requires_a_key_with_the_right(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("for-all name=a\nfor-ops name=b rights=control\n")
    keys.chmod(0o600)
    with llamasup(tiny_model, "--runtime", fake_server(), "--api-key-file", str(keys)) as running:
        environ = {**os.environ, "LLAMASUP_URL": running.url}
        without = httpx.get(f"{running.url}/llamasup/v1/status")
        assert (without.status_code, without.json()["error"]["cause"]) == (401, "api_key")
        inference = run_to_end("stop", env={**environ, "LLAMASUP_API_KEY": "for-all"})
        assert inference.returncode == 77
        assert "the key 'a' has only the right `inference`" in stderr_of(inference)
        assert run_to_end("restart", "--api-key-file", str(keys), env=environ).returncode == 0
        for path, refused in (("upgrade", (403, "control_closed")), ("upgrade%0A", (400, "path_spelling"))):
            body, key = {"runtime": "/bin/true"}, {"x-api-key": "for-ops"}
            answer = httpx.post(f"{running.url}/llamasup/v1/{path}", json=body, headers=key)
            assert (answer.status_code, answer.json()["error"]["cause"]) == refused
        stopped = run_to_end("stop", "--wait", env={**environ, "LLAMASUP_API_KEY": "for-ops"})
        assert (stopped.returncode, stderr_of(stopped).splitlines()[-1]) == (0, "llamasup has exited")
        assert running.end() == 0
        assert "for-ops" not in running.stderr_text + stopped.stdout + stopped.stderr


def test_other_program_at_the_url_is_distinguished_from_an_older_llamasup(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    """llama-server itself, for example."""
    server = (fake_server(), "--model", str(tiny_model), "--host", "127.0.0.1", "--port", "0")
    with wrapped(*server) as running:
        with_key = {**os.environ, "LLAMASUP_API_KEY": "x"}  # without, the command takes the private socket
        done = run_to_end("ps", "--url", running.url, env=with_key)
        assert done.returncode == 69
        assert "does not know GET /llamasup/v1/status" in stderr_of(done)
        assert running.stop() == 0


# --- readers of the output ---------------------------------------------------------------------------


def test_followed_log_continues_and_ctrl_c_ends_it(running: Llamasup) -> None:
    with follower("-n", "1") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        assert run_to_end("restart").returncode == 0
        line = b""
        while b"initializing" not in line:  # the next generation's first
            line = process.stdout.readline()
            assert line
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b""


def test_followed_log_ends_when_llamasup_ends(running: Llamasup) -> None:
    with follower("-n", "1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert run_to_end("stop", "--wait").returncode == 0
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_closed_pipe_of_the_reader_is_no_error(running: Llamasup) -> None:
    for arguments in (("ps",), ("logs",), ("logs", "-f"), ("status", "--json")):
        process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0, arguments
        assert process.stderr.read() == b"", arguments
        process.stderr.close()


def test_log_content_cannot_control_the_terminal(running: Llamasup, own_folders: Path) -> None:
    (log,) = (own_folders / "state" / "llamasup" / "logs").glob("*.log")
    with log.open("ab") as file:
        file.write(b"\x1b]0;owned\x07\xff\n")
    shown = on_terminal(command("logs", "-n", "1"), 80)
    assert "\x1b" not in shown
    assert "\\x1b]0;owned\\x07" in shown
    raw = subprocess.run(command("logs", "-n", "1"), capture_output=True, check=True, timeout=PATIENCE_S)
    assert raw.stdout == b"\x1b]0;owned\x07\xff\n"


def test_missing_log_is_reported(running: Llamasup, own_folders: Path) -> None:
    for log in (own_folders / "state" / "llamasup" / "logs").glob("*.log"):
        log.unlink()
    done = run_to_end("logs", "-f")
    assert (done.returncode, done.stdout) == (66, "")
    assert "tiny has no log yet." in stderr_of(done)


def test_ctrl_c_ends_a_waiting_command(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=30")) as running:
        running.wait_for("state", state="loading")
        process = subprocess.Popen(command("load"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + PATIENCE_S
        while "llamasup load" not in running.stderr_text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (130, b"")
        assert run_to_end("stop", "--now").returncode == 0
        assert running.end() == 0
