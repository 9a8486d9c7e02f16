"""Show that the tests catch faults: one-line faults drawn at random, in a throw-away copy of the checkout.

    python -m scripts.chaos mutants --seed N [--stages own,room,quick] [--skip FAULT=WHY …] [--only FAULT …]
    python -m scripts.chaos mutants --seed N --list

Half of the faults are in pure modules, half in modules with effects. For each, the stages of ``STAGES`` run
until one fails. A fault is caught by a test that fails with the fault, passes without it, and fails with it
again. A test that does not is left out, and its stage runs again.

A fault that changes no behaviour is replaced: ``--skip`` names it with the reason, and the next fault that is
drawn takes its place. Prints a Markdown table. Exit code 1 if a fault survived.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.chaos.mutation import Fault, applied, chosen, faults_of
from scripts.pages import ROOT
from scripts.pure_modules import pure_files

NOT_MUTATED = (
    "llamasup/embedded/",  # a program of its own
    "llamasup/core/system/native/macos",
    "llamasup/core/system/native/windows",
)


@dataclass(frozen=True)
class Stage:
    """Arguments of pytest.

    ``{own}``: the tests of the module. ``{room}``: those of its room. ``{own_processes}``: the tests with
    processes that import the module.
    """

    name: str
    arguments: str
    limit_s: int  # a fault can make the tests hang


NOT_QUICK = ("integration", "e2e", "real", "clients", "extended")
QUICK = " ".join(["tests", *(f"--ignore=tests/{folder}" for folder in NOT_QUICK)])

# Each stage runs only if the fault passes the stages before it. The stages own, room and own processes save
# time; the others are those of scripts/test. The last one needs $LLAMASUP_TEST_SERVER.
STAGES = (
    Stage("own", "-o timeout=180 {own}", 900),
    Stage("room", "-o timeout=180 -n WORKERS {room}", 1200),
    Stage("quick", f"-o timeout=180 -n WORKERS {QUICK}", 2400),
    Stage("own processes", "-n WORKERS {own_processes}", 1200),
    Stage("processes", "-n WORKERS --dist worksteal tests/integration tests/e2e", 3600),
    Stage("real", "-n WORKERS --dist worksteal tests/real tests/clients", 3600),
)


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    passed: bool
    failed: Sequence[str]
    """The failed tests; also files that could not be imported."""
    ending: str


@dataclass
class Outcome:
    """The verdict of the tests about a fault."""

    fault: Fault
    stage: str = ""
    caught_by: str = ""
    seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)
    """Tests that failed without the fault as well, or passed with it at the second time."""


class Copy:
    """A copy of the checkout, with a virtual environment in which ``llamasup`` is the copied package.

    Tests start llamasup as a process with another folder and a new environment. So the environment variable
    PYTHONPATH is not enough to have the copied package there.
    """

    def __init__(self, folder: Path, workers: str) -> None:
        self.root = folder / "checkout"
        self._workers = workers
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._bin = self._make_venv(folder / "venv")

    def _make_venv(self, folder: Path) -> Path:
        venv.create(folder, with_pip=False, symlinks=True)
        bin_folder = folder / "bin"
        (packages,) = (folder / "lib").glob("python*/site-packages")
        installed = [path for path in sys.path if path.endswith("site-packages")]
        # The .pth files of the folders named here are not read: neither is that of the original package.
        (packages / "copy.pth").write_text("\n".join([str(self.root), *installed]) + "\n")
        command = bin_folder / "llamasup"
        command.write_text(
            f"#!{bin_folder}/python\nimport sys\nfrom llamasup.cli import main\nsys.exit(main())\n"
        )
        command.chmod(0o755)
        return bin_folder

    @contextmanager
    def mutated(self, fault: Fault) -> Iterator[None]:
        path = self.root / fault.file
        source = path.read_text("utf-8")
        self._write(path, applied(fault, source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, "utf-8")
        # Python compares time and size of the source: a change within the same second can keep both.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, arguments: Sequence[str], limit_s: int) -> Run:
        last_failed = self.root / ".pytest_cache" / "v" / "cache" / "lastfailed"
        last_failed.unlink(missing_ok=True)
        python = str(self._bin / "python")
        words = [self._workers if word == "WORKERS" else word for word in arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] = f"{self._bin}{os.pathsep}{environment['PATH']}"
        process = subprocess.Popen(
            [python, "-m", "pytest", "-q", "-x", *words],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Run(False, (), f"nothing within {limit_s} s")
        failed = list(json.loads(last_failed.read_text())) if last_failed.exists() else []
        lines = [line for line in output.splitlines() if line.strip()]
        no_tests = process.returncode == 5
        return Run(process.returncode == 0 or no_tests, failed, lines[-1] if lines else "")


def arguments_for(stage: Stage, fault: Fault, root: Path) -> list[str] | None:
    """The words for pytest. None if the stage has no tests for the module of the fault."""
    room = room_of(fault.file, root)
    tests = {
        "own": shlex.join(own_tests(fault.file, root)),
        "room": room or "",
        "own_processes": shlex.join(own_tests(fault.file, root, within="integration")),
    }
    if any(not found and f"{{{name}}}" in stage.arguments for name, found in tests.items()):
        return None
    return shlex.split(stage.arguments.format(**tests))


def room_of(file: str, root: Path, within: str = "") -> str | None:
    """The folder with the tests of a module's room, below the folder ``within`` of ``tests``."""
    parts = Path(file).parts
    folder = Path("tests", within, parts[1])
    return str(folder) if len(parts) > 2 and (root / folder).is_dir() else None


