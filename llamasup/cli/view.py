"""What a person sees on standard error: one live line while something is loading, plain lines otherwise.

Results never go here; they go to standard output. Prompts and completions go nowhere (X13).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, Literal, Protocol, TypeGuard

__all__ = ["JsonView", "Level", "TextView", "View", "duration_text", "is_level", "memory_text"]

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def is_level(text: str) -> TypeGuard[Level]:
    return text in LEVELS


SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
CLEAR_LINE = "\r\x1b[2K"


def memory_text(count_bytes: int) -> str:
    """``1.4 GiB``, ``730 MiB``: three digits say enough to a person."""
    size = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration_text(seconds: float) -> str:
    """``84 ms``, ``3.2 s``, ``2 min 5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def plural(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class View(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether a live line wants to be moved."""
        ...

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        """One thing that happened: ``text`` for people, ``event`` and ``fields`` for machines."""
        ...

    def loading(self, text: str | None) -> None:
        """What is going on right now; None: nothing any more."""
        ...

    def tick(self) -> None:
        """Called several times a second while something is going on."""
        ...


@dataclass(slots=True)
class TextView:
    """Lines of text; on a terminal (``live``) what is going on is shown in place."""

    stream: IO[str]
    live: bool
    level: Level = "info"
    _going_on: str | None = None
    _since_s: float = 0.0
    _frame: int = 0

    @property
    def is_busy(self) -> bool:
        return self.live and self._going_on is not None

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        if LEVELS[level] < LEVELS[self.level]:
            return
        self._wipe()
        self._write("".join(f"{line}\n" for line in text.splitlines()))
        self.tick()

    def loading(self, text: str | None) -> None:
        if text is not None and self._going_on is None:
            self._since_s = time.monotonic()
        if text is None:
            self._wipe()
        self._going_on = text
        self.tick()

    def tick(self) -> None:
        if not self.live or self._going_on is None or LEVELS[self.level] > LEVELS["info"]:
            return
        self._frame = (self._frame + 1) % len(SPINNER)
        elapsed = duration_text(time.monotonic() - self._since_s)
        self._write(f"{CLEAR_LINE}{SPINNER[self._frame]} {self._going_on} · {elapsed}")

    def _wipe(self) -> None:
        if self.live and self._going_on is not None:
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (BrokenPipeError, OSError):
            pass  # the terminal is gone; the server need not be


@dataclass(slots=True)
class JsonView:
    """One JSON object a line, for log collectors."""

    stream: IO[str]
    level: Level = "info"
    is_busy: bool = False

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        if LEVELS[level] < LEVELS[self.level]:
            return
        record = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            "message": text,
            **fields,
        }
        try:
            self.stream.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            self.stream.flush()
        except (BrokenPipeError, OSError):
            pass

    def loading(self, text: str | None) -> None:
        pass

    def tick(self) -> None:
        pass


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Columns aligned on the widest cell; the last column is left as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return "\n".join(
        indent
        + "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    )
