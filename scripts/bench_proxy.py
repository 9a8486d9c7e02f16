#!/usr/bin/env python3
"""What the proxy costs: CPU per request and per streamed chunk, added latency, many streams (promises P1–P4).

Direct, through nginx and through llamasup, interleaved in the rounds of one run. nginx: one worker, upstream
connections kept for at most 100 requests as in llama-server, proxy_buffering off. llamasup: API key,
Host check, look-up of `model`, request ids and metrics all on. A second of each writes an access log. The
upstream is a fast fake in a process of its own, the load comes from a third; each is pinned to a core where
there are several.

P1 is measured at the same offered rate for all, over 32 connections: a proxy that does not saturate the other
processes pays for waking them, and one that does finds them awake, so under saturation the conditions would
differ. The saturated figures are printed too, for 1, 32 and 256 connections. Medians over the
rounds, with the smallest and largest.

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
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STREAMS = str(ROOT / "scripts" / "bench_streams.py")
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
SATURATED = (1, 32, 256)  # connections
TOKENS_PER_S = 20  # of each of many streams; bench_streams.py sends them
LATENCY_RATE_PER_S = 1000  # far below saturation, so that it is latency and not queueing


# --- the processes ---------------------------------------------------------------------------------


def serve_llamasup(port: int, upstream: str, profile: str | None, access_log: Path | None) -> None:
    """Run the proxy alone, with everything that P1 asks for switched on."""
    from llamasup.http.address import UnixAddress
    from llamasup.models.access import ResolvedModel
    from llamasup.observability.access_log import AccessLog
    from llamasup.observability.access_record import access_line
    from llamasup.proxy import Proxy, ProxyConfig, bind
    from llamasup.queueing.endpoint import Endpoint, Lease
    from llamasup.queueing.unavailable import Unavailable

    tiny = ResolvedModel(("tiny",))

    class OneModel:
        def __init__(self) -> None:
            self.endpoint = Endpoint("tiny", 1, UnixAddress(upstream))

        def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
            if model != "tiny":
                return Unavailable(404, f"no model {model!r}")
            return self.endpoint.lease_if_free(infers=infers)

        def readiness(self) -> Unavailable | None:
            return None

        def resolve(self, model: str | None) -> ResolvedModel | None:
            return tiny if model == "tiny" else None

        def listing(self) -> None:
            return None

    async def serve() -> None:
        log = AccessLog(access_log, access_line) if access_log is not None else None
        config = ProxyConfig(api_keys=("another", KEY))
        proxy = Proxy(OneModel(), config, on_finished=log.write if log is not None else _ignore)
        await proxy.start(bind("127.0.0.1", port))
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        await proxy.aclose()
        if log is not None:
            log.close()

    if profile is None:
        _run(serve())
    else:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(_run, serve())
        profiler.dump_stats(profile)


def _ignore(_: object) -> None:
    """Replaces the supervisor, which gets the record of every request."""


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
  access_log {log}; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
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
    """A target of requests. ``process``: the measured proxy; None if requests go to the upstream directly.

    ``streams_address``: the same in front of the upstream that sends tokens at a steady rate.
    """

    name: str
    address: str | int  # Unix path or port
    process: subprocess.Popen[bytes] | None
    streams_address: str | int = 0
    streams_process: subprocess.Popen[bytes] | None = None


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
    """CPU time of all threads so far, in nanoseconds if Linux reports them, otherwise in clock ticks."""
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
    def __init__(self, args: argparse.Namespace) -> None:
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.left = args.requests
        self.done = 0
        self.open = args.concurrency
        self.pause_s = args.concurrency / args.rate if args.rate else 0.0
        body = (STREAM_BODY if args.stream else BODY).encode()
        self.end = b"\r\n0\r\n\r\n" if args.stream else b"0.0}}"
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
            b"Accept-Encoding: gzip, deflate\r\nUser-Agent: bench\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (KEY.encode(), len(body), body)
        )
        self.first_byte_s: list[float] = []


def run_load(args: argparse.Namespace) -> None:
    async def main() -> None:
        load = Load(args)
        began = time.perf_counter()
        for _ in range(args.concurrency):
            if args.to.isdigit():
                await load.loop.create_connection(lambda: Client(load), "127.0.0.1", int(args.to))
            else:
                await load.loop.create_unix_connection(lambda: Client(load), args.to)
        await load.over.wait()
        if load.done != args.requests:
            raise SystemExit(f"{args.requests - load.done} of {args.requests} requests were lost")
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
    """Send requests to a target from a process of its own. Returns its report."""
    return run_pinned([sys.executable, __file__, "--load", "--to", str(target.address)], core, **options)


def run_pinned(argv: list[str], core: int | None, **options: object) -> dict[str, float]:
    for name, value in options.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]

    def pin() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=300, preexec_fn=pin)
    return dict(json.loads(done.stdout))


def rss_mb(process: subprocess.Popen[bytes]) -> float:
    import psutil

    return float(psutil.Process(process.pid).memory_info().rss / 1e6)


def many_streams(target: Target, core: int | None, streams: int, tokens: int) -> dict[str, float]:
    """P4: loss and delay of the tokens of many streams, and the proxy's CPU and memory."""
    argv = [sys.executable, STREAMS, "receive", "--to", str(target.streams_address)]
    process = target.streams_process
    if process is None:
        return run_pinned(argv, core, streams=streams, tokens=tokens)
    run_pinned(argv, core, streams=10, tokens=1)
    idle_mb, before_s = rss_mb(process), cpu_s(process)
    most_mb = idle_mb
    over = threading.Event()

    def watch() -> None:
        nonlocal most_mb
        while not over.wait(0.1):
            most_mb = max(most_mb, rss_mb(process))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        report = run_pinned(argv, core, streams=streams, tokens=tokens)
    finally:
        over.set()
        watching.join()
    report["rss_mb"] = most_mb - idle_mb
    report["core_share"] = (cpu_s(process) - before_s) / (tokens / TOKENS_PER_S)
    return report


