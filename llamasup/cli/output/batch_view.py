"""Shows a batch: a bar on a terminal, occasional lines elsewhere, events for programs."""

from __future__ import annotations

import time
from typing import Any

from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, duration_text
from llamasup.core.system.text import json_text
from llamasup.features.batch.engine import Progress

_COUNTS = (
    *("total", "done", "failed", "in_flight", "put_back", "events_lost"),
    *("tokens_prompt", "tokens_cached", "tokens_completion"),
)


def progress_fields(progress: Progress, now_s: float) -> dict[str, Any]:
    """Return the counts, for programs."""
    per_s, left_s = progress.rates(now_s)
    return {
        "state": progress.state,
        "waiting": progress.waiting or None,
        **{name: getattr(progress, name) for name in _COUNTS},
        "tokens_per_s": round(per_s, 1),
        "left_s": None if left_s is None else round(left_s),
    }


def progress_text(progress: Progress, now_s: float) -> str:
    """Format the progress: ``120 of 1000 lines, 2 failed, 340 tokens/s, 3 min left``."""
    per_s, left_s = progress.rates(now_s)
    parts = [f"{progress.done + progress.failed} of {progress.total} lines"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.waiting:
        return ", ".join((*parts, f"waiting: {progress.waiting}"))
    if per_s >= 0.05:
        parts.append(f"{per_s:.0f} tokens/s" if per_s >= 10 else f"{per_s:.1f} tokens/s")
    if left_s is not None and progress.left:
        parts.append(f"{duration_text(left_s)} left")
    return ", ".join(parts)


class BatchLines:
    """A line every ten seconds."""

    interval_s = 10.0

    def __init__(self, view: View) -> None:
        self._view = view
        self._shown_s = time.monotonic()
        self._reason = ""  # the last one that was shown

    def reading(self, read: int, size: int) -> None:
        if self._is_due(time.monotonic()):
            self._show_text(f"reading the input: {100 * read // max(size, 1)} %")

    def waits(self, reason: str) -> None:
        """The first line cannot run yet."""
        if self._is_due(time.monotonic(), reason):
            self._show_text(f"waiting: {reason}")

    def moved(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if self._is_due(now_s, progress.waiting):
            self._show(progress, now_s)

    def close(self) -> None:
        pass

    def _is_due(self, now_s: float, waiting: str = "") -> bool:
        """Tell whether to show the progress. A new reason why no line runs (``waiting``) is shown at once."""
        if now_s - self._shown_s < self.interval_s and waiting in ("", self._reason):
            return False
        self._shown_s = now_s
        self._reason = waiting or self._reason
        return True

    def _show(self, progress: Progress, now_s: float) -> None:
        self._show_text(progress_text(progress, now_s))

    def _show_text(self, text: str) -> None:
        self._view.say("info", "batch", text)


class BatchEvents(BatchLines):
    """One JSON object a line on standard output."""

    interval_s = 1.0

    def event(self, name: str, /, **fields: Any) -> None:
        write_result(json_text({"event": name, "protocol": 1, **fields}))

    def _show(self, progress: Progress, now_s: float) -> None:
        self.event("progress", **progress_fields(progress, now_s))

    def _show_text(self, text: str) -> None:
        self.event("note", text=text)


class BatchBar(BatchLines):
    """A bar, drawn by a thread of rich, which only this class imports."""

    interval_s = 0.25

    def __init__(self, view: View) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        super().__init__(view)
        self._bar = Bar(
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True, highlight=False),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()

    def _show(self, progress: Progress, now_s: float) -> None:
        over = progress.done + progress.failed
        text = progress_text(progress, now_s)
        self._bar.update(self._task, total=progress.total, completed=over, description=text)

    def _show_text(self, text: str) -> None:
        self._bar.update(self._task, description=text)
