"""The catalog of models of Codex, which a stand-in for Codex reads or refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.features.connect import connection
from llamasup.features.connect.clients import CLIENTS, Connection
from llamasup.features.connect.connection import with_catalog

TO = Connection("http://127.0.0.1:8080", 'a "b"', "sk-secret", 32768)
CODEX = CLIENTS["codex"]
SETTINGS = CODEX.settings(TO)
READS = """#!/bin/sh
[ "$1 $2 $3" = "debug models -c" ] || exit 2
path=${4#model_catalog_json=\\"}
cp "${path%\\"}" "$SEEN"
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / "codex"
    path.parent.mkdir()
    path.write_text(READS)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return path


def test_catalog_has_the_model_and_its_context(program: Path, tmp_path: Path) -> None:
    found = with_catalog(CODEX, SETTINGS, TO, tmp_path / "home" / ".codex")
    path = tmp_path / "home" / ".codex" / "llamasup-models.json"
    assert found == replace(SETTINGS, values={**SETTINGS.values, "model_catalog_json": str(path)})
    assert path.read_bytes() == (tmp_path / "seen").read_bytes()  # what the program has tried
    (model,) = json.loads(path.read_text())["models"]
    assert (model["slug"], model["context_window"]) == (TO.model, TO.context)
    assert (model["apply_patch_tool_type"], model["supports_search_tool"]) == ("freeform", False)
    assert "sk-secret" not in path.read_text()


@pytest.mark.parametrize("refuses", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\nexec sleep 60\n", "#!/nowhere\n"])
def test_catalog_that_the_program_does_not_read_is_left_out(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    monkeypatch.setattr(connection, "_CATALOG_TIMEOUT_S", 0.5)
    folder = tmp_path / ".codex"
    with_catalog(CODEX, SETTINGS, TO, folder)
    before = (folder / "llamasup-models.json").read_bytes()
    program.write_text(refuses)
    assert with_catalog(CODEX, SETTINGS, replace(TO, model="c"), folder) == SETTINGS
    assert (folder / "llamasup-models.json").read_bytes() == before  # other settings may name it


def test_without_the_program_or_a_folder_there_is_no_catalog(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("~nobody-of-this-name/x")):
        assert with_catalog(CODEX, SETTINGS, TO, folder) == SETTINGS
    opencode = CLIENTS["opencode"]
    assert with_catalog(opencode, SETTINGS, TO, tmp_path) == SETTINGS
    monkeypatch.setenv("PATH", str(tmp_path))
    assert with_catalog(CODEX, SETTINGS, TO, tmp_path) == SETTINGS
    assert not (tmp_path / "llamasup-models.json").exists()
