"""Run the stages of ``scripts/check`` and ``scripts/test``, with a line for each stage.

python scripts/stages.py test | all
python scripts/stages.py check [PATH | ARGUMENT OF PYTEST]…

A stage is one command, or several commands that run at the same time. Its line shows how long it took, and
``.build/stages/`` has its output. A stage that fails does not stop the stages after it. What failed stands at
the end, with the command that runs only that again. If a command exits with 77, this machine cannot run it:
the stage is skipped, and so are the stages that need its result.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".build" / "stages"
CANNOT_RUN_HERE = 77
SHOWN_LINES = 200  # of the output of a stage that failed
SHOWN_TESTS = 20  # commands for one test each

Level = Literal["check", "test", "all"]

_COUNTS = re.compile(r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s", re.MULTILINE)
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)
_PERCENT = re.compile(r"\[ *(\d+%)\]")


class Stage(NamedTuple):
    name: str
    commands: Sequence[Sequence[str]]
    env: Mapping[str, str] = {}
    sets: str | None = None
    """The environment variable that gets the last line of standard output, for the stages after this one."""
    needs: str | None = None
    """The environment variable without which the stage is skipped."""


class Outcome(NamedTuple):
    stage: Stage
    exit_codes: Sequence[int]
    output: str

    @property
    def skipped(self) -> bool:
        return not self.exit_codes or CANNOT_RUN_HERE in self.exit_codes

    @property
    def failed(self) -> bool:
        return not self.skipped and any(self.exit_codes)

    @property
    def counts(self) -> str:
        """The counts of pytest, such as ``11880 passed, 5 skipped``."""
        found = _COUNTS.findall(self.output)
        return found[-1] if found else ""

    @property
    def failed_tests(self) -> list[str]:
        return list(dict.fromkeys(_FAILED_TEST.findall(self.output)))


def stages(level: Level) -> list[Stage]:
    """The stages of ``level`` in the order in which they run."""
    static = [
        _lint("."),
        Stage("types", [_tool("mypy"), _types_of_other_systems()]),
        Stage("imports", [_tool("lint-imports")]),
        Stage("counts", [[sys.executable, "scripts/count.py", "--check"]]),
    ]
    quick = _tests("tests", *_without(_NOT_QUICK), workers=cores() + 1)
    if level == "check":
        return [*static, Stage("quick tests", [[*quick, *_without(_ROOMS_WITH_SOCKETS)]])]
    gate = [
        *static,
        Stage("quick tests", [[*quick, "--cov", "--cov-report="]]),
        Stage("coverage of pure modules", [_COVERED]),
        Stage("tests with processes", [_tests("tests/integration", "tests/e2e")]),
        Stage(
            "tests with llama-server", [_tests("tests/real", "tests/clients")], needs="LLAMASUP_TEST_SERVER"
        ),
    ]
    if level == "test":
        return gate
    return [*gate, *_only_all()]


def stages_for(arguments: Sequence[str]) -> list[Stage]:
    """Return the stages for some files or folders: their lint, the types, and their tests.

    pytest gets the arguments that are no path.
    """
    paths = [argument for argument in arguments if (ROOT / argument.partition("::")[0]).exists()]
    options = [argument for argument in arguments if argument not in paths]
    tests = list(dict.fromkeys(nearest_tests(path) for path in paths))
    return [
        _lint(*(path.partition("::")[0] for path in paths)),
        Stage("types", [_tool("mypy")]),
        Stage("tests", [[sys.executable, "-m", "pytest", "-q", *tests, *options]]),
    ]


def nearest_tests(path: str) -> str:
    """The tests of a module or a room: ``tests/core/ROOM/test_MODULE.py``, or the folder nearest to it."""
    if path.startswith(("packaging/", "scripts/")):
        return "tests/scripts"
    if not path.startswith("llamasup/"):
        return path
    mirrored = Path("tests", *Path(path).parts[1:])
    own = mirrored.with_name(f"test_{mirrored.name}")
    candidates = [own, *([mirrored] if mirrored.suffix != ".py" else []), *mirrored.parents]
    return next(str(candidate) for candidate in candidates if (ROOT / candidate).exists())


_COVERED = (sys.executable, "-m", "coverage", "report", "--fail-under=100")
_WITH_BUILD = """
LLAMASUP_TEST_SERVER=$(LLAMASUP_TEST_SERVER= scripts/llama-server "$0") || exit
export LLAMASUP_TEST_SERVER
exec "$@"
"""
_NOT_QUICK = ("integration", "e2e", "real", "clients", "extended")
# Their tests are half of the time of the quick tests. `scripts/check llamasup/core/proxy` runs those of a
# room.
_ROOMS_WITH_SOCKETS = (
    *("core/control", "core/hub", "core/proxy", "core/system"),
    *("features/downloads", "features/ollama", "features/peers"),
    *("features/agent_tools/test_stage.py", "features/agent_tools/test_with_other_stages.py"),
    "features/continuation/test_continued_streams.py",
    *("features/repair/test_conversations.py", "features/repair/test_second_try.py"),
    *("fleet", "security", "service"),
)

_OWN_STAGES = ("extended/agents", "extended/fleet", "extended/windows")


def _without(folders: Sequence[str]) -> list[str]:
    return [f"--ignore=tests/{folder}" for folder in folders]


def _only_all() -> list[Stage]:
    """Return the stages that ``--all`` runs after the gate."""
    rest = {"LLAMASUP_TEST_CASES": "rest"}
    every = {"LLAMASUP_TEST_CASES": "all"}
    made = [
        Stage("bundle", [["scripts/bundle"]], sets="LLAMASUP_TEST_BUNDLE"),
        Stage(
            "bundle without a runtime",
            [["scripts/bundle", "--without-embedded"]],
            sets="LLAMASUP_TEST_BUNDLE_WITHOUT_EMBEDDED",
        ),
        Stage("Windows Python", [["scripts/windows-python"]], sets="LLAMASUP_WINDOWS_PYTHON"),
    ]
    fleet = [Stage("tests of a fleet", [["scripts/test_fleet", "-m", "not extended"]])]
    if os.environ.get("LLAMASUP_TEST_FLEET") == "0":
        fleet = []
    clients = [Stage("tests of clients", [["scripts/test_clients"]])]
    if os.environ.get("LLAMASUP_TEST_CLIENTS") == "0":
        clients = []
    contract = _tests("tests/real", "-m", "contract", "-k", "not embedded")
    return [
        *(
            Stage(f"contract with {build}", [["sh", "-c", _WITH_BUILD, build, *contract]])
            for build in ("0.10092.0", "0.10434.0")
        ),
        Stage("llama-server from source", [["scripts/llama-server", "source"]], sets="LLAMASUP_TEST_SERVER"),
        *(stage for stage in made if not os.environ.get(stage.sets or "")),
        Stage("known vulnerabilities", [["scripts/release", "--audit"]]),
        Stage("other loop or runtime", [_tests("tests", "--ignore=tests/extended")], env=rest),
        Stage(
            "extended tests",
            [_tests("tests/extended", *_without(_OWN_STAGES))],
            env=every,
        ),
        Stage(
            "tests on Windows",
            [_tests("tests/extended/windows", "--maxfail", "3", workers=cores())],
            env=every,
            needs="LLAMASUP_WINDOWS_PYTHON",
        ),
        *fleet,
        *clients,
    ]


def cores() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tool(name: str, *arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name(name)), *arguments]


def _lint(*paths: str) -> Stage:
    return Stage("lint", [_tool("ruff", "check", *paths), _tool("ruff", "format", "--check", *paths)])


def _types_of_other_systems() -> list[str]:
    """One after the other: together they take as long as mypy on this system."""
    mypy = shlex.join(_tool("mypy", "--package", "llamasup"))
    systems = (f"{mypy} --platform {name} --cache-dir .mypy_cache/{name}" for name in ("darwin", "win32"))
    return ["sh", "-c", " && ".join(systems)]


def _tests(*arguments: str, workers: int = 0) -> list[str]:
    # Most tests wait more than they compute: two workers a core. A worker without work takes it from another.
    count = str(workers or 2 * cores())
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        count,
        "--dist",
        "worksteal",
        "--durations=20",
        *arguments,
    ]


def run(stage: Stage, env: dict[str, str], console: Console) -> Outcome:
    """Run a stage and print its line. ``env`` gets the variable that the stage sets."""
    if stage.needs is not None and not env.get(stage.needs):
        console.print(f"{stage.name:<28}    skipped: {stage.needs} is not set")
        return Outcome(stage, [], "")
    log = _log_of(stage)
    began_s = time.monotonic()
    result = log.with_suffix(".result")
    with log.open("wb") as output, result.open("wb") as printed, console.status(stage.name) as status:
        stdout = output if stage.sets is None else printed
        children = [
            subprocess.Popen(command, cwd=ROOT, env={**env, **stage.env}, stdout=stdout, stderr=output)
            for command in stage.commands
        ]
        for child in children:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1.0)
                status.update(f"{stage.name} {_progress(log)}")
    seconds = time.monotonic() - began_s
    outcome = Outcome(
        stage, [child.returncode for child in children], log.read_text("utf-8", errors="replace")
    )
    if stage.sets is not None and not any(outcome.exit_codes):
        env[stage.sets] = result.read_text("utf-8").rstrip().rpartition("\n")[2]
    verdict = "FAILED  " if outcome.failed else "skipped " if outcome.skipped else ""
    console.print(f"{stage.name:<28} {seconds:6.1f} s  {verdict}{outcome.counts}")
    return outcome


def _log_of(stage: Stage) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / (re.sub(r"\W+", "-", stage.name) + ".log")


def _progress(log: Path) -> str:
    """Return how far pytest is, in percent."""
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - 500))
        found = _PERCENT.findall(output.read().decode("utf-8", errors="replace"))
    return found[-1] if found else ""


def report(outcomes: Sequence[Outcome], seconds: float, console: Console) -> int:
    """Print what failed and how to run it again. Returns the exit code."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        console.rule(outcome.stage.name, characters="=")
        console.print("\n".join(outcome.output.splitlines()[-SHOWN_LINES:]), markup=False)
    console.rule(characters="=")
    for outcome in outcomes:
        if outcome.skipped:
            why = outcome.output.rstrip().rpartition("\n")[2] or f"{outcome.stage.needs} is not set"
            console.print(f"skipped: {outcome.stage.name} ({why})", markup=False)
    for outcome in failed:
        console.print(
            f"failed: {outcome.stage.name}. Its output: {_log_of(outcome.stage).relative_to(ROOT)}. Again:"
        )
        again = [shlex.join([_runs(test), test]) for test in outcome.failed_tests]
        if len(again) > SHOWN_TESTS:
            again[SHOWN_TESTS:] = [f"… and {len(again) - SHOWN_TESTS} more"]
        for line in again or [shlex.join(command) for command in outcome.stage.commands]:
            console.print(f"    {line}", markup=False)
    passed = len(outcomes) - len(failed) - sum(outcome.skipped for outcome in outcomes)
    console.print(f"{passed} stages passed, {len(failed)} failed, in {seconds / 60:.1f} min")
    return 1 if failed else 0


def _runs(test: str) -> str:
    """The script for a test: Ray has an environment of its own."""
    return "scripts/test_fleet" if test.startswith("tests/extended/fleet/") else "scripts/test"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("level", choices=["check", "test", "all"])
    chosen, others = parser.parse_known_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    env = dict(os.environ)
    began_s = time.monotonic()
    outcomes = [
        run(stage, env, console) for stage in (stages_for(others) if others else stages(chosen.level))
    ]
    return report(outcomes, time.monotonic() - began_s, console)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
