#!/usr/bin/env python3
"""The cost of an idle supervisor (promise P7): CPU and resident memory of `llamasup run demo`.

python scripts/bench_idle.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import psutil

FIRST_S = 10  # work that the start postpones does not count


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU and memory of an idle llamasup.")
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    argv = [sys.executable, "-m", "llamasup", "run", "demo", "--port", "0", "--events", "jsonl"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            if not any(json.loads(line)["event"] == "ready" for line in process.stdout):
                raise SystemExit("llamasup did not become ready")
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
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
