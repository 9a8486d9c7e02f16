#!/usr/bin/env python3
"""Half an hour of mixed load on a real server, with crashes, hangs and restarts in between.

Different clients use one ``llamasup run``: some disconnect, some are slow, some send invalid requests. Each
client checks its own answers. Exit code 1 if a request was lost (without a correct answer or an error), if a
slot is busy at the end, if llamasup has more resources than at the start or its memory grows, or if it leaves
anything behind.

    python scripts/soak.py [--minutes 30] [--runtime PATH|embedded] [--seed N] [--docs PAGE]

The load and the faults are in tests/real/soak*.py; a test runs 90 s of them.
"""

from __future__ import annotations

import argparse
import json
import os
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
from tests.extended.soak.soak import soak  # noqa: E402
from tests.kit.tiny import tiny_decoder  # noqa: E402

MARKS = "<!-- soak -->", "<!-- /soak -->"


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:  # short: sockets lie below it
        home = Path(folder)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        tiny = home / "tiny.gguf"
        tiny.write_bytes(tiny_decoder())
        words = command("plan", str(tiny), "--json", *(["--runtime", args.runtime] if args.runtime else []))
        found = json.loads(subprocess.check_output(words))["runtime"]
        runtime = "embedded" if found["kind"] == "embedded" else found["path"]
        report = soak(runtime, tiny, home, duration_s=args.minutes * 60, seed=args.seed)
    name = f"{'The embedded runtime' if runtime == 'embedded' else 'llama-server'}, {found['version']}"
    heading = f"### {name}, {args.minutes:g} min\n\n{machine()}, {time.strftime('%Y-%m-%d')}."
    text = "\n".join((heading, "", *report.table()))
    print(text)
    for violation in report.violations:
        print(f"OFF: {violation}")
    if args.docs and not report.violations:
        write_between(args.docs, MARKS, text)
    return 1 if report.violations else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--runtime", help="as in llamasup")
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients' choices")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="write the report into this page, between its marks"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