# --- the measurement -------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace, targets: list[Target], core: int | None
) -> dict[str, dict[str, list[float]]]:
    results: dict[str, dict[str, list[float]]] = {target.name: {} for target in targets}

    def note(target: Target, name: str, value: float) -> None:
        results[target.name].setdefault(name, []).append(value)

    for target in targets:  # warm: connections, caches, code
        load(target, core, requests=500, concurrency=args.concurrency)
    for number in range(args.rounds):
        for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
            process, common = target.process, {"concurrency": args.concurrency}
            for concurrency in SATURATED:
                requests = args.requests if concurrency > 1 else args.requests // 4
                before = cpu_s(process)
                plain = load(target, core, requests=requests, concurrency=concurrency)
                note(target, f"requests_per_s_{concurrency}", requests / plain["took_s"])
                if process is not None:
                    saturated_s = (cpu_s(process) - before) / requests
                    note(target, f"us_per_request_saturated_{concurrency}", saturated_s * 1e6)
            before = cpu_s(process)
            load(target, core, requests=args.requests // 2, rate=RATE_PER_S, **common)
            per_request = (cpu_s(process) - before) / (args.requests // 2)
            before = cpu_s(process)
            load(target, core, requests=args.streams, stream=True, **common)
            streamed = cpu_s(process) - before - args.streams * per_request
            paced = load(target, core, requests=args.requests // 8, rate=LATENCY_RATE_PER_S, **common)
            note(target, "first_byte_median_ms", paced["median_s"] * 1e3)
            note(target, "first_byte_p99_ms", paced["p99_s"] * 1e3)
            if process is not None:
                note(target, "us_per_request", per_request * 1e6)
                note(target, "us_per_chunk", streamed / (args.streams * args.chunks) * 1e6)
            if target.streams_address and args.many_streams:
                many = many_streams(target, core, args.many_streams, args.tokens)
                for name, value in many.items():
                    note(target, name, value)
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    return results


ROWS: list[tuple[str, str, str]] = [
    ("us_per_request", "CPU per request, µs", "P1"),
    ("us_per_chunk", "CPU per streamed chunk, µs", "P2"),
    ("first_byte_median_ms", "first byte, median, ms", "P3"),
    ("first_byte_p99_ms", "first byte, p99, ms", "P3"),
    *((f"us_per_request_saturated_{n}", f"CPU per request, saturated, {n}, µs", "") for n in SATURATED),
    *((f"requests_per_s_{n}", f"requests/s, saturated, {n}", "") for n in SATURATED),
    ("lost", "many streams: events lost", "P4"),
    ("out_of_order", "many streams: out of order", "P4"),
    ("late", "many streams: later than 50 ms", "P4"),
    ("delay_median_ms", "many streams: delay, median, ms", ""),
    ("delay_p999_ms", "many streams: delay, p99.9, ms", ""),
    ("delay_max_ms", "many streams: delay, most, ms", ""),
    ("rss_mb", "many streams: RSS above idle, MB", "P4"),
    ("core_share", "many streams: share of a core", ""),
]
WHOLE = ("requests_per_s", "lost", "out_of_order", "late")  # rows of whole numbers


def show(results: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Print the table; return the ratios and differences that the promises name."""
    print(f"{'':42}" + "".join(f"{name:>26}" for name in results))
    for row, title, promise in ROWS:
        cells = []
        for values in results.values():
            column = values.get(row)
            digits = 0 if row.startswith(WHOLE) else 2
            cells.append(
                f"{statistics.median(column):.{digits}f} ({min(column):.{digits}f}–{max(column):.{digits}f})"
                if column
                else "–"
            )
        print(f"{title + (f' [{promise}]' if promise else ''):42}" + "".join(f"{cell:>26}" for cell in cells))

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
            "P1 with an access log on both sides (≤ 2)": median("llamasup, logging", "us_per_request")
            / median("nginx, logging", "us_per_request"),
            "P2 CPU per chunk against nginx (≤ 1.15)": median("llamasup", "us_per_chunk")
            / median("nginx", "us_per_chunk"),
        } | verdict
    print()
    for name, value in verdict.items():
        print(f"{name}: {value:.2f}")
    return verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU and latency of the proxy, compared with nginx.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000, help="plain requests per round and target")
    parser.add_argument("--streams", type=int, default=160, help="streams per round and target")
    parser.add_argument("--chunks", type=int, default=200, help="chunks per stream")
    parser.add_argument("--interval-ms", type=float, default=2.0, help="time between two chunks of a stream")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--many-streams", type=int, default=1000, help="streams of the measurement for P4; 0: skip it"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens of each of these streams, at 20 a second"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--profile",
        help="write a cProfile of llamasup's proxy to this file (which makes its figures worthless)",
    )
    for name, kind in (
        ("--load", bool),
        ("--stream", bool),
        ("--to", str),
        ("--rate", int),
        ("--serve", int),
        ("--access-log", Path),
    ):
        if kind is bool:
            parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        else:
            parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.load:
        run_load(args)
        return
    if args.serve is not None:
        serve_llamasup(args.serve, args.to, args.profile, args.access_log)
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    proxy_core, upstream_core, client_core = (
        (cores[0], cores[1], cores[2 % len(cores) or 1]) if len(cores) >= 2 else (None, None, None)
    )
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-"))
        upstream, tokens = f"{folder}/up.sock", f"{folder}/tokens.sock"

        def start(argv: list[str], core: int | None, address: str | int) -> subprocess.Popen[bytes]:
            process = running.enter_context(started(argv, core))
            wait_until_open(address, process)
            return process

        options = ["--chunks", str(args.chunks), "--interval-ms", str(args.interval_ms)]
        fake = [sys.executable, "-m", "llamasup.testing.upstream", "--unix", upstream, *options]
        start(fake, upstream_core, upstream)
        start([sys.executable, STREAMS, "send", "--unix", tokens], upstream_core, tokens)

        def start_llamasup(to: str, *more: str) -> tuple[int, subprocess.Popen[bytes]]:
            port = free_port()
            return port, start(
                [sys.executable, __file__, "--serve", str(port), "--to", to, *more], proxy_core, port
            )

        def start_nginx(to: str, log: str = "off") -> tuple[int, subprocess.Popen[bytes]]:
            port = free_port()
            own = Path(tempfile.mkdtemp(dir=folder))
            config = own / "nginx.conf"
            config.write_text(NGINX.format(folder=own, upstream=to, port=port, log=log))
            return port, start([str(nginx), "-c", str(config), "-p", str(own)], proxy_core, port)

        profile = ["--profile", args.profile] if args.profile else []
        targets = [Target("direct", upstream, None, tokens)]
        if nginx is None:
            print("nginx is not installed (Debian: nginx-light): its column is left out", file=sys.stderr)
        else:
            targets.append(Target("nginx", *start_nginx(upstream), *start_nginx(tokens)))
            targets.append(Target("nginx, logging", *start_nginx(upstream, f"{folder}/nginx.log")))
        targets.append(Target("llamasup", *start_llamasup(upstream, *profile), *start_llamasup(tokens)))
        log = ("--access-log", f"{folder}/access.jsonl")
        targets.append(Target("llamasup, logging", *start_llamasup(upstream, *log)))
        results = measure(args, targets, client_core)
    verdict = show(results)
    if args.json:
        report = {
            "machine": {
                "cpus": len(cores),
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "settings": {
                name: getattr(args, name)
                for name in (
                    "rounds",
                    "requests",
                    "streams",
                    "chunks",
                    "concurrency",
                    "many_streams",
                    "tokens",
                )
            },
            "results": results,
            "verdict": verdict,
        }
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
