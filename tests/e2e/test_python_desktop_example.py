"""examples/python-desktop, on a display of its own. Its Tcl interpreter drives and reads the window."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.driver import await_guardian, await_removed, seconds_until_gone
from tests.e2e.test_sidecar_examples import assert_nothing_left, await_server
from tests.kit.children import NewChildren, end_all
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually

EXAMPLE = ROOT / "examples" / "python-desktop"

DRIVEN = """
import json, runpy, sys, tkinter

class Tk(tkinter.Tk):
    def __init__(self):
        super().__init__()
        self.createfilehandler(sys.stdin, tkinter.READABLE, lambda *_: self.evaluate(sys.stdin.readline()))
        print(json.dumps("open"), flush=True)

    def evaluate(self, line):
        if line:
            print(json.dumps(self.tk.eval(json.loads(line))), flush=True)

tkinter.Tk = Tk
sys.path.insert(0, sys.argv[1])
runpy.run_path(f"{sys.argv[1]}/main.py", run_name="__main__")
"""
"""The application as it stands, whose interpreter evaluates each line of standard input."""

COUNT_PIECES = """
set pieces 0
proc count {command args} {if {[lindex $command 1] eq "insert"} {incr ::pieces}}
trace add execution .answer leave count
"""


class Application:
    """The example with a window. Its standard error is kept in a file, because nothing reads it meanwhile."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVEN, str(EXAMPLE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors
        return str(json.loads(line))

    def tcl(self, script: str) -> str:
        """What the interpreter of the window answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(script)}\n".encode())
        self.process.stdin.flush()
        return self.read()

    def shown(self) -> str:
        return self.tcl(".answer get 1.0 end")

    def ask(self, question: str) -> None:
        self.tcl(f".question insert end {{{question}}}; .ask invoke")

    def await_answer(self) -> None:
        eventually(lambda: self.tcl(".ask cget -state") == "normal", "the end of the answer", every_s=0.02)

    def close(self) -> int:
        """As the button of its frame does."""
        self.tcl("after idle [wm protocol . WM_DELETE_WINDOW]")
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """The name of a display without a screen."""
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb is missing (Debian: xvfb)")
    # ImportError: the module is there, and a library that it needs is not.
    reason = "this Python has no tkinter (Debian: python3-tk)"
    pytest.importorskip("tkinter", reason=reason, exc_type=ImportError)
    reading, writing = os.pipe()
    words = ["Xvfb", "-displayfd", str(writing), "-nolisten", "tcp", "-screen", "0", "800x600x24"]
    process = subprocess.Popen(words, pass_fds=[writing], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(writing)
    try:
        with os.fdopen(reading) as numbers:
            number = numbers.readline().strip()
        assert number, f"Xvfb ended with {process.wait()}"
        yield f":{number}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture
def application(
    display: str, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Application]]:
    """Starts the application, once its runtime and its model are set."""
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("LLAMASUP", str(program))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for a server on this machine
    started = []

    def start() -> Application:
        started.append(Application(tmp_path / "errors"))
        assert started[0].read() == "open", started[0].errors
        return started[0]

    yield start
    for one in started:
        end_all(one.process)


@pytest.fixture
def real_model(runtime: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", runtime)
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))


@pytest.mark.usefixtures("real_model")
def test_answers_appear_in_the_window_piece_by_piece_and_nothing_is_left_after_it_is_closed(
    application: Callable[[], Application], own_folders: Path, new_children: NewChildren
) -> None:
    app = application()
    app.tcl(COUNT_PIECES)
    for question in ("Once upon a time", "And then?"):
        before = app.shown()
        app.ask(question)
        app.await_answer()
        assert app.shown().removeprefix(before.strip("\n")).strip().startswith(f"> {question}\n")
        assert len(app.shown()) > len(before) + len(question) + 10, app.errors
    pieces_of_others = 4  # two questions and two ends of lines
    assert int(app.tcl("set pieces")) > pieces_of_others + 2
    assert app.close() == 0, app.errors
    assert_nothing_left(own_folders, new_children)


@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_everything_ends_with_an_application_that_is_killed_or_crashes_within_an_answer(
    number: signal.Signals, application: Callable[[], Application], own_folders: Path
) -> None:
    app = application()
    app.ask("Once upon a time")
    eventually(lambda: len(app.shown()) > len("> Once upon a time\n") + 5, "text", every_s=0.01)
    family = psutil.Process(app.process.pid).children(recursive=True)
    (folder,) = (own_folders / "run" / "llamasup").iterdir()
    app.process.send_signal(number)
    assert app.process.wait(PATIENCE_S) == -number
    seconds_until_gone(family)
    await_removed(folder)


def test_window_says_why_the_model_could_not_be_started(
    application: Callable[[], Application],
    tmp_path: Path,
    fake_server: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    new_children: NewChildren,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tmp_path / "no-such.gguf"))
    app = application()
    eventually(lambda: "no-such.gguf" in app.shown(), every_s=0.02)
    assert app.shown().startswith("llamasup ended with 66\n")
    app.ask("Once upon a time")
    app.await_answer()
    assert app.shown().count("llamasup ended with 66") == 2
    assert app.close() == 0
    assert new_children() == []


@pytest.mark.parametrize("program", ["", "/no/such/program"])
def test_window_says_that_the_program_cannot_be_started(
    program: str, application: Callable[[], Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASUP", program)
    app = application()
    eventually(lambda: f"{program} could not be started: " in app.shown(), every_s=0.02)
    app.ask("Once upon a time")
    app.await_answer()
    assert app.shown().count("could not be started: ") == 2
    assert app.close() == 0


def test_window_says_that_llamasup_was_killed(
    application: Callable[[], Application],
    tiny_model: Path,
    fake_server: Callable[..., str],
    own_folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", fake_server())
    monkeypatch.setenv("LLAMASUP_MODEL", str(tiny_model))
    app = application()
    await_server(app.process)
    await_guardian(next((own_folders / "run" / "llamasup").iterdir()))
    psutil.Process(app.process.pid).children()[0].kill()
    eventually(lambda: f"llamasup ended with {-signal.SIGKILL}" in app.shown(), every_s=0.02)
    assert app.close() == 0


READY = '{"event":"ready"}'


@pytest.mark.parametrize(
    ("line", "code"), [("hello", 3), ("5\n{}", 4), ('{"event":"sta', 0), (f"{READY}\n{READY}", 5)]
)
def test_window_survives_a_program_whose_lines_are_no_events(
    line: str,
    code: int,
    application: Callable[[], Application],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{line}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("LLAMASUP", str(program))
    app = application()
    eventually(lambda: f"llamasup ended with {code}" in app.shown(), every_s=0.02)
    assert app.close() == 0


def test_example_is_in_the_docs() -> None:
    assert "examples/python-desktop" in (ROOT / "docs" / "sidecar.md").read_text("utf-8")
