"""Starts a llamasup for the time that a command needs it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from llamasup.core.system.own_command import own_command
from llamasup.core.system.process.sweep import record_child, tag_environment
from llamasup.errors import ServerFailed, UsageInvalid

STOP_WAIT_S: Final = 90.0
"""The time limit for the exit of the started llamasup: longer than it waits for its last requests."""
_MAX_EVENT_BYTES: Final = 1 << 20


@asynccontextmanager
async def started_server(
    model: str,
    arguments: Sequence[str],
    *,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    run_folder: Path | None = None,
) -> AsyncIterator[str]:
    """Yield the URL of a llamasup that serves ``model`` until the block or this process ends.

    ``arguments`` are options of ``llamasup run``. Ctrl-C in the terminal does not reach the new llamasup.
    Its warnings and its live line appear on standard error, unless ``on_event`` gets its events. The guardian
    of ``run_folder`` also ends it. Raises UsageInvalid and ServerFailed.
    """
    command = own_command("llamasup")
    if command is None:
        raise UsageInvalid(
            f"This application cannot start llamasup for {model!r}.",
            remedy="Start llamasup first, and give its address with --url.",
        )
    process = await asyncio.create_subprocess_exec(
        *(*command, "run", model, "--sidecar", "--log-level", "warning"),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if on_event is None else asyncio.subprocess.DEVNULL,
        limit=_MAX_EVENT_BYTES,
        env=None if run_folder is None else tag_environment(os.environ, run_folder),
        **_OWN_GROUP,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading: asyncio.Task[None] | None = None
    try:
        if run_folder is not None:
            record_child(run_folder, process.pid, command[0])
        failed: Mapping[str, Any] = {}
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                break
            failed = event if event["event"] == "failed" else failed
            if on_event is not None:
                on_event(event)
        else:
            raise _not_served(model, await process.wait(), failed if on_event is not None else {})
        reading = asyncio.get_running_loop().create_task(
            _read(process.stdout, on_event), name="started-server/events"
        )
        yield event["url"]
    finally:
        if reading is not None:
            reading.cancel()
        process.stdin.close()  # it stops then
        try:
            async with asyncio.timeout(STOP_WAIT_S):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()  # its guardian kills llama-server
                await process.wait()


# The terminal sends Ctrl-C to its foreground group.
if sys.platform == "win32":
    _OWN_GROUP: Final[Mapping[str, Any]] = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
else:
    _OWN_GROUP: Final[Mapping[str, Any]] = {"process_group": 0}


def _not_served(model: str, code: int, failed: Mapping[str, Any]) -> ServerFailed:
    """Make the error of a failed start. If there is no event, the message is on standard error already."""
    return ServerFailed(
        failed.get("message") or f"llamasup could not serve {model!r}; it exited with {code}.",
        cause=failed.get("cause") or "start_failed",
        exit_code=code if code > 0 else 75,
        remedy=failed.get("remedy", "") if failed else "See the message above.",
    )


async def _read(events: asyncio.StreamReader, on_event: Callable[[Mapping[str, Any]], None] | None) -> None:
    """Read the further events, so that llamasup does not wait for a reader."""
    with suppress(ValueError):  # one is too long
        async for line in events:
            if on_event is not None:
                on_event(json.loads(line))
    if on_event is not None:
        on_event({"event": "ended"})  # also after a SIGKILL, which no event of its own reports
