#!/usr/bin/env python3
"""What the proxy costs: CPU per request and per streamed chunk, and added latency (promises P1, P2, P3).

Direct, through nginx and through llamasup, interleaved in the rounds of one run. nginx: one worker, upstream
connections kept for at most 100 requests as llama-server has it, proxy_buffering off. llamasup: API key,
Host check, look-up of `model`, request ids and metrics all on. The upstream is a fast fake in a process of
its own, the load comes from a third; each is pinned to a core where there are several.

P1 is measured at the same offered rate for all: a proxy that does not saturate its neighbours pays for waking
them, one that does finds them awake, and so each would be measured under conditions of its own. The saturated
figures are printed too. Medians over the rounds, with the smallest and largest.

    python scripts/bench_proxy.py [--rounds 3] [--requests 20000] [--json FILE] [--profile FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KEY = "bench-key"
BODY = json.dumps(
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a llama. " * 4}],
        "temperature": 0,
        "max_tokens": 16,
    },
    separators=(",", ":"),
)
STREAM_BODY = BODY[:-1] + ',"stream":true}'
RATE_PER_S = (
    5000  # offered while CPU per request is measured; the slowest machine that this ran on does 10,000
)
LATENCY_RATE_PER_S = 1000  # far below saturation, so that it is latency and not queueing


# --- the processes ---------------------------------------------------------------------------------


def serve_llamasup(port: int, upstream: str, profile: str | None) -> None:
    """Run the proxy alone, with everything that P1 asks for switched on."""
    from llamasup.core.address import UnixAddress
    from llamasup.proxy import Proxy, ProxyConfig, bind
    from llamasup.runtime.endpoint import Endpoint, Lease, Unavailable

    class OneModel:
        def __init__(self) -> None:
            self.endpoint = Endpoint("tiny", 1, UnixAddress(upstream))

        def lease(self, model: str | None, *, infers: bool = False) -> Lease | Unavailable:
            if model != "tiny":
                return Unavailable(404, f"no model {model!r}")
            return self.endpoint.lease_if_free(infers=infers)

        def readiness(self) -> Unavailable | None:
            return None

    async def serve() -> None:
        finished = 0

        def count(_: object) -> None:
            nonlocal finished
            finished += 1

        proxy = Proxy(OneModel(), ProxyConfig(api_keys=("another", KEY)), on_finished=count)
        await proxy.start(bind("127.0.0.1", port))
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        await proxy.aclose()

    if profile is None:
        _run(serve())
    else:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(_run, serve())
        profiler.dump_stats(profile)


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000; keepalive_timeout 75s;
  upstream child {{ server unix:{upstream}; keepalive 128; keepalive_requests 100; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://child; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering on;
    }}
  }}
}}
"""


@dataclass(slots=True)
class Target:
    """Something to send requests to; ``process`` is what costs (None: nothing is in between)."""

    name: str
    address: str | int  # Unix path or port
    process: subprocess.Popen[bytes] | None


