"""Mixed load on a real server under ``llamasup run``, with crashes, hangs and restarts in between.

Each client checks its own answers (tests/extended/soak/soak_clients.py). This module injects the faults,
samples the resources of llamasup, and collects the violations.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.e2e.driver import NEW_INTERPRETER, Llamasup, is_alive, llamasup
from tests.extended.soak.soak_clients import IDLE, KEY, KINDS, MAX_IDLE_S, Client, Kind, Result
from tests.extended.soak.soak_wire import Outcome
from tests.real.remains import folders_of, remains_of

__all__ = ["Report", "ResourceUsage", "soak"]

WORKERS = 10
IDLE_CLIENTS = 10
PAUSE_S = 0.4  # on average, between two requests of a worker
CRASHES_PER_WINDOW = 4
WINDOW_S = 600.0  # more than 5 crashes in it would be a crash loop (S3)
PATIENCE_S = 120.0
FAULT_GAP_S = 6.0
"""From the end of one fault to the next. A request that two faults hit may fail (S10)."""
FAULT_REPORT_S = 1.0
"""After a restart of the server, a client sees an earlier fault within this time."""
# The allocator may keep this much after a burst. A leak of 20 KiB per request exceeds it in two minutes, and
# a leak of 2 KiB in half an hour.
MAX_GROWTH_BYTES = 4 << 20
# The pool of threads begins another one when its work overlaps for the first time, which may be late.
MORE_THREADS = 2


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The resources of llamasup at one time."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    children: int


@dataclass(frozen=True, slots=True)
class Span:
    """From a fault until the server served again. ``interrupts``: requests in flight are lost."""

    began_s: float
    ended_s: float
    what: str
    interrupts: bool


@dataclass(slots=True)
class Report:
    """The results of a soak. ``violations`` must be empty."""

    counts: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    start: ResourceUsage | None = None
    samples: list[ResourceUsage] = field(default_factory=list)
    end: ResourceUsage | None = None
    cut: list[tuple[float, float, Kind, Result]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def count(self, *outcomes: Outcome) -> int:
        return sum(count for (_, outcome), count in self.counts.items() if outcome in outcomes)

    @property
    def growth_bytes(self) -> int:
        """The growth of the smallest resident memory from the third to the last quarter of the time.

        All other values include the bodies of open requests: with 200 requests in a quarter, the
        median differed by 2.1 MB in a run that ended with less memory than it had after its first quarter.
        """
        quarter = len(self.samples) // 4
        third, last = self.samples[2 * quarter : 3 * quarter], self.samples[3 * quarter :]
        return min(sample.rss_bytes for sample in last) - min(sample.rss_bytes for sample in third)

    def summary(self) -> dict[str, str]:
        """The counts of all requests, and what llamasup used: a column of docs/measurements.md."""
        faults = Counter(span.what for span in self.spans)
        usages = [usage for usage in (self.start, self.end) if usage is not None]
        return {
            **{outcome.value: f"{self.count(outcome):,}" for outcome in Outcome},
            "faults": ", ".join(f"{count} × {what}" for what, count in faults.items()),
            "RSS at the start and at the end": " → ".join(
                f"{usage.rss_bytes / 1e6:.1f} MB" for usage in usages
            ),
            "descriptors": " → ".join(f"{usage.descriptors}" for usage in usages),
        }

    def table(self) -> Iterator[str]:
        yield f"| What the client does | {' | '.join(Outcome)} |"
        yield f"|---|{'---:|' * len(Outcome)}"
        for kind in (*(kind.name for kind in KINDS), IDLE.name):
            yield f"| {kind} | {' | '.join(str(self.counts[kind, outcome] or '–') for outcome in Outcome)} |"
        yield f"| **all** | {' | '.join(f'**{self.count(outcome):,}**' for outcome in Outcome)} |"
        yield ""
        faults = Counter(span.what for span in self.spans)
        yield f"Faults: {', '.join(f'{count} × {what}' for what, count in faults.items())}.\n"
        yield "| | RSS | descriptors | threads | children |"
        yield "|---|---:|---:|---:|---:|"
        warm = self.samples[len(self.samples) // 4]
        for name, usage in (
            ("at the start", self.start),
            ("after a quarter", warm),
            ("at the end", self.end),
        ):
            if usage is not None:
                row = f"{usage.descriptors} | {usage.threads} | {usage.children}"
                yield f"| {name} | {usage.rss_bytes / 1e6:.1f} MB | {row} |"
        yield f"\nLeast RSS from the third to the last quarter: {self.growth_bytes / 1e6:+.2f} MB."


def soak(runtime: str, model: Path, home: Path, *, duration_s: float, seed: int = 1) -> Report:
    """``home``: for llamasup's folders. Its path must be short, because it contains sockets."""
    report = Report()
    keys = home / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    ready_file = home / "ready.json"
    with (
        _notify_socket(home) as notify_environ,
        llamasup(
            model,
            *("--runtime", runtime, "--api-key-file", str(keys), "--ready-file", str(ready_file)),
            *("--ctx-size", "4096", "--parallel", "4", "--log-level", "warning"),
            env={**os.environ, **folders_of(home), **notify_environ},
            prefix=NEW_INTERPRETER,
        ) as running,
    ):
        port = int(running.wait_for("ready")["port"])
        asyncio.run(_Soak(running, port, report, duration_s, seed).run())
        code = running.stop()
        if code:
            report.violations.append(f"llamasup ended with {code}: {running.stderr_text[-2000:]}")
        report.violations += [f"left behind: {remaining}" for remaining in remains_of(home, ready_file)]
        if "Traceback" in running.stderr_text or "bug" in running.stderr_text:
            report.violations.append(f"llamasup said: {running.stderr_text[-4000:]}")
    return report


