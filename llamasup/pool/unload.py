"""Stops the processes of a model and waits until their memory is free."""

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

__all__ = ["is_ready_or_settled", "is_settled", "memory_released", "stop_all"]

_log = logging.getLogger(__name__)


async def stop_all(runners: Iterable[InstanceRunner]) -> None:
    """Drain and stop all of them at the same time. Returns when all are settled."""

    async def stop_one(runner: InstanceRunner) -> None:
        await runner.submit(StopRequested())
        await runner.until(is_settled)

    async with asyncio.TaskGroup() as tasks:
        for runner in runners:
            tasks.create_task(stop_one(runner), name=f"{runner.model}/end")


@asynccontextmanager
async def memory_released(sized: SizedModel | None) -> AsyncIterator[None]:
    """Wrap the stop of a model: returns when the devices report its memory free, which a driver may delay."""
    if sized is None or not set(sized.needs) - {RAM}:
        yield
        return
    runtime, environ = sized.launch.runtime, sized.launch.environ
    try:
        before = await asyncio.to_thread(devices_now, runtime, environ)
    except LlamasupError as error:
        _log.warning("cannot read the free device memory: %s", error)
        yield
        return
    yield
    if not await asyncio.to_thread(await_freed, runtime, environ, before, sized.needs):
        _log.warning("model %r has stopped, but its device memory is not free yet", sized.launch.model_id)


def is_settled(instance: Instance) -> bool:
    return instance.is_settled


def is_ready_or_settled(instance: Instance) -> bool:
    """True also for a failed instance that retries by itself in some minutes."""
    return instance.state in {State.READY, State.FAILED} or instance.is_settled
