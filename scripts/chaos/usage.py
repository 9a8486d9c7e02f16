"""Compares the usage of thousands of mixed requests, with crashes, with two other counts of them.

The clients add up the tokens that the answers report, and llama-server counts in its /metrics. All sums must
be equal, also those of each key. Exit code 1 if they are not.

    python -m scripts.chaos usage [--runtime PATH|embedded]…

The load is in tests/extended/real/usage_load.py; a test runs 100 requests of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.processes import machine, runtime_for
from tests.e2e.driver import NEW_INTERPRETER, command, llamasup
from tests.extended.real.usage_load import COUNTS, KEYS, UsageLoad, counts_of, write_keys
from tests.kit.tiny import tiny_decoder

FOLDERS = ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")


def main(args: argparse.Namespace) -> int:
    texts, is_equal = [], True
    for runtime in args.runtime or [None]:
        with tempfile.TemporaryDirectory(prefix="usage-", dir="/tmp") as folder:  # short: for the sockets
            text, equal = of_runtime(runtime, Path(folder), args)
        texts.append(text)
        is_equal = is_equal and equal
    print("\n\n".join([f"{machine()}, {time.strftime('%Y-%m-%d')}.", *texts]))
    return 0 if is_equal else 1


def of_runtime(runtime: str | None, home: Path, args: argparse.Namespace) -> tuple[str, bool]:
    """The report, and whether all sums are equal."""
    for variable in FOLDERS:
        (home / variable).mkdir(mode=0o700)
        os.environ[variable] = str(home / variable)
    tiny = home / "tiny.gguf"
    tiny.write_bytes(tiny_decoder())
    found = runtime_for(tiny, runtime)
    options = ("--runtime", found.path, "--api-key-file", str(write_keys(home / "keys")), "--parallel", "4")
    loads, is_equal = [], True
    for number in range(args.runs):
        with llamasup(tiny, *options, prefix=NEW_INTERPRETER) as running:
            running.wait_for("ready")
            loads.append(load := UsageLoad(running, seed=number))
            load.run(args.requests // args.runs, args.crashes)
            is_equal = is_equal and load.usage("key") == by_key(loads)
            running.stop()
    shown = json.loads(subprocess.check_output(command("usage", "--by", "key", "--json")))
    saved = {row["key"]: counts_of(row) for row in shown["rows"]}
    servers, total = sum((load.of_servers() for load in loads), Counter()), sum(saved.values(), Counter())
    is_equal = (
        is_equal
        and saved == by_key(loads)
        and servers["prompt"] == total["tokens_prompt"] - total["tokens_cached"]
        and servers["predicted"] == total["tokens_completion"]
    )
    crashes = sum(load.crashes for load in loads)
    kinds = sum((load.kinds for load in loads), Counter())
    lines = [
        f"### {found.name}",
        "",
        f"{total['requests']:,} requests with {len(KEYS)} keys, {args.runs} runs of llamasup,"
        f" {crashes} crashes of the server: {kinds_of(kinds)}.",
        "",
        *table(sum(by_key(loads).values(), Counter()), servers, total),
        "",
        "All sums are equal, also for each key." if is_equal else "THE SUMS DIFFER.",
    ]
    return "\n".join(lines), is_equal


def by_key(loads: Sequence[UsageLoad]) -> Mapping[str, Counter[str]]:
    """The counts of the clients."""
    return {key: sum((load.counted[key] for load in loads), Counter()) for key in KEYS}


def kinds_of(kinds: Mapping[str, int]) -> str:
    return "; ".join(f"{count:,} × {kind}" for kind, count in sorted(kinds.items(), key=lambda one: -one[1]))


def table(clients: Counter[str], servers: Counter[str], saved: Counter[str]) -> Sequence[str]:
    rows = [
        ("Counted by", "Requests", "Errors", "Prompt", "Cached", "Not cached", "Completion", "Unreported"),
        ("---", *["---:"] * 7),
        ("the clients", *cells(clients)),
        ("llama-server", "", "", "", "", f"{servers['prompt']:,}", f"{servers['predicted']:,}", ""),
        ("`llamasup usage`", *cells(saved)),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def cells(counts: Counter[str]) -> Sequence[str]:
    requests, errors, prompt, cached, completion, unreported = (counts[name] for name in COUNTS)
    return [
        f"{count:,}" for count in (requests, errors, prompt, cached, prompt - cached, completion, unreported)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3, help="of llamasup, one after the other")
    parser.add_argument("--crashes", type=int, default=4, help="in each run; more than 5 are a crash loop")
    parser.add_argument("--runtime", action="append", help="as in llamasup; may be repeated")
