"""The cost of an idle supervisor (promise P7): CPU and resident memory of `llamasup run demo`.

python -m scripts.bench idle [--seconds 60]
"""

from __future__ import annotations

import argparse
import time

import psutil

from scripts.processes import LLAMASUP, until_ready

FIRST_S = 10  # work that the start postpones does not count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, default=60)


def main(args: argparse.Namespace) -> None:
    with until_ready(*LLAMASUP, "run", "demo", "--port", "0", "--events", "jsonl") as (process, _):
        supervisor = psutil.Process(process.pid)
        time.sleep(FIRST_S)
        before = supervisor.cpu_times()
        time.sleep(args.seconds)
        after = supervisor.cpu_times()
        spent_s = after.user + after.system - before.user - before.system
        print(f"CPU: {spent_s / args.seconds:.2%} of a core (≤ 0.5 %), over {args.seconds} s")
        print(f"RSS: {supervisor.memory_info().rss / 1e6:.1f} MB (≤ 60 MB)")
        for child in supervisor.children(recursive=True):
            print(f"child: {child.name()}, RSS {child.memory_info().rss / 1e6:.1f} MB")
