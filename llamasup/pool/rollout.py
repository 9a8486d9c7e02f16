"""Replaces the processes of a model whose file or settings changed, and removes models (S16)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.models.access import unknown_model
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import remaining
from llamasup.pool.eviction_policy import Phase
from llamasup.pool.model import ManagedModel, SizedModel, not_loaded
from llamasup.pool.pool import Pool
from llamasup.pool.unload import is_ready_or_settled, memory_released, stop_all
from llamasup.queueing.unavailable import Unavailable
from llamasup.supervision.events import ModelUnloading
from llamasup.supervision.failure import failure_of
from llamasup.supervision.states import StartRequested, State

__all__ = ["remove", "roll_out"]

_log = logging.getLogger(__name__)


def remove(pool: Pool, managed: ManagedModel, successor: ManagedModel | None = None) -> None:
    """Remove the model: requests in flight may finish, queued ones move to ``successor`` or are rejected."""
    managed.removed, managed.reload_after = True, False
    managed.stop_sizing()
    if successor is not None:
        _transfer(pool, managed, successor)
    error = unknown_model(managed.spec.id)
    managed.served.pause(Unavailable(error.status, error.message, error.type, error.cause, error.remedy))
    managed.resolve_load_waiters(ModelUnknown(f"{error.message}.", remedy=error.remedy))
    if any(not runner.instance.is_settled for runner in managed.all_runners) or managed.starting:
        pool.bus.publish(ModelUnloading(managed.spec.id, "removed"))
        pool.start(_unload_and_forget(pool, managed), f"{managed.spec.id}/remove")
    else:
        pool.forget(managed)


def _transfer(pool: Pool, managed: ManagedModel, successor: ManagedModel) -> None:
    def over(waiter: asyncio.Future[None]) -> None:
        """A caller that gives up removes its waiter from the old model only."""
        if waiter in successor.load_waiters:
            successor.load_waiters.remove(waiter)
            pool.reconcile_soon()

    is_wanted = managed.wanted
    load_waiters, managed.load_waiters = managed.load_waiters, []
    for waiter in load_waiters:
        pool.add_load_waiter(successor, waiter)
        waiter.add_done_callback(over)
    successor.pending_demand, managed.pending_demand = (
        successor.pending_demand or managed.pending_demand,
        None,
    )
    managed.served.queue.transfer_to(successor.served.queue)
    if is_wanted:
        pool.want(successor)


async def _unload_and_forget(pool: Pool, managed: ManagedModel) -> None:
    async with memory_released(managed.sized):
        await stop_all(managed.all_runners)
    pool.forget(managed)


def roll_out(pool: Pool, managed: ManagedModel, spec: ModelSpec) -> None:
    """Serve the model from its new file or with its new settings, without a failed request."""
    pool.update_spec(managed, spec)
    managed.stop_sizing()  # of the old spec
    if managed.rolling_out:
        return  # the running rollout continues with the newest spec
    if managed.phase in {Phase.ABSENT, Phase.FAILED}:
        _reset(pool, managed)
    elif managed.is_outdated or managed.sized is None:
        managed.rolling_out = True
        managed.rollout = pool.start(_roll_out(pool, managed), f"{spec.id}/rollout")


def _reset(pool: Pool, managed: ManagedModel) -> None:
    """Forget the old spec of a model without processes."""
    pool.runners.drop(managed, managed.runners)
    managed.runners = []
    managed.sized = managed.error = None
    managed.served.unavailable_reason = not_loaded(managed.spec)
    pool.reconcile_soon()


async def _roll_out(pool: Pool, managed: ManagedModel) -> LlamasupError | None:
    """Swap next to the old servers if both fit, else after them; repeat for later changes.

    Returns the error of the last swap.
    """
    managed.reload_after = False
    failure: LlamasupError | None = None
    try:
        while _is_outdated(pool, managed):
            spec = managed.spec
            if managed.unloading is not None:
                await asyncio.shield(managed.unloading)
                continue
            if managed.phase is Phase.ABSENT:
                _reset(pool, managed)
                break
            try:
                sized = await _size_new(pool, managed)
                if sized is not None:
                    async with pool.swapping:
                        await _swap(pool, managed, sized)
            except LlamasupError as error:
                if managed.spec.started_as != spec.started_as:
                    continue  # the newer spec may work
                failure = error
                _log.error("rollout of model %r failed, its old processes keep running: %s", spec.id, error)
                break
    finally:
        managed.rolling_out = False
        pool.reconcile_soon()
    if managed.reload_after and not pool.stopping:
        failure = await _reload(pool, managed)
    return failure


def _is_outdated(pool: Pool, managed: ManagedModel) -> bool:
    return (managed.is_outdated or managed.sized is None) and not (managed.removed or pool.stopping)


async def _size_new(pool: Pool, managed: ManagedModel) -> SizedModel | None:
    """Download and size the new spec while the old one serves (or is evicted). None if cancelled."""
    sizing = pool.begin_sizing(managed, "rollout-size")
    await asyncio.wait([sizing])
    outcome = None if sizing.cancelled() else sizing.result()
    if isinstance(outcome, LlamasupError):
        raise outcome
    return outcome


async def _swap(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    """Swap to the new spec. After an error the old one serves. Does nothing if ``sized`` is not the newest or
    the model is unloaded; the caller checks again.
    """
    is_newest = sized.spec.started_as == managed.spec.started_as and _is_outdated(pool, managed)
    if not is_newest or managed.unloading is not None or managed.phase is Phase.ABSENT:
        return
    managed.swapping = True
    try:
        serves = any(runner.instance.state is State.READY for runner in managed.runners)
        if serves and _fits(sized, remaining(pool.remaining_for(managed), [managed.needs])):
            await _swap_side_by_side(pool, managed, sized)
        else:
            await _swap_in_turn(pool, managed, sized)
    finally:
        managed.swapping = False
        pool.reconcile_soon()


def _fits(sized: SizedModel, free: Mapping[str, int]) -> bool:
    return all(free.get(device, 0) >= size_bytes for device, size_bytes in sized.needs.items())


async def _swap_side_by_side(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    old, before = managed.runners, managed.sized
    managed.old_replicas, managed.old_needs = old, managed.needs
    try:
        error = await _start_new(pool, managed, sized)
        if not managed.runners:
            managed.runners, managed.sized = old, before
            if error is not None:
                raise error
            return  # another command has stopped them
        for runner in old:
            managed.served.remove(runner)  # new requests go to the new processes
        async with memory_released(before):
            await stop_all(old)
        pool.runners.drop(managed, old)
    finally:
        managed.old_replicas, managed.old_needs = [], {}


async def _swap_in_turn(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    """Requests queue meanwhile, also while the old spec is started again after a failure of the new one."""
    before = managed.sized
    if managed.starting or any(not runner.instance.is_settled for runner in managed.runners):
        pool.bus.publish(ModelUnloading(managed.spec.id, "changed"))
        managed.reload_after = True
    managed.cordoned = managed.starting = False
    managed.served.pause(_CHANGING)
    async with memory_released(before):
        await stop_all(managed.runners)
    pool.runners.drop(managed, managed.runners)
    managed.runners, managed.sized, managed.error = [], sized, None
    managed.served.unavailable_reason = not_loaded(managed.spec)
    error = None
    if _will_reload(pool, managed) and before is not None and _fits(sized, pool.remaining_for(managed)):
        error = await _start_or_restore(pool, managed, sized, before)
    if managed.unloading is None and not (managed.removed or pool.stopping):
        managed.served.resume()
    if error is not None:
        raise error


async def _start_or_restore(
    pool: Pool, managed: ManagedModel, sized: SizedModel, before: SizedModel
) -> LlamasupError | None:
    """Start the new spec, or the old one if that fails. Until then the old one's memory stays charged."""
    needs = sized.needs
    spare = {device: size - needs.get(device, 0) for device, size in before.needs.items()}
    managed.old_needs = {device: size for device, size in spare.items() if size > 0}
    try:
        error = await _start_new(pool, managed, sized)
    finally:
        managed.old_needs = {}
    if error is not None and _will_reload(pool, managed):
        await _start_new(pool, managed, before)
    managed.reload_after = False
    return error


