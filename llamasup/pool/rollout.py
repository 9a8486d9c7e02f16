"""A model whose file or settings have changed, and one that is served no more (S16)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.models.access import unknown_model
from llamasup.models.spec import ModelSpec
from llamasup.planning.memory.shares import left_of
from llamasup.pool.model import Sized, Tenancy, absent
from llamasup.pool.policy import Phase
from llamasup.pool.pool import Pool
from llamasup.pool.unload import end, freed, is_up_or_over
from llamasup.queueing.endpoint import Unavailable
from llamasup.supervision.events import ModelLeaves
from llamasup.supervision.failure import failure_of
from llamasup.supervision.states import StartAsked, State

__all__ = ["remove", "renew"]

_log = logging.getLogger(__name__)


def remove(pool: Pool, tenancy: Tenancy, heir: Tenancy | None = None) -> None:
    """Serve it no more: what is in flight may finish; who waits has ``heir`` instead, or is told."""
    tenancy.removed, tenancy.comes_back = True, False
    tenancy.stop_sizing()
    if heir is not None:
        _hand_over(pool, tenancy, heir)
    error = unknown_model(tenancy.spec.id)
    tenancy.served.shut(Unavailable(error.status, error.message, error.type, error.cause, error.remedy))
    tenancy.settle_claims(ModelUnknown(f"{error.message}.", remedy=error.remedy))
    if any(not runner.instance.at_rest for runner in tenancy.all_runners) or tenancy.starting:
        pool.bus.publish(ModelLeaves(tenancy.spec.id, "removed"))
        pool.start(_see_out(pool, tenancy), f"{tenancy.spec.id}/remove")
    else:
        pool.forget(tenancy)


def _hand_over(pool: Pool, tenancy: Tenancy, heir: Tenancy) -> None:
    def over(claim: asyncio.Future[None]) -> None:
        """Whoever gives up looks for it where it was."""
        if claim in heir.claims:
            heir.claims.remove(claim)
            pool.decide_soon()

    is_wanted = tenancy.wanted
    claims, tenancy.claims = tenancy.claims, []
    for claim in claims:
        pool.claim(heir, claim)
        claim.add_done_callback(over)
    heir.wish, tenancy.wish = heir.wish or tenancy.wish, None
    tenancy.served.room.hand_over(heir.served.room)
    if is_wanted:
        pool.want(heir)


async def _see_out(pool: Pool, tenancy: Tenancy) -> None:
    async with freed(tenancy.sized):
        await end(tenancy.all_runners)
    pool.forget(tenancy)


def renew(pool: Pool, tenancy: Tenancy, spec: ModelSpec) -> None:
    """Serve it from its new file, or with its new settings. Nobody notices but by the answers."""
    pool.retouch(tenancy, spec)
    tenancy.stop_sizing()  # of what it was
    if tenancy.renewing:
        return  # whoever is at it goes on with the newest
    if tenancy.phase in {Phase.ABSENT, Phase.FAILED}:
        _begin_anew(pool, tenancy)
    elif tenancy.is_outdated or tenancy.sized is None:
        tenancy.renewing = True
        tenancy.renewal = pool.start(_replace(pool, tenancy), f"{spec.id}/renew")


def _begin_anew(pool: Pool, tenancy: Tenancy) -> None:
    """Nothing of it runs: from now on it is another."""
    pool.runners.drop(tenancy, tenancy.runners)
    tenancy.runners = []
    tenancy.sized = tenancy.error = None
    tenancy.served.absent = absent(tenancy.spec)
    pool.decide_soon()


async def _replace(pool: Pool, tenancy: Tenancy) -> LlamasupError | None:
    """Beside the old servers where both fit, else after them. Repeated for what changed meanwhile.

    Returns why it came to nothing, where it did.
    """
    tenancy.comes_back = False
    failure: LlamasupError | None = None
    try:
        while _is_behind(pool, tenancy):
            spec = tenancy.spec
            if tenancy.departure is not None:
                await asyncio.shield(tenancy.departure)
                continue
            if tenancy.phase is Phase.ABSENT:
                _begin_anew(pool, tenancy)
                break
            try:
                sized = await _weighed(pool, tenancy)
                if sized is not None:
                    async with pool.swapping:
                        await _swap(pool, tenancy, sized)
            except LlamasupError as error:
                if tenancy.spec.started_as != spec.started_as:
                    continue  # what it is to be by now may be possible
                failure = error
                _log.error("%s goes on as it was: %s", spec.id, error)
                break
    finally:
        tenancy.renewing = False
        pool.decide_soon()
    if tenancy.comes_back and not pool.stopping:
        failure = await _bring_back(pool, tenancy)
    return failure


def _is_behind(pool: Pool, tenancy: Tenancy) -> bool:
    return (tenancy.is_outdated or tenancy.sized is None) and not (tenancy.removed or pool.stopping)


async def _weighed(pool: Pool, tenancy: Tenancy) -> Sized | None:
    """What it takes from now on, and it is here then. Meanwhile it is as it was: it may be evicted, too.

    None: something came between. Raises why it cannot be.
    """
    sizing = pool.begin_sizing(tenancy, "weigh")
    await asyncio.wait([sizing])
    outcome = None if sizing.cancelled() else sizing.result()
    if isinstance(outcome, LlamasupError):
        raise outcome
    return outcome


async def _swap(pool: Pool, tenancy: Tenancy, sized: Sized) -> None:
    """Raises why it cannot be changed; then all is as it was. It is, too, where something else came between:
    whoever calls looks again.
    """
    is_newest = sized.spec.started_as == tenancy.spec.started_as and _is_behind(pool, tenancy)
    if not is_newest or tenancy.departure is not None or tenancy.phase is Phase.ABSENT:
        return
    tenancy.changing = True
    try:
        serves = any(runner.instance.state is State.READY for runner in tenancy.runners)
        if serves and _fits(sized, left_of(pool.left_for(tenancy), [tenancy.needs])):
            await _replace_beside(pool, tenancy, sized)
        else:
            await _replace_after(pool, tenancy, sized)
    finally:
        tenancy.changing = False
        pool.decide_soon()


def _fits(sized: Sized, left: Mapping[str, int]) -> bool:
    return all(left.get(place, 0) >= size_bytes for place, size_bytes in sized.needs.items())


async def _replace_beside(pool: Pool, tenancy: Tenancy, sized: Sized) -> None:
    old, before = tenancy.runners, tenancy.sized
    tenancy.outgoing, tenancy.outgoing_needs = old, tenancy.needs
    try:
        error = await _try(pool, tenancy, sized)
        if not tenancy.runners:
            tenancy.runners, tenancy.sized = old, before
            if error is not None:
                raise error
            return  # somebody has ended them
        for runner in old:
            tenancy.served.remove(runner)  # who comes from now on comes to the new ones
        async with freed(before):
            await end(old)
        pool.runners.drop(tenancy, old)
    finally:
        tenancy.outgoing, tenancy.outgoing_needs = [], {}


async def _replace_after(pool: Pool, tenancy: Tenancy, sized: Sized) -> None:
    """Who comes meanwhile waits, also while the new one fails and the old one is started again."""
    before = tenancy.sized
    if tenancy.starting or any(not runner.instance.at_rest for runner in tenancy.runners):
        pool.bus.publish(ModelLeaves(tenancy.spec.id, "changed"))
        tenancy.comes_back = True
    tenancy.yielding = tenancy.starting = False
    tenancy.served.shut(_CHANGING)
    async with freed(before):
        await end(tenancy.runners)
    pool.runners.drop(tenancy, tenancy.runners)
    tenancy.runners, tenancy.sized, tenancy.error = [], sized, None
    tenancy.served.absent = absent(tenancy.spec)
    error = None
    if _comes_back(pool, tenancy) and before is not None and _fits(sized, pool.left_for(tenancy)):
        error = await _replace_in_place(pool, tenancy, sized, before)
    if tenancy.departure is None and not (tenancy.removed or pool.stopping):
        tenancy.served.open()
    if error is not None:
        raise error


async def _replace_in_place(
    pool: Pool, tenancy: Tenancy, sized: Sized, before: Sized
) -> LlamasupError | None:
    """In the memory of the old one, which nobody else gets before it is sure not to be needed again."""
    needs = sized.needs
    kept = {place: size - needs.get(place, 0) for place, size in before.needs.items()}
    tenancy.outgoing_needs = {place: size for place, size in kept.items() if size > 0}
    try:
        error = await _try(pool, tenancy, sized)
    finally:
        tenancy.outgoing_needs = {}
    if error is not None and _comes_back(pool, tenancy):
        await _try(pool, tenancy, before)
    tenancy.comes_back = False
    return error


async def _try(pool: Pool, tenancy: Tenancy, sized: Sized) -> LlamasupError | None:
    """Start it. Where none of its servers serves they are put away; why, unless somebody has ended them."""
    tenancy.sized = sized
    tenancy.runners = new = pool.make_runners(tenancy, sized)
    for heard in [runner.take(StartAsked()) for runner in new]:  # all before anybody can end one
        await heard
    ends = [await runner.until(is_up_or_over) for runner in new]
    if any(each.state is State.READY for each in ends):
        return None
    pool.runners.drop(tenancy, new)
    tenancy.runners = []
    return next((failure_of(each) for each in ends if each.state is State.FAILED), None)


def _comes_back(pool: Pool, tenancy: Tenancy) -> bool:
    """Nobody has said otherwise meanwhile."""
    return tenancy.comes_back and not (tenancy.removed or pool.stopping)


async def _bring_back(pool: Pool, tenancy: Tenancy) -> LlamasupError | None:
    """It was loaded, and is to be so again, although perhaps nobody asks for it at this moment.

    Returns why it is not.
    """
    try:
        await pool.load(tenancy)
    except LlamasupError as error:
        if not pool.stopping:
            _log.warning("%s was changed, and is not loaded again: %s", tenancy.spec.id, error)
            return error
    return None


_CHANGING = Unavailable(503, "The model is being changed", cause="changing", retry_after_s=1.0, may_wait=True)
