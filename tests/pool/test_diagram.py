"""The diagram of a model's states in docs/design.md matches the table that it is drawn from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from scripts.pool_diagram import DOC, MARKS, diagram
from tests.kit.script import run_script

draw = partial(run_script, "pool_diagram.py")


def test_diagram_in_docs_matches_table() -> None:
    text = DOC.read_text("utf-8")
    between = text[text.index(MARKS[0]) + len(MARKS[0]) : text.index(MARKS[1])]
    assert between.strip() == diagram()


@pytest.mark.extended
def test_check_finds_stale_diagram_and_the_script_updates_it(tmp_path: Path) -> None:
    stale = tmp_path / "design.md"
    stale.write_text(DOC.read_text("utf-8").replace("absent --> loading: Load", "absent --> loading: Other"))
    done = draw("--check", "--doc", str(stale))
    assert (done.returncode, "is stale" in done.stderr) == (1, True)
    assert draw("--doc", str(stale)).returncode == 0
    assert stale.read_text("utf-8") == DOC.read_text("utf-8")