@contextmanager
def started(argv: list[str], core: int | None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_open(address: str | int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with socket.socket(family) as sock:
            try:
                sock.connect(address if isinstance(address, str) else ("127.0.0.1", address))
            except OSError:
                time.sleep(0.01)
            else:
                return
    raise SystemExit(f"{process.args!r} did not begin to listen on {address}")


def cpu_s(process: subprocess.Popen[bytes] | None) -> float:
    """CPU time of all threads so far; to the nanosecond where Linux says it, else in clock ticks."""
    if process is None:
        return 0.0
    try:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        import psutil

        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)


# --- the load --------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One keep-alive connection that repeats one request while there is work."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sent_at = 0.0
        self._first = True
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._next()

    def _next(self) -> None:
        load = self._load
        if load.left <= 0:
            self._transport.close()
            return
        load.left -= 1
        if load.pause_s:
            load.loop.call_later(random.uniform(0, 2 * load.pause_s), self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._first = True
        self._end = b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        load = self._load
        if self._first:
            self._first = False
            load.first_byte_s.append(time.perf_counter() - self._sent_at)
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not a 200: {data[:300]!r}")
        self._end = (self._end + data)[-8:] if len(data) < 8 else data[-8:]
        if self._end.endswith(load.end):
            load.done += 1
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.open -= 1
        if not self._load.open:
            self._load.over.set()


class Load:
    def __init__(self, given: argparse.Namespace) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.left = given.requests
        self.done = 0
        self.open = given.concurrency
        self.pause_s = given.concurrency / given.rate if given.rate else 0.0
        body = (STREAM_BODY if given.stream else BODY).encode()
        self.end = b"\r\n0\r\n\r\n" if given.stream else b"0.0}}"
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
            b"Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (KEY.encode(), len(body), body)
        )
        self.first_byte_s: list[float] = []


def run_load(given: argparse.Namespace) -> None:
    async def main() -> None:
        load = Load(given)
        began = time.perf_counter()
        for _ in range(given.concurrency):
            if given.to.isdigit():
                await load.loop.create_connection(lambda: Client(load), "127.0.0.1", int(given.to))
            else:
                await load.loop.create_unix_connection(lambda: Client(load), given.to)
        await load.over.wait()
        if load.done != given.requests:
            raise SystemExit(f"{given.requests - load.done} of {given.requests} requests were lost")
        took_s = time.perf_counter() - began
        ordered = sorted(load.first_byte_s)
        report = {
            "took_s": took_s,
            "median_s": statistics.median(ordered),
            "p99_s": ordered[int(len(ordered) * 0.99)],
        }
        sys.stdout.write(json.dumps(report))

    _run(main())


def load(target: Target, core: int | None, **options: object) -> dict[str, float]:
    argv = [sys.executable, __file__, "--load", "--to", str(target.address)]
    for name, value in options.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]

    def pin() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=300, preexec_fn=pin)
    return dict(json.loads(done.stdout))


# --- the measurement -------------------------------------------------------------------------------


