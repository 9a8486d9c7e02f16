#!/usr/bin/env python3
"""Trace which modules of llamasup one streamed request runs through, and one crash of llama-server.

    scripts/walk.py             a table: the modules and functions of each room
    scripts/walk.py --list      also the modules, with their functions

llamasup serves in this process, with the fake llama-server of the tests. A walk counts the functions that ran
for it. What ran at the start, at an import, or in two seconds without a request does not count. In the second
walk, llama-server is killed while a request waits for its first token. The walk ends when a new server has
answered this request.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup.core.proxy.listeners.bind import bind  # noqa: E402
from llamasup.core.settings.model import Settings  # noqa: E402
from llamasup.core.supervision.events import Bus, Ready  # noqa: E402
from llamasup.service.hosting import Service  # noqa: E402
from llamasup.service.options import RunOptions  # noqa: E402
from scripts.pages import aligned_table  # noqa: E402
from tests.kit import fake_server  # noqa: E402
from tests.kit.tiny import tiny_decoder  # noqa: E402

PACKAGE = f"{ROOT / 'llamasup'}{os.sep}"
PREFILL_S = 0.5  # until the first token: the server is killed in this time
IDLE_S = 2.0
LIMIT_S = 60.0
REQUEST, CRASH = "one streamed request", "one crash with a waiting request"

Walk = Mapping[str, set[str]]
"""The functions that ran, by module."""


class Tracer:
    """Collects the functions of llamasup that are called in any thread while it records."""

    def __init__(self) -> None:
        self._codes: set[CodeType] | None = None

    def install(self) -> None:
        """Must come before the threads that it shall trace."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._codes is not None:
            self._codes.add(frame.f_code)

    @contextmanager
    def recording(self) -> Iterator[dict[str, set[str]]]:
        """The walk is complete at the end of the block."""
        walk: dict[str, set[str]] = {}
        codes = self._codes = set()
        try:
            yield walk
        finally:
            self._codes = None
            for code in codes:
                # The bodies of modules and classes run at an import, and are not optimized.
                if code.co_filename.startswith(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED:
                    module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
                    walk.setdefault(module, set()).add(f"{code.co_name}:{code.co_firstlineno}")


async def ask(port: int) -> None:
    """Send a streamed request, and read its answer to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = json.dumps({"model": "tiny", "stream": True, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        raise SystemExit(f"the request failed: {answer!r}")


def server() -> psutil.Process:
    """The llama-server of this process."""
    children = psutil.Process().children(recursive=True)
    (found,) = [child for child in children if "tests.kit.fake_server" in child.cmdline()]
    return found


async def walks(folder: Path) -> dict[str, Walk]:
    """Both walks, by name."""
    model = folder / "tiny.gguf"
    model.write_bytes(tiny_decoder())
    runtime = fake_server.install(folder / "llama-server", f"prefill_s={PREFILL_S}")
    sockets = tuple(bind("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    bus, ready = Bus(), asyncio.Event()
    bus.listen(lambda event: ready.set() if isinstance(event, Ready) else None)
    tracer = Tracer()
    tracer.install()
    settings = Settings(parallel=1)
    service = Service(RunOptions(str(model), settings=settings, runtime=str(runtime), sockets=sockets), bus)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        await ready.wait()
        await ask(port)  # imports what the first request needs
        with tracer.recording() as idle:
            await asyncio.sleep(IDLE_S)
        with tracer.recording() as request:
            await ask(port)
        waiting = tasks.create_task(ask(port))
        await asyncio.sleep(PREFILL_S / 2)
        with tracer.recording() as crash:
            server().send_signal(signal.SIGKILL)
            await waiting
        service.ask_stop()
        await running
    sys.setprofile(None)
    return {REQUEST: beyond(request, idle), CRASH: beyond(crash, idle)}


def beyond(walk: Walk, idle: Walk) -> Walk:
    """Leave out the functions that also run without a request."""
    left = {module: functions - idle.get(module, set()) for module, functions in walk.items()}
    return {module: functions for module, functions in left.items() if functions}


def room_of(module: str) -> str:
    """``core/proxy`` for ``core/proxy/reader``, and ``service`` for ``service/hosting``."""
    parts = module.split("/")
    return "/".join(parts[:2] if parts[0] in ("core", "features") else parts[:1])


def table(found: Mapping[str, Walk]) -> str:
    """Markdown: the modules and functions of each room in each walk."""
    cells = [["Room", *(f"{name}: modules, functions" for name in found)]]
    rooms = sorted({room_of(module) for walk in found.values() for module in walk})
    for room in [*rooms, ""]:
        row = [room or f"{len(rooms)} rooms"]
        for walk in found.values():
            inside = [module for module in walk if not room or room_of(module) == room]
            row.append(f"{len(inside)}, {sum(len(walk[module]) for module in inside)}" if inside else "")
        cells.append(row)
    return aligned_table(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="also list the modules and their functions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-", dir="/tmp") as name:  # short: sockets lie below it
        for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
            os.environ[variable] = f"{name}/{variable}"
            Path(name, variable).mkdir(mode=0o700)
        found = asyncio.run(walks(Path(name)))
    print(table(found))
    if options.list:
        for title, walk in found.items():
            print(f"\n{title}:")
            for module, functions in sorted(walk.items()):
                names = sorted({function.partition(":")[0] for function in functions})
                print(f"  {module}: {', '.join(names)}")


if __name__ == "__main__":
    main()
