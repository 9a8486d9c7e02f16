"""Measures the start of the bundle against ``python -m llamasup``, in turns: prints medians and their ratio.

.venv/bin/python scripts/bench_bundle.py [dist/llamasup/llamasup] [--rounds 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

RUN = ("run", "demo", "--sidecar", "--runtime", "embedded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", default="dist/llamasup/llamasup")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    programs = {"python": [sys.executable, "-P", "-m", "llamasup"], "bundle": [arguments.bundle]}
    for what, seconds_of in (("--version", until_version), ("run, until ready", until_ready)):
        taken: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(arguments.rounds):
            for name in sorted(programs, reverse=bool(turn % 2)):
                taken[name].append(seconds_of(programs[name]))
        python, bundle = (statistics.median(taken[name]) for name in ("python", "bundle"))
        pairs = zip(taken["bundle"], taken["python"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"{what}: python {1000 * python:.0f} ms, bundle {1000 * bundle:.0f} ms, ratio {ratio:.2f}")


def until_version(program: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*program, "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def until_ready(program: Sequence[str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(
        [*program, *RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                break
        else:
            sys.exit(f"{program[0]} ended with {process.wait()}")
        taken = time.perf_counter() - began
        process.stdin.close()
        process.stdout.read()
    return taken


if __name__ == "__main__":
    main()
