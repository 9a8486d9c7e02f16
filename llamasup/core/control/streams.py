"""Responses that stay open: the event stream, followed logs, and the progress of a download.

A stream has a bounded queue, or reads a file as fast as its client does, so a client that stops reading costs
no more than that. Streams end with llamasup.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec import structs
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamasup.core.control.interface import ControlTarget, Fetch
from llamasup.core.http.errors import error_object
from llamasup.core.hub.remote_file import Listener, Progress
from llamasup.core.observability.own_log import OwnLogTail
from llamasup.core.proxy.live.requests import LiveRequests
from llamasup.core.supervision.events import LoadProgressed, PublishedEvent, Stopped, as_json, as_object
from llamasup.core.system.process.log_tail import LogTail
from llamasup.core.system.text import json_text
from llamasup.errors import Conflict, LlamasupError, LogMissing, Stopping

# Between two events. uvloop's timers can fire 1 ms early, so an event may come a little earlier.
REQUESTS_INTERVAL_S = 1.0
_EARLY = 0.9
# Finished requests. A person cannot read more in a second; `ended_total` shows how many there were.
MAX_ENDED_IN_EVENT = 20
# A request that is older than this gets the token counts of its slot, for which llama-server is asked.
_SETTLED_S = 0.5

_encode = msgspec.json.Encoder().encode


class RequestUpdates:
    """The last event, for all streams. ``clock``: monotonic, in seconds."""

    def __init__(self, requests: LiveRequests, clock: Callable[[], float] = monotonic) -> None:
        self._requests = requests
        self._clock = clock
        self._making = asyncio.Lock()
        self._wakes: set[asyncio.Event] = set()
        self._ended_total = requests.ended_so_far
        self._was_busy = False
        self._looked_s = float("-inf")
        self._made_s = float("-inf")
        self.frame = b""
        """The frame of the last event."""

    @contextmanager
    def watched(self, wake: asyncio.Event) -> Iterator[Watcher]:
        """Watch the events. ``wake`` is set when there is a new one."""
        if not self._wakes:
            self._ended_total = self._requests.ended_so_far
        self._wakes.add(wake)
        try:
            yield Watcher(self)
        finally:
            self._wakes.discard(wake)

    async def refresh(self, *, is_first: bool) -> None:
        """Make the next event, if it is due and there is news. ``is_first``: also without news."""
        async with self._making:
            now_s = self._clock()
            due_s = now_s - _EARLY * REQUESTS_INTERVAL_S
            if self._looked_s > due_s and not (is_first and self._made_s <= due_s):
                return
            self._looked_s = now_s
            live = await self._requests.in_flight(settled_s=_SETTLED_S)
            total = self._requests.ended_so_far
            new, self._ended_total = total - self._ended_total, total
            was_busy, self._was_busy = self._was_busy, bool(live)
            if not (live or new or was_busy or is_first):
                return
            ended = self._requests.last_ended(min(new, MAX_ENDED_IN_EVENT))
            event = as_object("requests", live=live, ended=ended, ended_total=total)
            self.frame = b"data: " + _encode(event) + b"\n\n"
            self._made_s = now_s
            for wake in self._wakes:
                wake.set()


class Watcher:
    """One stream. A slow one misses events; ``ended_total`` shows that."""

    def __init__(self, updates: RequestUpdates) -> None:
        self._updates = updates
        self._seen: bytes | None = None

    async def next(self) -> bytes | None:
        """The next event as a frame of the stream; None: there is no news. The first is sent in any case."""
        await self._updates.refresh(is_first=self._seen is None)
        if self._seen is self._updates.frame:
            return None
        self._seen = self._updates.frame
        return self._seen


_log = logging.getLogger(__name__)

# A start has about six events: forty models that start at once, or one that crashed forty times.
MAX_WAITING = 256
# Each is a connection and a queue; a client that needs more forgets to close them.
MAX_STREAMS = 64
# Streams of downloads, which any key may request. They must leave the streams above to operators.
MAX_PULLS = 32
MAX_PULLS_OF_ONE = 4
# Half of the usual idle limit of proxies and load balancers.
KEEPALIVE_S = 15.0
# For new lines of a followed log; one stat() each.
POLL_S = 0.2


class TooManyStreams(Conflict):
    """The maximum number of streams is open."""

    http_status = 429
    cause = "too_many_streams"


class Streams:
    """All open streams of one kind: at most ``most``, and ``most_of_one`` of each client with a name."""

    def __init__(
        self, most: int = MAX_STREAMS, what: str = "streams of events and logs", most_of_one: int = 0
    ) -> None:
        self.ended = False
        self._most = most
        self._most_of_one = most_of_one
        self._what = what
        self._clients: list[str] = []  # one entry for each open stream
        self._wakes: set[asyncio.Event] = set()

    def end(self) -> None:
        """End all streams."""
        self.ended = True
        self.wake()

    def wake(self) -> None:
        """Let each stream see whether it may continue."""
        for wake in self._wakes:
            wake.set()

    def enter(self, client: str = "") -> None:
        """Raises TooManyStreams. ``Stream`` calls ``leave``."""
        if len(self._clients) >= self._most:
            raise TooManyStreams(
                f"{self._most} {self._what} are open, which is the maximum.", remedy="Close unused ones."
            )
        if client and self._clients.count(client) >= self._most_of_one:
            raise TooManyStreams(
                f"{self._most_of_one} {self._what} of this key are open, which is the maximum of one key.",
                remedy="Close unused ones.",
            )
        self._clients.append(client)

    def leave(self, client: str) -> None:
        self._clients.remove(client)

    @contextmanager
    def waking(self) -> Iterator[asyncio.Event]:
        """An event that is set when the streams end."""
        wake = asyncio.Event()
        self._wakes.add(wake)
        try:
            yield wake
        finally:
            self._wakes.discard(wake)


class Stream(StreamingResponse):
    """The response of one stream of ``streams``. ``release`` is called at its end, in a thread."""

    def __init__(
        self,
        streams: Streams,
        pieces: AsyncGenerator[bytes],
        media_type: str,
        release: Callable[[], None] | None = None,
        client: str = "",
    ) -> None:
        # No cache and no buffer (nginx) may hold it back.
        headers = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-content-type-options": "nosniff",
        }
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._streams = streams
        self._pieces = pieces
        self._release = release
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":  # ends after the head, so the connection can be reused
                await Response(headers=dict(self.headers))(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            self._streams.leave(self._client)
            await self._pieces.aclose()  # now, and not at garbage collection
            if self._release is not None:
                await asyncio.to_thread(self._release)


# --- events ------------------------------------------------------------------------------------------


async def event_stream(
    control_target: ControlTarget,
    streams: Streams,
    requests: RequestUpdates | None = None,
    *,
    keepalive_s: float = KEEPALIVE_S,
    is_open: Callable[[], bool] = lambda: True,
) -> AsyncGenerator[bytes]:
    """Server-sent events: the state of each model, then every event of the bus.

    ``requests``: also the requests in flight, each second in which there are any. The stream ends once it is
    not ``is_open``.
    """
    queue: deque[PublishedEvent] = deque()
    missed = 0
    now_s = asyncio.get_running_loop().time
    sent_s = now_s()
    with (
        streams.waking() as wake,
        nullcontext() if requests is None else requests.watched(wake) as watcher,
    ):

        def on_event(event: PublishedEvent) -> None:
            nonlocal missed
            if isinstance(event, LoadProgressed):
                _drop_older(queue, event)
            if missed or len(queue) >= MAX_WAITING:
                missed += 1
            else:
                queue.append(event)
            wake.set()

        control_target.bus.listen(on_event)
        try:
            for model in control_target.status()["models"]:
                state, generation = model["state"], model["generation"]
                yield _frame(as_object("state", model=model["id"], state=state, generation=generation))
            while True:
                wake.clear()
                while queue:
                    sent_s = now_s()
                    yield _frame(as_json(queue.popleft()))
                if missed:
                    # The client connects again, as a stream with missing events is useless.
                    yield _frame(as_object("missed", count=missed))
                    return
                if streams.ended:
                    yield _frame(as_json(Stopped()))
                    return
                if not is_open():
                    return
                if watcher is not None and (frame := await watcher.next()) is not None:
                    sent_s = now_s()
                    yield frame
                try:
                    async with asyncio.timeout(
                        keepalive_s if watcher is None else min(keepalive_s, REQUESTS_INTERVAL_S)
                    ):
                        await wake.wait()
                except TimeoutError:
                    if now_s() - sent_s >= keepalive_s:
                        sent_s = now_s()
                        yield b": keepalive\n\n"
        finally:
            control_target.bus.unsubscribe(on_event)


def _drop_older(queue: deque[PublishedEvent], progress: LoadProgressed) -> None:
    """A slow client gets only the newest progress of a model. It would otherwise miss other events."""
    for event in queue:
        if isinstance(event, LoadProgressed) and event.model == progress.model:
            queue.remove(event)
            return


def _frame(shown: Any) -> bytes:
    return f"data: {json_text(shown)}\n\n".encode()


# --- logs --------------------------------------------------------------------------------------------


async def open_log(path: Path | None, model: str, lines: int) -> LogTail:
    """Raises LogMissing."""
    if path is None:
        raise LogMissing(
            f"The output of {model}'s llama-server is not kept.",
            remedy="The state folder cannot be used: see the warning at the start of llamasup.",
        )
    try:
        return await asyncio.to_thread(LogTail, path, lines)
    except FileNotFoundError:
        raise LogMissing(f"{model} has no log yet.", remedy="Its first start creates it.") from None
    except OSError as error:
        raise LogMissing(f"The log of {model} cannot be read: {error.strerror or error}.") from error


async def log_stream(
    log: LogTail | OwnLogTail, streams: Streams, *, follow: bool, is_open: Callable[[], bool] = lambda: True
) -> AsyncGenerator[bytes]:
    """The unchanged bytes of the lines; with ``follow`` also of the lines to come."""
    with streams.waking() as wake:
        while True:
            wake.clear()
            # Checked before reading, to send all lines before the end.
            is_last = not follow or streams.ended or not is_open()
            # In a thread: the disk may be slow.
            if chunk := await asyncio.to_thread(log.read):
                yield chunk
            elif is_last:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await wake.wait()


# --- downloads ---------------------------------------------------------------------------------------


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

        task = tasks.create_task(_outcome_of(fetch, moved), name="control/pull")
        task.add_done_callback(lambda _: wake.set())
        try:
            while not (task.done() or streams.ended):
                wake.clear()
                if seen is not None:
                    frame = _frame({"event": "progress", **structs.asdict(seen)})
                    seen = None
                    yield frame
                try:
                    async with asyncio.timeout(keepalive_s):
                        await wake.wait()
                except TimeoutError:
                    yield b": keepalive\n\n"
            ended = task.done() and not task.cancelled()
            error = task.result() if ended else Stopping("llamasup is stopping.", remedy="Start it again.")
            yield _frame({"event": "done"} if error is None else {"event": "error", **error_object(error)})
        finally:
            task.cancel()


async def _outcome_of(fetch: Fetch, moved: Listener) -> LlamasupError | None:
    """The error of a download, which must not end llamasup."""
    try:
        await fetch(moved)
    except LlamasupError as error:
        return error
    except Exception as error:
        _log.exception("a download failed")
        return LlamasupError(f"Internal error in llamasup: {type(error).__name__}.", remedy="See its log.")
    return None
