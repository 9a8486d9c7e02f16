"""Between a pool and its policy: what follows for each model from how it is, then the verdicts on all."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, assert_never

from llamasup.core.errors import DoesNotFit
from llamasup.core.failure import failure_of
from llamasup.core.instance import StartAsked, State
from llamasup.core.residency import (
    Evict,
    Load,
    Phase,
    Refuse,
    Resume,
    Verdict,
    WakeAt,
    World,
    Yield,
    decide,
)
from llamasup.runtime.events import LoadFailed
from llamasup.runtime.tenancy import Tenancy, absent, making_room

if TYPE_CHECKING:
    from llamasup.runtime.pool import Pool

__all__ = ["decide_now"]

_REFUSED = "Make it smaller (ctx_size, parallel), pin fewer, or allow more (memory, max_loaded, groups)."


def decide_now(pool: Pool) -> None:
    now_s = monotonic()
    for tenancy in tuple(pool.active):
        if not tenancy.removed:
            _look_at(pool, tenancy, now_s)
    tenants = {each.key: each.tenant() for each in pool.active if each.sized is not None}
    for verdict in decide(World(now_s, tenants, pool.options.budget, pool.options.residency)):
        _carry_out(pool, verdict)


def _look_at(pool: Pool, tenancy: Tenancy, now_s: float) -> None:
    """What follows from how it is, whatever else is loaded."""
    _look_at_wish(pool, tenancy, now_s)
    if tenancy.serves:
        _serves(tenancy)
    if tenancy.phase is Phase.FAILED:
        if tenancy.error is None:
            runner = next(each for each in tenancy.runners if each.instance.state is State.FAILED)
            pool.fail(tenancy, failure_of(runner.instance), runner.unavailable())
        if tenancy.retry_at_s > now_s:
            pool.alarm.ring_at(tenancy.retry_at_s)
            return
        pool.forget_failure(tenancy)
    if tenancy.sized is not None and tenancy.phase is Phase.ABSENT and tenancy.is_outdated:
        pool.runners.drop(tenancy, tenancy.runners)
        tenancy.runners, tenancy.sized = [], None
    if tenancy.phase is Phase.ABSENT and not tenancy.wanted:
        if tenancy.sizing is None:
            del pool.active[tenancy]
        elif tenancy.sized is None:
            tenancy.stop_sizing()
    elif tenancy.sized is None and not (tenancy.sizing or tenancy.changing):
        pool.size_soon(tenancy, "size")


def _look_at_wish(pool: Pool, tenancy: Tenancy, now_s: float) -> None:
    if tenancy.wish is not None:
        if tenancy.wish.until_s <= now_s:
            tenancy.wish = None
        else:
            pool.alarm.ring_at(tenancy.wish.until_s)


def _serves(tenancy: Tenancy) -> None:
    """Whoever waits for no more than that has it; what was wrong with it is over."""
    tenancy.wish = None
    if tenancy.error is not None:
        tenancy.error = None
        tenancy.served.absent = absent(tenancy.spec)
    tenancy.settle_claims()


def _carry_out(pool: Pool, verdict: Verdict) -> None:
    match verdict:
        case Load(id_):
            _begin(pool, pool.tenancies[id_])
        case Evict(id_, reason, for_id):
            pool.leave(pool.tenancies[id_], reason, for_id)
        case Yield(id_, for_id):
            tenancy = pool.tenancies[id_]
            tenancy.yielding = True
            tenancy.served.shut(making_room(tenancy.spec, for_id))
        case Resume(id_):
            tenancy = pool.tenancies[id_]
            tenancy.yielding = False
            tenancy.served.open()
            _serves(tenancy)
        case Refuse(id_, reason):
            refused = DoesNotFit(f"{id_} does not fit: {reason}.", remedy=_REFUSED)
            pool.fail(pool.tenancies[id_], refused)
            pool.bus.publish(LoadFailed(id_, refused))
        case WakeAt(at_s):
            pool.alarm.ring_at(at_s)
        case _ as unreachable:
            assert_never(unreachable)


def _begin(pool: Pool, tenancy: Tenancy) -> None:
    if not tenancy.runners:
        assert tenancy.sized is not None  # nothing is loaded that was not sized
        tenancy.runners = pool.make_runners(tenancy, tenancy.sized)
    tenancy.starting = True
    for runner in tenancy.runners:
        runner.post(StartAsked())
