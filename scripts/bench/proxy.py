"""Measure the cost of `llamasup run` as a proxy: CPU per request and chunk, latency, many streams (P1–P4).

Measures the processes as users start them: `llamasup run` with its line per request on standard error and
with an API key, the same with `--log-level warning`, nginx with its access log, llama-swap if it is on PATH,
``llamasup serve`` in front of another node, and ``bare_relay.py``, the floor for a proxy in Python. Behind
each is ``fast_server.py``. A load process
sends the requests. The proxy has one core; the load and the upstream share another.

All targets are measured in turn, in each round, so that a ratio compares figures of the same minute. A figure
is the median over the rounds; a ratio is the median of the ratios of each round.

    python -m scripts.bench proxy [--rounds 5] [--before DIR] [--write] [--json FILE]

``--before DIR`` measures another working tree of llamasup as well. ``--write`` writes docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import psutil

from scripts.bench import fast_server
from scripts.bench.load import KEY
from scripts.bench.streams import TOKENS_PER_S
from scripts.menu import publish
from scripts.pages import ROOT, aligned_table, spread
from tests.kit.ports import free_port

PAGE = "performance.md"
LOAD, STREAMS, RELAY = (f"scripts.bench.{name}" for name in ("load", "streams", "bare_relay"))
CONNECTIONS = 32
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
# Offered while CPU per request at one rate is measured: every proxy here can do more on a slow machine.
RATE_PER_S = 2000
LATENCY_RATE_PER_S = 1000  # far below saturation, so that it is latency and not queueing
START_TIMEOUT_S = 30.0

NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
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
LLAMA_SWAP = """
healthCheckTimeout: 15
models:
  tiny:
    cmd: {server} --host 127.0.0.1 --port ${{PORT}}
    proxy: http://127.0.0.1:${{PORT}}
    concurrencyLimit: 1000
