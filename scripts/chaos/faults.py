"""The fault matrix: for each fault, what clients see, the time until llamasup serves again, and what is left.

Every fault is injected into a real server under ``llamasup run``, for each runtime. Exit code 1 if a promise
is broken: a request without a received byte is lost, a stream is cut without an error event, something is
left behind, a crash costs more than the server's own load time and 100 ms (P6), or crash cycles leak (S18).

    python -m scripts.chaos faults [--runtime PATH|embedded …] [--quick] [--only WORDS] [--write]

The faults themselves are in tests/extended/real/fault_cases.py; the tests run them too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.menu import publish
from scripts.pages import ROOT
from scripts.processes import machine, runtime_for, seconds_to_ready
from tests.e2e.driver import command
from tests.extended.real.cycles import ResourceUsage, crash_cycles, leaked_resources
from tests.extended.real.fault_cases import CASES, Case, UnsupportedFault, idle
from tests.extended.real.fault_clients import Ending
from tests.extended.real.fault_testbed import FaultTestbed, Outcome
from tests.extended.real.flood import flooded_over_quiet
from tests.kit.tiny import tiny_decoder
from tests.real.remains import folders_of

PAGE = "reliability.md"
MAX_ADDED_S = 0.1  # P6
GONE_WITHIN_S = 2.0  # S14
MAX_SLOWED = 1.1


class Verdict:
    """The broken promises."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)
            print(f"BROKEN: {otherwise}", file=sys.stderr)


def main(args: argparse.Namespace) -> int:
    if args.cycles:
        return only_cycles(*args.cycles)
    verdict = Verdict()
    sections = [f"{machine()}, {time.strftime('%Y-%m-%d')}."]
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as folder:  # short: sockets lie below it
        home = Path(folder)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # one for all: probing a runtime takes 0.2 s
        (home / "cache").mkdir()
        for number, runtime in enumerate(args.runtime or [None, "embedded"]):
            runtime_folder = home / f"r{number}"
            runtime_folder.mkdir()
            tiny = runtime_folder / "tiny.gguf"
            tiny.write_bytes(tiny_decoder())
            testbed, name = prepared(runtime, runtime_folder, tiny)
            sections.append(f"### {name}\n")
            sections += of_runtime(testbed, args, verdict)
    text = "\n".join(sections)
    publish(args, text)
    for violation in verdict.broken:
        print(f"BROKEN: {violation}", file=sys.stderr)
    return 1 if verdict.broken else 0


def prepared(runtime: str | None, folder: Path, tiny: Path) -> tuple[FaultTestbed, str]:
    """The testbed of a runtime, and its name. ``runtime`` None: the runtime that llamasup finds."""
    found = runtime_for(tiny, runtime)
    return FaultTestbed(found.path, folder, tiny), found.name


def of_runtime(testbed: FaultTestbed, args: argparse.Namespace, verdict: Verdict) -> Iterator[str]:
    cases = [case for case in CASES if args.only in case.name and not (args.quick and case.slow)]
    yield from matrix(testbed, cases, verdict)
    if args.only:
        return
    yield from crash_to_served(testbed, 3 if args.quick else 15, verdict)
    services, crashes = (4, 10) if args.quick else (21, 50)  # the first service is a warm-up
    yield from cycles(testbed, services, crashes, verdict)
    yield from flood(testbed, 10 if args.quick else 60, verdict)


# --- the matrix ----------------------------------------------------------------------------------


