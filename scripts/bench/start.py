"""The time from exec to ready of ``llamasup run``, and of the commands that people wait for (P5).

Each round starts llamasup once for each runtime, and then the same server command line without llamasup, so
that both see the same machine. With ``--before``, each round also starts the llamasup of another checkout.
The phases come from events. Medians over the rounds, with their spread.

Each checkout is installed first into an environment of its own, as its users install it: httpx imports more
if other packages are there, such as those of the tests.

    python -m scripts.bench start [--runtime PATH] [--runs 20] [--before CHECKOUT] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.menu import publish
from scripts.pages import ROOT, deciles_table, side_by_side
from scripts.processes import seconds_to_ready, until_ready

PAGE = "performance.md"
MAX_SHARE_MS = 150
PHASES = {
    "starting": "llamasup: imports, facts, plan, listen, spawn",
    "warming": "server: exec to healthy, and noticing it",
    "ready": "warm-up: the first real token",
}
IMPORTS = "import llamasup.cli.commands.run, llamasup.cli.foreground, llamasup.service.hosting"
COMMANDS = {"--version": 80, "--help": 80, "ps": 200}
"""The most milliseconds that each may take."""

Rounds = list[dict[str, float]]
"""Milliseconds by name, of each round."""


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"": ROOT} | ({"before": Path(options.before).resolve()} if options.before else {})
        _measure(options, {name: _installed(at, Path(folder)) for name, at in checkouts.items()})


def _measure(options: argparse.Namespace, checkouts: dict[str, Path]) -> None:
    """``checkouts``: the environment of each, by its name."""
    here = checkouts[""]
    texts = [f"{options.runs} runs, milliseconds, {platform.machine()}, {os.cpu_count()} CPUs."]
    measured: dict[str, Any] = {}
    medians: dict[str, dict[str, float]] = {}
    for runtime in options.runtime or [None]:
        common = [options.model, *(["--runtime", runtime] if runtime else [])]
        plan = json.loads(_llamasup(here, "plan", *common, "--json"))
        title = f"{plan['runtime']['kind']} {plan['runtime']['version']}"
        rounds = _measure_starts(checkouts, common, plan, options.runs)
        measured[title] = rounds
        medians[title] = {name: statistics.median(values) for name, values in _by_name(rounds).items()}
    shown = {
        title: {name: f"{took_ms:.0f}" for name, took_ms in each.items()} for title, each in medians.items()
    }
    texts.append(f"Medians of `run`:\n\n{side_by_side(shown)}")
    with _serving(here, options.model):  # for ps
        measured["commands"] = rounds = _measure_commands(checkouts, options.runs)
    texts.append(f"Commands, from exec to the end:\n\n{deciles_table(_by_name(rounds))}")
    text = "\n\n".join(texts)
    publish(options, text)
    for title, each in medians.items():
        print(_verdict(f"without the server's own start ({title})", each["llamasup's share"], MAX_SHARE_MS))
    for command, limit_ms in COMMANDS.items():
        print(_verdict(command, statistics.median(each[command] for each in rounds), limit_ms))
    if options.json:
        Path(options.json).write_text(json.dumps(measured, indent=2))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", action="append", help="may be given more than once")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--before", metavar="CHECKOUT", help="of an earlier version")
    parser.add_argument("--json", metavar="FILE")


def _measure_starts(checkouts: dict[str, Path], common: list[str], plan: dict[str, Any], runs: int) -> Rounds:
    rounds: Rounds = []
    for number in range(runs + 1):
        measured: dict[str, float] = {}
        for name, folder in checkouts.items():
            phases = _start([*_command(folder), "run", *common, "--port", "0", "--events", "jsonl"], folder)
            if name:
                measured[f"total, {name}"] = phases["total"]
            else:
                measured |= phases
                measured["  of which Python itself"] = _took_ms([_python(folder), "-c", "pass"], folder)
                imports_ms = _took_ms([_python(folder), "-c", IMPORTS], folder)
                measured["  of which imports"] = imports_ms - measured["  of which Python itself"]
        measured["by hand"] = seconds_to_ready(plan) * 1e3
        for name in ["total", *(f"total, {name}" for name in checkouts if name)]:
            measured[name.replace("total", "llamasup's share")] = measured[name] - measured["by hand"]
        if number:  # the first round fills the caches
            rounds.append(measured)
    return rounds


def _measure_commands(checkouts: dict[str, Path], runs: int) -> Rounds:
    rounds: Rounds = []
    for _ in range(runs):
        rounds.append(
            {
                command + (f", {name}" if name else ""): _took_ms([*_command(folder), command], folder)
                for command in COMMANDS
                for name, folder in checkouts.items()
            }
        )
    return rounds


@contextmanager
def _serving(environment: Path, model: str) -> Iterator[None]:
    """The only llamasup of this user, as far as the commands can see."""
    command = [*_command(environment), "run", model, "--port", "0", "--events", "jsonl"]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": folder}),
        until_ready(*command, env=_environment()),
    ):
        yield


def _start(command: list[str], folder: Path) -> dict[str, float]:
    """Milliseconds by phase, at the times when a parent program receives the events."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    state_began_s: dict[str, float] = {}
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        state_began_s[event.get("state", event["event"])] = time.monotonic()
        if event["event"] == "ready":
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    marks = [began, state_began_s["starting"], state_began_s["warming"], state_began_s["ready"]]
    phases = {
        name: (after - before) * 1e3
        for name, (before, after) in zip(PHASES.values(), pairwise(marks), strict=True)
    }
    return {**phases, "total": (marks[-1] - began) * 1e3}


def _took_ms(command: list[str], folder: Path) -> float:
    began = time.monotonic()
    subprocess.run(
        command, cwd=folder, env=_environment(), check=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    return (time.monotonic() - began) * 1e3


def _llamasup(folder: Path, *arguments: str) -> bytes:
    return subprocess.check_output([*_command(folder), *arguments], cwd=folder, env=_environment())


def _installed(checkout: Path, folder: Path) -> Path:
    """A new environment in ``folder`` with the llamasup of ``checkout``, and the embedded runtime."""
    environment = Path(tempfile.mkdtemp(dir=folder))
    venv.create(environment, with_pip=True)
    pip = [_python(environment), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{checkout}[embedded]"], check=True)
    _llamasup(environment, "--version")
    return environment


def _command(environment: Path) -> list[str]:
    return [str(environment / "bin" / "llamasup")]


def _python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def _environment() -> dict[str, str]:
    """Return the environment of a user: what Python compiles is kept."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _by_name(rounds: Rounds) -> dict[str, list[float]]:
    return {name: [each[name] for each in rounds] for name in rounds[0]}


def _verdict(what: str, took_ms: float, limit_ms: float) -> str:
    return f"{what}: {took_ms:.0f} ms, at most {limit_ms} ms: {'kept' if took_ms <= limit_ms else 'MISSED'}"
