"""What is loaded is not removed, however its server was told where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamasup.cli.rm import rm_command


@pytest.mark.parametrize("given", ["{folder}/m.gguf", "./m.gguf", "../models/m.gguf", "link.gguf"])
def test_a_model_is_not_removed_while_a_process_has_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    model = folder / "m.gguf"
    model.write_bytes(b"GGUF")
    (folder / "link.gguf").symlink_to(model)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = [sys.executable, "-c", "input()", "-m", given.format(folder=folder)]

    with subprocess.Popen(server, cwd=folder, stdin=subprocess.PIPE) as process:
        assert rm_command(["m.gguf"], folder=folder, yes=True, json=False) == 2
        assert f"is loaded by process {process.pid}" in capfd.readouterr().err
        process.communicate(b"\n")
    assert model.exists()
    assert rm_command(["m.gguf"], folder=folder, yes=True, json=False) == 0
    assert not model.exists()
