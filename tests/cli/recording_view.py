"""A view that records the lines and the activity that it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from msgspec import field

from llamasup.cli.output.event_lines import ConsoleReporter
from llamasup.cli.output.view import LaterLine, Level, View


class RecordingView(View):
    """``lines``: level, event, text and fields of each line. ``activity()``: the text of the live line."""

    writer: Any = None
    lines: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)
    _activity: str | None = "checking the models"

    @property
    def texts(self) -> list[str]:
        return [text for _, _, text, _ in self.lines]

    def activity(self) -> str | None:
        return self._activity

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        self.lines.append((level, event, text, fields))

    def shows(self, level: Level) -> bool:
        return True

    def say_later(self, level: Level, event: str, line: LaterLine) -> None:
        self.say(level, event, line.text(), **line.fields())

    def show_activity(self, text: str | None) -> None:
        self._activity = text


def reporter_to(view: RecordingView, *, has_many: bool = False) -> ConsoleReporter:
    """The reporter of a service with one model, or with many."""
    return ConsoleReporter(view, cast("Any", SimpleNamespace(launch=None if has_many else object())), 0.0)
