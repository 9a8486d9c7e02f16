"""Half an hour of mixed load on a real server, with crashes, hangs and restarts in between.

Different clients use one ``llamasup run``: some disconnect, some are slow, some send invalid requests. Each
client checks its own answers. Exit code 1 if a request was lost (without a correct answer or an error), if a
slot is busy at the end, if llamasup has more resources than at the start or its memory grows, or if it leaves
anything behind.

    python -m scripts.chaos soak [--minutes 30] [--runtime PATH|embedded] [--seed N] [--write]

The load and the faults are in tests/real/soak*.py; a test runs 90 s of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from scripts.menu import publish
from scripts.processes import machine, runtime_for
from tests.extended.soak.soak import soak
from tests.kit.tiny import tiny_decoder

PAGE = "reliability.md"


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:  # short: sockets lie below it
        home = Path(folder)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = home / "tiny.gguf"
        tiny.write_bytes(tiny_decoder())
        runtime = runtime_for(tiny, args.runtime)
        report = soak(runtime.path, tiny, home, duration_s=args.minutes * 60, seed=args.seed)
    heading = f"### {runtime.name}, {args.minutes:g} min\n\n{machine()}, {time.strftime('%Y-%m-%d')}."
    if report.violations:
        args.write = None
    publish(args, "\n".join((heading, "", *report.table())))
    for violation in report.violations:
        print(f"OFF: {violation}")
    return 1 if report.violations else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--runtime", help="as in llamasup")
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients' choices")
