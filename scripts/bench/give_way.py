"""Measure how long a tuning takes to yield, from a request to a served model to the end of its servers.

    python -m scripts.bench give-way --runtime PATH [--requests 50]

A `llamasup run` serves the demo model, and a `llamasup tune` of the same model measures in another process.
At random times, while servers under measurement run, a client asks the served model for a long answer. The
time ends when all servers of the tuning have ended. The answer is cancelled then, and the tuning goes on.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from textwrap import wrap

import psutil

from scripts.pages import ROOT

LONG = {"prompt": "Once", "n_predict": 100_000, "ignore_eos": True, "stream": True}
WAIT_S = 120.0
GOAL_S = 0.1
# A tuning starts a server, and ends one, several times a second: the request comes at any moment of that.
LONGEST_PAUSE_S = 2.0


def servers_of(tuning: psutil.Process) -> list[psutil.Process]:
    """The llama-servers that the tuning has started, without its guardian."""
    found = []
    for child in tuning.children():
        with suppress(psutil.Error):
            if "--model" in child.cmdline():
                found.append(child)
    return found


def end_of(servers: list[psutil.Process]) -> float:
    """Wait for the end of all ``servers``, and return its time."""
    ended_s = 0.0
    for server in servers:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(server.pid)
            try:
                if not select.select([descriptor], [], [], WAIT_S)[0]:
                    raise SystemExit(f"the tuning did not give way within {WAIT_S:.0f} s")
            finally:
                os.close(descriptor)
        ended_s = time.monotonic()
    return ended_s


def one_request(address: tuple[str, int], tuning: psutil.Process, draw: random.Random) -> float:
    while not servers_of(tuning):
        if not tuning.is_running() or tuning.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit("the tuning has ended")
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, LONGEST_PAUSE_S))
    while not (servers := servers_of(tuning)):
        time.sleep(0.001)
    body = json.dumps(LONG).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address) as client:
        sent_s = time.monotonic()
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        ended_s = end_of(servers)
        while servers := servers_of(tuning):  # one that was being started
            ended_s = end_of(servers)
    return ended_s - sent_s


def measure(runtime: str, requests: int, draw: random.Random) -> list[float]:
    llamasup = [sys.executable, "-m", "llamasup"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        ready, state = Path(folder, "ready"), Path(folder, "state")
        # A runtime folder of its own: no other llamasup of this user takes part.
        environ = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state)}
        environ |= {"XDG_RUNTIME_DIR": folder, "TMPDIR": folder}

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([*llamasup, *words], env=environ, stderr=subprocess.DEVNULL)
            ends.callback(process.wait)
            ends.callback(process.send_signal, signal.SIGINT)
            return process

        start("run", "demo", "--runtime", runtime, "--port", "0", "--ready-file", str(ready))
        while not ready.exists():
            time.sleep(0.01)
        url = json.loads(ready.read_bytes())
        tuning = start("tune", "demo", "--runtime", runtime, "--minutes", "60")
        times_s = []
        for number in range(requests):
            times_s.append(one_request((url["host"], url["port"]), psutil.Process(tuning.pid), draw))
            print(f"{number + 1}: {times_s[-1] * 1e3:.0f} ms", file=sys.stderr, flush=True)
        return times_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)


def main(options: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    times_s = sorted(measure(options.runtime, options.requests, random.Random(options.seed)))
    most, middle = times_s[-1] * 1e3, median(times_s) * 1e3
    in_time = sum(time_s <= GOAL_S for time_s in times_s)
    text = (
        f"From a request to the end of both servers under measurement took {middle:.0f} ms in the median of "
        f"{len(times_s)} requests, and {most:.0f} ms at most; {in_time} took {GOAL_S * 1e3:.0f} ms or less "
        f"(demo model, {os.cpu_count()} CPUs, a load of {load:.0f} by other programs)."
    )
    print("\n".join(wrap(text, 120)))