async def _start_new(pool: Pool, managed: ManagedModel, sized: SizedModel) -> LlamasupError | None:
    """Start the processes. If none becomes ready, drop them and return the error, if there is one."""
    managed.sized = sized
    managed.runners = new = pool.make_runners(managed, sized)
    for taken in [runner.submit(StartRequested()) for runner in new]:  # all starts come before any stop
        await taken
    instances = [await runner.until(is_ready_or_settled) for runner in new]
    if any(instance.state is State.READY for instance in instances):
        return None
    pool.runners.drop(managed, new)
    managed.runners = []
    return next((failure_of(instance) for instance in instances if instance.state is State.FAILED), None)


def _will_reload(pool: Pool, managed: ManagedModel) -> bool:
    """Whether no later command cancelled the reload."""
    return managed.reload_after and not (managed.removed or pool.stopping)


async def _reload(pool: Pool, managed: ManagedModel) -> LlamasupError | None:
    """Load the model again, because it was loaded before the rollout. Returns the error."""
    try:
        await pool.load(managed)
    except LlamasupError as error:
        if not pool.stopping:
            _log.warning("model %r was updated but could not be loaded again: %s", managed.spec.id, error)
            return error
    return None


_CHANGING = Unavailable(
    503, "The model is being updated", cause="changing", retry_after_s=1.0, queueable=True
)
