"""Measure the cost of an open page of the console, in one process: with and without it, in turns.

Two processes of llamasup differ by more than the page costs. So one `llamasup run` gets the same load again
and again, and every other time a client asks as the page "Requests" does (console/static/assets/store.js).
Each pair gives a ratio of the CPU time; the median of the ratios and their quartiles are reported.

    python -m scripts.bench console [--pairs 24]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from scripts.bench.proxy import (
    CONNECTIONS,
    LOAD,
    RATE_PER_S,
    Cores,
    Starter,
    Target,
    cpu_s,
    send,
)
from scripts.pages import ROOT, aligned_table

LIMIT = 1.02
STATUS_S = 5.0  # between two reads of the status while requests come and go
SATURATED, AT_RATE, STREAMS, CHUNKS = 20_000, 4_000, 200, 200


@contextmanager
def open_page(control: Path) -> Iterator[None]:
    """A client that shows the requests, until the end of the block."""
    opened, over = threading.Event(), threading.Event()
    client = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(control)),
        base_url="http://llamasup/llamasup/v1",
        timeout=60,
    )

    def show() -> None:
        with suppress(httpx.HTTPError), client.stream("GET", "/events", params={"requests": "1"}) as events:
            asked_s = 0.0
            for line in events.iter_lines():
                opened.set()
                if over.is_set():
                    return
                if line.startswith("data:") and time.monotonic() > asked_s + STATUS_S:
                    client.get("/status").raise_for_status()
                    asked_s = time.monotonic()

    page = threading.Thread(target=show)
    page.start()
    opened.wait(60)
    try:
        yield
    finally:
        over.set()  # the next event, at most a second later, ends it
        page.join()
        client.close()


def measurements(target: Target, core: int | None) -> dict[str, Callable[[], float]]:
    """By row: CPU seconds for one request or chunk."""

    def cost(count: int, **options: object) -> float:
        before = cpu_s(target.process)
        send(LOAD, target, core, connections=CONNECTIONS, **options)
        return (cpu_s(target.process) - before) / count

    return {
        f"a request, saturated, {CONNECTIONS} connections": lambda: cost(SATURATED, requests=SATURATED),
        f"a request, {RATE_PER_S:,} requests/s": lambda: cost(AT_RATE, requests=AT_RATE, rate=RATE_PER_S),
        "a streamed chunk": lambda: cost(STREAMS * CHUNKS, requests=STREAMS, stream=True),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=24)


def main(args: argparse.Namespace) -> None:
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = Cores(allowed[0], allowed[1]) if len(allowed) > 1 else Cores(None, None)
    streams = argparse.Namespace(chunks=CHUNKS, interval_ms=2.0)
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-console-") as folder, ExitStack() as running:
        starter = Starter(running, Path(folder), cores, streams)
        target = starter.llamasup("run", ROOT, "--max-concurrent", str(CONNECTIONS))
        (control,) = (Path(folder) / "run" / "run").rglob("control.sock")
        send(LOAD, target, cores.others, requests=4000, connections=CONNECTIONS)
        for number in range(args.pairs):
            for row, measure in measurements(target, cores.others).items():
                cost = {}
                for is_open in (True, False) if number % 2 else (False, True):
                    with open_page(control) if is_open else ExitStack():
                        cost[is_open] = measure()
                found.setdefault(row, []).append((cost[True], cost[False]))
            print(f"pair {number + 1} of {args.pairs} done", file=sys.stderr)
    cells = [["CPU for", "without", "with the page", "ratio: median (quartiles)", "limit"]]
    for row, pairs in found.items():
        ratios = [one / other for one, other in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        cells.append(
            [
                row,
                f"{statistics.median(other for _, other in pairs) * 1e6:.1f} µs",
                f"{statistics.median(one for one, _ in pairs) * 1e6:.1f} µs",
                f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})",
                f"{LIMIT:g}",
            ]
        )
    print(f"{args.pairs} pairs.\n\n{aligned_table(cells)}")
