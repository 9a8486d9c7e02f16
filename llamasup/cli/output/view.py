"""Writes the lines on standard error: one live line while something is loading, plain lines otherwise.

Results go to standard output. Prompts and completions are never written (X13).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from msgspec import Struct

from llamasup.cli.output.layout import cut_to
from llamasup.cli.output.nonblocking_writer import OutputWriter
from llamasup.core.system.text import json_text, printable

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Mapping[Level, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
CLEAR_LINE = "\r\x1b[2K"
_MAX_NAMED = 5


def duration_text(seconds: float) -> str:
    """Format a time: ``84 ms``, ``3.2 s``, ``2 min 5 s``, ``3 h 20 min``, ``12 d 4 h``."""
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def plural(count: int, noun: str) -> str:
    """Count things: ``1 request``, ``2 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shortened(names: Sequence[str]) -> str:
    """List the first names: ``a, b, c, d, e, and 995 more``."""
    more = len(names) - _MAX_NAMED
    return ", ".join((*names[:_MAX_NAMED], f"and {more} more")) if more > 0 else ", ".join(names)


class LaterLine(Protocol):
    """A line whose text is made in the writer's thread."""

    def text(self) -> str: ...

    def fields(self) -> Mapping[str, Any]: ...


class View(Struct):
    """Writes lines. ``note`` gets the level and the text of each line that is said, except at the level
    debug.
    """

    writer: OutputWriter
    level: Level = "info"
    note: Callable[[str, str], None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is a live line to move."""
        return False

    def shows(self, level: Level) -> bool:
        """Whether lines of this level are written."""
        return LEVELS[level] >= LEVELS[self.level]

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        """Report an event: ``text`` for people, ``event`` and ``fields`` for programs."""
        if self.note is not None and level != "debug":
            self.note(level, text)
        if self.shows(level):
            self._write(level, event, text, fields)

    def _write(self, level: Level, event: str, text: str, fields: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def say_later(self, level: Level, event: str, line: LaterLine) -> None:
        """Say a line of which there are many, at little cost. It is dropped if the reader lags."""
        raise NotImplementedError

    def show_activity(self, text: str | None) -> None:
        """Set the live line, such as ``loading qwen``; None removes it."""

    def show_server_log(self, lines: list[bytes]) -> None:
        """Show lines of llama-server's log, from any thread. They are dropped if the reader lags."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called several times a second while there is a live line."""


class TextView(View):
    """Lines of text, and on a terminal the live line."""

    _activity: str | None = None
    _since_s: float = 0.0
    _frame: int = 0

    @property
    def is_busy(self) -> bool:
        return self.writer.is_terminal and self._activity is not None

    def _write(self, level: Level, event: str, text: str, fields: Mapping[str, Any]) -> None:
        self.writer.write((CLEAR_LINE if self.is_busy else "") + _printable_lines(text), keep=True)
        self.tick()

    def say_later(self, level: Level, event: str, line: LaterLine) -> None:
        if not self.shows(level):
            return
        if self.is_busy:
            self.writer.write_later(lambda: CLEAR_LINE + _printable_lines(line.text()))
            self.tick()
        else:
            self.writer.write_later(lambda: _printable_lines(line.text()))

    def show_activity(self, text: str | None) -> None:
        if text is not None and self._activity is None:
            self._since_s = time.monotonic()
        if text is None and self.is_busy:
            self.writer.write(CLEAR_LINE)
        self._activity = None if text is None else printable(text)
        self.tick()

    def show_server_log(self, lines: list[bytes]) -> None:
        if self.writer.is_behind:
            return
        text = b"\n".join(lines).decode("utf-8", "replace")
        if self.writer.is_terminal:
            text = "\n".join(map(printable, text.split("\n")))
        self.writer.write(f"{CLEAR_LINE if self.is_busy else ''}{text}\n")

    def tick(self) -> None:
        if not self.is_busy or LEVELS[self.level] > LEVELS["info"]:
            return
        self._frame = (self._frame + 1) % len(SPINNER)
        elapsed = f" · {duration_text(time.monotonic() - self._since_s)}"
        # A wrapped line is not cleared as a whole, and some terminals wrap already in the last column.
        columns = self.writer.columns - 1 - len(f"{SPINNER[self._frame]} {elapsed}")
        activity = cut_to(columns, self._activity or "")
        self.writer.write(f"{CLEAR_LINE}{SPINNER[self._frame]} {activity}{elapsed}")


class JsonView(View):
    """One JSON object a line, for log collectors."""

    def _write(self, level: Level, event: str, text: str, fields: Mapping[str, Any]) -> None:
        self.writer.write(_json_line(datetime.now(UTC), level, event, text, fields), keep=True)

    def say_later(self, level: Level, event: str, line: LaterLine) -> None:
        if self.shows(level):
            now = datetime.now(UTC)
            self.writer.write_later(lambda: _json_line(now, level, event, line.text(), line.fields()))

    def show_server_log(self, lines: list[bytes]) -> None:
        if self.writer.is_behind:
            return  # before any work on the lines: a flood must not slow down requests
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        records = (
            {"time": time, "event": "server_log", "message": line.decode("utf-8", "replace")}
            for line in lines
        )
        self.writer.write("".join(f"{json_text(record)}\n" for record in records))


def _printable_lines(text: str) -> str:
    """The text may contain a file name, whose control characters must not reach the terminal."""
    return "".join(f"{printable(line)}\n" for line in text.splitlines())


def _json_line(time: datetime, level: Level, event: str, text: str, fields: Mapping[str, Any]) -> str:
    moment = time.isoformat(timespec="milliseconds")
    return json_text({"time": moment, "level": level, "event": event, "message": text, **fields}) + "\n"


# No live line for a shorter wait: it would only flicker.
LIVE_LINE_DELAY_S = 0.3
TICK_S = 0.1


@contextmanager
def while_waiting(view: View, text: str) -> Iterator[None]:
    """Show ``text`` on the live line, moved by a thread: the block runs no event loop.

    The block itself must not write lines.
    """
    over = threading.Event()

    def show() -> None:
        if over.wait(LIVE_LINE_DELAY_S):
            return
        view.show_activity(text)
        while not over.wait(TICK_S):
            view.tick()
        view.show_activity(None)

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
