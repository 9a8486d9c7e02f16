"""What a person reads when a command fails."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.cli.output.error_report import show_error
from llamasup.cli.output.view import Level
from llamasup.errors import ModelMissing
from llamasup.system.hardware.facts import cgroup_files


class Told:
    """A view that remembers."""

    is_busy = False

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def say(self, level: Level, event: str, text: str, **fields: Any) -> None:
        self.texts[event] = text

    def loading(self, text: str | None) -> None:
        raise NotImplementedError

    def server_said(self, lines: list[bytes]) -> None:
        pass

    def tick(self) -> None:
        raise NotImplementedError


def test_a_bug_names_the_line_of_ours_that_it_came_through() -> None:
    view = Told()
    with pytest.raises(AttributeError) as raised:
        cgroup_files(None, "")  # type: ignore[arg-type]
    assert show_error(view, raised.value) == 70
    assert "error in llamasup (llamasup/system/hardware/facts.py:" in view.texts["error"]
    assert "This is a bug" in view.texts["error"]
    assert "Traceback" in view.texts["traceback"]
    assert show_error(view, ExceptionGroup("", [ValueError("five")])) == 70
    assert "error in llamasup: ValueError: five" in view.texts["error"]


def test_an_error_of_ours_is_its_message_and_remedy() -> None:
    view = Told()
    assert show_error(view, ModelMissing("there is no x", remedy="Give y.")) == 66
    assert view.texts == {"error": "llamasup: there is no x\n  → Give y."}
