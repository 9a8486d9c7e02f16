"""Starts a llamasup for the time that a command needs it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from llamasup.core.system.own_command import own_command
from llamasup.errors import ServerFailed, UsageInvalid

STOP_WAIT_S: Final = 90.0
"""The time limit for the exit of the started llamasup: longer than it waits for its last requests."""
_MAX_EVENT_BYTES: Final = 1 << 20


@asynccontextmanager
async def started_server(model: str, arguments: Sequence[str]) -> AsyncIterator[str]:
    """Yield the URL of a llamasup that serves ``model`` until the block or this process ends.

    ``arguments`` are options of ``llamasup run``. Ctrl-C in the terminal does not reach the new llamasup.
    Its warnings and its live line appear on standard error. Raises UsageInvalid and ServerFailed.
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
        limit=_MAX_EVENT_BYTES,
        **_OWN_GROUP,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading: asyncio.Task[None] | None = None
    try:
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        else:
            code = await process.wait()
            raise ServerFailed(
                f"llamasup could not serve {model!r}; it exited with {code}.",
                cause="start_failed",
                exit_code=code or 75,
                remedy="See the message above.",
            )
        reading = asyncio.get_running_loop().create_task(_drop(process.stdout), name="started/events")
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


async def _drop(events: asyncio.StreamReader) -> None:
    """Read the further events, so that llamasup does not wait for a reader."""
    with suppress(ValueError):  # one is too long
        async for _ in events:
            pass