def measure(
    given: argparse.Namespace, targets: list[Target], core: int | None
) -> dict[str, dict[str, list[float]]]:
    results: dict[str, dict[str, list[float]]] = {target.name: {} for target in targets}

    def note(target: Target, name: str, value: float) -> None:
        results[target.name].setdefault(name, []).append(value)

    for target in targets:  # warm: connections, caches, code
        load(target, core, requests=500, concurrency=given.concurrency)
    for number in range(given.rounds):
        for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
            process, common = target.process, {"concurrency": given.concurrency}
            before = cpu_s(process)
            plain = load(target, core, requests=given.requests, **common)
            saturated = (cpu_s(process) - before) / given.requests
            before = cpu_s(process)
            load(target, core, requests=given.requests // 2, rate=RATE_PER_S, **common)
            per_request = (cpu_s(process) - before) / (given.requests // 2)
            before = cpu_s(process)
            load(target, core, requests=given.streams, stream=True, **common)
            streamed = cpu_s(process) - before - given.streams * per_request
            paced = load(target, core, requests=given.requests // 8, rate=LATENCY_RATE_PER_S, **common)
            note(target, "first_byte_median_ms", paced["median_s"] * 1e3)
            note(target, "first_byte_p99_ms", paced["p99_s"] * 1e3)
            note(target, "requests_per_s", given.requests / plain["took_s"])
            if process is not None:
                note(target, "us_per_request", per_request * 1e6)
                note(target, "us_per_chunk", streamed / (given.streams * given.chunks) * 1e6)
                note(target, "us_per_request_saturated", saturated * 1e6)
        print(f"round {number + 1} of {given.rounds} done", file=sys.stderr)
    return results


ROWS: list[tuple[str, str, str]] = [
    ("us_per_request", "CPU per request, µs", "P1"),
    ("us_per_chunk", "CPU per streamed chunk, µs", "P2"),
    ("first_byte_median_ms", "first byte, median, ms", "P3"),
    ("first_byte_p99_ms", "first byte, p99, ms", "P3"),
    ("us_per_request_saturated", "CPU per request, saturated, µs", ""),
    ("requests_per_s", "requests/s, saturated", ""),
]


def show(results: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Print the table; return the ratios and differences that the promises name."""
    print(f"{'':34}" + "".join(f"{name:>26}" for name in results))
    for row, title, promise in ROWS:
        cells = []
        for values in results.values():
            seen = values.get(row)
            digits = 0 if row == "requests_per_s" else 2
            cells.append(
                f"{statistics.median(seen):.{digits}f} ({min(seen):.{digits}f}–{max(seen):.{digits}f})"
                if seen
                else "–"
            )
        print(f"{title + (f' [{promise}]' if promise else ''):34}" + "".join(f"{cell:>26}" for cell in cells))

    def median(target: str, row: str) -> float:
        return statistics.median(results[target][row])

    verdict = {
        "P3 added to first byte, median, ms (≤ 0.3)": median("llamasup", "first_byte_median_ms")
        - median("direct", "first_byte_median_ms"),
        "P3 added to first byte, p99, ms (≤ 1)": median("llamasup", "first_byte_p99_ms")
        - median("direct", "first_byte_p99_ms"),
    }
    if "nginx" in results:
        verdict = {
            "P1 CPU per request against nginx (≤ 2)": median("llamasup", "us_per_request")
            / median("nginx", "us_per_request"),
            "P2 CPU per chunk against nginx (≤ 1.15)": median("llamasup", "us_per_chunk")
            / median("nginx", "us_per_chunk"),
        } | verdict
    print()
    for name, value in verdict.items():
        print(f"{name}: {value:.2f}")
    return verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU and latency of the proxy, beside nginx.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000, help="plain requests per round and target")
    parser.add_argument("--streams", type=int, default=160, help="streams per round and target")
    parser.add_argument("--chunks", type=int, default=200, help="chunks per stream")
    parser.add_argument("--interval-ms", type=float, default=2.0, help="between two chunks of a stream")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--profile", help="write a cProfile of llamasup's proxy there (its figures are then worthless)"
    )
    for name, kind in (
        ("--load", bool),
        ("--stream", bool),
        ("--to", str),
        ("--rate", int),
        ("--serve", int),
    ):
        if kind is bool:
            parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        else:
            parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.load:
        run_load(given)
        return
    if given.serve is not None:
        serve_llamasup(given.serve, given.to, given.profile)
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    proxy_core, upstream_core, client_core = (
        (cores[0], cores[1], cores[2 % len(cores) or 1]) if len(cores) >= 2 else (None, None, None)
    )
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    with tempfile.TemporaryDirectory(prefix="bench-proxy-") as folder:
        upstream = f"{folder}/up.sock"
        options = ["--chunks", str(given.chunks), "--interval-ms", str(given.interval_ms)]
        argv = [sys.executable, "-m", "llamasup.testing.upstream", "--unix", upstream, *options]
        with started(argv, upstream_core) as process:
            wait_until_open(upstream, process)
            targets = [Target("direct", upstream, None)]
            port = free_port()
            serve = [sys.executable, __file__, "--serve", str(port), "--to", upstream]
            serve += ["--profile", given.profile] if given.profile else []
            with started(serve, proxy_core) as llamasup:
                wait_until_open(port, llamasup)
                targets.append(Target("llamasup", port, llamasup))
                if nginx is None:
                    print(
                        "nginx is not installed (Debian: nginx-light): its column is left out",
                        file=sys.stderr,
                    )
                    results = measure(given, targets, client_core)
                else:
                    port = free_port()
                    config = Path(folder, "nginx.conf")
                    config.write_text(NGINX.format(folder=folder, upstream=upstream, port=port))
                    with started([nginx, "-c", str(config), "-p", folder], proxy_core) as process:
                        wait_until_open(port, process)
                        targets.insert(1, Target("nginx", port, process))
                        results = measure(given, targets, client_core)
    verdict = show(results)
    if given.json:
        report = {
            "machine": {
                "cpus": len(cores),
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "settings": {
                name: getattr(given, name)
                for name in ("rounds", "requests", "streams", "chunks", "concurrency")
            },
            "results": results,
            "verdict": verdict,
        }
        given.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
