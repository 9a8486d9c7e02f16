"""Each example of docs/python.md runs unchanged, as a separate program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.e2e.driver import PATIENCE_S
from tests.kit.paths import ROOT
from tests.kit.tour import blocks

pytestmark = pytest.mark.one_runtime

DOCS = (ROOT / "docs" / "python.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCS, re.M | re.S)
(APPLICATION,) = [block for block in BLOCKS if "lifespan=" in block]
PROGRAMS = [block for block in BLOCKS if block is not APPLICATION]


@pytest.fixture(autouse=True)
def chosen(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASUP_RUNTIME", runtime)


def test_page_has_the_expected_examples() -> None:
    assert len(PROGRAMS) == 7
    (shown,) = blocks("py")
    assert shown == PROGRAMS[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_example_runs_and_prints_output(program: str, tmp_path: Path) -> None:
    words = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()


def test_application_example_answers_a_request() -> None:
    names: dict[str, object] = {}
    exec(APPLICATION, names)  # noqa: S102 - our own documentation
    with TestClient(names["app"]) as client:  # type: ignore[arg-type]
        assert client.get("/words").json()["text"]
