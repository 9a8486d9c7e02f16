"""Readers of what happens: each has everything from its beginning on, within a bound, until the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing
from typing import Any

import pytest

from llamasup.api.events import MAX_WAITING, AsyncEvents, Events, Feed
from llamasup.supervision.events import StateChanged, Stopped
from llamasup.supervision.states import State
from tests.api.in_loop import in_loop
from tests.patience import PATIENCE_S


def ready(generation: int) -> StateChanged:
    return StateChanged("tiny", State.READY, generation)


def seen(events: list[Any]) -> list[Any]:
    return [each.get("generation", each["event"]) for each in events]


async def all_of(events: AsyncEvents) -> list[Any]:
    return seen([each async for each in events])


@in_loop
async def test_each_reader_has_all_from_its_beginning_to_the_end() -> None:
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
async def test_an_event_is_the_object_of_the_contract() -> None:
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
async def test_a_reader_that_waits_is_woken() -> None:
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
async def test_a_reader_too_far_behind_hears_how_much_it_has_missed_and_then_the_newest() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    for generation in range(MAX_WAITING + 7):
        feed.notice(ready(generation))
    feed.notice(Stopped())
    assert await anext(events) == {"event": "missed", "protocol": 1, "count": 8}
    assert await all_of(events) == [*range(8, MAX_WAITING + 7), "stopped"]


@in_loop
async def test_two_tasks_that_read_the_same_share_it() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(anext(events)) for _ in range(2)]
        await asyncio.sleep(0)
        feed.notice(ready(1))
        feed.notice(ready(2))
    assert sorted(seen([each.result() for each in both])) == [1, 2]


@in_loop
async def test_a_cancelled_reading_loses_nothing() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await anext(events)
    feed.notice(ready(1))
    assert seen([await anext(events)]) == [1]


@in_loop
async def test_a_closed_reader_is_at_its_end_and_hears_no_more() -> None:
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
async def test_a_reader_that_somebody_closes_ends_while_it_waits() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(all_of(events))
        await asyncio.sleep(0)
        events.close()
    assert reading.result() == []


@in_loop
async def test_a_reader_that_was_dropped_costs_nothing() -> None:
    feed, events = Feed(), AsyncEvents()
    feed.add(events)
    gone = weakref.ref(events)
    del events
    gc.collect()
    assert gone() is None
    feed.notice(ready(1))


@in_loop
async def test_after_the_end_there_is_nothing_to_read() -> None:
    feed = Feed()
    feed.end()
    assert not feed.add(AsyncEvents())
    assert not feed.add(Events())


def test_a_thread_has_all_from_the_beginning_to_the_end() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    told: list[Any] = []
    reading = threading.Thread(target=lambda: told.extend(events))
    reading.start()
    for generation in range(100):
        feed.notice(ready(generation))
    feed.notice(Stopped())
    reading.join(PATIENCE_S)
    assert seen(told) == [*range(100), "stopped"]


def test_what_a_thread_has_not_read_is_there_after_the_end() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    for generation in range(MAX_WAITING + 1):
        feed.notice(ready(generation))
    feed.end()
    told = list(events)
    assert told[0] == {"event": "missed", "protocol": 1, "count": 1}
    assert seen(told[1:]) == list(range(1, MAX_WAITING + 1))
    assert list(events) == []


def test_a_thread_that_waits_ends_when_another_closes() -> None:
    feed, events = Feed(), Events()
    feed.add(events)
    told: list[Any] = []
    reading = threading.Thread(target=lambda: told.extend(events))
    reading.start()
    events.close()
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
    feed.notice(ready(1))
    assert told == []
