"""The diagram in docs/design.md matches the table that it is drawn from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.kit.paths import ROOT
from tests.kit.script import run_script

DOC = ROOT / "docs" / "design.md"


draw = partial(run_script, "lifecycle_diagram.py")


def test_diagram_in_docs_matches_table() -> None:
    done = draw("--check")
    assert done.returncode == 0, done.stderr


def test_check_finds_stale_diagram_and_the_script_updates_it(tmp_path: Path) -> None:
    stale = tmp_path / "design.md"
    stale.write_text(DOC.read_text("utf-8").replace("ready --> stopping: Kill", "ready --> stopping: Other"))
    done = draw("--check", "--doc", str(stale))
    assert (done.returncode, "is stale" in done.stderr) == (1, True)
    assert draw("--doc", str(stale)).returncode == 0
    assert stale.read_text("utf-8") == DOC.read_text("utf-8")


def test_document_without_markers_is_unchanged(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# Something else\n")
    assert draw("--doc", str(other)).returncode == 2
    assert other.read_text() == "# Something else\n"
