"""Answers without an end: what happens, and what llama-server says, to whoever goes on reading.

Each has a bounded queue, or reads from a file at its reader's pace: whoever stops reading costs no more than
that. They end when llamasup does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamasup.control.interface import ControlTarget
from llamasup.errors import Conflict, LogMissing
from llamasup.supervision.events import PROTOCOL, PublishedEvent, Stopped, as_json
from llamasup.system.process.log_tail import LogTail
from llamasup.system.text import json_text

__all__ = ["MAX_WAITING", "Stream", "Streams", "TooManyStreams", "event_stream", "log_stream", "open_log"]

# A start is half a dozen notices: forty models that start at once, or one that crashed forty times.
MAX_WAITING = 256
# Each is a connection and a queue; whoever needs more is forgetting to close them.
MAX_STREAMS = 64
# Half of what proxies and load balancers allow a silent connection, mostly.
KEEPALIVE_S = 15.0
# A file says nothing when it grows. A stat() each, and only while somebody follows.
POLL_S = 0.2


class TooManyStreams(Conflict):
    """As many as there may be are open."""

    http_status = 429
    cause = "too_many_streams"


class Streams:
    """All that are open."""

    def __init__(self) -> None:
        self.ended = False
        self._open = 0
        self._wakes: set[asyncio.Event] = set()

    def end(self) -> None:
        """Let each of them come to its end."""
        self.ended = True
        for wake in self._wakes:
            wake.set()

    def enter(self) -> None:
        """Raises TooManyStreams. A ``Stream`` leaves by itself."""
        if self._open >= MAX_STREAMS:
            raise TooManyStreams(
                f"{MAX_STREAMS} streams of events and logs are open, which is all that there may be.",
                remedy="Close those that nobody reads.",
            )
        self._open += 1

    def leave(self) -> None:
        self._open -= 1

    @contextmanager
    def waking(self) -> Iterator[asyncio.Event]:
        """What is set when they end."""
        wake = asyncio.Event()
        self._wakes.add(wake)
        try:
            yield wake
        finally:
            self._wakes.discard(wake)


class Stream(StreamingResponse):
    """Of one reader who has entered ``streams``. ``release``, which may block, is called at its end."""

    def __init__(
        self,
        streams: Streams,
        pieces: AsyncGenerator[bytes],
        media_type: str,
        release: Callable[[], None] | None = None,
    ) -> None:
        # Nothing on the way may keep it: a cache, or nginx's buffer.
        headers = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-content-type-options": "nosniff",
        }
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._streams = streams
        self._pieces = pieces
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":  # over with its head: the connection is to serve who comes next
                await Response(headers=dict(self.headers))(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            self._streams.leave()
            await self._pieces.aclose()  # at once, and not whenever it is collected
            if self._release is not None:
                await asyncio.to_thread(self._release)


# --- events ------------------------------------------------------------------------------------------


async def event_stream(
    controlled: ControlTarget, streams: Streams, *, keepalive_s: float = KEEPALIVE_S
) -> AsyncGenerator[bytes]:
    """Server-sent events: the state of each model, then every notice of the bus as its contract object."""
    waiting: deque[PublishedEvent] = deque()
    missed = 0
    with streams.waking() as wake:

        def hear(notice: PublishedEvent) -> None:
            nonlocal missed
            if missed or len(waiting) >= MAX_WAITING:
                missed += 1
            else:
                waiting.append(notice)
            wake.set()

        controlled.bus.listen(hear)
        try:
            for model in controlled.status()["models"]:
                yield _event("state", model=model["id"], state=model["state"], generation=model["generation"])
            while True:
                wake.clear()
                while waiting:
                    yield _frame(as_json(waiting.popleft()))
                if missed:
                    # With a hole in it the story is worth less than its beginning anew.
                    yield _event("missed", count=missed)
                    return
                if streams.ended:
                    yield _frame(as_json(Stopped()))
                    return
                try:
                    async with asyncio.timeout(keepalive_s):
                        await wake.wait()
                except TimeoutError:
                    yield b": keepalive\n\n"
        finally:
            controlled.bus.unsubscribe(hear)


def _event(event: str, **fields: Any) -> bytes:
    return _frame({"event": event, "protocol": PROTOCOL, **fields})


def _frame(shown: Any) -> bytes:
    return f"data: {json_text(shown)}\n\n".encode()


# --- logs --------------------------------------------------------------------------------------------


async def open_log(path: Path | None, model: str, lines: int) -> LogTail:
    """Raises LogMissing where there is none."""
    if path is None:
        raise LogMissing(
            f"The output of {model}'s llama-server is not kept.",
            remedy="The state folder cannot be used: llamasup said why when it started.",
        )
    try:
        return await asyncio.to_thread(LogTail, path, lines)
    except FileNotFoundError:
        raise LogMissing(
            f"{model} has no log yet.", remedy="It is written from its first start on."
        ) from None
    except OSError as error:
        raise LogMissing(f"The log of {model} cannot be read: {error.strerror or error}.") from error


async def log_stream(log: LogTail, streams: Streams, *, follow: bool) -> AsyncGenerator[bytes]:
    """The lines as llama-server wrote them, whatever bytes they hold; with ``follow`` those to come, too."""
    with streams.waking() as wake:
        while True:
            is_last = not follow or streams.ended  # before the reading: what was written till then counts
            # In a thread: the disk may be slow, and requests are being served meanwhile.
            if chunk := await asyncio.to_thread(log.read):
                yield chunk
            elif is_last:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await wake.wait()
