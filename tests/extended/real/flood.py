"""A real server, and a process that writes a million lines per minute to its log at times (S19)."""

from __future__ import annotations

import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence

import httpx
import psutil

from tests.extended.real.fault_testbed import PATIENCE_S, FaultRun, FaultTestbed, fault_run

__all__ = ["flooded_over_quiet"]

LINES_PER_MINUTE = 1_000_000
BLOCK_LINES = LINES_PER_MINUTE // 6000
_LINE = b"0.00.000.100 I srv  " + b"z" * 79 + b"\n"
BLOCKS_PER_ROUND = 5  # both times, so that each round has a flood, however fast the requests are
# Each SIGUSR1 switches the output between /dev/null and the log. The writer costs the same both times, so the
# difference is the cost of the log.
_FLOOD = f"""
import os, signal, time
block = {_LINE!r} * {BLOCK_LINES}
ways = [os.open("/dev/null", os.O_WRONLY), 2]
signal.signal(signal.SIGUSR1, lambda number, frame: ways.reverse())
due = time.monotonic()
while True:
    os.write(ways[0], block)
    due = max(due + 0.01, time.monotonic() - 1)
    time.sleep(max(0.0, due - time.monotonic()))
"""


def flooded_over_quiet(testbed: FaultTestbed, *, rounds: int, requests: int) -> Sequence[tuple[float, float]]:
    """Median seconds of a small request with a quiet log and with a flooded one, in turn."""
    wrapper = testbed.new_folder() / "llama-server"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--model*) {shlex.join([sys.executable, "-c", _FLOOD])} & ;; esac\n'
        f'exec {testbed.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    with fault_run(testbed, testbed.tiny, "--parallel", "1", runtime=str(wrapper)) as run:
        run.wait_until_ready()
        flood = next(child for child in run.running.children() if _FLOOD in child.cmdline())
        with httpx.Client(base_url=run.url, timeout=PATIENCE_S) as client:
            _median_s(client, flood, requests)  # the first requests load what is loaded once
            seen = [_round(client, flood, requests) for _ in range(rounds)]
        # A block that began before the signal goes to /dev/null, and the last may still be in the pipe.
        assert _flooded_lines(run) > rounds * BLOCK_LINES
        assert run.stop() == ()
    return seen


def _round(client: httpx.Client, flood: psutil.Process, requests: int) -> tuple[float, float]:
    quiet_s = _median_s(client, flood, requests)
    os.kill(flood.pid, signal.SIGUSR1)
    flooded_s = _median_s(client, flood, requests)
    os.kill(flood.pid, signal.SIGUSR1)
    return quiet_s, flooded_s


def _median_s(client: httpx.Client, flood: psutil.Process, requests: int) -> float:
    """Of at least ``requests`` requests, during which ``flood`` writes at least BLOCKS_PER_ROUND blocks."""
    taken_s: list[float] = []
    enough = _written_bytes(flood) + BLOCKS_PER_ROUND * BLOCK_LINES * len(_LINE)
    while len(taken_s) < requests or _written_bytes(flood) < enough:
        began_s = time.monotonic()
        client.post("/tokenize", json={"content": "Once"}).raise_for_status()  # uses no busy threads
        taken_s.append(time.monotonic() - began_s)
    return statistics.median(taken_s)


def _written_bytes(flood: psutil.Process) -> int:
    """To the log and to /dev/null."""
    return int(flood.io_counters().write_chars)


def _flooded_lines(run: FaultRun) -> int:
    """Only lines of the flood: requests are logged too."""
    logs = (path.read_bytes() for path in (run.home / "state").rglob("*.log*"))
    return sum(log.count(b"z" * 79) for log in logs)
