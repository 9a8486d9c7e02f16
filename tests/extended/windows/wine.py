"""Starts commands in the Windows Python that scripts/windows-python prepares, under Wine.

One process of that Python (``inside.py``) starts and watches them for the whole session, so the process IDs
and exit codes here are those of Windows.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Self

import httpx

from tests.kit.paths import ROOT

PATIENCE_S = 150.0
"""For everything under Wine: a start takes seconds there, and several times that on a loaded machine."""

_INSIDE = Path(__file__).with_name("inside.py")
# The rest of the environment is that of a user of Linux, which Wine would pass on.
_ENVIRONMENT = ("HOME", "PATH", "USER", "LOGNAME", "TMPDIR")


class Session:
    """The process that starts all others. ``close`` ends it and everything that is left of Wine."""

    def __init__(self, python: Path) -> None:
        self.python = python.parent / "cpython" / "python.exe"
        self.llama_server = python.parent / "llama-server" / "llama-server.exe"
        self._env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._env |= {"WINEPREFIX": str(_own_prefix(python.parent)), "WINEARCH": "win64"}
        self._env |= {"WINEDEBUG": "-all", "LANG": "C.UTF-8"}
        self._server("-k", "-w")  # what an earlier session left
        self._server("-p")
        # Wine's services start with the first process, and keep its streams.
        self._quietly("wine", "wineboot")
        self._popen = subprocess.Popen(
            ["wine", str(self.python), windows_path(_INSIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            cwd=ROOT,
        )
        self._numbers = itertools.count()
        self._answers: dict[int, queue.Queue[tuple[Any, Any]]] = {}
        self._running: dict[str, Running] = {}
        self._errors: list[bytes] = []
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._drain)]
        for thread in self._threads:
            thread.start()

    def ask(self, question: str, *arguments: object) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = queue.Queue()
        stdin: Any = self._popen.stdin
        stdin.write(json.dumps([number, question, *arguments]).encode() + b"\n")
        stdin.flush()
        try:
            value, error = answer.get(timeout=PATIENCE_S)
        except queue.Empty:
            said = b"".join(self._errors).decode(errors="replace")
            raise AssertionError(f"no answer to {question!r} within {PATIENCE_S} s: {said}") from None
        assert error is None, error
        return value

    def start(self, argv: Sequence[str], env: Mapping[str, str], stdin: str | None = None) -> Running:
        """``stdin``: a file; None: a pipe."""
        name = str(next(self._numbers))
        running = self._running[name] = Running(self, name)
        running.pid = self.ask("start", name, argv, env, stdin)
        return running

    def close(self) -> None:
        self._server("-k", "-w")  # kill, and wait
        self._popen.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def _server(self, *arguments: str) -> None:
        self._quietly("wineserver", *arguments)

    def _quietly(self, *command: str) -> None:
        quiet = subprocess.DEVNULL
        subprocess.run(command, env=self._env, stdin=quiet, stdout=quiet, stderr=quiet, check=False)

    def _read(self) -> None:
        stdout: Any = self._popen.stdout
        for line in stdout:
            match json.loads(line):
                case ["answer", number, value, error]:
                    self._answers.pop(number).put((value, error))
                case ["stdout", name, text]:
                    self._running[name].lines.put(text)
                case ["stderr", name, text]:
                    self._running[name].said.append(text)
                case ["exit", name, code]:
                    self._running[name].exited(code)

    def _drain(self) -> None:
        stderr: Any = self._popen.stderr
        self._errors.extend(stderr)


def _own_prefix(folder: Path) -> Path:
    """Wine's folder for this worker of pytest-xdist: each worker has a Windows of its own.

    Hard links are enough: Wine replaces the files of its registry, and writes to no other.
    """
    prefix, worker = folder / "prefix", os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return prefix
    own = folder / f"prefix-{worker}"
    if not own.exists():
        part = folder / f"prefix-{worker}.part"
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run(["cp", "-al", prefix, part], check=True)
        part.rename(own)
    return own


class Running:
    """A process of Windows. ``said``: its lines on stderr."""

    def __init__(self, session: Session, name: str) -> None:
        self.pid = 0
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.said: list[str] = []
        self._session = session
        self._name = name
        self._code = 0
        self._has_exited = threading.Event()

    def event(self, name: str) -> Mapping[str, Any]:
        """The next event of this name; earlier ones are dropped."""
        until = monotonic() + PATIENCE_S
        while True:
            try:
                line = self.lines.get(timeout=max(0.1, until - monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {name!r} within {PATIENCE_S} s: {self.errors}") from None
            assert line is not None, f"it ended with {self._code} before {name!r}: {self.errors}"
            found: Mapping[str, Any] = json.loads(line)
            if found["event"] == name:
                return found

    def write(self, text: str) -> None:
        self._session.ask("write", self._name, text)

    def close_stdin(self) -> None:
        self._session.ask("close_stdin", self._name)

    def ctrl_c(self) -> None:
        self._session.ask("ctrl_c", self._name)

    def terminate(self) -> None:
        """TerminateProcess, which Windows has for SIGKILL."""
        self._session.ask("terminate", self.pid)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        assert self._has_exited.wait(patience_s), f"it did not end within {patience_s} s: {self.errors}"
        return self._code

    def has_exited(self) -> bool:
        return self._has_exited.is_set()

    def exited(self, code: int) -> None:
        self._code = code
        self.lines.put(None)
        self._has_exited.set()

    @property
    def errors(self) -> str:
        return "\n".join(self.said)

    def output(self) -> str:
        """What is left of its stdout, once it has ended."""
        self.wait()
        return "".join(f"{line}\n" for line in iter(self.lines.get, None))


class Windows:
    """One user of Windows, with folders of one test below ``folder``."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.folder = folder
        self._started: list[Running] = []
        home = folder / "Benützer"
        home.mkdir()
        local = windows_path(home)
        # platformdirs asks the system where the user's folders are, and has variables of its own.
        folders = ("LOCALAPPDATA", "APPDATA", "USERPROFILE", "TEMP", "TMP")
        overrides = ("WIN_PD_OVERRIDE_LOCAL_APPDATA", "WIN_PD_OVERRIDE_APPDATA")
        self.env = dict.fromkeys((*folders, *overrides), local)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._started:
            if not running.has_exited():
                running.terminate()
        for running in self._started:
            running.wait()
        self.session.ask("close_files")
        eventually(lambda: self.processes() == [])

    def program(self, *argv: str, stdin: str | None = None) -> Running:
        """``stdin``: a file; None: a pipe that stays open."""
        running = self.session.start(argv, self.env, stdin)
        self._started.append(running)
        return running

    def python(self, *argv: str, stdin: str | None = None) -> Running:
        return self.program(windows_path(self.session.python), *argv, stdin=stdin)

    def start(self, *arguments: str | Path, stdin: str | None = None) -> Running:
        """A command of llamasup."""
        return self.python("-m", "llamasup", *map(_argument, arguments), stdin=stdin)

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of a command of llamasup that ends by itself."""
        running = self.start(*arguments, stdin="NUL")
        return running.wait(), running.output(), running.errors

    def control(self, *arguments: str | Path) -> str:
        """The stdout of a command for a running llamasup, which succeeds in the end.

        On a busy machine, llamasup may answer the first one too late: it loads its control application then.
        """

        def stdout() -> tuple[str] | None:
            code, shown, said = self.run(*arguments)
            assert code == 0 or (code == 69 and "does not answer" in said), (code, said)
            return None if code else (shown,)

        (shown,) = eventually(stdout)
        return str(shown)

    def processes(self) -> Sequence[object]:
        """Those of llamasup, its servers and guardians."""
        found: Sequence[object] = self.session.ask("processes")
        return found

    def left(self) -> list[str]:
        """The run folders and ready files."""
        patterns = ("**/*-????????", "**/ready*.json")
        return sorted(path.name for pattern in patterns for path in self.folder.glob(pattern))


def eventually(is_true: Callable[[], Any]) -> Any:
    """Wait for a true value, and return it."""
    until = monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (found := is_true()):
        assert monotonic() < until, "it did not become true"
        pause.wait(0.1)
    return found


def complete(url: str, prompt: str = "Once", tokens: int = 8) -> Mapping[str, Any]:
    answer = httpx.post(
        f"{url}/completion", json={"prompt": prompt, "n_predict": tokens}, timeout=PATIENCE_S, trust_env=False
    )
    answer.raise_for_status()
    found: Mapping[str, Any] = answer.json()
    return found


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=PATIENCE_S, trust_env=False)


def windows_path(path: Path) -> str:
    return "Z:" + str(path).replace("/", "\\")


def _argument(argument: str | Path) -> str:
    return windows_path(argument) if isinstance(argument, Path) else argument
