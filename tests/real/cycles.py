"""What this process holds over many crashes of a real server, and stops and starts of its service (S18)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from llamasup.llama_server.settings import Settings
from llamasup.proxy.bind import bind
from llamasup.service.run import RunOptions, Service
from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.events import Bus
from llamasup.supervision.states import State
from tests.patience import PATIENCE_S
from tests.real.remains import seconds_until_gone

__all__ = ["ResourceUsage", "crash_cycles", "leaked_resources"]

AT_ONCE = RestartPolicy(first_delay_s=0.0, longest_delay_s=0.0, window_s=1.0, most_crashes=1_000_000)
# The allocator's own ups and downs; 1,000 cycles that leaked no more than an event each would be above it.
MAX_GROWTH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What this process has at a moment at which nothing is served."""

    cycles: int
    descriptors: int
    threads: int
    tasks: int
    children: int
    files: int
    """In the run-time and temporary folders."""
    rss_bytes: int


def leaked_resources(usages: Sequence[ResourceUsage]) -> Sequence[str]:
    """What there is more of at the end than after the first service, if anything."""
    first, last = usages[0], usages[-1]
    counted = ("descriptors", "threads", "tasks", "children", "files")
    growth = [
        f"{name}: {getattr(first, name)} before, {getattr(last, name)} after"
        for name in counted
        if getattr(last, name) > getattr(first, name)
    ]
    grown_bytes = last.rss_bytes - first.rss_bytes
    return growth + [f"RSS: {grown_bytes} bytes more"] * (grown_bytes > MAX_GROWTH_BYTES)


def crash_cycles(
    runtime: str, model: Path, home: Path, *, services: int, crashes: int
) -> Sequence[ResourceUsage]:
    """Start, ``crashes`` times a server killed in the middle of a stream, stop; ``services`` times over.

    Returns what was held after each service, the first of which has loaded what is loaded once.
    """
    usages = []
    for number in range(1, services + 1):
        # A loop for each: its pool of threads grows by need, up to a bound, and goes with it.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            tasks = loop.run(_one_service(runtime, model, crashes))
        usages.append(_resource_usage(home, number * crashes, tasks))
    return usages


async def _one_service(runtime: str, model: Path, crashes: int) -> int:
    """The tasks that there are afterwards, this one included."""
    sockets = tuple(bind("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    settings = Settings(ctx_size=2048, parallel=1, extra=("--context-shift",))  # streams without an end
    options = RunOptions(str(model), settings, runtime=runtime, sockets=sockets, restart=AT_ONCE)
    service = Service(options, Bus())
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(service.run())
        await asyncio.sleep(0)
        runner = service.runner
        assert runner is not None
        for generation in range(1, crashes + 2):
            async with asyncio.timeout(PATIENCE_S):
                await runner.until(lambda now, n=generation: (now.state, now.generation) == (State.READY, n))  # type: ignore[misc]
            if generation <= crashes:
                await _cut_stream(port, runner.pid)
        service.ask_stop()
        await run
    return len(asyncio.all_tasks())


async def _cut_stream(port: int, pid: int | None) -> None:
    """A client in the middle of an answer, whose server is killed."""
    assert pid is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True}).encode()
    writer.write(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"data: ")
        os.kill(pid, signal.SIGKILL)
        rest = await reader.read(-1)
    assert b'data: {"error":' in rest
    writer.close()
    await writer.wait_closed()


def _resource_usage(home: Path, cycles: int, tasks: int) -> ResourceUsage:
    seconds_until_gone(home)  # the guardian goes a moment after us
    gc.collect()
    process = psutil.Process()
    return ResourceUsage(
        cycles,
        descriptors=process.num_fds(),
        threads=threading.active_count(),
        tasks=tasks,
        children=len(process.children(recursive=True)),
        files=sum(1 for name in ("run", "tmp") for _ in (home / name).rglob("*")),
        rss_bytes=process.memory_info().rss,
    )
