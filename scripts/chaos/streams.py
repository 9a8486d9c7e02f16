"""Kills a real llama-server in the middle of streams, and counts those that go on as if nothing had happened.

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
from tests.extended.real.continued_streams import Outcomes, kill_in_streams

INTERVAL_S = 1.0
PAGE = "continuation.md"


def table(found: dict[str, dict[str, Outcomes]]) -> str:
    lines = [
        "| Runtime | API | Kills | Continued | Finished | Nearly | Wrong | Median pause | Longest |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for runtime, by_path in found.items():
        for path, outcomes in by_path.items():
            kills = outcomes.continued + outcomes.finished + outcomes.ended + len(outcomes.wrong)
            median, longest = outcomes.pauses_ms
            lines.append(
                f"| {runtime} | `{path}` | {kills} | {outcomes.continued} | {outcomes.finished} "
                f"| {outcomes.ended} | {len(outcomes.wrong)} | {median:.0f} ms | {longest:.0f} ms |"
            )
    return "\n".join(lines)


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
    publish(args, table(found))
    for outcomes in (outcomes for by_path in found.values() for outcomes in by_path.values()):
        for wrong in outcomes.wrong:
            print(wrong, file=sys.stderr)
    if any(outcomes.wrong for by_path in found.values() for outcomes in by_path.values()):
        raise SystemExit(1)