def own_tests(file: str, root: Path, within: str = "") -> list[str]:
    """The files of tests in the module's room that import the module or have its name."""
    path = Path(file)
    module = ".".join(path.with_suffix("").parts)
    room = room_of(file, root, within)
    tests = sorted((root / (room or Path("tests", within))).glob("**/test_*.py" if room else "test_*.py"))
    return [
        str(name.relative_to(root))
        for name in tests
        if name.stem == f"test_{path.stem}" or f"{module} import" in name.read_text("utf-8")
    ]


def judged(fault: Fault, copy: Copy, stages: Sequence[Stage]) -> Outcome:
    """Run the stages until a test catches the fault."""
    outcome = Outcome(fault)
    began_s = time.monotonic()
    for stage in stages:
        arguments = arguments_for(stage, fault, copy.root)
        if arguments is None:
            continue
        while not (run := _run_with(fault, copy, arguments, stage, outcome)).passed:
            caught = _confirmed(fault, copy, run, arguments, stage)
            if caught:
                outcome.stage, outcome.caught_by = stage.name, caught
                outcome.seconds = time.monotonic() - began_s
                return outcome
            if not run.failed:
                raise SystemExit(f"The stage {stage.name} fails without a fault: {run.ending}")
            outcome.left_out += run.failed
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _run_with(fault: Fault, copy: Copy, arguments: Sequence[str], stage: Stage, outcome: Outcome) -> Run:
    left_out = [word for test in outcome.left_out for word in ("--deselect", test)]
    with copy.mutated(fault):
        return copy.pytest([*arguments, *left_out], stage.limit_s)


def _confirmed(fault: Fault, copy: Copy, run: Run, arguments: Sequence[str], stage: Stage) -> str:
    """The test that fails because of the fault. Empty if there is none."""
    for test in run.failed:
        options = ["-o", "timeout=180", test]
        if not copy.pytest(options, stage.limit_s).passed:
            continue
        with copy.mutated(fault):
            if not copy.pytest(options, stage.limit_s).passed:
                return test
    if not run.failed and copy.pytest(arguments, stage.limit_s).passed:
        return run.ending
    return ""


# --- the faults, and the table -------------------------------------------------------------------


def drawn(count: int, seed: int, skipped: Mapping[str, str]) -> list[Fault]:
    """Half of the faults in pure modules, half in modules with effects."""
    pure = set(pure_files(ROOT))
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "llamasup").rglob("*.py"))
    files = [name for name in files if not name.startswith(NOT_MUTATED)]
    groups = {
        "pure": [name for name in files if name in pure],
        "effect": [name for name in files if name not in pure],
    }
    found = []
    for group, names in groups.items():
        faults = [fault for name in names for fault in faults_of(name, (ROOT / name).read_text("utf-8"))]
        wanted = count // 2 if group == "effect" else count - count // 2
        found += chosen(faults, wanted, seed=f"{seed} {group}", without=skipped)
    return found


def table(outcomes: Sequence[Outcome], skipped: Mapping[str, str]) -> str:
    lines = ["| Module | Kind | Before → after | Caught by | Stage | After |", "|---|---|---|---|---|---:|"]
    for outcome in outcomes:
        caught = f"`{_cell(outcome.caught_by)}`" if outcome.stage else "**survived**"
        lines.append(
            f"| {_place(outcome.fault)} | {outcome.fault.kind} | {_change(outcome.fault)} | {caught} "
            f"| {outcome.stage} | {outcome.seconds:.0f} s |"
        )
    caught_count = sum(bool(outcome.stage) for outcome in outcomes)
    lines += ["", f"{caught_count} of {len(outcomes)} caught."]
    if skipped:
        lines += ["", "| Replaced | Why |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(why)} |" for name, why in skipped.items()]
    left_out = sorted({test for outcome in outcomes for test in outcome.left_out})
    lines += ["", *(f"Left out, since the result does not depend on a fault: `{test}`" for test in left_out)]
    return "\n".join(lines).rstrip()


def _place(fault: Fault) -> str:
    return f"{fault.file.removeprefix('llamasup/')}:{fault.line}"


def _change(fault: Fault) -> str:
    return f"`{_cell(fault.before.strip())}` → `{_cell(fault.after.strip())}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def main(args: argparse.Namespace) -> int:
    skipped = dict(given.partition("=")[::2] for given in args.skip)
    faults = drawn(args.count, args.seed, skipped)
    if args.only:
        faults = [fault for fault in faults if any(words in fault.name for words in args.only)]
    if args.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.before.strip()}\n    {fault.after.strip()}")
        return 0
    stages = [stage for stage in STAGES if stage.name in args.stages.split(",")]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-", dir="/tmp") as folder:  # short: sockets lie below it
        copy = Copy(Path(folder), args.workers)
        for fault in faults:
            outcomes.append(judged(fault, copy, stages))
            print(f"{fault.name}: {outcomes[-1].caught_by or 'survived'}", file=sys.stderr, flush=True)
    print(table(outcomes, skipped))
    return 0 if all(outcome.stage for outcome in outcomes) else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    names = ",".join(stage.name for stage in STAGES)
    parser.add_argument("--stages", default=names, help=f"of {names}; the order is always this one")
    parser.add_argument("--workers", default="2", help="of pytest-xdist")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="FAULT=WHY", help="an equivalent fault"
    )
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="or a part of its name")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
