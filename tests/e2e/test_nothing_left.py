"""S14: nothing is left after any end of llamasup, and it never touches processes or files of others."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.driver import (
    PATIENCE_S,
    Llamasup,
    adopted,
    await_guardian,
    await_removed,
    children_of,
    command,
    is_alive,
    llamasup,
    run_to_end,
    seconds_until_gone,
)

ServerMaker = Callable[..., str]


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def wrapper(fake_server: ServerMaker, tmp_path: Path) -> str:
    """A script that starts the server and waits, and a helper that leaves the process group."""
    server = fake_server()
    return script(
        tmp_path / "wrapper",
        f'case "$*" in *--model*) setsid sleep 600 & ;; *) exec {shlex.quote(server)} "$@" ;; esac',
        f'{shlex.quote(server)} "$@"',
        "exit $?",
    )


def run_folder(home: Path, running: Llamasup) -> Path:
    (folder,) = (home / "run" / "llamasup").glob(f"{running.pid}-*")
    return folder


def is_served(running: Llamasup) -> bool:
    return httpx.get(f"{running.url}/health").status_code == 200


def test_file_that_signs_a_browser_in_goes_with_its_llamasup(
    tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server()) as running:
        running.wait_for("ready")
        opened = run_to_end("ui", "--pid", str(running.pid), env={**os.environ, "BROWSER": "true"})
        assert opened.returncode == 0, opened.stderr
        assert len(list((own_folders / "run").rglob("console-*.html"))) == 1
        assert running.stop() == 0
    assert list((own_folders / "run" / "llamasup").iterdir()) == []


# --- llamasup is killed --------------------------------------------------------------------------


def test_kill_ends_a_server_behind_a_script_and_processes_outside_its_group(
    tiny_model: Path, wrapper: str, own_folders: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    with llamasup(tiny_model, "--runtime", wrapper, "--ready-file", str(ready_file)) as running:
        running.wait_for("ready")
        children = running.children()
        assert len(children) == 3  # the script, the server, and the sleeper in a session of its own
        folder = run_folder(own_folders, running)
        guardian = await_guardian(folder)
        running.send_signal(signal.SIGKILL)
        running.end()
        took_s = seconds_until_gone(children)
        await_removed(folder)
        assert seconds_until_gone([guardian]) < PATIENCE_S
        assert not ready_file.exists()
        print(f"everything was gone after {took_s:.3f} s")


def test_kill_during_the_load_leaves_nothing_behind(
    tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("load_s=60")) as running:
        running.wait_for("state", state="loading")
        children = running.children()
        folder = run_folder(own_folders, running)
        await_guardian(folder)
        running.send_signal(signal.SIGKILL)
        running.end()
        seconds_until_gone(children)
        await_removed(folder)


def test_kill_of_the_whole_process_group_leaves_nothing_behind(
    tiny_model: Path, wrapper: str, own_folders: Path
) -> None:
    """What a terminal, an IDE or a test runner does with what hangs."""
    with llamasup(tiny_model, "--runtime", wrapper, start_new_session=True) as running:
        running.wait_for("ready")
        children = running.children()
        folder = run_folder(own_folders, running)
        os.killpg(running.pid, signal.SIGKILL)
        running.end()
        seconds_until_gone(children)
        await_removed(folder)


@contextlib.contextmanager
def killed_with_its_guardian(
    model: Path, wrapper: str, home: Path, *arguments: str
) -> Iterator[tuple[Path, list[psutil.Process]]]:
    """The folder and the surviving processes of a run without any clean-up."""
    with llamasup(model, "--runtime", wrapper, *arguments) as running:
        running.wait_for("ready")
        children = running.children()
        wrappers = [child for child in children if child.name() == "wrapper"]
        folder = run_folder(home, running)
        guardian = await_guardian(folder)
        guardian.kill()
        seconds_until_gone([guardian])
        running.send_signal(signal.SIGKILL)
        running.end()
    seconds_until_gone(wrappers)  # PR_SET_PDEATHSIG
    survivors = [child for child in children if is_alive(child)]
    try:
        yield folder, survivors
    finally:
        for child in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_next_start_ends_surviving_processes_and_reports_it_in_one_line(
    tiny_model: Path, wrapper: str, fake_server: ServerMaker, own_folders: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    with (
        llamasup(tiny_model, "--runtime", wrapper) as sibling,
        killed_with_its_guardian(tiny_model, wrapper, own_folders, "--ready-file", str(ready_file)) as left,
    ):
        sibling.wait_for("ready")
        folder, survivors = left
        (sleeper,) = [survivor for survivor in survivors if survivor.name() == "sleep"]
        assert ready_file.exists()
        with llamasup(tiny_model, "--runtime", fake_server()) as running:
            running.wait_for("ready")
            assert not any(map(is_alive, survivors))
            assert not folder.exists()
            assert not ready_file.exists()
            # The running llamasup is not affected.
            assert is_served(sibling)
            assert len(sibling.children()) == 3
            assert run_folder(own_folders, sibling).is_dir()
            assert running.stop() == 0
            (line,) = [line for line in running.stderr_text.splitlines() if "Cleaned up after" in line]
        assert str(folder) in line
        assert str(ready_file) in line
        # The server may have ended by then: it ends if it writes output and the pipe has no reader.
        assert f"process {sleeper.pid} (a descendant)" in line
        assert sibling.stop() == 0


def test_doctor_shows_surviving_processes_and_ends_none(
    tiny_model: Path, wrapper: str, fake_server: ServerMaker, own_folders: Path
) -> None:
    with killed_with_its_guardian(tiny_model, wrapper, own_folders) as (folder, survivors):
        done = run_to_end("doctor", "--runtime", fake_server(), "--port", "0", "--json")
        (check,) = [
            one_check for one_check in json.loads(done.stdout)["checks"] if one_check["name"] == "left behind"
        ]
        assert not check["ok"]
        assert str(folder) in check["found"]
        assert [survivor for survivor in survivors if survivor.name() == "sleep" and is_alive(survivor)]
        with llamasup(tiny_model, "--runtime", fake_server()) as running:  # which cleans up after the test
            running.wait_for("ready")
            assert running.stop() == 0


def test_concurrent_starts_clean_up_without_affecting_each_other(
    tiny_model: Path, wrapper: str, fake_server: ServerMaker, own_folders: Path
) -> None:
    with (
        killed_with_its_guardian(tiny_model, wrapper, own_folders) as (folder, survivors),
        llamasup(tiny_model, "--runtime", fake_server()) as one,
        llamasup(tiny_model, "--runtime", fake_server()) as two,
    ):
        for running in (one, two):
            running.wait_for("ready")
        assert not any(map(is_alive, survivors))
        assert not folder.exists()
        assert is_served(one)
        assert is_served(two)
        assert one.stop() == two.stop() == 0
        reported = [
            line for line in (one.stderr_text + two.stderr_text).splitlines() if "Cleaned up after" in line
        ]
        assert len(reported) == 1


# --- other ends ----------------------------------------------------------------------------------


def test_second_start_on_a_port_ends_with_71_and_affects_nothing(
    tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    with llamasup(tiny_model, "--runtime", fake_server()) as first:
        port = first.wait_for("ready")["port"]
        second = run_to_end("run", str(tiny_model), "--runtime", fake_server(), "--port", str(port))
        assert second.returncode == 71
        assert str(port) in second.stderr
        assert is_served(first)
        assert [path.name for path in (own_folders / "run" / "llamasup").iterdir()] == [
            run_folder(own_folders, first).name
        ]
        assert first.stop() == 0


def test_second_llamasup_with_the_same_ready_file_is_refused(
    tiny_model: Path, fake_server: ServerMaker, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready.json"
    words = ("--runtime", fake_server(), "--ready-file", str(ready_file))
    with llamasup(tiny_model, *words) as first:
        ready = first.wait_for("ready")
        second = run_to_end("run", str(tiny_model), "--port", "0", *words)
        assert second.returncode == 2
        assert ready["url"] in second.stderr
        assert json.loads(ready_file.read_text()) == ready
        assert first.stop() == 0


@pytest.mark.parametrize("what", ["run", "serve"])
def test_closed_terminal_stops_llamasup(
    what: str, tiny_model: Path, fake_server: ServerMaker, own_folders: Path, tmp_path: Path
) -> None:
    """llamasup leads the terminal's session, as under a terminal emulator; its end sends SIGHUP. While the
    terminal is open a SIGHUP has come from a person: `serve` reads its config again.
    """
    served = [str(tiny_model)]
    if what == "serve":
        (tmp_path / "c.yaml").write_text(f"models: {{tiny: {{path: {tiny_model}, preload: true}}}}")
        served = ["--config", str(tmp_path / "c.yaml")]
    terminal, child_end = pty.openpty()
    become_leader = "import os,pty,sys,fcntl,termios;os.setsid();fcntl.ioctl(2,termios.TIOCSCTTY,0);"
    become_leader += "os.execv(sys.argv[1],sys.argv[1:])"
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", become_leader),
            *command(what, *served, "--runtime", fake_server(), "--port", "0", "--events", "jsonl"),
        ],
        stdin=child_end,
        stdout=subprocess.PIPE,
        stderr=child_end,
        text=True,
    )
    os.close(child_end)
    closing, window_open = os.pipe()
    shown = threading.Thread(target=_show, args=(terminal, closing), daemon=True)
    shown.start()
    try:
        assert process.stdout is not None
        with process.stdout as events:
            next(line for line in events if '"ready"' in line and "url" in line)
            children = children_of(process.pid)
            assert len(children) == 1
            if what == "serve":
                process.send_signal(signal.SIGHUP)
                assert '["tiny"]' in next(line for line in events if '"unchanged"' in line)
            os.close(window_open)
            shown.join(PATIENCE_S)  # it closes the terminal
            assert process.wait(PATIENCE_S) == 0
            assert '"stopped"' in events.read()
        seconds_until_gone(children)
    finally:
        process.kill()
        process.wait()
        os.close(closing)


def _show(terminal: int, closing: int) -> None:
    """A terminal window until it is closed. (A pending read would keep it open.)"""
    while closing not in (readable := select.select([terminal, closing], [], [])[0]):
        assert readable
        os.read(terminal, 65536)
    os.close(terminal)


PATIENT = ("--drain-timeout", "1000", "--stop-timeout", "1000")


@pytest.mark.parametrize("how", ["stdin", "pid"])
@pytest.mark.parametrize("when", ["idle", "loading", "streaming"])
def test_everything_ends_when_the_parent_is_killed(
    how: str, when: str, tiny_model: Path, fake_server: ServerMaker, own_folders: Path
) -> None:
    """Long before the time that a drain or a server's stop may take."""
    faults = {"idle": "tokens=8", "loading": "load_s=60", "streaming": "token_s=60"}[when]
    parent = (
        "import os,subprocess,sys\n"
        "argv = [word.replace('PARENT', str(os.getpid())) for word in sys.argv[1:]]\n"
        f"child = subprocess.Popen(argv, stdin=subprocess.{'PIPE' if how == 'stdin' else 'DEVNULL'})\n"
        "child.wait()\n"
    )
    tie = ["--sidecar"] if how == "stdin" else ["--port", "0", "--events", "jsonl", "--parent-pid", "PARENT"]
    words = command("run", str(tiny_model), "--runtime", fake_server(faults), "--no-warmup", *PATIENT, *tie)
    process = subprocess.Popen(
        [sys.executable, "-c", parent, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with adopted(process) as running:
        if when == "loading":
            running.wait_for("state", state="loading")
        else:
            port = running.wait_for("ready")["port"]
        family = running.children()
        assert len(family) >= 2  # while it loads the guardian may still be on its way
        with contextlib.ExitStack() as client:
            if when == "streaming":
                connection = client.enter_context(socket.create_connection(("127.0.0.1", port)))
                body = b'{"prompt": "x", "stream": true}'
                connection.sendall(
                    b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                while (
                    httpx.get(f"http://127.0.0.1:{port}/metrics").text.find(
                        'llamasup_in_flight{model="tiny"} 1.0'
                    )
                    < 0
                ):
                    pass
            running.send_signal(signal.SIGKILL)
            took_s = seconds_until_gone(family)
        running.end()
        assert list((own_folders / "run" / "llamasup").iterdir()) == []
        reason = "Standard input ended" if how == "stdin" else "The parent ended"
        assert f"{reason}: stopping." in running.stderr_text
        print(f"{how}, {when}: everything was gone after {took_s:.3f} s")
