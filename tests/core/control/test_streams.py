"""Event streams and followed logs: slow, disconnecting and idle clients, and the end of llamasup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.control import streams
from llamasup.core.control.streams import (
    MAX_STREAMS,
    MAX_WAITING,
    RequestUpdates,
    Streams,
    TooManyStreams,
    event_stream,
)
from llamasup.core.http.heads import HttpError
from llamasup.core.observability.counters import CANCELLED, RequestRecord
from llamasup.core.proxy.live.requests import LiveRequests
from llamasup.core.supervision.events import LoadProgressed, ServerWarned
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.system.process.log_tail import LogTail
from llamasup.core.system.process.output_pump import RotatedFile
from llamasup.errors import LogMissing
from tests.core.control.fake import (
    PATIENCE_S,
    AsyncControlClient,
    FakeConnection,
    FakeControlTarget,
    controlled,
    served,
)

Event = Mapping[str, Any]

RECORD = RequestRecord(
    "mine", "POST", "/completion", "/completion", "tiny", 1, 499, None, None, None, None, 0.0, None, 1.0, 0,
    "cancelled",
)  # fmt: skip


def run(visit: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await visit()

    asyncio.run(bounded())


async def event(stream: AsyncIterator[Event]) -> Event:
    return await anext(stream)


def as_event(frame: bytes) -> Event:
    shown: Event = json.loads(frame.removeprefix(b"data: "))
    return shown


# --- events ------------------------------------------------------------------------------------------


def test_events_begin_with_the_state_of_each_model(tmp_path: Path) -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        async with controlled(fake, tmp_path) as client:
            events = client.events()
            assert await event(events) == {
                "event": "state",
                "protocol": 1,
                "model": "tiny",
                "state": "ready",
                "generation": 1,
            }
            assert (await event(events))["model"] == "org/repo:q8_0"
            for generation in (2, 3, 4):
                fake.happens(generation)
            assert [(await event(events))["generation"] for _ in range(3)] == [2, 3, 4]
            fake.bus.publish(ServerWarned("tiny", 4, "it is odd\n\ndata: {}", "look"))
            warned = await event(events)
            assert (warned["event"], warned["message"]) == ("warning", "it is odd\n\ndata: {}")
            await events.aclose()

    run(visit)


def test_disconnected_listener_is_unsubscribed(tmp_path: Path) -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        async with served(fake, tmp_path) as (_, path):
            async with AsyncControlClient(path) as client:
                listening = [client.events() for _ in range(3)]
                for events in listening:
                    await event(events)
                assert fake.bus.listeners == 3
                for events in listening:
                    await events.aclose()
            await fake.until(lambda: fake.bus.listeners == 0)

    run(visit)


def test_listeners_get_stopped_event_at_the_end(tmp_path: Path) -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        async with served(fake, tmp_path) as (server, path), AsyncControlClient(path) as client:
            events = client.events()
            await event(events)
            fake.happens(2)
            await server.aclose()
            told = [each async for each in events]
            assert [each["event"] for each in told] == ["state", "state", "stopped"]

    run(visit)


def test_events_may_include_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first event is sent in any case, later ones only if there is something new."""
    monkeypatch.setattr(streams, "REQUESTS_INTERVAL_S", 0.01)

    async def visit() -> None:
        fake = FakeControlTarget()
        requests = LiveRequests(fake.connections, fake.query_slots)
        stream = event_stream(fake, Streams(), RequestUpdates(requests), keepalive_s=0.2)
        told = [as_event(await anext(stream)) for _ in range(3)]
        assert [each["event"] for each in told] == ["state", "state", "requests"]
        assert (told[2]["live"], told[2]["ended"]) == ([], [])
        assert await anext(stream) == b": keepalive\n\n"  # no request, no event
        fake.connections.append(FakeConnection("mine"))
        (shown,) = as_event(await anext(stream))["live"]
        assert shown["id"] == "mine"
        fake.connections[0].interrupt(HttpError(499, "cancelled"), CANCELLED)
        requests.note_ended(RECORD)
        while as_event(frame := await anext(stream))["live"]:
            pass
        (ended,) = as_event(frame)["ended"]
        assert (ended["request_id"], ended["outcome"]) == ("mine", "cancelled")
        assert await anext(stream) == b": keepalive\n\n"
        fake.happens(7)
        assert as_event(await anext(stream))["generation"] == 7
        await stream.aclose()

    run(visit)


def test_slow_reader_gets_missed_event_after_queued_ones() -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        stream = event_stream(fake, Streams())
        await anext(stream)
        for generation in range(MAX_WAITING + 44):
            fake.happens(generation)
        told = [as_event(frame) async for frame in stream]
        assert told[0]["model"] == "org/repo:q8_0"
        assert [each["generation"] for each in told[1:-1]] == list(range(MAX_WAITING))
        assert told[-1] == {"event": "missed", "protocol": 1, "count": 44}
        assert fake.bus.listeners == 0

    run(visit)


def test_slow_reader_gets_only_the_last_progress_of_a_model() -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        stream = event_stream(fake, Streams())
        await anext(stream)
        for percent in range(MAX_WAITING + 44):
            for model in ("a", "b"):
                fake.bus.publish(LoadProgressed(model, 1, LoadProgress(percent / 10, 1.0, 1.0)))
        fake.happens(7)
        told = [as_event(await anext(stream)) for _ in range(4)]
        assert [each["event"] for each in told] == ["state", "progress", "progress", "state"]
        assert [each["percent"] for each in told[1:3]] == [(MAX_WAITING + 43) / 10] * 2
        await stream.aclose()

    run(visit)