"""


class Target(NamedTuple):
    """A measured proxy. ``process`` is None for the upstream itself."""

    name: str
    address: str  # a port, or the path of a Unix socket
    process: subprocess.Popen[bytes] | None


class Cores(NamedTuple):
    """The cores for the proxy and for all else; None if this machine has one core, or cannot pin."""

    proxy: int | None
    others: int | None


# --- processes -------------------------------------------------------------------------------------


@contextmanager
def started(
    argv: list[str], core: int | None, env: dict[str, str], stderr: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with stderr.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=env, cwd=stderr.parent
        )
    try:
        pin(process.pid, core)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pin(pid: int, core: int | None) -> None:
    if core is not None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def wait_until_open(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(socket.AF_INET if address.isdigit() else socket.AF_UNIX) as sock:
            try:
                sock.connect(("127.0.0.1", int(address)) if address.isdigit() else address)
            except OSError:
                time.sleep(0.01)
            else:
                return
    raise SystemExit(f"{process.args!r} did not begin to listen on {address}")


def wait_until_listed(model: str, port: str) -> None:
    """Wait until a front has heard of the model of its node."""
    deadline = time.monotonic() + START_TIMEOUT_S
    listed = ""
    while time.monotonic() < deadline:
        with urlopen(Request(f"http://127.0.0.1:{port}/v1/models", headers=AUTHORIZATION)) as answer:
            listed = answer.read().decode()
        if f'"{model}"' in listed:
            return
        time.sleep(0.05)
    raise SystemExit(f"the front does not list {model}: {listed}")


class Starter:
    """Starts the targets of one run, in folders of their own, and stops them with ``running``."""

    def __init__(self, running: ExitStack, folder: Path, cores: Cores, args: argparse.Namespace) -> None:
        self._running = running
        self._folder = folder
        self._cores = cores
        self._options = ("--chunks", str(args.chunks), "--interval-ms", str(args.interval_ms))
        self._server = fast_server.install(folder / "llama-server", *self._options)
        self.upstream = str(folder / "upstream.sock")

    def _start(
        self, name: str, argv: list[str], core: int | None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log = self._folder / f"{name.replace(' ', '-')}.stderr"
        return self._running.enter_context(started(argv, core, {**os.environ, **(env or {})}, log))

    def direct(self) -> Target:
        process = self._start("upstream", [str(self._server), "--host", self.upstream], self._cores.others)
        wait_until_open(self.upstream, process)
        return Target("direct", self.upstream, None)

    def nginx(self) -> Target | None:
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            print("nginx is not on PATH (Debian: nginx): it is not measured", file=sys.stderr)
            return None
        own, port = self._folder / "nginx", free_port()
        own.mkdir()
        (own / "nginx.conf").write_text(NGINX.format(folder=own, upstream=self.upstream, port=port))
        argv = [program, "-e", str(own / "error.log"), "-c", str(own / "nginx.conf"), "-p", str(own)]
        return self._listening("nginx", argv, port)

    def bare_relay(self) -> Target:
        port = free_port()
        argv = [sys.executable, "-m", RELAY, "--port", str(port), "--to", self.upstream]
        return self._listening("bare relay", argv, port)

    def llama_swap(self) -> Target | None:
        program = shutil.which("llama-swap")
        if program is None:
            print("llama-swap is not on PATH: it is not measured", file=sys.stderr)
            return None
        config, port = self._folder / "llama-swap.yaml", free_port()
        config.write_text(LLAMA_SWAP.format(server=self._server))
        return self._listening(
            "llama-swap", [program, "--config", str(config), "--listen", f"127.0.0.1:{port}"], port
        )

    def _listening(self, name: str, argv: list[str], port: int) -> Target:
        process = self._start(name, argv, self._cores.proxy, {"PYTHONPATH": str(ROOT)})
        wait_until_open(str(port), process)
        return Target(name, str(port), process)

    def llamasup(self, name: str, tree: Path, *options: str, rights: str = "") -> Target:
        """`llamasup run` of the working tree ``tree``, with the interpreter of its .venv, if any."""
        own = self._folder / name.replace(" ", "-")
        own.mkdir()
        keys, ready = own / "keys", own / "ready.json"
        keys.write_text(f"{KEY} {rights}\n")
        keys.chmod(0o600)
        python = tree / ".venv" / "bin" / "python"
        argv = [str(python) if python.exists() else sys.executable, "-P", "-m", "llamasup", "run", "demo"]
        argv += ["--port", "0", "--runtime", str(self._server), "--api-key-file", str(keys)]
        argv += ["--ready-file", str(ready), *options]
        process = self._start(name, argv, self._cores.proxy, self._environment(own, tree))
        self._await_ready(ready, process, own)
        pin(process.pid, self._cores.proxy)  # its threads
        for child in psutil.Process(process.pid).children(recursive=True):
            pin(child.pid, self._cores.others)
        return Target(name, str(json.loads(ready.read_text())["port"]), process)

    def front(self, name: str, *options: str, tls: bool = False) -> Target:
        """`llamasup serve` in front of a `llamasup run` that is another node (docs/peers.md)."""
        own = self._folder / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        node_options = ["--alias", "tiny"]  # the model of the load process
        if tls:
            certificate, private = own / "cert.pem", own / "cert.key"
            words = [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
            ]
            names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
            subprocess.run(
                [*words, *names, "-out", str(certificate), "-keyout", str(private)],
                check=True,
                capture_output=True,
            )
            node_options += ["--tls-cert", str(certificate), "--tls-key", str(private)]
        rights = "rights=inference,node"
        node = self.llamasup(f"node of {own.name}", ROOT, *options, *node_options, rights=rights)
        assert node.process is not None
        pin(node.process.pid, self._cores.others)  # its CPU is not that of the front
        keys = own / "keys"
        keys.write_text(f"{KEY}\n")
        keys.chmod(0o600)
        scheme = "https" if tls else "http"
        peer = {"url": f"{scheme}://127.0.0.1:{node.address}", "key_file": str(keys)}
        if tls:
            peer["ca_file"] = str(certificate)
        config, ready = own / "config.yaml", own / "ready.json"
        config.write_text(
            json.dumps(
                {"listen": "127.0.0.1:0", "auth": {"api_key_file": str(keys)}, "peers": {"node": peer}}
            )
        )
        argv = [sys.executable, "-P", "-m", "llamasup", "serve", "--config", str(config)]
        argv += ["--runtime", str(self._server), "--ready-file", str(ready)]
        process = self._start(name, argv, self._cores.proxy, self._environment(own, ROOT))
        self._await_ready(ready, process, own)
        pin(process.pid, self._cores.proxy)
        port = str(json.loads(ready.read_text())["port"])
        wait_until_listed("tiny", port)
        return Target(name, port, process)

    def _environment(self, own: Path, tree: Path) -> dict[str, str]:
        xdg = {f"XDG_{kind}_HOME": str(own / kind.lower()) for kind in ("STATE", "CACHE", "CONFIG")}
        (own / "run").mkdir(mode=0o700)
        return {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(own / "run"), **xdg}

    def _await_ready(self, ready: Path, process: subprocess.Popen[bytes], own: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                log = (own.parent / f"{own.name}.stderr").read_text()
                raise SystemExit(f"{process.args!r} did not become ready: {log}")
            time.sleep(0.01)


# --- one measurement -------------------------------------------------------------------------------


def cpu_s(process: subprocess.Popen[bytes] | None) -> float:
    """CPU time of all threads so far, in nanoseconds if Linux reports them, otherwise in clock ticks."""
    if process is None:
        return 0.0
    try:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)


def rss_mb(process: subprocess.Popen[bytes]) -> float:
    return float(psutil.Process(process.pid).memory_info().rss / 1e6)


def send(module: str, target: Target, core: int | None, **options: object) -> dict[str, float]:
    """Send requests to a target from a process of its own. Returns its report."""
    argv = [sys.executable, "-m", module, "--to", target.address]
    for name, value in options.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    prefix = [] if core is None else ["taskset", "--cpu-list", str(core)]
    done = subprocess.run([*prefix, *argv], stdout=subprocess.PIPE, check=True, timeout=300, cwd=ROOT)
    return dict(json.loads(done.stdout))


def measure_once(args: argparse.Namespace, target: Target, core: int | None) -> dict[str, float]:
    """All figures of one target in one round."""
    process, results = target.process, {}
    before = cpu_s(process)
    saturated = send(LOAD, target, core, requests=args.requests, connections=CONNECTIONS)
    results["us_saturated"] = (cpu_s(process) - before) / args.requests * 1e6
    results["requests_per_s"] = args.requests / saturated["took_s"]
    before = cpu_s(process)
    send(LOAD, target, core, requests=args.requests // 2, connections=CONNECTIONS, rate=RATE_PER_S)
    per_request_s = (cpu_s(process) - before) / (args.requests // 2)
    results["us_at_rate"] = per_request_s * 1e6
    if args.streams:
        before = cpu_s(process)
        send(LOAD, target, core, requests=args.streams, connections=CONNECTIONS, stream=True)
        streamed_s = cpu_s(process) - before - args.streams * per_request_s
        results["us_per_chunk"] = streamed_s / (args.streams * args.chunks) * 1e6
    paced = send(
        LOAD, target, core, requests=args.requests // 8, connections=CONNECTIONS, rate=LATENCY_RATE_PER_S
    )
    results["first_byte_median_ms"] = paced["median_s"] * 1e3
    results["first_byte_p99_ms"] = paced["p99_s"] * 1e3
    if process is None:
        return {name: value for name, value in results.items() if not name.startswith("us_")}
    return results


def many_streams(target: Target, core: int | None, streams: int, tokens: int) -> dict[str, float]:
    """P4: loss and delay of the tokens of many streams, and the proxy's CPU and memory."""
    process = target.process
    if process is None:
        return send(STREAMS, target, core, streams=streams, tokens=tokens)
    send(STREAMS, target, core, streams=10, tokens=1)
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
        report = send(STREAMS, target, core, streams=streams, tokens=tokens)
    finally:
        over.set()
        watching.join()
    report["rss_mb"] = most_mb - idle_mb
    report["core_share"] = (cpu_s(process) - before_s) / (tokens / TOKENS_PER_S)
    return report


