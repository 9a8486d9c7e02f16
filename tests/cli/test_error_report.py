"""The lines about an error of a command."""

from __future__ import annotations

import pytest

from llamasup.cli.output.error_report import show_error
from llamasup.core.system.hardware.facts import cgroup_files
from llamasup.errors import ModelMissing
from tests.cli.recording_view import RecordingView


def test_internal_error_names_innermost_line_of_llamasup() -> None:
    view = RecordingView()
    with pytest.raises(AttributeError) as raised:
        cgroup_files(None, "")  # type: ignore[arg-type]
    assert show_error(view, raised.value) == 70
    (_, traceback_event, traceback, _), (_, event, text, _) = view.lines
    assert (traceback_event, event) == ("traceback", "error")
    assert "error in llamasup (llamasup/core/system/hardware/facts.py:" in text
    assert "This is a bug" in text
    assert "Traceback" in traceback
    assert show_error(view, ExceptionGroup("", [ValueError("five")])) == 70
    assert "error in llamasup: ValueError: five" in view.texts[-1]


def test_error_of_llamasup_shows_message_and_remedy() -> None:
    view = RecordingView()
    assert show_error(view, ModelMissing("there is no x", remedy="Give y.")) == 66
    assert view.texts == ["llamasup: there is no x\n  → Give y."]
