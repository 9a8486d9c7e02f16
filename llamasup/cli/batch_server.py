"""Finds the llamasup that serves a batch, or starts one for the run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from llamasup.cli.started_server import started_server
from llamasup.cli.target import find_target
from llamasup.core.auth.key_source import client_key
from llamasup.core.control.client import ControlClient
from llamasup.features.batch.job import Job


@asynccontextmanager
async def server_of(job: Job) -> AsyncIterator[tuple[str, str | None]]:
    """Yield the URL of the llamasup that serves ``job``, and the key for it."""
    if job.model is not None:
        async with started_server(job.model, job.arguments) as url:
            yield url, client_key(None, os.environ)  # the new llamasup takes its key from the environment
        return
    api_key = client_key(None if job.api_key_file is None else Path(job.api_key_file), os.environ)
    if job.url is not None:
        yield job.url, api_key
        return
    with ControlClient(find_target(pid=job.pid, url=None, api_key_file=None)) as client:
        url = str(client.status()["url"])
    yield url, api_key