def test_client_that_never_reads_costs_a_bounded_queue(tmp_path: Path) -> None:
    """Over a real socket: its buffers take what they can, then the queue, then it is over."""

    async def visit() -> None:
        fake = FakeControlTarget()
        async with served(fake, tmp_path) as (_, path):
            reader, writer = await asyncio.open_unix_connection(path, limit=1)
            writer.write(b"GET /llamasup/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await fake.until(lambda: fake.bus.listeners == 1)
            for generation in range(60_000):
                fake.happens(generation)
                if generation % 100 == 0:
                    await asyncio.sleep(0)
            rest = bytearray()
            while chunk := await reader.read(65_536):
                rest += chunk
                if b'"missed"' in rest[-500:]:
                    break
            missed = int(json.loads(rest[rest.rindex(b"data: ") + 6 : rest.rindex(b"}") + 1])["count"])
            assert missed > 0
            assert rest.count(b'"state"') > MAX_WAITING
            await fake.until(lambda: fake.bus.listeners == 0)
            writer.close()
            await writer.wait_closed()

    run(visit)


def test_idle_stream_gets_keepalive_comments() -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        fake.names = {}
        stream = event_stream(fake, Streams(), keepalive_s=0.01)
        assert [await anext(stream) for _ in range(2)] == [b": keepalive\n\n"] * 2
        fake.happens(7)
        assert as_event(await anext(stream))["generation"] == 7
        await stream.aclose()

    run(visit)


def test_number_of_streams_is_limited_and_ended_streams_free_theirs(tmp_path: Path) -> None:
    async def visit() -> None:
        fake = FakeControlTarget()
        async with served(fake, tmp_path) as (_, path), AsyncControlClient(path) as client:
            listening = [client.events() for _ in range(MAX_STREAMS)]
            for events in listening:
                await event(events)
            with pytest.raises(Exception, match=f"{MAX_STREAMS} streams") as raised:
                await event(client.events())
            assert getattr(raised.value, "cause", "") == TooManyStreams.cause
            assert (await client.status())["pid"] == 4242  # which is no stream
            await listening.pop().aclose()
            await fake.until(lambda: fake.bus.listeners == MAX_STREAMS - 1)
            again = client.events()
            await event(again)
            for events in (*listening, again):
                await events.aclose()

    run(visit)


# --- logs --------------------------------------------------------------------------------------------


def test_end_of_a_log_is_sent_unchanged(tmp_path: Path) -> None:
    async def visit() -> None:
        log = tmp_path / "a.log"
        log.write_bytes(b"one\ntwo\n\xff\x1b[31mthree\n")
        async with controlled(FakeControlTarget(log), tmp_path) as client:
            assert (
                b"".join([each async for each in client.log("tiny", lines=2)]) == b"two\n\xff\x1b[31mthree\n"
            )
            assert b"".join([each async for each in client.log("small", lines=0)]) == b""

    run(visit)


def test_follower_gets_all_lines_through_rotations_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "POLL_S", 0.01)

    async def visit() -> None:
        log = tmp_path / "a.log"
        written = RotatedFile(log, max_bytes=64, files=3)
        written.write(b"line 0\n")
        fake = FakeControlTarget(log)
        async with served(fake, tmp_path) as (server, path), AsyncControlClient(path) as client:
            following = client.log("tiny", follow=True)
            seen = await anext(following)
            for number in range(1, 60):
                written.write(b"line %d\n" % number)
                if number % 7 == 0:
                    while not seen.endswith(b"line %d\n" % number):
                        seen += await anext(following)
            written.close()
            await server.aclose()
            async for piece in following:
                seen += piece
        assert seen == b"".join(b"line %d\n" % number for number in range(60))

    run(visit)


def test_disconnected_follower_frees_its_stream(tmp_path: Path) -> None:
    async def visit() -> None:
        log = tmp_path / "a.log"
        log.write_bytes(b"one\n")
        async with controlled(FakeControlTarget(log), tmp_path) as client:
            for _ in range(MAX_STREAMS * 2):
                following = client.log("tiny", follow=True)
                assert await anext(following) == b"one\n"
                await following.aclose()

    run(visit)


@pytest.mark.parametrize(
    ("log", "says"), [(None, "is not kept"), ("missing.log", "has no log yet"), (".", "cannot be read")]
)
@pytest.mark.parametrize("follow", [False, True])
def test_missing_log_is_an_error_with_a_reason(
    tmp_path: Path, log: str | None, says: str, follow: bool
) -> None:
    async def visit() -> None:
        path = None if log is None else tmp_path / log
        async with controlled(FakeControlTarget(path), tmp_path) as client:
            with pytest.raises(LogMissing, match=says):
                await anext(client.log("tiny", follow=follow))

    run(visit)


def test_every_opened_log_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a reader who has gone before the first byte, whose stream never begins."""
    opened: list[LogTail] = []
    closed: list[LogTail] = []

    class Watched(LogTail):
        def __init__(self, path: Path, lines: int) -> None:
            super().__init__(path, lines)
            opened.append(self)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(streams, "LogTail", Watched)

    async def visit() -> None:
        log = tmp_path / "a.log"
        log.write_bytes(b"one\n" * 10_000)
        async with served(FakeControlTarget(log), tmp_path) as (_, path):
            for number in range(40):
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(
                    b"GET /llamasup/v1/models/tiny/logs?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
                )
                await writer.drain()
                if number % 2:
                    await asyncio.sleep(0.001 * number)  # gone at any moment
                writer.transport.abort()
        assert opened
        assert set(opened) == set(closed)

    run(visit)
