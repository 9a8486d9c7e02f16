"""Starts commands in the Windows Python that scripts/windows-python prepares, under Wine.

The standard streams are pipes. A process of Windows has two process IDs: Wine's, which llamasup prints, and
that of Linux, which is not used here. A test sees processes and files by ``Windows.processes`` and ``files``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

PATIENCE_S = 120.0
"""For everything under Wine: a first request to the embedded runtime takes seconds there."""

_AFTER_EXIT_S = 1.0
_ROOT = Path(__file__).parents[2]
_HELPER = Path(__file__).with_name("inside.py")


def windows_python() -> Path | None:
    """The launcher; None if it was not prepared."""
    given = os.environ.get("LLAMASUP_WINDOWS_PYTHON")
    path = Path(given) if given else _ROOT / ".build/windows-python/python"
    return path if path.exists() else None


class Running:
    """A started command. ``lines`` are those of stdout, as they come."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.popen = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[bytes] = []
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.put(line.decode("utf-8", "replace").rstrip())
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        self._errors.extend(self.popen.stderr)

    @property
    def errors(self) -> str:
        return b"".join(self._errors).decode("utf-8", "replace")

    def event(self, name: str) -> Mapping[str, Any]:
        """The next event of this name; earlier ones are dropped."""
        until = monotonic() + PATIENCE_S
        while True:
            line = self.lines.get(timeout=max(0.1, until - monotonic()))
            assert line is not None, f"it ended before {name!r}:\n{self.errors}"
            found: Mapping[str, Any] = json.loads(line)
            if found["event"] == name:
                return found

    def write(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text.encode() + b"\n")
        self.popen.stdin.flush()

    def close_stdin(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def wait(self) -> int:
        return self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        self._join()

    def output(self) -> tuple[str, str]:
        """All of stdout and stderr, once it has ended."""
        self._join()
        lines = []
        while not self.lines.empty() and (line := self.lines.get()) is not None:
            lines.append(f"{line}\n")
        return "".join(lines), self.errors.replace("\r", "")

    def _join(self) -> None:
        """A moment only: processes of Wine, such as its consoles, inherit the pipes and keep them open."""
        for thread in self._threads:
            thread.join(_AFTER_EXIT_S)


class Windows:
    """One user of Windows: a prefix of Wine, and folders of this test below ``folder``."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder = folder
        self._python = python
        self._started: list[Running] = []
        local = _windows_path(folder / "local")
        self.env = {"LOCALAPPDATA": local, "APPDATA": local, "TEMP": local, "TMP": local}
        (folder / "local").mkdir()

    def start(self, *arguments: str | Path, program: Sequence[str] = ("-m", "llamasup")) -> Running:
        running = Running((self._python, *program, *map(_argument, arguments)), self.env)
        self._started.append(running)
        return running

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of a command that ends by itself."""
        running = self.start(*arguments)
        running.close_stdin()
        return running.wait(), *running.output()

    def inside(self) -> Inside:
        """A Python of Windows that sees and ends processes."""
        return Inside(self.start(program=(_windows_path(_HELPER),)))

    def left(self) -> list[str]:
        """The run folders and ready files."""
        return sorted(
            path.name
            for pattern in ("local/**/*-????????", "**/ready*.json")
            for path in self.folder.glob(pattern)
        )

    def close(self) -> None:
        for running in self._started:
            running.close()


class Inside:
    """Questions to ``inside.py``."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def ask(self, *words: object) -> Any:
        self._running.write(json.dumps(words))
        line = self._running.lines.get(timeout=PATIENCE_S)
        assert line is not None, self._running.errors
        return json.loads(line)


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


def _argument(argument: str | Path) -> str:
    return _windows_path(argument) if isinstance(argument, Path) else argument


def _windows_path(path: Path) -> str:
    return "Z:" + str(path).replace("/", "\\")
