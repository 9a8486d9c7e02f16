"""Finds the llamasup that serves a batch, or starts one for the run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from llamasup.cli.target import find_target
from llamasup.core.auth.key_source import client_key
from llamasup.core.control.client import ControlClient
from llamasup.core.system.own_command import own_command
from llamasup.errors import ServerFailed, UsageInvalid
from llamasup.features.batch.job import Job

STOP_WAIT_S: Final = 90.0
"""The time limit for the exit of the started llamasup: longer than it waits for its last requests."""
_MAX_EVENT_BYTES: Final = 1 << 20


@asynccontextmanager
async def server_of(job: Job) -> AsyncIterator[tuple[str, str | None]]:
    """Yield the URL of the llamasup that serves ``job``, and the key for it."""
    if job.model is not None:
        async with _started(job.model, job.arguments) as url:
            yield url, client_key(None, os.environ)  # the new llamasup takes its key from the environment
        return
    api_key = client_key(None if job.api_key_file is None else Path(job.api_key_file), os.environ)
    if job.url is not None:
        yield job.url, api_key
        return
    with ControlClient(find_target(pid=job.pid, url=None, api_key_file=None)) as client:
        url = str(client.status()["url"])
    yield url, api_key


@asynccontextmanager
async def _started(model: str, arguments: tuple[str, ...]) -> AsyncIterator[str]:
    """Yield the URL of a llamasup that runs until the block or this process ends."""
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
        reading = asyncio.get_running_loop().create_task(_drop(process.stdout), name="batch/events")
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


async def _drop(events: asyncio.StreamReader) -> None:
    """Read the further events, so that llamasup does not wait for a reader."""
    with suppress(ValueError):  # one is too long
        async for _ in events:
            pass
