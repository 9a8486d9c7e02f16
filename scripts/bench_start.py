"""The time from exec to ready of ``llamasup run``, and the part of the server's own start (P5).

Each round starts llamasup, and then the same server command line without llamasup, so that both see the same
machine. The phases come from llamasup's events. Medians over the rounds, with their spread.

    python scripts/bench_start.py [--runtime embedded] [--runs 20] [--model demo] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bare_server import seconds_to_ready

PHASES = {
    "starting": "llamasup: imports, facts, plan, listen, spawn",
    "warming": "server: exec to healthy, and noticing it",
    "ready": "warm-up: the first real token",
}


def main() -> None:
    options = _options()
    llamasup = [sys.executable, "-m", "llamasup"]
    common = [options.model, *(["--runtime", options.runtime] if options.runtime else [])]
    plan = json.loads(subprocess.check_output([*llamasup, "plan", *common, "--json"]))
    print(
        f"{plan['runtime']['kind']} {plan['runtime']['version']}, {platform.machine()}, {os.cpu_count()} CPUs"
    )

    rounds: list[dict[str, float]] = []
    for number in range(options.runs + 1):
        measured = _llamasup_start([*llamasup, "run", *common, "--port", "0", "--events", "jsonl"])
        measured["by hand"] = seconds_to_ready(plan) * 1e3
        if number:  # the first round fills the caches
            rounds.append(measured)

    rows = {name: [one_round[name] for one_round in rounds] for name in rounds[0]}
    rows["llamasup's share"] = [one_round["total"] - one_round["by hand"] for one_round in rounds]
    print(f"{options.runs} runs, milliseconds:\n")
    print(f"| {'':52} | median | {'10 %':>6} | {'90 %':>6} |\n|{'-' * 54}|-------:|-------:|-------:|")
    for name, values in rows.items():
        deciles = statistics.quantiles(values, n=10)
        label = PHASES.get(name, name)
        print(f"| {label:52} | {statistics.median(values):6.0f} | {deciles[0]:6.0f} | {deciles[-1]:6.0f} |")
    share = statistics.median(rows["llamasup's share"])
    verdict = "kept" if share <= 400 else "MISSED"
    print(f"\nP5, at most 400 ms beside the server's own start: {share:.0f} ms, {verdict}")
    if options.json:
        Path(options.json).write_text(json.dumps({"plan": plan["runtime"], "runs": rounds}, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runtime")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _llamasup_start(command: list[str]) -> dict[str, float]:
    """Milliseconds by phase, at the times when a parent program receives the events."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    state_began_s: dict[str, float] = {}
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        state_began_s[event.get("state", event["event"])] = time.monotonic()
        if event["event"] == "ready":
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    marks = [began, state_began_s["starting"], state_began_s["warming"], state_began_s["ready"]]
    phases = {
        name: (after - before) * 1e3 for name, (before, after) in zip(PHASES, pairwise(marks), strict=True)
    }
    return {**phases, "total": (marks[-1] - began) * 1e3}


if __name__ == "__main__":
    main()