def matrix(testbed: FaultTestbed, cases: Sequence[Case], verdict: Verdict) -> Iterator[str]:
    yield "| Fault | Clients saw | Noticed after | Back-off | Serves again after | Left behind |"
    yield "|---|---|---:|---:|---:|---|"
    for case in cases:
        began_s = time.monotonic()
        try:
            outcome = case.run(testbed)
        except UnsupportedFault as why:
            yield f"| {case.name} | not run: {why} | | | | |"
            continue
        except AssertionError as error:  # llamasup did not start, did not serve again, or did not end
            yield f"| {case.name} | **failed** | | | | |"
            verdict.expect(False, f"{case.name}: {error}")
            continue
        print(f"{testbed.runtime}: {case.name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr)
        judge(case, outcome, verdict)
        yield row(case, outcome)
    yield ""


def judge(case: Case, outcome: Outcome, verdict: Verdict) -> None:
    detail = f"{case.name}: {outcome.detail}"
    verdict.expect(not outcome.left, f"{case.name}: left behind: {outcome.left}")
    if case.ends_llamasup:
        verdict.expect(
            (outcome.gone_s or 0.0) <= GONE_WITHIN_S, f"{case.name}: {outcome.gone_s} s to be gone"
        )
    else:
        verdict.expect(outcome.count(Ending.LOST) == 0, f"lost without a byte: {detail}")
        verdict.expect(outcome.count(Ending.CUT) == 0, f"cut without an error event: {detail}")


def row(case: Case, outcome: Outcome) -> str:
    endings = "; ".join(
        f"{outcome.count(ending)} {ending.value}" for ending in Ending if outcome.count(ending)
    )
    if outcome.gone_s is not None:
        left = f"nothing after {shown(outcome.gone_s)}"
    else:
        left = ", ".join(outcome.left) or "nothing"
    waited = shown(outcome.restart_in_s) if outcome.restart_in_s else "–"
    cells = (case.name, endings, shown(outcome.detected_s), waited, shown(outcome.serves_s), left)
    return f"| {' | '.join(cells)} |"


def shown(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


# --- single figures ------------------------------------------------------------------------------


def plan_of(testbed: FaultTestbed, model: Path) -> Mapping[str, Any]:
    arguments = command("plan", str(model), "--runtime", testbed.runtime, "--json")
    plan: dict[str, Any] = json.loads(
        subprocess.check_output(arguments, env=os.environ | folders_of(testbed.home))
    )
    return plan


def crash_to_served(testbed: FaultTestbed, repeats: int, verdict: Verdict) -> Iterator[str]:
    """P6, alternating with the same command line without llamasup."""
    plan = plan_of(testbed, testbed.tiny)
    own_s, added_s = [], []
    for _ in range(repeats):
        own_s.append(seconds_to_ready(plan))
        late_s = idle(testbed).late_s
        assert late_s is not None
        added_s.append(late_s - own_s[-1])
    added = statistics.median(added_s)
    verdict.expect(added <= MAX_ADDED_S, f"P6: {shown(added)} added to the server's own load time")
    yield (
        f"**Crash to served again** (P6; {repeats} times, medians): a request sent right after the SIGKILL "
        f"waits {shown(added)} ({shown(min(added_s))} to {shown(max(added_s))}) longer than the server's own "
        f"load time. That time is {shown(statistics.median(own_s))}, measured in turn with the same command "
        "line without llamasup. Promised: at most 100 ms.\n"
    )


def cycles(testbed: FaultTestbed, services: int, crashes: int, verdict: Verdict) -> Iterator[str]:
    """S18, in a process of its own, because this process has other resources."""
    home = testbed.new_folder()
    words = [testbed.runtime, str(testbed.tiny), str(home), str(services), str(crashes)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.chaos", "faults", "--cycles", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | folders_of(home),
        cwd=ROOT,
    )
    verdict.expect(done.returncode == 0, f"S18: {done.stdout}")
    yield done.stdout


def only_cycles(runtime: str, model: str, home: str, services: str, crashes: str) -> int:
    usages = crash_cycles(runtime, Path(model), Path(home), services=int(services), crashes=int(crashes))
    before, after = usages[0], usages[-1]
    print(
        f"**{after.cycles - before.cycles:,} crash cycles** (S18): a server is killed in mid-stream "
        f"{crashes} times, then stopped and started, all this {len(usages) - 1} times in one process:\n\n"
        f"| | descriptors | threads | tasks | children | files | RSS |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for name, usage in (("before", before), ("after", after)):
        print(f"| {name} | {' | '.join(map(str, figures(usage)))} | {usage.rss_bytes / 1e6:.1f} MB |")
    growth = leaked_resources(usages)
    print("".join(f"\n{growth_line}" for growth_line in growth))
    return 1 if growth else 0


def figures(usage: ResourceUsage) -> tuple[int, ...]:
    return usage.descriptors, usage.threads, usage.tasks, usage.children, usage.files


def flood(testbed: FaultTestbed, rounds: int, verdict: Verdict) -> Iterator[str]:
    """S19."""
    pairs_s = flooded_over_quiet(testbed, rounds=rounds, requests=50)
    ratios = sorted(flooded_s / quiet_s for quiet_s, flooded_s in pairs_s)
    ratio = statistics.median(ratios)
    verdict.expect(ratio <= MAX_SLOWED, f"S19: with a flooded log a request takes {ratio:.2f} of its time")
    yield (
        f"**A million log lines a minute** (S19): a small request takes {ratio:.2f} times as long as with "
        f"a quiet log (median of {rounds} rounds, in turn; half of them within "
        f"{ratios[len(ratios) // 4]:.2f}–{ratios[3 * len(ratios) // 4]:.2f}).\n"
    )


# --- options -------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", nargs="+", help="as in llamasup; default: both kinds")
    parser.add_argument("--quick", action="store_true", help="skip slow faults, and repeat less")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults with these words in their name")
    parser.add_argument("--cycles", nargs=5, help=argparse.SUPPRESS)
