"""The last events of a model, where people look for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.collect import process_of
from llamasup.core.pool.catalog.status import model_status
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.supervision import states
from llamasup.core.supervision.state_machine import InvalidTransition
from llamasup.core.supervision.states import State
from tests.e2e.service import serving


def test_status_lists_the_last_events(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server()) as server:
            await server.reaches(State.READY, 1)
            info = ModelInfo(ModelSpec("m", "/m.gguf"), processes=(process_of(server.runner),))
            events = model_status(info, datetime.now(UTC), lambda pid: None)["events"]
            assert events[0]["event"] == "start_requested"
            assert events[0]["state"] == "starting"
            assert events[0]["time"].startswith("20")
            assert events[-1]["event"] == "warmup_succeeded"
            assert (events[-1]["state"], events[-1]["generation"]) == ("ready", 1)
            assert repr(server.runner) == "<InstanceRunner 'tiny' ready generation 1>"
            generation = server.runner._generation
            assert repr(generation) == f"<Generation 1 of 'tiny': process {server.pid}>"

    asyncio.run(test())


def test_impossible_event_is_raised_with_the_events_before_it(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=fake_server()) as server:
            await server.reaches(State.READY, 1)
            server.runner.post(states.WarmupSucceeded(1))  # without a warm-up
            await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(test())
    (error,) = [error for error in leaves(caught.value) if isinstance(error, InvalidTransition)]
    (note,) = error.__notes__
    assert note.startswith("The last events of ")
    assert note.splitlines()[-1].endswith("warmup_succeeded ready 1")


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error
