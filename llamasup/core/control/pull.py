"""The stream of one download that a client of the control API asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from llamasup.core.control.interface import Fetch
from llamasup.core.control.streams import KEEPALIVE_S, Streams
from llamasup.core.http.errors import error_object
from llamasup.core.hub.progress import Listener, Progress
from llamasup.core.system.text import json_text
from llamasup.errors import LlamasupError, Stopping

__all__ = ["pull_stream"]

_log = logging.getLogger(__name__)


async def pull_stream(
    fetch: Fetch, streams: Streams, tasks: asyncio.TaskGroup, *, keepalive_s: float = KEEPALIVE_S
) -> AsyncGenerator[bytes]:
    """Server-sent events: ``progress``, and at the end ``done`` or ``error``. The download ends with the
    stream, unless other requests wait for it.
    """
    seen: Progress | None = None  # the last progress that is not sent yet
    with streams.waking() as wake:

        def moved(progress: Progress) -> None:
            nonlocal seen
            seen = progress
            wake.set()

        task = tasks.create_task(_outcome(fetch, moved), name="control/pull")
        task.add_done_callback(lambda _: wake.set())
        try:
            while not (task.done() or streams.ended):
                wake.clear()
                if seen is not None:
                    frame, seen = _progress(seen), None
                    yield frame
                try:
                    async with asyncio.timeout(keepalive_s):
                        await wake.wait()
                except TimeoutError:
                    yield b": keepalive\n\n"
            ended = task.done() and not task.cancelled()
            error = task.result() if ended else Stopping("llamasup is stopping.", remedy="Start it again.")
            yield _event("done") if error is None else _event("error", **error_object(error))
        finally:
            task.cancel()


async def _outcome(fetch: Fetch, moved: Listener) -> LlamasupError | None:
    """The error of a download, which must not end llamasup."""
    try:
        await fetch(moved)
    except LlamasupError as error:
        return error
    except Exception as error:
        _log.exception("a download failed")
        return LlamasupError(f"Internal error in llamasup: {type(error).__name__}.", remedy="See its log.")
    return None


def _progress(seen: Progress) -> bytes:
    return _event(
        "progress", done_bytes=seen.done_bytes, total_bytes=seen.total_bytes, bytes_per_s=seen.bytes_per_s
    )


def _event(event: str, **fields: Any) -> bytes:
    return f"data: {json_text({'event': event, **fields})}\n\n".encode()
