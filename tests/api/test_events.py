"""Readers of events: each gets all events from its start to the end, within a bound."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing
from typing import Any

import pytest

from llamasup.api.events import MAX_WAITING, AsyncEvents, Events, Feed
from llamasup.core.supervision.events import StateChanged, Stopped
from llamasup.core.supervision.states import State
from tests.api.in_loop import in_loop
from tests.kit.patience import PATIENCE_S


def ready(generation: int) -> StateChanged:
    return StateChanged("tiny", State.READY, generation)


def contents_of(events: list[Any]) -> list[Any]:
    return [event.get("generation", event["event"]) for event in events]


async def all_of(events: AsyncEvents) -> list[Any]:
    return contents_of([event async for event in events])


@in_loop
async def test_each_reader_gets_all_events_from_its_start_to_the_end() -> None:
    feed, first = Feed(), AsyncEvents()
    assert feed.add(first)
    feed.notice(ready(1))
    second = AsyncEvents()
    assert feed.add(second)
    feed.notice(ready(2))
    feed.notice(Stopped())
    feed.notice(ready(3))
    assert await all_of(first) == [1, 2, "stopped"]
    assert await all_of(second) == [2, "stopped"]
    assert await all_of(first) == []


@in_loop
async def test_events_have_the_documented_fields() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    feed.notice(ready(1))
    assert await anext(events) == {
        "event": "state",
        "protocol": 1,
        "model": "tiny",
        "state": "ready",
        "generation": 1,
    }


@in_loop
async def test_event_wakes_a_waiting_reader() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(all_of(events))
        await asyncio.sleep(0)
        feed.notice(ready(1))
        await asyncio.sleep(0)
        feed.notice(Stopped())
    assert reading.result() == [1, "stopped"]


@in_loop
async def test_slow_reader_gets_the_number_of_missed_events_and_the_newest() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    for generation in range(MAX_WAITING + 7):
        feed.notice(ready(generation))
    feed.notice(Stopped())
    assert await anext(events) == {"event": "missed", "protocol": 1, "count": 8}
    assert await all_of(events) == [*range(8, MAX_WAITING + 7), "stopped"]


@in_loop
async def test_two_tasks_share_the_events_of_one_reader() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(anext(events)) for _ in range(2)]
        await asyncio.sleep(0)
        feed.notice(ready(1))
        feed.notice(ready(2))
    assert sorted(contents_of([event.result() for event in both])) == [1, 2]


@in_loop
async def test_cancelled_read_loses_no_event() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await anext(events)
    feed.notice(ready(1))
    assert contents_of([await anext(events)]) == [1]


@in_loop
async def test_closed_reader_ends_and_gets_no_more_events() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with aclosing(events):
        feed.notice(ready(1))
        async for _ in events:
            break
        feed.notice(ready(2))
    feed.notice(ready(3))
    assert await all_of(events) == []
    events.close()


@in_loop
async def test_close_ends_a_waiting_reader() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(all_of(events))
        await asyncio.sleep(0)
        events.close()
    assert reading.result() == []


@in_loop
async def test_dropped_reader_is_removed() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    reference = weakref.ref(events)
    del events
    gc.collect()
    assert reference() is None
    feed.notice(ready(1))


@in_loop
async def test_reader_created_after_the_end_gets_no_events() -> None:
    feed = Feed()
    feed.end()
    assert not feed.add(AsyncEvents())
    assert not feed.add(Events())


def test_thread_gets_all_events_from_its_start_to_the_end() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    received: list[Any] = []
    reading = threading.Thread(target=lambda: received.extend(events))
    reading.start()
    for generation in range(100):
        feed.notice(ready(generation))
    feed.notice(Stopped())
    reading.join(PATIENCE_S)
    assert contents_of(received) == [*range(100), "stopped"]


def test_thread_can_read_remaining_events_after_the_end() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    for generation in range(MAX_WAITING + 1):
        feed.notice(ready(generation))
    feed.end()
    received = list(events)
    assert received[0] == {"event": "missed", "protocol": 1, "count": 1}
    assert contents_of(received[1:]) == list(range(1, MAX_WAITING + 1))
    assert list(events) == []


def test_close_from_another_thread_ends_a_waiting_reader() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    received: list[Any] = []
    reading = threading.Thread(target=lambda: received.extend(events))
    reading.start()
    events.close()
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
    feed.notice(ready(1))
    assert received == []
