"""Shows a download: a bar on a terminal, occasional lines elsewhere, events for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, duration_text
from llamasup.core.system.text import json_text, memory_text, printable
from llamasup.features.downloads.pull import Choosing

_LIVE_INTERVAL_S = 0.25
_LINE_INTERVAL_S = 10.0
_NAME_COLUMNS = 24  # the bar takes the rest


class DownloadView:
    """The ProgressListener of one download. ``say`` shows a message; ``close`` removes the progress."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.done_bytes = 0
        self.choosing: Choosing | None = None
        self._began_s = 0.0
        self._bytes_at_start = 0
        self._shown_s = 0.0

    def close(self) -> None:
        pass

    def chosen(self, choosing: Choosing) -> None:
        self.choosing = choosing
        size = "" if choosing.size_bytes is None else f", {memory_text(choosing.size_bytes)}"
        self.say(f"{choosing.name}{size}: {choosing.reason}")
        for note in choosing.notes:
            self.say(f"{choosing.name}: {note}")

    def moved(self, done_bytes: int) -> None:
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s, self._bytes_at_start = now_s, done_bytes
        self.done_bytes = done_bytes
        self._progress(now_s)

    def _progress(self, now_s: float) -> None:
        raise NotImplementedError

    def _is_due(self, now_s: float, every_s: float) -> bool:
        if now_s - self._shown_s < every_s:
            return False
        self._shown_s = now_s
        return True

    def _bytes_per_s(self, now_s: float) -> float:
        taken_s = now_s - self._began_s
        return (self.done_bytes - self._bytes_at_start) / taken_s if taken_s > 0 else 0.0

    def _text(self, now_s: float) -> str:
        name, size = (self.choosing.name, self.choosing.size_bytes) if self.choosing else ("", None)
        per_s = self._bytes_per_s(now_s)
        parts = [f"downloading {name}: {memory_text(self.done_bytes)}"]
        if size:
            parts[0] = f"downloading {name}: {100 * self.done_bytes // size} % of {memory_text(size)}"
        if per_s:
            parts.append(f"{memory_text(round(per_s))}/s")
            if size:
                parts.append(f"{duration_text((size - self.done_bytes) / per_s)} left")
        return ", ".join(parts)


class ProgressLines(DownloadView):
    """The live line of ``view`` on a terminal, otherwise a line every ten seconds."""

    def __init__(self, view: View, *, live: bool) -> None:
        super().__init__(lambda text: view.say("info", "download", text))
        self._view = view
        self._live = live

    def close(self) -> None:
        if self._live:
            self._view.show_activity(None)

    def _progress(self, now_s: float) -> None:
        if self._live:
            if self._is_due(now_s, _LIVE_INTERVAL_S):
                self._view.show_activity(self._text(now_s))
            return
        if not self._shown_s:
            self._shown_s = now_s
        if self._is_due(now_s, _LINE_INTERVAL_S):
            self.say(self._text(now_s))


class ProgressEvents(DownloadView):
    """One JSON object a line on standard output."""

    def __init__(self, ref: str) -> None:
        super().__init__(lambda text: self.event("note", text=text))
        self._ref = ref

    def event(self, name: str, /, **fields: Any) -> None:
        write_result(json_text({"event": name, "protocol": 1, "ref": self._ref, **fields}))

    def chosen(self, choosing: Choosing) -> None:
        self.choosing = choosing
        self.event(
            "chosen",
            name=choosing.name,
            files=list(choosing.files),
            total_bytes=choosing.size_bytes,
            missing=choosing.missing,
            reason=choosing.reason,
            notes=list(choosing.notes),
        )

    def _progress(self, now_s: float) -> None:
        if self._is_due(now_s, _LIVE_INTERVAL_S):
            self.event(
                "progress",
                done_bytes=self.done_bytes,
                total_bytes=self.choosing.size_bytes if self.choosing else None,
                bytes_per_s=round(self._bytes_per_s(now_s)),
            )


class ProgressBar(DownloadView):
    """A bar with speed and remaining time, drawn by a thread of rich, which only this class imports."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
            expand=True,
        )
        self._task: Any = None
        console = self._bar.console
        super().__init__(
            lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
        )
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def _progress(self, now_s: float) -> None:
        if self._task is None:
            name = self.choosing.name if self.choosing else ""
            short = name if len(name) <= _NAME_COLUMNS else "…" + name[1 - _NAME_COLUMNS :]
            size = self.choosing.size_bytes if self.choosing else None
            self._task = self._bar.add_task(printable(short), total=size, completed=self.done_bytes)
        else:
            self._bar.update(self._task, completed=self.done_bytes)
