"""What a parent program may rely on, under Wine (docs/sidecar.md)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.extended.windows.wine import Windows, eventually, windows_path

KILLS = int(os.environ.get("LLAMASUP_WINDOWS_KILLS", "8"))
AT_A_TIME = 4

PARENT = """
import os, subprocess, sys
*command, how = sys.argv[1:]
if how == "stdin":
    command.append("--sidecar")
else:
    command += ["--port", "0", "--events", "jsonl", "--parent-pid", str(os.getpid())]
stdin = subprocess.PIPE if how == "stdin" else subprocess.DEVNULL
subprocess.Popen(command, stdin=stdin).wait()
"""


def test_kills_of_the_parent_leave_no_process_and_no_file(
    windows: Windows, tiny_model: Path, runtime: str
) -> None:
    python = windows_path(windows.session.python)
    kill_parents(windows, tiny_model, KILLS, python, "-m", "llamasup", runtime=runtime)


def kill_parents(
    windows: Windows, model: Path, count: int, *llamasup: str, runtime: str = "embedded"
) -> None:
    """By the end of standard input or by --parent-pid; at the first event, or when the model is ready."""

    def kill(number: int) -> None:
        how, event = ("stdin", "pid")[number % 2], ("state", "ready")[number // 2 % 2]
        ready_file = windows.folder / f"ready{number}.json"
        options = ("--runtime", runtime, "--ready-file", windows_path(ready_file))
        words = (*llamasup, "run", windows_path(model), *options)
        parent = windows.python("-c", PARENT, *words, how)
        parent.event(event)
        parent.terminate()
        parent.wait()  # its pipes end when llamasup, too, has ended

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(kill, range(count)))
    eventually(lambda: windows.processes() == [])
    eventually(lambda: windows.left() == [])


def test_what_cannot_end_a_sidecar_is_refused(windows: Windows, tiny_model: Path) -> None:
    empty = windows.folder / "empty"
    empty.touch()
    run = ("run", tiny_model)
    refused = [
        windows.start(*run, "--sidecar", stdin="NUL"),
        windows.start(*run, "--sidecar", stdin=windows_path(empty)),
        windows.start(*run, "--parent-pid", "4000000"),
    ]
    assert [running.wait() for running in refused] == [2, 2, 2], [running.errors for running in refused]
    assert "this is nul" in refused[0].errors
    assert "this is a file" in refused[1].errors
    assert "4000000" in refused[2].errors
    assert windows.left() == []


def test_ready_file_belongs_to_one_running_llamasup(windows: Windows, tiny_model: Path) -> None:
    ready_file = windows.folder / "ready.json"
    run = ("run", tiny_model, "--sidecar", "--ready-file", ready_file)
    first = windows.start(*run)
    first.event("ready")
    second = windows.start(*run)
    assert second.wait() == 2, second.errors
    assert str(ready_file.name) in second.errors
    first.terminate()  # and the file stays for a moment, until the guardian removes it
    first.wait()
    third = windows.start(*run)
    assert third.event("ready")["pid"] == third.pid
    third.close_stdin()
    assert third.wait() == 0
    assert windows.left() == []
    ready_file.write_text("my notes")
    fourth = windows.start(*run)
    assert fourth.wait() == 2, fourth.errors
    assert ready_file.read_text() == "my notes"
