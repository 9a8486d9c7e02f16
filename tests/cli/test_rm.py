"""``rm`` lists every file that it removes, and refuses to remove loaded models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamasup.cli.commands.models import rm
from llamasup.core.hub.part_file import PartFile
from tests.kit import models


@pytest.mark.parametrize(
    "given",
    ["{folder}/m.gguf", "./m.gguf", "../models/m.gguf", "link.gguf", "other.gguf:0,{folder}/m.gguf:0.5"],
)
def test_loaded_model_is_not_removed(
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
        assert rm(["m.gguf"], folder=folder, yes=True, json=False) == 2
        assert f"is loaded by process {process.pid}" in capfd.readouterr().err
        process.communicate(b"\n")
    assert model.exists()
    assert rm(["m.gguf"], folder=folder, yes=True, json=False) == 0
    assert not model.exists()


def test_all_files_are_listed_before_and_after_removal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path / "models/o/r"
    folder.mkdir(parents=True)
    paths = [
        *models.write_split_decoder(folder, "m-Q8_0", 2),
        folder / "mmproj-F16.gguf",
        folder / "mmproj-F16.gguf.part",
    ]
    paths[2].write_bytes(models.tiny_projector())
    part = PartFile(paths[2])
    part.write(0, b"some")
    part.keep()

    assert rm(["o/r"], folder=tmp_path / "models", yes=True, json=True) == 0
    printed = capfd.readouterr()
    before, after, _ = printed.err.splitlines()
    names = ", ".join(str(path.relative_to(tmp_path / "models")) for path in paths)
    assert f"o/r: {names} (" in before
    assert f"Deleted {names}." in after
    assert json.loads(printed.out)["removed"] == [str(path) for path in paths]
    assert list((tmp_path / "models").iterdir()) == []
