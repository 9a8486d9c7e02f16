"""From request to first token: for a loaded model, for an unloaded one, and for one that evicts another.

In the same round, the script starts the same server command line without llamasup, polls its health every
millisecond, and sends the same request. For a swap, it first ends another server. The difference is
llamasup's share: decision, plan, spawn, detection of readiness, and the warm-up.

    python -m scripts.bench swap [--runtime embedded] [--runs 20] [--write] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.menu import publish
from scripts.pages import deciles_table
from scripts.processes import LLAMASUP, until_ready
from tests.kit.tiny import tiny_decoder

MAX_LOST_MS = 50.0
PAGE = "performance.md"
ROWS = {
    "warm": "loaded: request to first token",
    "cold": "not loaded",
    "cold by hand": "  the same command line by hand: exec to first token",
    "swapped": "another goes for it",
    "swapped by hand": "  by hand: SIGTERM to the other, its end, exec, first token",
    "cold lost": "llamasup's share of a cold start",
    "swapped lost": "llamasup's share of a swap",
}
_TICK_S = 0.001
_BODY = {"prompt": "Once", "max_tokens": 2, "stream": True, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Child:
    """The command line and the environment of a child, to start it again."""

    argv: list[str]
    environ: dict[str, str]


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rounds = list(_rounds(Path(folder), options.runtime, options.runs))
    rows = {name: [one_round[name] for one_round in rounds] for name in rounds[0]}
    for kind in ("cold", "swapped"):
        rows[f"{kind} lost"] = [one_round[kind] - one_round[f"{kind} by hand"] for one_round in rounds]
    table = deciles_table({label: rows[name] for name, label in ROWS.items()})
    publish(options, f"{options.runs} runs, the demo model, milliseconds:\n\n{table}")
    for kind in ("cold", "swapped"):
        lost = statistics.median(rows[f"{kind} lost"])
        print(f"{kind}: {lost:.0f} ms lost, {'kept' if lost <= MAX_LOST_MS else 'MISSED'} (50 ms at most)")
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=2))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")


def _rounds(folder: Path, runtime: str | None, runs: int) -> Iterator[dict[str, float]]:
    for name in ("one", "other"):
        (folder / f"{name}.gguf").write_bytes(tiny_decoder())
    config = folder / "config.yaml"
    config.write_text("listen: 127.0.0.1:0\nmodels_dir: .\nmax_loaded: 1\n")
    command = (*LLAMASUP, "serve", "--config", str(config), "--events", "jsonl")
    with until_ready(*command, *(["--runtime", runtime] if runtime else [])) as (llamasup, ready):
        pid, address = llamasup.pid, ready["url"].removeprefix("http://")
        _first_token(http.client.HTTPConnection(address, timeout=60), "one")
        child = _child_of(pid)
        for number in range(runs + 1):
            measured = {
                "warm": _first_token(http.client.HTTPConnection(address, timeout=60), "one"),
                "swapped": _first_token(http.client.HTTPConnection(address, timeout=60), "other"),
            }
            _control(pid, "/llamasup/v1/models/other/unload")
            measured["cold"] = _first_token(http.client.HTTPConnection(address, timeout=60), "one")
            measured |= _by_hand(child, folder)
            if number:  # the first round fills the caches
                yield measured


def _first_token(connection: http.client.HTTPConnection, model: str, began_s: float | None = None) -> float:
    """Milliseconds to the first event of a stream, from ``began_s`` on; the rest of the answer is read."""
    began_s = time.monotonic() if began_s is None else began_s
    body = json.dumps({"model": model, **_BODY})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.read1(65536)
    took_ms = (time.monotonic() - began_s) * 1e3
    if answer.status != 200 or not first.startswith(b"data:"):
        raise SystemExit(f"{answer.status}: {first!r}")
    answer.read()
    connection.close()
    return took_ms


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def _control(pid: int, path: str) -> None:
    base = Path(os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir()))
    (folder,) = (path_found for path_found in base.glob(f"llamasup*/{pid}-*") if path_found.is_dir())
    connection = _Unix(folder / "control.sock")
    connection.request("POST", path)
    answer = connection.getresponse()
    if answer.status >= 300:
        raise SystemExit(f"{path}: {answer.status} {answer.read()!r}")
    connection.close()


def _child_of(pid: int) -> Child:
    """The llama-server of the llamasup process ``pid``."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            argv = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
            variables = (folder / "environ").read_bytes().decode().split("\0")[:-1]
        except OSError:
            continue
        if parent == pid and "--model" in argv:
            environ = dict(variable.split("=", 1) for variable in variables if "=" in variable)
            return Child(argv, environ)
    raise SystemExit("llamasup has no llama-server")


def _by_hand(child: Child, folder: Path) -> dict[str, float]:
    """A cold start, and a swap: the end of the same kind of server, then a cold start."""
    first, cold_ms = _start(child, folder)
    began_s = time.monotonic()
    first.send_signal(signal.SIGTERM)
    first.wait(30)
    second, swapped_ms = _start(child, folder, began_s)
    second.kill()
    second.wait(30)
    return {"cold by hand": cold_ms, "swapped by hand": swapped_ms}


def _start(child: Child, folder: Path, began_s: float | None = None) -> tuple[subprocess.Popen[bytes], float]:
    path = folder / "by-hand.sock"
    path.unlink(missing_ok=True)
    argv = [str(path) if argument.endswith(".sock") else argument for argument in child.argv]
    began_s = time.monotonic() if began_s is None else began_s
    process = subprocess.Popen(
        argv,
        env=child.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    while not _is_healthy(path):
        time.sleep(_TICK_S)
    return process, _first_token(_Unix(path), "by hand", began_s)


def _is_healthy(path: Path) -> bool:
    connection = _Unix(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
