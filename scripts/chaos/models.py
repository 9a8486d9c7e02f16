"""``llamasup serve`` with 8 models in memory for 2 to 3, under random load and random changes.

Clients request models by name. One key sends more requests at once than the queue holds, and some requests
make their llama-server abort: both must cost the other clients nothing. Meanwhile the script kills processes,
replaces model files, edits and breaks the config, and loads and unloads models. It checks every answer: each
version of each model has its own words, so it detects an answer of the wrong model or of a replaced file.
Exit code 1 if an answer is wrong, missing or cut without an error event, if memory or processes disagree with
the status, or if anything is left behind.

    python -m scripts.chaos models [--minutes 10] [--runtime PATH|embedded …] [--seed N] [--write]

The seed decides the changes, the requests, their order and the pauses. The load is in
tests/extended/soak/stress*.py; a test runs 30 s of it on each runtime.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from scripts.menu import publish
from scripts.pages import side_by_side
from scripts.processes import machine, runtime_for
from tests.extended.soak.stress import Report, stress
from tests.kit.tiny import tiny_decoder

PAGE = "measurements.md"


def main(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children would inherit this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clean-up runs
    columns, reports = {}, []
    for runtime in args.runtime or [os.environ.get("LLAMASUP_TEST_SERVER") or "embedded"]:
        name, report = of_runtime(runtime, args.minutes, args.seed)
        print("\n".join((f"{name}\n", *report.table())), file=sys.stderr)
        columns[name] = report.summary()
        reports.append(report)
        for violation in report.violations:
            print(f"OFF: {violation}")
    failed = any(report.violations for report in reports)
    if failed:
        args.write = None
    heading = f"{machine()}, {args.minutes:g} min, {time.strftime('%Y-%m-%d')}."
    publish(args, f"{heading}\n\n{side_by_side(columns)}")
    return 1 if failed else 0


def of_runtime(runtime: str, minutes: float, seed: int) -> tuple[str, Report]:
    with tempfile.TemporaryDirectory(prefix="stress-", dir="/tmp") as folder:  # short: sockets lie below it
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = Path(folder, "tiny.gguf")
        tiny.write_bytes(tiny_decoder())
        found = runtime_for(tiny, runtime)
        print(f"{found.name}: seed {seed}", file=sys.stderr, flush=True)
        return found.name, stress(found.path, Path(folder), duration_s=minutes * 60, seed=seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for each runtime")
    parser.add_argument("--runtime", action="append", help="as in llamasup; may be repeated")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(1_000_000), help="default: a random one"
    )
