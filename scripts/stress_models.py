#!/usr/bin/env python3
"""``llamasup serve`` with 8 models in memory for 2 to 3, under random load and random changes.

Clients request models by name. One key sends more requests at once than the queue holds, and some requests
make their llama-server abort: both must cost the other clients nothing. Meanwhile the script kills processes,
replaces model files, edits and breaks the config, and loads and unloads models. It checks every answer: each
version of each model has its own words, so it detects an answer of the wrong model or of a replaced file.
Exit code 1 if an answer is wrong, missing or cut without an error event, if memory or processes disagree with
the status, or if anything is left behind.

    python scripts/stress_models.py [--minutes 10] [--runtime PATH|embedded …] [--seed N] [--docs PAGE]

The seed decides the changes, the requests, their order and the pauses. The load is in
tests/real/stress*.py; a test runs 30 s of it on each runtime.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.faults import machine  # noqa: E402
from scripts.pages import write_between  # noqa: E402
from tests.e2e.driver import command  # noqa: E402
from tests.extended.soak.stress import Report, stress  # noqa: E402
from tests.kit.tiny import tiny_decoder  # noqa: E402

MARKS = "<!-- stress -->", "<!-- /stress -->"


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children would inherit this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clean-up runs
    sections, reports = [], []
    for runtime in args.runtime or [os.environ.get("LLAMASUP_TEST_SERVER") or "embedded"]:
        name, report = of_runtime(runtime, args.minutes, args.seed)
        heading = f"### {name}, {args.minutes:g} min\n\n{machine()}, {time.strftime('%Y-%m-%d')}."
        sections.append("\n".join((heading, "", *report.table())))
        reports.append(report)
        print(sections[-1], flush=True)
        for violation in report.violations:
            print(f"OFF: {violation}")
    failed = any(report.violations for report in reports)
    if args.docs and not failed:
        write_between(args.docs, MARKS, "\n\n".join(sections))
    return 1 if failed else 0


def of_runtime(runtime: str, minutes: float, seed: int) -> tuple[str, Report]:
    with tempfile.TemporaryDirectory(prefix="stress-", dir="/tmp") as folder:  # short: sockets lie below it
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = Path(folder, "tiny.gguf")
        tiny.write_bytes(tiny_decoder())
        words = command("plan", str(tiny), "--json", "--runtime", runtime)
        found = json.loads(subprocess.check_output(words))["runtime"]
        is_embedded = found["kind"] == "embedded"
        name = f"{'The embedded runtime' if is_embedded else 'llama-server'}, {found['version']}"
        print(f"{name}: seed {seed}", file=sys.stderr, flush=True)
        return name, stress(
            "embedded" if is_embedded else found["path"], Path(folder), duration_s=minutes * 60, seed=seed
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for each runtime")
    parser.add_argument("--runtime", action="append", help="as in llamasup; may be repeated")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(1_000_000), help="default: a random one"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="write the tables into this page, between its marks"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
