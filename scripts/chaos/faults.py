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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.menu import publish
from scripts.pages import ROOT, side_by_side
from scripts.processes import machine, runtime_for, seconds_to_ready
from tests.e2e.driver import command
from tests.extended.real.cycles import crash_cycles, leaked_resources
from tests.extended.real.fault_cases import CASES, Case, UnsupportedFault, idle
from tests.extended.real.fault_clients import Ending
from tests.extended.real.fault_testbed import FaultTestbed, Outcome
from tests.extended.real.flood import flooded_over_quiet
from tests.kit.tiny import tiny_decoder
from tests.real.remains import folders_of

PAGE = "measurements.md"
MAX_ADDED_S = 0.1  # P6
GONE_WITHIN_S = 2.0  # S14
MAX_SLOWED = 1.1
COUNTED = ("descriptors", "threads", "tasks", "children", "files")


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
    outcomes: dict[str, dict[str, Outcome | str]] = {}
    figures: dict[str, dict[str, str]] = {}
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
            cases = [case for case in CASES if args.only in case.name and not (args.quick and case.slow)]
            outcomes[name] = dict(matrix(testbed, cases, verdict))
            figures[name] = {} if args.only else single_figures(testbed, args.quick, verdict)
    head = f"{machine()}, {time.strftime('%Y-%m-%d')}."
    publish(args, "\n\n".join((head, table(list(outcomes.values())), side_by_side(figures))))
    for violation in verdict.broken:
        print(f"BROKEN: {violation}", file=sys.stderr)
    return 1 if verdict.broken else 0


def prepared(runtime: str | None, folder: Path, tiny: Path) -> tuple[FaultTestbed, str]:
    """The testbed of a runtime, and its name. ``runtime`` None: the runtime that llamasup finds."""
    found = runtime_for(tiny, runtime)
    return FaultTestbed(found.path, folder, tiny), found.name


def single_figures(testbed: FaultTestbed, quick: bool, verdict: Verdict) -> dict[str, str]:
    services, crashes = (4, 10) if quick else (21, 50)  # the first service is a warm-up
    return {
        **crash_to_served(testbed, 3 if quick else 15, verdict),
        **cycles(testbed, services, crashes, verdict),
        **flood(testbed, 10 if quick else 60, verdict),
    }


# --- the matrix ----------------------------------------------------------------------------------


def matrix(
    testbed: FaultTestbed, cases: Sequence[Case], verdict: Verdict
) -> Iterator[tuple[str, Outcome | str]]:
    """Yield the outcome of each fault, or why it has none."""
    for case in cases:
        began_s = time.monotonic()
        try:
            outcome = case.run(testbed)
        except UnsupportedFault as why:
            yield case.name, f"not run: {why}"
            continue
        except AssertionError as error:  # llamasup did not start, did not serve again, or did not end
            yield case.name, "**failed**"
            verdict.expect(False, f"{case.name}: {error}")
            continue
        took_s = time.monotonic() - began_s
        print(f"{testbed.runtime}: {' | '.join(row(outcome))} | {case.name}: {took_s:.1f} s", file=sys.stderr)
        judge(case, outcome, verdict)
        yield case.name, outcome


def table(runtimes: Sequence[Mapping[str, Outcome | str]]) -> str:
    """A row for each fault, with the longest times of all runtimes."""
    lines = [
        "| Fault | Clients saw | Noticed after | Serves again after |",
        "|---|---|---:|---:|",
    ]
    for name in runtimes[0]:
        found = [outcomes[name] for outcomes in runtimes if name in outcomes]
        failed = [outcome for outcome in found if isinstance(outcome, str)]
        measured = [outcome for outcome in found if not isinstance(outcome, str)]
        cells = row(*measured) if measured else ("", "", "")
        seen = " · ".join(dict.fromkeys([*failed, *([cells[0]] if measured else [])]))
        lines.append(f"| {name} | {' | '.join((seen, *cells[1:]))} |")
    return "\n".join(lines)


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


def row(*outcomes: Outcome) -> tuple[str, str, str]:
    """The cells of a fault: what clients saw and what was left, and the longest times."""
    gone_s = longest(outcome.gone_s for outcome in outcomes)
    serves_s = longest(outcome.serves_s for outcome in outcomes)
    left = dict.fromkeys(name for outcome in outcomes for name in outcome.left)
    seen = " · ".join(dict.fromkeys(map(endings, outcomes)))
    return (
        f"{seen}; **left behind**: {', '.join(left)}" if left else seen,
        shown(longest(outcome.detected_s for outcome in outcomes)),
        shown(serves_s) if gone_s is None else f"gone after {shown(gone_s)}",
    )


def endings(outcome: Outcome) -> str:
    counts = {ending: outcome.count(ending) for ending in Ending}
    return "; ".join(f"{count} {ending.value}" for ending, count in counts.items() if count)


def longest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


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


def crash_to_served(testbed: FaultTestbed, repeats: int, verdict: Verdict) -> dict[str, str]:
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
    return {
        "load time of the server": shown(statistics.median(own_s)),
        f"a request right after a SIGKILL waits longer by (P6, median of {repeats}; at most 100 ms)": (
            f"{shown(added)} ({shown(min(added_s))} to {shown(max(added_s))})"
        ),
    }


def cycles(testbed: FaultTestbed, services: int, crashes: int, verdict: Verdict) -> dict[str, str]:
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
    name, _, changes = done.stdout.strip().partition(": ")
    return {name: changes}


def only_cycles(runtime: str, model: str, home: str, services: str, crashes: str) -> int:
    usages = crash_cycles(runtime, Path(model), Path(home), services=int(services), crashes=int(crashes))
    before, after = usages[0], usages[-1]
    counts = {name: (getattr(before, name), getattr(after, name)) for name in COUNTED}
    changes = [f"{old} → {new} {name}" for name, (old, new) in counts.items() if old != new]
    changes = changes or [f"no more {', '.join(COUNTED[:-1])} or {COUNTED[-1]}"]
    changes.append(f"{before.rss_bytes / 1e6:.1f} → {after.rss_bytes / 1e6:.1f} MB")
    growth = leaked_resources(usages)
    print(f"{after.cycles - before.cycles:,} crash cycles (S18): {', '.join([*changes, *growth])}")
    return 1 if growth else 0


def flood(testbed: FaultTestbed, rounds: int, verdict: Verdict) -> dict[str, str]:
    """S19."""
    pairs_s = flooded_over_quiet(testbed, rounds=rounds, requests=50)
    ratios = sorted(flooded_s / quiet_s for quiet_s, flooded_s in pairs_s)
    ratio = statistics.median(ratios)
    verdict.expect(ratio <= MAX_SLOWED, f"S19: with a flooded log a request takes {ratio:.2f} of its time")
    middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f}"
    name = f"factor of a request's time with a million log lines a minute (S19, median of {rounds})"
    return {name: f"{ratio:.2f} (half: {middle})"}


# --- options -------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", nargs="+", help="as in llamasup; default: both kinds")
    parser.add_argument("--quick", action="store_true", help="skip slow faults, and repeat less")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults with these words in their name")
    parser.add_argument("--cycles", nargs=5, help=argparse.SUPPRESS)
