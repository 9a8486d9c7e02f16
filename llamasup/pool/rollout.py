"""A model whose file or settings have changed, and one that is served no more (S16)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.models.access import unknown_model
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import remaining
from llamasup.pool.model import ManagedModel, SizedModel, absent
from llamasup.pool.policy import Phase
from llamasup.pool.pool import Pool
from llamasup.pool.unload import end, is_up_or_over, memory_released
from llamasup.queueing.endpoint import Unavailable
from llamasup.supervision.events import ModelUnloading
from llamasup.supervision.failure import failure_of
from llamasup.supervision.states import StartRequested, State

__all__ = ["remove", "roll_out"]

_log = logging.getLogger(__name__)


def remove(pool: Pool, managed: ManagedModel, successor: ManagedModel | None = None) -> None:
    """Serve it no more: what is in flight may finish; who waits has ``heir`` instead, or is told."""
    managed.removed, managed.reload_after = True, False
    managed.stop_sizing()
    if successor is not None:
        _transfer(pool, managed, successor)
    error = unknown_model(managed.spec.id)
    managed.served.shut(Unavailable(error.status, error.message, error.type, error.cause, error.remedy))
    managed.resolve_load_waiters(ModelUnknown(f"{error.message}.", remedy=error.remedy))
    if any(not runner.instance.is_settled for runner in managed.all_runners) or managed.starting:
        pool.bus.publish(ModelUnloading(managed.spec.id, "removed"))
        pool.start(_see_out(pool, managed), f"{managed.spec.id}/remove")
    else:
        pool.forget(managed)


def _transfer(pool: Pool, managed: ManagedModel, successor: ManagedModel) -> None:
    def over(claim: asyncio.Future[None]) -> None:
        """Whoever gives up looks for it where it was."""
        if claim in successor.load_waiters:
            successor.load_waiters.remove(claim)
            pool.decide_soon()

    is_wanted = managed.wanted
    load_waiters, managed.load_waiters = managed.load_waiters, []
    for claim in load_waiters:
        pool.claim(successor, claim)
        claim.add_done_callback(over)
    successor.wish, managed.wish = successor.wish or managed.wish, None
    managed.served.room.transfer_to(successor.served.room)
    if is_wanted:
        pool.want(successor)


async def _see_out(pool: Pool, managed: ManagedModel) -> None:
    async with memory_released(managed.sized):
        await end(managed.all_runners)
    pool.forget(managed)


def roll_out(pool: Pool, managed: ManagedModel, spec: ModelSpec) -> None:
    """Serve it from its new file, or with its new settings. Nobody notices but by the answers."""
    pool.retouch(managed, spec)
    managed.stop_sizing()  # of what it was
    if managed.rolling_out:
        return  # whoever is at it goes on with the newest
    if managed.phase in {Phase.ABSENT, Phase.FAILED}:
        _begin_anew(pool, managed)
    elif managed.is_outdated or managed.sized is None:
        managed.rolling_out = True
        managed.rollout = pool.start(_replace(pool, managed), f"{spec.id}/renew")


def _begin_anew(pool: Pool, managed: ManagedModel) -> None:
    """Nothing of it runs: from now on it is another."""
    pool.runners.drop(managed, managed.runners)
    managed.runners = []
    managed.sized = managed.error = None
    managed.served.absent = absent(managed.spec)
    pool.decide_soon()


async def _replace(pool: Pool, managed: ManagedModel) -> LlamasupError | None:
    """Beside the old servers where both fit, else after them. Repeated for what changed meanwhile.

    Returns why it came to nothing, where it did.
    """
    managed.reload_after = False
    failure: LlamasupError | None = None
    try:
        while _is_behind(pool, managed):
            spec = managed.spec
            if managed.unloading is not None:
                await asyncio.shield(managed.unloading)
                continue
            if managed.phase is Phase.ABSENT:
                _begin_anew(pool, managed)
                break
            try:
                sized = await _size_new(pool, managed)
                if sized is not None:
                    async with pool.swapping:
                        await _swap(pool, managed, sized)
            except LlamasupError as error:
                if managed.spec.started_as != spec.started_as:
                    continue  # what it is to be by now may be possible
                failure = error
                _log.error("%s goes on as it was: %s", spec.id, error)
                break
    finally:
        managed.rolling_out = False
        pool.decide_soon()
    if managed.reload_after and not pool.stopping:
        failure = await _reload(pool, managed)
    return failure


def _is_behind(pool: Pool, managed: ManagedModel) -> bool:
    return (managed.is_outdated or managed.sized is None) and not (managed.removed or pool.stopping)


async def _size_new(pool: Pool, managed: ManagedModel) -> SizedModel | None:
    """What it takes from now on, and it is here then. Meanwhile it is as it was: it may be evicted, too.

    None: something came between. Raises why it cannot be.
    """
    sizing = pool.begin_sizing(managed, "weigh")
    await asyncio.wait([sizing])
    outcome = None if sizing.cancelled() else sizing.result()
    if isinstance(outcome, LlamasupError):
        raise outcome
    return outcome


async def _swap(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    """Raises why it cannot be changed; then all is as it was. It is, too, where something else came between:
    whoever calls looks again.
    """
    is_newest = sized.spec.started_as == managed.spec.started_as and _is_behind(pool, managed)
    if not is_newest or managed.unloading is not None or managed.phase is Phase.ABSENT:
        return
    managed.swapping = True
    try:
        serves = any(runner.instance.state is State.READY for runner in managed.runners)
        if serves and _fits(sized, remaining(pool.left_for(managed), [managed.needs])):
            await _replace_beside(pool, managed, sized)
        else:
            await _replace_after(pool, managed, sized)
    finally:
        managed.swapping = False
        pool.decide_soon()


def _fits(sized: SizedModel, left: Mapping[str, int]) -> bool:
    return all(left.get(place, 0) >= size_bytes for place, size_bytes in sized.needs.items())


async def _replace_beside(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    old, before = managed.runners, managed.sized
    managed.old_replicas, managed.outgoing_needs = old, managed.needs
    try:
        error = await _try(pool, managed, sized)
        if not managed.runners:
            managed.runners, managed.sized = old, before
            if error is not None:
                raise error
            return  # somebody has ended them
        for runner in old:
            managed.served.remove(runner)  # who comes from now on comes to the new ones
        async with memory_released(before):
            await end(old)
        pool.runners.drop(managed, old)
    finally:
        managed.old_replicas, managed.outgoing_needs = [], {}


async def _replace_after(pool: Pool, managed: ManagedModel, sized: SizedModel) -> None:
    """Who comes meanwhile waits, also while the new one fails and the old one is started again."""
    before = managed.sized
    if managed.starting or any(not runner.instance.is_settled for runner in managed.runners):
        pool.bus.publish(ModelUnloading(managed.spec.id, "changed"))
        managed.reload_after = True
    managed.yielding = managed.starting = False
    managed.served.shut(_CHANGING)
    async with memory_released(before):
        await end(managed.runners)
    pool.runners.drop(managed, managed.runners)
    managed.runners, managed.sized, managed.error = [], sized, None
    managed.served.absent = absent(managed.spec)
    error = None
    if _comes_back(pool, managed) and before is not None and _fits(sized, pool.left_for(managed)):
        error = await _replace_in_place(pool, managed, sized, before)
    if managed.unloading is None and not (managed.removed or pool.stopping):
        managed.served.open()
    if error is not None:
        raise error


async def _replace_in_place(
    pool: Pool, managed: ManagedModel, sized: SizedModel, before: SizedModel
) -> LlamasupError | None:
    """In the memory of the old one, which nobody else gets before it is sure not to be needed again."""
    needs = sized.needs
    kept = {place: size - needs.get(place, 0) for place, size in before.needs.items()}
    managed.outgoing_needs = {place: size for place, size in kept.items() if size > 0}
    try:
        error = await _try(pool, managed, sized)
    finally:
        managed.outgoing_needs = {}
    if error is not None and _comes_back(pool, managed):
        await _try(pool, managed, before)
    managed.reload_after = False
    return error


async def _try(pool: Pool, managed: ManagedModel, sized: SizedModel) -> LlamasupError | None:
    """Start it. Where none of its servers serves they are put away; why, unless somebody has ended them."""
    managed.sized = sized
    managed.runners = new = pool.make_runners(managed, sized)
    for heard in [runner.submit(StartRequested()) for runner in new]:  # all before anybody can end one
        await heard
    ends = [await runner.until(is_up_or_over) for runner in new]
    if any(each.state is State.READY for each in ends):
        return None
    pool.runners.drop(managed, new)
    managed.runners = []
    return next((failure_of(each) for each in ends if each.state is State.FAILED), None)


def _comes_back(pool: Pool, managed: ManagedModel) -> bool:
    """Nobody has said otherwise meanwhile."""
    return managed.reload_after and not (managed.removed or pool.stopping)


async def _reload(pool: Pool, managed: ManagedModel) -> LlamasupError | None:
    """It was loaded, and is to be so again, although perhaps nobody asks for it at this moment.

    Returns why it is not.
    """
    try:
        await pool.load(managed)
    except LlamasupError as error:
        if not pool.stopping:
            _log.warning("%s was changed, and is not loaded again: %s", managed.spec.id, error)
            return error
    return None


_CHANGING = Unavailable(503, "The model is being changed", cause="changing", retry_after_s=1.0, may_wait=True)
