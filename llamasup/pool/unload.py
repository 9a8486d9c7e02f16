"""The end of a model's servers, and of what they held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from llamasup.errors import LlamasupError
from llamasup.llama_server.device_memory import await_freed, devices_now
from llamasup.planning.memory.shares import RAM
from llamasup.pool.model import SizedModel
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import Instance, State, StopRequested

__all__ = ["end", "is_settled", "is_up_or_over", "memory_released"]

_log = logging.getLogger(__name__)


async def end(runners: Iterable[InstanceRunner]) -> None:
    """Kindly, all at once, until each is at rest."""

    async def end_one(runner: InstanceRunner) -> None:
        await runner.submit(StopRequested())
        await runner.until(is_settled)

    async with asyncio.TaskGroup() as tasks:
        for runner in runners:
            tasks.create_task(end_one(runner), name=f"{runner.model}/end")


@asynccontextmanager
async def memory_released(sized: SizedModel | None) -> AsyncIterator[None]:
    """Around the end of a model's servers: over when what they held can be seen to be free.

    The host has its memory back with the process; a driver takes its time.
    """
    if sized is None or not set(sized.needs) - {RAM}:
        yield
        return
    runtime, environ = sized.launch.runtime, sized.launch.environ
    try:
        before = await asyncio.to_thread(devices_now, runtime, environ)
    except LlamasupError as error:
        _log.warning("What is free on the devices cannot be told: %s", error)
        yield
        return
    yield
    if not await asyncio.to_thread(await_freed, runtime, environ, before, sized.needs):
        _log.warning("%s has ended, and its memory is not free on the device yet.", sized.launch.model_id)


def is_settled(instance: Instance) -> bool:
    return instance.is_settled


def is_up_or_over(instance: Instance) -> bool:
    """It serves, or whoever waits for that waits in vain: also where it tries again by itself in minutes."""
    return instance.state in {State.READY, State.FAILED} or instance.is_settled
