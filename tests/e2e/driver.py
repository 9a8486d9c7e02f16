"""Runs the ``llamasup`` command as a real process and reads its output, like a parent program."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.forked import ForkedCommand, forked_to_end
from tests.kit.patience import PATIENCE_S, eventually, wait_longer_for_answers

wait_longer_for_answers()

__all__ = [
    "NEW_INTERPRETER",
    "PATIENCE_S",
    "Llamasup",
    "adopted",
    "await_guardian",
    "await_removed",
    "children_of",
    "command",
    "is_alive",
    "llamasup",
    "on_terminal",
    "run_to_end",
    "seconds_until_gone",
    "started",
    "wrapped",
]


NEW_INTERPRETER = ("env",)
"""A ``prefix`` of ``started``: no fork, so the memory and the processes are those of a user's command."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "llamasup", *arguments]


def run_to_end(
    *arguments: str,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself; ``prefix`` is a program that runs it."""
    if not prefix and not options and not _changes_python(env):
        return forked_to_end(*arguments, env=env, cwd=cwd)
    return subprocess.run(
        [*prefix, *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=env,
        cwd=cwd,
        **options,
    )


def _changes_python(env: Mapping[str, str] | None) -> bool:
    """Whether ``env`` changes a variable that Python reads when it starts."""
    names = {name for name in (*(env or ()), *os.environ) if name.startswith(("PYTHON", "LC_", "LANG", "TZ"))}
    return env is not None and any(env.get(name) != os.environ.get(name) for name in names)


def on_terminal(command: Sequence[str], columns: int, **options: Any) -> str:
    """What a command writes to standard output where that is a terminal of this width."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    process = subprocess.Popen(command, stdout=slave, **options)
    os.close(slave)
    received = b""
    try:
        while chunk := os.read(master, 65_536):
            received += chunk
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(master)
        process.wait(PATIENCE_S)
    return received.decode().replace("\r\n", "\n")


_QUESTIONS = frozenset({"--help", "--version", "--list-devices"})


def children_of(pid: int) -> list[psutil.Process]:
    """The descendants that stay: not those that are asked at any time what llama-server can do."""
    process = psutil.Process(pid)
    own = process.cmdline()

    def stays(child: psutil.Process) -> bool:
        try:
            words = child.cmdline()
        except psutil.Error:  # it has ended
            return False
        return words != own and not _QUESTIONS & set(words[-1:])  # its own words: before exec

    return [child for child in process.children(recursive=True) if stays(child)]


class Llamasup:
    """A running ``llamasup run … --events jsonl``."""

    def __init__(self, process: subprocess.Popen[str] | ForkedCommand) -> None:
        self.process = process
        self.events: list[Mapping[str, Any]] = []
        self.stderr: list[str] = []
        self._unread: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return str(self.wait_for("ready")["url"])

    @property
    def stderr_text(self) -> str:
        """Everything on standard error so far."""
        return "".join(self.stderr)

    def wait_for(self, name: str, *, times: int = 1, **fields: Any) -> Mapping[str, Any]:
        """The first (or ``times``-th) event of this name with these fields, past or to come."""
        left = times

        def matches(event: Mapping[str, Any]) -> bool:
            nonlocal left
            if event["event"] == name and all(event.get(key) == value for key, value in fields.items()):
                left -= 1
            return left == 0

        return self._next(matches, f"{name} {fields or ''}")

    def wait_for_ready_after(self, generation: int) -> Mapping[str, Any]:
        """The first time that a later generation serves, past or to come."""

        def matches(event: Mapping[str, Any]) -> bool:
            return event.get("state") == "ready" and event["generation"] > generation

        return self._next(matches, f"ready after generation {generation}")

    def all_events(self) -> Sequence[Mapping[str, Any]]:
        """All events until its end."""
        while (event := self._unread.get(timeout=PATIENCE_S)) is not None:
            self.events.append(event)
        self._unread.put(None)
        return self.events

    def children(self) -> list[psutil.Process]:
        return children_of(self.pid)

    def send_signal(self, signal_number: signal.Signals) -> None:
        self.process.send_signal(signal_number)

    def end(self) -> int:
        """Wait for the exit code."""
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return code

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        self.send_signal(signal_number)
        return self.end()

    def _next(self, matches: Callable[[Mapping[str, Any]], bool], what: str) -> Mapping[str, Any]:
        for event in self.events:
            if matches(event):
                return event
        while True:
            try:
                event_or_end = self._unread.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError(
                    f"no {what} within {PATIENCE_S} s; {self.events}\n{self.stderr_text}"
                ) from None
            if event_or_end is None:
                self._unread.put(None)
                raise AssertionError(f"ended without {what}; {self.events}\n{self.stderr_text}")
            self.events.append(event_or_end)
            if matches(event_or_end):
                return event_or_end

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._unread.put(json.loads(line))
        self._unread.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self.stderr.extend(self.process.stderr)


def llamasup(model: Path | str, *arguments: str, **options: Any) -> AbstractContextManager[Llamasup]:
    """``llamasup run MODEL --port 0 --events jsonl ARGUMENTS…``; options are those of ``started``."""
    return started("run", str(model), "--port", "0", *arguments, **options)


@contextmanager
def started(
    name: str,
    *arguments: str,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **options: Any,
) -> Iterator[Llamasup]:
    """``llamasup NAME --events jsonl ARGUMENTS…``, surely ended afterwards.

    ``prefix`` is a program that becomes it (``exec``). With options of Popen it is no fork.
    """
    words = (name, "--events", "jsonl", *arguments)
    process: subprocess.Popen[str] | ForkedCommand
    if prefix or options or _changes_python(env):
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(
            [*prefix, *command(*words)], **{**pipes, "env": env, "cwd": cwd, **options}
        )
    else:
        process = ForkedCommand(*words, env=env, cwd=cwd)
    with adopted(process) as running:
        yield running


@contextmanager
def adopted(process: subprocess.Popen[str] | ForkedCommand) -> Iterator[Llamasup]:
    """A process that speaks as ``llamasup run … --events jsonl`` does, surely ended afterwards."""
    try:
        yield (running := Llamasup(process))
    finally:
        if process.poll() is None:
            process.kill()
        running.end()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def await_guardian(folder: Path) -> psutil.Process:
    """The guardian of the run folder. A llamasup that is killed before it runs leaves the folder behind."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(folder) in words and "exec_guardian" in " ".join(words):
                found.append(process)
        return bool(found)

    eventually(runs, "the guardian")
    return found[0]


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended: its new parent decides when to reap it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_until_gone(processes: Sequence[psutil.Process]) -> float:
    """Wait until all have ended."""
    began = time.monotonic()
    while any(map(is_alive, processes)):
        assert time.monotonic() - began < PATIENCE_S, [process for process in processes if is_alive(process)]
        time.sleep(0.002)
    return time.monotonic() - began


def await_removed(path: Path) -> None:
    """Wait until ``path`` does not exist any more."""
    began = time.monotonic()
    while path.exists():
        assert time.monotonic() - began < PATIENCE_S, path
        time.sleep(0.002)


def wrapped(*words: str, options: Sequence[str] = (), **more: Any) -> AbstractContextManager[Llamasup]:
    """``llamasup wrap --events jsonl OPTIONS… -- WORDS…``; more options are those of ``started``."""
    return started("wrap", *options, "--", *words, **more)
