"""`llamasup connect --write`: the mode of the settings file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from llamasup.features.connect.clients import CLIENTS, Connection
from llamasup.features.connect.command import _write
from tests.cli.recording_view import RecordingView

KEY = "sk-secret"
CLOSED = "Only you can access it now"


def write(client: str, file: Path, key: str = KEY) -> tuple[Path | None, str]:
    """The file before, and the lines in the terminal."""
    view = RecordingView()
    settings = CLIENTS[client].settings(Connection("http://127.0.0.1:8080", "qwen", key, 4096))
    backup = _write(cast("Any", view), file, CLIENTS[client], settings, key, show=False)
    return backup, "\n".join(view.texts)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.check("X13", "mode 0600")
@pytest.mark.parametrize("before", [0o644, 0o640, 0o666, 0o604, 0o755, 0o600, 0o700])
@pytest.mark.parametrize("client", ["claude-code", "continue"])
def test_file_with_a_key_is_private(tmp_path: Path, client: str, before: int) -> None:
    file = tmp_path / "settings"
    file.write_text("{}" if client == "claude-code" else "name: Mine\n")
    file.chmod(before)
    backup, said = write(client, file)
    assert KEY in file.read_text()
    assert backup is not None
    assert mode_of(file) == mode_of(backup) == before & 0o700
    assert (CLOSED in said) == (before & 0o077 != 0)
    if before & 0o077:
        assert f"(mode {before & 0o700:04o}, before {before:04o})" in said


def test_file_that_has_the_key_already_becomes_private(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    write("claude-code", file)
    assert mode_of(file) == 0o600
    file.chmod(0o644)
    backup, said = write("claude-code", file)
    assert backup is None
    assert "has these settings already" in said
    assert CLOSED in said
    assert mode_of(file) == 0o600
    assert CLOSED not in write("claude-code", file)[1]


@pytest.mark.parametrize(("client", "key"), [("zed", KEY), ("claude-code", "")])
def test_file_without_a_key_keeps_its_mode(tmp_path: Path, client: str, key: str) -> None:
    """Zed reads the key from the environment."""
    file = tmp_path / "settings"
    file.write_text(json.dumps({"theme": "dark"}))
    file.chmod(0o644)
    _, said = write(client, file, key)
    assert mode_of(file) == 0o644
    assert CLOSED not in said
