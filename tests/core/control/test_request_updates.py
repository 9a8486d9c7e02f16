"""The event with the requests is made once for all streams, and has a bounded size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from llamasup.core.control.streams import (
    MAX_ENDED_IN_EVENT,
    REQUESTS_INTERVAL_S,
    RequestUpdates,
    Watcher,
)
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.proxy.live.requests import LiveRequests
from tests.core.control.fake import FakeConnection, FakeControlTarget

RECORD = RequestRecord(
    "", "POST", "/completion", "/completion", "tiny", 1, 200, None, None, None, None, 0.0, None, 1.0, 0, "ok"
)  # fmt: skip


class Rig:
    """The updates at a time that the test chooses. ``looks``: how often the requests in flight were read."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.looks = 0
        self.fake = FakeControlTarget()
        self.requests = LiveRequests(self, self.fake.query_slots)
        self.updates = RequestUpdates(self.requests, lambda: self.now_s)
        self.open = ExitStack()

    def __iter__(self) -> Any:
        """The connections."""
        self.looks += 1
        return iter(self.fake.connections)

    def watch(self) -> tuple[Watcher, asyncio.Event]:
        wake = asyncio.Event()
        return self.open.enter_context(self.updates.watched(wake)), wake

    def end_requests(self, *ids: str) -> None:
        for request_id in ids:
            self.requests.note_ended(replace(RECORD, request_id=request_id))

    def pass_time(self, seconds: float = REQUESTS_INTERVAL_S) -> None:
        self.now_s += seconds


def run(visit: Callable[[Rig], Awaitable[None]]) -> None:
    async def bounded() -> None:
        rig = Rig()
        with rig.open:
            await visit(rig)

    asyncio.run(bounded())


def event(frame: bytes | None) -> Any:
    assert frame is not None
    assert frame.endswith(b"\n\n")
    return json.loads(frame.removeprefix(b"data: "))


def ended(frame: bytes | None) -> Sequence[str]:
    return [record["request_id"] for record in event(frame)["ended"]]


def test_all_streams_get_the_same_event_that_is_made_once() -> None:
    async def visit(rig: Rig) -> None:
        watchers = [rig.watch()[0] for _ in range(10)]
        first = [await watcher.next() for watcher in watchers]
        assert all(frame is first[0] for frame in first)
        rig.end_requests("a", "b")
        rig.pass_time()
        looks = rig.looks
        frames = await asyncio.gather(*(watcher.next() for watcher in watchers))
        assert all(frame is frames[0] for frame in frames)
        assert ended(frames[0]) == ["b", "a"]
        assert rig.looks - looks <= 2  # for the slots, and for the list

    run(visit)


def test_streams_are_woken_by_a_new_event() -> None:
    async def visit(rig: Rig) -> None:
        (first, _), (second, wake) = rig.watch(), rig.watch()
        await first.next()
        await second.next()
        wake.clear()
        rig.pass_time()
        assert await first.next() is None  # no news
        assert not wake.is_set()
        rig.end_requests("a")
        rig.pass_time()
        assert await first.next() is not None
        assert wake.is_set()

    run(visit)


def test_event_has_a_limited_number_of_finished_requests_and_their_total() -> None:
    async def visit(rig: Rig) -> None:
        rig.end_requests("before")
        watcher, _ = rig.watch()
        assert event(await watcher.next())["ended_total"] == 1
        rig.end_requests(*map(str, range(1_000)))
        rig.pass_time()
        shown = event(await watcher.next())
        assert len(shown["ended"]) == MAX_ENDED_IN_EVENT
        assert shown["ended"][0]["request_id"] == "999"
        assert shown["ended_total"] == 1_001

    run(visit)


def test_no_event_is_made_earlier_than_after_the_interval() -> None:
    async def visit(rig: Rig) -> None:
        rig.fake.connections.append(FakeConnection("live"))
        watcher, _ = rig.watch()
        assert await watcher.next() is not None
        looks = rig.looks
        for _ in range(8):
            rig.pass_time(0.1)
            rig.end_requests("a")
            assert await watcher.next() is None
        assert rig.looks == looks
        rig.pass_time(0.2)
        assert ended(await watcher.next()) == ["a"] * 8

    run(visit)


def test_new_stream_gets_an_event_although_there_is_no_news() -> None:
    async def visit(rig: Rig) -> None:
        first, _ = rig.watch()
        await first.next()
        rig.pass_time(10)
        assert await first.next() is None
        rig.pass_time(0.1)
        late, _ = rig.watch()
        assert event(await late.next())["live"] == []

    run(visit)


def test_last_request_in_flight_is_followed_by_an_empty_event() -> None:
    async def visit(rig: Rig) -> None:
        rig.fake.connections.append(FakeConnection("live"))
        watcher, _ = rig.watch()
        assert [one["id"] for one in event(await watcher.next())["live"]] == ["live"]
        rig.fake.connections.clear()
        rig.pass_time()
        assert event(await watcher.next())["live"] == []
        rig.pass_time()
        assert await watcher.next() is None

    run(visit)


def test_requests_that_ended_while_no_stream_was_open_are_only_in_the_total() -> None:
    async def visit(rig: Rig) -> None:
        with rig.updates.watched(asyncio.Event()) as watcher:
            await watcher.next()
        rig.end_requests("unseen")
        rig.pass_time()
        later, _ = rig.watch()
        shown = event(await later.next())
        assert (shown["ended"], shown["ended_total"]) == ([], 1)

    run(visit)
