"""Measures the start of the bundle against that of llama-server alone and of ``python -m llamasup``.

Each round starts each of them once, in turns, so that all see the same machine. The goal: ready
at most 400 ms after llama-server alone would be. The Python of .venv-bundle has what the bundle is made of:

    [chrt -r 1] .venv-bundle/bin/python -m scripts.bench bundle [--bundle PATH] [--runtime PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from scripts.pages import ROOT
from scripts.processes import LLAMASUP, seconds_to_ready

MODEL = "demo"
MOST_MS = 400

Rounds = dict[str, list[float]]
"""The milliseconds of each round, by what was started."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", default=str(ROOT / "dist" / "llamasup" / "llamasup"))
    parser.add_argument("--runtime", help="of a llama-server (default: that of the tests)")
    parser.add_argument("--rounds", type=int, default=20)


def main(options: argparse.Namespace) -> None:
    runtime = (
        options.runtime or subprocess.check_output([ROOT / "scripts" / "llama-server"], text=True).strip()
    )
    bundle = (options.bundle,)
    rows = []
    for name, chosen in {"llama-server": runtime, "the embedded runtime": "embedded"}.items():
        run = ("run", MODEL, "--runtime", chosen)
        plan = json.loads(subprocess.check_output([*LLAMASUP, "plan", *run[1:], "--json"]))
        measured = rounds_of(
            {
                "alone": lambda plan=plan: seconds_to_ready(plan),
                "python": lambda run=run: until_ready((*LLAMASUP, *run)),
                "bundle": lambda run=run: until_ready((*bundle, *run)),
            },
            options.rounds,
        )
        rows.append(row(f"`run` with {name}, until ready", measured))
        beyond_ms = median_difference(measured)
        print(f"{name}: {beyond_ms:.0f} ms beyond it alone; the goal is {MOST_MS} ms", file=sys.stderr)
    commands = {"python": lambda: until_end(LLAMASUP), "bundle": lambda: until_end(bundle)}
    rows.append(row("`--version`, until its end", rounds_of(commands, options.rounds)))
    text = "\n".join(
        [
            f"Milliseconds, medians of {options.rounds} rounds; {platform.machine()}, {os.cpu_count()} CPUs, "
            f"Python {platform.python_version()}.\n",
            "| | llama-server alone | `python -m llamasup` | bundle | bundle − alone | bundle ÷ Python |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(text)


def rounds_of(starts: dict[str, Callable[[], float]], count: int) -> Rounds:
    taken: Rounds = {name: [] for name in starts}
    for number in range(-1, count):
        for name in sorted(starts, reverse=bool(number % 2)):
            took_ms = starts[name]() * 1e3
            if number >= 0:  # the first round fills the caches
                taken[name].append(took_ms)
    return taken


def row(what: str, taken: Rounds) -> str:
    medians = [f"{statistics.median(taken[name]):.0f}" if name in taken else "" for name in COLUMNS]
    ratio = statistics.median(
        one / other for one, other in zip(taken["bundle"], taken["python"], strict=True)
    )
    beyond = f"{median_difference(taken):.0f}" if "alone" in taken else ""
    return f"| {' | '.join([what, *medians, beyond, f'{ratio:.2f}'])} |"


COLUMNS = ("alone", "python", "bundle")


def median_difference(taken: Rounds) -> float:
    return statistics.median(one - other for one, other in zip(taken["bundle"], taken["alone"], strict=True))


def until_end(program: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*program, "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def until_ready(command: Sequence[str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--sidecar"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "ready":
                break
        else:
            sys.exit(f"{command[0]} ended with {process.wait()}")
        taken = time.perf_counter() - began
        process.stdin.close()
        process.stdout.read()
    return taken