@contextmanager
def _notify_socket(home: Path) -> Iterator[Mapping[str, str]]:
    """The notification socket of a service manager: for a service, SIGHUP means a restart (S15)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        path = home / "notify.sock"
        notifications.bind(str(path))
        yield {"NOTIFY_SOCKET": str(path)}  # the sender drops messages that do not fit the buffer
        path.unlink()


class _Soak:
    def __init__(self, running: Llamasup, port: int, report: Report, duration_s: float, seed: int) -> None:
        self._running = running
        self._process = psutil.Process(running.pid)
        self._port = port
        self._report = report
        self._duration_s = duration_s
        self._seed = seed
        self._over = asyncio.Event()
        self._generation = 1

    async def run(self) -> None:
        report = self._report
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port}",
            headers={"Authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as http:
            (await http.get("/metrics")).raise_for_status()  # loads what is loaded once
            await self._wait_until_idle(http)
            report.start = self._resource_usage()
            async with asyncio.TaskGroup() as tasks:
                for number in range(WORKERS):
                    tasks.create_task(self._work(number, None))
                for number in range(WORKERS, WORKERS + IDLE_CLIENTS):
                    tasks.create_task(self._work(number, IDLE))
                tasks.create_task(self._sample())
                tasks.create_task(self._inject_faults())
            await self._wait_until_idle(http)
            report.end = self._resource_usage()
            report.violations += [fault async for fault in self._remaining_activity(http)]
        self._check()

    # --- load

    async def _work(self, number: int, only: Kind | None) -> None:
        rng = random.Random(self._seed * 1000 + number)
        # The soak waits for its last clients, so in a short soak no client is idle for long.
        client = Client(self._port, rng, min(MAX_IDLE_S, self._duration_s / 10))
        weights = [kind.weight for kind in KINDS]
        while not self._over.is_set():
            kind = only or rng.choices(KINDS, weights)[0]
            began_s = time.monotonic()
            try:
                results = await kind.send(client)
            except OSError as error:  # llamasup does not listen
                results = [Result(Outcome.LOST, repr(error))]
            self._note(kind, began_s, results)
            await self._pause(rng.expovariate(1 / PAUSE_S))

    def _note(self, kind: Kind, began_s: float, results: Sequence[Result]) -> None:
        report, now_s = self._report, time.monotonic()
        for result in results:
            report.counts[kind.name, result.outcome] += 1
            if result.outcome is Outcome.LOST:
                report.violations.append(f"lost, {kind.name}, {now_s - began_s:.1f} s: {result.detail}")
                print(report.violations[-1], file=sys.stderr, flush=True)
            elif result.outcome is Outcome.CUT:
                report.cut.append((began_s, now_s, kind, result))

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the soak."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass

    # --- faults

    async def _inject_faults(self) -> None:
        """At most four crashes in ten minutes, every third a hang; a restart after each kill.

        A minute and a half at least: to be noticed, a hang alone takes up to 26 s.
        """
        crashes = max(1, round(CRASHES_PER_WINDOW * max(1.0, self._duration_s / WINDOW_S)))
        every_s = self._duration_s / crashes
        began_s = time.monotonic()
        for number in range(crashes):
            await self._pause(began_s + (number + 0.25) * every_s - time.monotonic())
            hang = number % 3 == 2
            await self._inject_fault(
                "SIGSTOP" if hang else "SIGKILL", signal.SIGSTOP if hang else signal.SIGKILL
            )
            if not hang:
                await self._pause(began_s + (number + 0.75) * every_s - time.monotonic())
                await self._inject_fault("restart (SIGHUP)", None)
        await self._pause(began_s + self._duration_s - time.monotonic())
        self._over.set()

    async def _inject_fault(self, what: str, number: signal.Signals | None) -> None:
        began_s = time.monotonic()
        if number is None:
            self._running.send_signal(signal.SIGHUP)
        else:
            self._server().send_signal(number)
        ready = await asyncio.to_thread(self._running.wait_for_ready_after, self._generation)
        self._generation = ready["generation"]
        ended_s = time.monotonic()
        self._report.spans.append(Span(began_s, ended_s, what, interrupts=number is not None))
        print(f"{what}: serves again after {ended_s - began_s:.2f} s", file=sys.stderr, flush=True)
        await self._pause(FAULT_GAP_S)

    def _server(self) -> psutil.Process:
        return next(child for child in self._running.children() if "--host" in child.cmdline())

    # --- resources of llamasup

    async def _sample(self) -> None:
        every_s = min(5.0, self._duration_s / 60)
        while not self._over.is_set():
            self._report.samples.append(self._resource_usage())
            await self._pause(every_s)

    def _resource_usage(self) -> ResourceUsage:
        process = self._process
        with process.oneshot():
            children = [child for child in process.children(recursive=True) if is_alive(child)]
            return ResourceUsage(
                time.monotonic(),
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
                len(children),
            )

    async def _wait_until_idle(self, http: httpx.AsyncClient) -> None:
        """Wait until nothing is in flight, and until unused connections to the server are closed (5 s)."""
        deadline_s = time.monotonic() + PATIENCE_S
        while [fault async for fault in self._remaining_activity(http)]:
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.1)
        await asyncio.sleep(8.0)

    async def _remaining_activity(self, http: httpx.AsyncClient) -> AsyncIterator[str]:
        slots = (await http.get("/slots")).json()
        busy = [slot["id"] for slot in slots if slot["is_processing"]]
        if busy:
            yield f"slots are busy: {busy}"
        lines = (await http.get("/metrics")).text.splitlines()
        for name in ("llamasup_in_flight", "llamasup_queued"):
            for line in lines:
                if line.startswith(f"{name}{{") and float(line.rpartition(" ")[2]):
                    yield f"still counted: {line}"

    # --- violations

    def _check(self) -> None:
        report = self._report
        start, end = report.start, report.end
        assert start is not None
        assert end is not None
        for began_s, ended_s, kind, result in report.cut:
            overlapping = [
                span
                for span in report.spans
                if began_s <= span.ended_s + FAULT_REPORT_S and ended_s >= span.began_s
            ]
            if not any(span.interrupts or not kind.work for span in overlapping):
                report.violations.append(
                    f"broken off although nothing was done, {kind.name}: {result.detail}"
                )
        if end.descriptors > start.descriptors:
            report.violations.append(
                f"descriptors: {start.descriptors} at the start, {end.descriptors} at the end"
            )
        if end.children != start.children:
            report.violations.append(f"children: {start.children} at the start, {end.children} at the end")
        half = report.samples[: len(report.samples) // 2]
        most = max(sample.threads for sample in half)
        if end.threads > most + MORE_THREADS:
            report.violations.append(f"threads: {end.threads} at the end, at most {most} in the first half")
        if report.growth_bytes > MAX_GROWTH_BYTES:
            report.violations.append(
                f"RSS: {report.growth_bytes} bytes more in the last quarter than in the third"
            )
