"""The lines of ``scripts/check`` and ``scripts/test``, and what they say of a failure."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from scripts import stages
from scripts.stages import Outcome, Stage, nearest_tests, report, run


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(stages, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def python(text: str) -> Sequence[str]:
    return [sys.executable, "-c", text]


def test_line_of_a_stage_has_its_time_and_the_counts_of_pytest(console: Console) -> None:
    outcome = run(Stage("quick tests", [python("print('12 passed, 1 skipped in 3.21s')")]), {}, console)
    assert not outcome.failed
    assert " s  12 passed, 1 skipped\n" in shown(console)


def test_failed_stage_names_the_command_that_runs_only_its_failed_tests_again(console: Console) -> None:
    output = "FAILED tests/cli/test_app.py::test_a[b - c] - assert 1\\n2 failed, 3 passed in 1.00s"
    outcome = run(Stage("quick tests", [python(f"print('{output}'); exit(1)")]), {}, console)
    assert report([outcome], 61, console) == 1
    assert "FAILED  2 failed, 3 passed" in shown(console)
    assert "    scripts/test 'tests/cli/test_app.py::test_a[b - c]'\n" in shown(console)
    assert "0 stages passed, 1 failed, in 1.0 min" in shown(console)


def test_one_failed_command_of_several_fails_the_stage_and_is_shown(console: Console) -> None:
    stage = Stage("types", [python("exit(0)"), python("print('error: [x]'); exit(1)")])
    outcome = run(stage, {}, console)
    assert outcome.failed
    report([outcome], 0, console)
    assert "error: [x]" in shown(console)


def test_exit_code_77_skips_the_stage_and_those_that_need_its_result(console: Console) -> None:
    made = Stage(
        "bundle", [python("import sys; print('strip is missing', file=sys.stderr); exit(77)")], sets="BUNDLE"
    )
    env: dict[str, str] = {}
    outcomes = [
        run(stage, env, console) for stage in (made, Stage("its tests", [python("exit(1)")], needs="BUNDLE"))
    ]
    assert report(outcomes, 0, console) == 0
    assert "skipped: bundle (strip is missing)" in shown(console)
    assert "skipped: its tests (BUNDLE is not set)" in shown(console)


def test_last_line_of_a_stage_is_the_variable_of_the_stages_after_it(console: Console) -> None:
    env: dict[str, str] = {}
    run(
        Stage(
            "build",
            [python("import sys; print('Built.', file=sys.stderr); print('/built/program')")],
            sets="PROGRAM",
        ),
        env,
        console,
    )
    assert env == {"PROGRAM": "/built/program"}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("llamasup/core/queueing/queue_order.py", "tests/core/queueing/test_queue_order.py"),
        ("llamasup/core/queueing/lease.py", "tests/core/queueing"),
        ("llamasup/core/proxy/listeners", "tests/core/proxy/listeners"),
        ("llamasup/errors.py", "tests/test_errors.py"),
        ("tests/cli/test_app.py", "tests/cli/test_app.py"),
    ],
)
def test_nearest_tests_of_a_path(path: str, tests: str) -> None:
    assert nearest_tests(path) == tests


def test_all_has_the_stages_of_the_gate_first() -> None:
    names = [stage.name for stage in stages.stages("test")]
    assert [stage.name for stage in stages.stages("all")][: len(names)] == names


def test_outcome_of_nothing_is_skipped() -> None:
    assert Outcome(Stage("x", []), [], "").skipped
