"""``scripts/docs.py``: what it generates is current, and an outdated part is found and written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import docs
from scripts.generated import security
from tests.kit.paths import ROOT

# tests/core/pool/test_model_steps.py draws it from a sweep that its tests share. Alone, it takes longer.
SLOW = {"pool-states"}
PARTS = [pytest.param(name, marks=pytest.mark.extended if name in SLOW else ()) for name in docs.PARTS]


@pytest.mark.parametrize("name", PARTS)
def test_part_is_current(name: str) -> None:
    assert docs.keep(name, ROOT, check=True) == 0, f"run scripts/docs.py {name}"


@pytest.mark.parametrize(
    ("name", "current", "other"),
    [
        ("states", "ready --> stopping: Kill", "ready --> stopping: Other"),
        ("metrics", "- `llamasup_replays_total{", "- `llamasup_reruns_total{"),
        ("grafana", "llamasup_queued", "llamasup_waiting"),
        ("arguments", "    nice: int", "    kind: int"),
        pytest.param("pool-states", "absent --> loading: load", "absent --> x", marks=pytest.mark.extended),
    ],
)
def test_outdated_part_is_found_and_rewritten(
    name: str, current: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = docs.PARTS[name].file
    stale, text = tmp_path / file, (ROOT / file).read_text("utf-8")
    stale.parent.mkdir(parents=True)
    stale.write_text(text.replace(current, other))
    assert stale.read_text("utf-8") != text
    assert docs.keep(name, tmp_path, check=True) == 1
    assert capsys.readouterr().err == f"{stale} is stale: run scripts/docs.py {name}\n"
    assert docs.keep(name, tmp_path, check=False) == 0
    assert stale.read_text("utf-8") == text


def test_page_without_marks_is_unchanged(tmp_path: Path) -> None:
    page = tmp_path / docs.PARTS["metrics"].file
    page.parent.mkdir()
    page.write_text("# Something else\n")
    assert docs.keep("metrics", tmp_path, check=False) == 2
    assert page.read_text() == "# Something else\n"


def test_every_promise_of_security_has_a_test() -> None:
    assert {check.promise for check in security.all_checks()} == set(security.PROMISES)


def test_line_of_a_check_comes_from_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        '@pytest.mark.check("X2", "a | b")\n'
        '@pytest.mark.check("X1")\n'
        '@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)\n'
        "def test_what_is_odd(raw): ...\n"
        "def test_what_shows_nothing(): ...\n"
    )
    listed = security.checks_list()
    assert listed.count("\n- [test_what_is_odd](../tests/test_it.py)\n") == 2
    assert "nothing" not in listed
