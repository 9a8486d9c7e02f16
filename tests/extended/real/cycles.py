"""The resources of this process over many crashes of a real server and restarts of its service (S18)."""

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

from llamasup.core.proxy.listeners.bind import bind
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.states import State
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions
from tests.kit.patience import PATIENCE_S
from tests.real.remains import seconds_until_gone

__all__ = ["ResourceUsage", "crash_cycles", "leaked_resources"]

AT_ONCE = RestartPolicy(first_delay_s=0.0, longest_delay_s=0.0, window_s=1.0, most_crashes=1_000_000)
# The allocator's own variation. A leak of one event per cycle exceeds it after 1,000 cycles.
MAX_GROWTH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The resources of this process while no service runs."""

    cycles: int
    descriptors: int
    threads: int
    tasks: int
    children: int
    files: int
    """In the run-time and temporary folders."""
    rss_bytes: int


def leaked_resources(usages: Sequence[ResourceUsage]) -> Sequence[str]:
    """The resources that grew between the first service and the last one."""
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
    """Run ``services`` services. In each, kill the server ``crashes`` times in the middle of a stream.

    Returns the resources after each service. The first service also loads what a process loads once.
    """
    usages = []
    for number in range(1, services + 1):
        # Each service gets its own loop, because the thread pool of a loop grows up to a bound.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            tasks = loop.run(_one_service(runtime, model, crashes))
        usages.append(_resource_usage(home, number * crashes, tasks))
    return usages


async def _one_service(runtime: str, model: Path, crashes: int) -> int:
    """Returns the number of tasks afterwards, including this one."""
    sockets = tuple(bind("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    settings = Settings(ctx_size=2048, parallel=1, extra=("--context-shift",))  # streams without an end
    options = RunOptions(str(model), settings, runtime=runtime, sockets=sockets, restart=AT_ONCE)
    bus, starting = Bus(), asyncio.Event()
    bus.listen(lambda _: starting.set())
    service = Service(options, bus)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(service.run())
        async with asyncio.timeout(PATIENCE_S):
            await starting.wait()
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
    """Kill the server while a client reads its answer."""
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
    seconds_until_gone(home)  # the guardian ends shortly after llamasup
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
