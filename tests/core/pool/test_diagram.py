"""The script that draws the states of a model into docs/design.md."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from scripts.pool_diagram import DOC
from tests.kit.script import run_script

draw = partial(run_script, "pool_diagram.py")


@pytest.mark.extended
def test_check_finds_stale_diagram_and_the_script_updates_it(tmp_path: Path) -> None:
    stale = tmp_path / "design.md"
    stale.write_text(DOC.read_text("utf-8").replace("absent --> loading: Load", "absent --> loading: Other"))
    done = draw("--check", "--doc", str(stale))
    assert (done.returncode, "is stale" in done.stderr) == (1, True)
    assert draw("--doc", str(stale)).returncode == 0
    assert stale.read_text("utf-8") == DOC.read_text("utf-8")
