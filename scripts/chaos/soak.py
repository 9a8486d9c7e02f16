"""Half an hour of mixed load on a real server, with crashes, hangs and restarts in between.

Different clients use one ``llamasup run``: some disconnect, some are slow, some send invalid requests. Each
client checks its own answers. Exit code 1 if a request was lost (without a correct answer or an error), if a
slot is busy at the end, if llamasup has more resources than at the start or its memory grows, or if it leaves
anything behind.

    python -m scripts.chaos soak [--minutes 30] [--runtime PATH|embedded …] [--seed N] [--write]

The load and the faults are in tests/extended/soak/soak*.py; a test runs 90 s of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from scripts.menu import publish
from scripts.pages import side_by_side
from scripts.processes import machine, runtime_for
from tests.extended.soak.soak import soak
from tests.kit.tiny import tiny_decoder

PAGE = "measurements.md"


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:  # short: sockets lie below it
        home = Path(folder)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = home / "tiny.gguf"
        tiny.write_bytes(tiny_decoder())
        columns, violations = {}, []
        for number, runtime in enumerate(args.runtime or [None]):
            found = runtime_for(tiny, runtime)
            (home / f"{number}").mkdir()
            report = soak(found.path, tiny, home / f"{number}", duration_s=args.minutes * 60, seed=args.seed)
            print("\n".join((f"{found.name}\n", *report.table())), file=sys.stderr)
            columns[found.name] = report.summary()
            violations += report.violations
    if violations:
        args.write = None
    heading = f"{machine()}, {args.minutes:g} min, {time.strftime('%Y-%m-%d')}."
    publish(args, f"{heading}\n\n{side_by_side(columns)}")
    for violation in violations:
        print(f"OFF: {violation}")
    return 1 if violations else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--runtime", action="append", help="as in llamasup; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients' choices")