Results = dict[str, dict[str, list[float]]]
"""By target and row: a value for each round."""


def measure(args: argparse.Namespace, targets: list[Target], core: int | None) -> Results:
    results: Results = {target.name: {} for target in targets}
    for target in targets:  # warm: connections, caches, code
        send(LOAD, target, core, requests=2000, connections=CONNECTIONS)
    for number in range(args.rounds):
        turn = number % len(targets)
        for target in targets[turn:] + targets[:turn]:
            values = measure_once(args, target, core)
            if args.many_streams and target.name in STREAMED:
                values |= many_streams(target, core, args.many_streams, args.tokens)
            for row, value in values.items():
                results[target.name].setdefault(row, []).append(value)
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    return results


# --- the report ------------------------------------------------------------------------------------

RUN, QUIET, BEFORE_RUN, BEFORE_QUIET = "run", "run, quiet", "before: run", "before: quiet"
FRONT, FRONT_TLS = "front of a node", "front of a node over TLS"
STREAMED = ("direct", "nginx", RUN)  # the targets of the many streams
# Row, title, digits. `--json` has more rows.
ROWS = (
    ("us_saturated", f"CPU per request, saturated, {CONNECTIONS} connections, µs", 1),
    ("us_at_rate", f"CPU per request, {RATE_PER_S:,} requests/s, µs", 1),
    ("us_per_chunk", "CPU per streamed chunk, µs", 1),
    ("first_byte_median_ms", "first byte, median, ms", 2),
    ("first_byte_p99_ms", "first byte, p99, ms", 2),
    ("requests_per_s", f"requests/s, saturated, {CONNECTIONS} connections", 0),
    ("lost", "many streams: lost", 0),
    ("out_of_order", "many streams: out of order", 0),
    ("late", "many streams: later than 50 ms", 0),
    ("delay_p999_ms", "many streams: delay, p99.9, ms", 1),
    ("rss_mb", "many streams: RSS above idle, MB", 1),
)
# What is compared: measured target, row, target to compare with, limit.
RATIOS = (
    (RUN, "us_saturated", "nginx", 2.5),
    (QUIET, "us_saturated", "nginx", 2.0),
    (RUN, "us_at_rate", "nginx", 1.6),
    (QUIET, "us_at_rate", "nginx", 1.6),
    (RUN, "us_per_chunk", "nginx", 1.15),
    (FRONT, "us_saturated", RUN, None),
    (FRONT, "us_at_rate", RUN, None),
    (FRONT, "us_per_chunk", RUN, None),
    (FRONT, "us_at_rate", "nginx", 1.6),
    (FRONT, "us_per_chunk", "nginx", 1.15),
    (FRONT_TLS, "us_at_rate", RUN, None),
    (FRONT_TLS, "us_per_chunk", RUN, None),
    (RUN, "us_saturated", "llama-swap", 0.5),
    (RUN, "us_saturated", BEFORE_RUN, None),
    (QUIET, "us_saturated", BEFORE_QUIET, None),
    (RUN, "us_at_rate", BEFORE_RUN, None),
    (RUN, "us_per_chunk", BEFORE_RUN, None),
)


