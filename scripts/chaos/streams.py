"""Kills a real llama-server in the middle of streams, and counts the streams that continue unchanged.

python -m scripts.chaos streams [--runtime PATH …] [--kills 200] [--seed N] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from scripts.menu import publish
from scripts.pages import side_by_side
from tests.extended.real.continued_streams import Outcomes, kill_in_streams

INTERVAL_S = 1.0
PAGE = "measurements.md"


def summary(by_path: dict[str, Outcomes]) -> dict[str, str]:
    """The column of a runtime. The APIs differ only in their pauses."""
    for path, outcomes in by_path.items():
        print(f"{path}: {outcomes}, pauses of {outcomes.pauses_ms} ms", file=sys.stderr)
    found = by_path.values()
    medians = sorted(outcomes.pauses_ms[0] for outcomes in found)
    counts = {
        "continued": sum(outcomes.continued for outcomes in found),
        "finished before the kill": sum(outcomes.finished for outcomes in found),
        "finished but for the events after the text": sum(outcomes.ended for outcomes in found),
        "wrong": sum(len(outcomes.wrong) for outcomes in found),
    }
    return {
        "APIs": f"{len(by_path)}",
        "kills": f"{sum(counts.values())}",
        **{name: f"{count}" for name, count in counts.items() if count or not name.startswith("finished")},
        "median pause, by API": f"{medians[0]:.0f} to {medians[-1]:.0f} ms",
        "longest pause": f"{max(outcomes.pauses_ms[1] for outcomes in found):.0f} ms",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", action="append", help="may be given more than once; default: embedded")
    parser.add_argument("--kills", type=int, default=200, help="for each runtime")
    parser.add_argument("--seed", type=int, default=1)


def main(args: argparse.Namespace) -> None:
    found = {}
    with tempfile.TemporaryDirectory(prefix="stress-streams-") as home:
        for name in ("STATE_HOME", "CACHE_HOME", "CONFIG_HOME", "RUNTIME_DIR"):
            os.environ[f"XDG_{name}"] = home
        for runtime in args.runtime or ["embedded"]:
            name = runtime if runtime == "embedded" else Path(runtime).name
            found[name] = asyncio.run(
                kill_in_streams(runtime, "demo", args.kills, args.seed, interval_s=INTERVAL_S)
            )
    publish(args, side_by_side({name: summary(by_path) for name, by_path in found.items()}))
    for outcomes in (outcomes for by_path in found.values() for outcomes in by_path.values()):
        for wrong in outcomes.wrong:
            print(wrong, file=sys.stderr)
    if any(outcomes.wrong for by_path in found.values() for outcomes in by_path.values()):
        raise SystemExit(1)