def figure(values: list[float] | None, digits: int) -> str:
    return spread(values, digits) if values else "–"


def report(results: Results) -> str:
    head = ["", *results]
    rows = [
        [title, *(figure(values.get(row), digits) for values in results.values())]
        for row, title, digits in ROWS
        if any(row in values for values in results.values())
    ]
    titles = {row: title.rpartition(",")[0] or title for row, title, _ in ROWS}
    ratios = [["Ratio", "Measured", "Limit"]]
    for name, row, other, limit in RATIOS:
        ours, theirs = results.get(name, {}).get(row), results.get(other, {}).get(row)
        if ours and theirs:
            each = [one / another for one, another in zip(ours, theirs, strict=True)]
            ratios.append(
                [f"{titles[row]}: {name} / {other}", figure(each, 2), "" if limit is None else f"{limit:g}"]
            )
    return f"{aligned_table([head, *rows])}\n\n{aligned_table(ratios)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="measure this working tree of llamasup as well"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="saturated, for each round and target")
    parser.add_argument("--streams", type=int, default=96, help="for each round and target; 0: none")
    parser.add_argument("--chunks", type=int, default=200, help="chunks per stream")
    parser.add_argument("--interval-ms", type=float, default=2.0, help="time between two chunks of a stream")
    parser.add_argument(
        "--many-streams", type=int, default=1000, help="concurrent streams for P4; 0: skip it"
    )
    parser.add_argument(
        "--tokens", type=int, default=160, help="tokens of each of these streams, at 20 a second"
    )
    parser.add_argument("--only", nargs="*", metavar="TARGET", help="measure only these, such as nginx run")
    parser.add_argument("--json", type=Path, help="write all values to this file")


def main(args: argparse.Namespace) -> None:
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = Cores(allowed[0], allowed[1]) if len(allowed) > 1 else Cores(None, None)
    # Permits for all connections, as nginx has no limit either.
    permits = ("--max-concurrent", str(max(CONNECTIONS, args.many_streams)))
    quiet = ("--log-level", "warning")
    with tempfile.TemporaryDirectory(prefix="bench-proxy-") as folder, ExitStack() as running:
        starter = Starter(running, Path(folder), cores, args)
        direct = starter.direct()
        starts = {
            "direct": lambda: direct,
            "nginx": starter.nginx,
            "bare relay": starter.bare_relay,
            RUN: lambda: starter.llamasup(RUN, ROOT, *permits),
            QUIET: lambda: starter.llamasup(QUIET, ROOT, *permits, *quiet),
            FRONT: lambda: starter.front(FRONT, *permits),
            FRONT_TLS: lambda: starter.front(FRONT_TLS, *permits, tls=True),
            "llama-swap": starter.llama_swap,
        }
        if args.before is not None:
            tree = args.before.resolve()
            starts[BEFORE_RUN] = lambda: starter.llamasup(BEFORE_RUN, tree, *permits)
            starts[BEFORE_QUIET] = lambda: starter.llamasup(BEFORE_QUIET, tree, *permits, *quiet)
        made = (start() for name, start in starts.items() if not args.only or name in args.only)
        targets = [target for target in made if target is not None]
        results = measure(args, targets, cores.others)
    text = report(results)
    publish(args, text)
    if args.json:
        machine = {"cpus": len(allowed), "python": platform.python_version(), "system": platform.platform()}
        settings = {name: value for name, value in vars(args).items() if isinstance(value, int | float)}
        args.json.write_text(
            json.dumps({"machine": machine, "settings": settings, "results": results}, indent=1)
        )
