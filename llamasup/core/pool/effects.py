"""Derives all that has to be done when a model changes from the model before and after (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.model_states import (
    HOLDING,
    Estimate,
    Model,
    ModelState,
    ProcessesStatus,
    RolloutStep,
    is_proof_under_way,
)
from llamasup.core.supervision.events import LoadFailed, ModelUnloading, PublishedEvent
from llamasup.errors import LlamasupError


class Size(Struct, frozen=True):
    """Download the model if it is missing, and estimate its memory."""

    ticket: int
    spec: ModelSpec


class CancelSizing(Struct, frozen=True):
    ticket: int


class Start(Struct, frozen=True):
    """Start these processes; make them first if they are new. ``withheld``: they get no requests yet."""

    id: int
    sized: Estimate
    withheld: bool = False


class Prove(Struct, frozen=True):
    """Compare these processes with the old ones; then ``prove`` or ``disprove``."""

    id: int
    old_id: int


class Admit(Struct, frozen=True):
    """Send requests to these processes, which were withheld."""

    id: int
    sized: Estimate


class Withdraw(Struct, frozen=True):
    """Send these processes no more requests."""

    id: int


class Stop(Struct, frozen=True):
    """Stop these processes after their requests, or ``now``; then they are STOPPED."""

    id: int
    sized: Estimate | None
    now: bool = False


class Drop(Struct, frozen=True):
    """Forget these stopped processes."""

    id: int


class SizedUp(Struct, frozen=True):
    """The sizing for a load has succeeded."""


class EndLoads(Struct, frozen=True):
    """End the waiting ``load`` commands, with the error if there is one."""

    error: LlamasupError | None = None


class EndRollout(Struct, frozen=True):
    error: LlamasupError | None = None


class Reload(Struct, frozen=True):
    """Load the model again because it was loaded before the rollout, which ends with that load."""


class Announce(Struct, frozen=True):
    event: PublishedEvent


class Forget(Struct, frozen=True):
    """The removed model holds nothing any more."""


Effect = (
    Size
    | CancelSizing
    | Start
    | Prove
    | Admit
    | Withdraw
    | Stop
    | Drop
    | SizedUp
    | EndLoads
    | EndRollout
    | Reload
    | Announce
    | Forget
)


def effects_of(before: Model, after: Model) -> Iterator[Effect]:
    """Return all that has to be done when a model changes, in order. Nothing has if it stays the same."""
    if after is before:
        return
    if after.reason and after.reason != before.reason:
        yield Announce(ModelUnloading(after.spec.id, after.reason, after.for_id))
    yield from _on_processes(before, after)
    yield from _on_loads(before, after)
    yield from _on_sizing(before, after)
    if before.rollout is not None and after.rollout is None:
        yield Reload() if after.rollout_end.reload else EndRollout(after.rollout_end.error)
    is_gone = after.removal is not None and not after.removal.stops and not after.holding
    if is_gone and (before.removal is None or before.holding):
        yield Forget()


def _on_sizing(before: Model, after: Model) -> Iterator[Effect]:
    was, now = before.sizing, after.sizing
    if was is not None and (now is None or now.ticket != was.ticket):
        yield CancelSizing(was.ticket)
    if now is not None and (was is None or now.ticket != was.ticket):
        yield Size(now.ticket, after.spec)
    if before.state is ModelState.SIZING and after.sized is not None:
        yield SizedUp()


def _on_processes(before: Model, after: Model) -> Iterator[Effect]:
    was = {each.id: each.status for each in before.processes}
    ids = {each.id for each in after.processes}
    yield from (Drop(id_) for id_ in was if id_ not in ids)
    was_withheld, withheld = _withheld(before), _withheld(after)
    place = after.place if after.place is not before.place else None
    is_now = after.is_urgent and not before.is_urgent
    for each, sized in ((after.current, after.sized), (after.old, after.old_sized)):
        if each is None or sized is None:
            continue
        if each is after.old and place is RolloutStep.DRAINING and each.id != was_withheld:
            yield Withdraw(each.id)
        status = was.get(each.id)
        if each.status is ProcessesStatus.STARTING and status not in HOLDING:
            yield Start(each.id, sized, each.id == withheld)
        elif each.status is ProcessesStatus.STOPPING:
            if is_now or status is not ProcessesStatus.STOPPING:
                is_end = after.removal is not None and after.removal.stops
                yield Stop(each.id, None if is_end else sized, after.is_urgent)
        elif each.id == was_withheld != withheld:
            yield Admit(each.id, sized)
    if place is RolloutStep.PROVING and after.current is not None and after.old is not None:
        yield Prove(after.current.id, after.old.id)


def _withheld(model: Model) -> int | None:
    """The id of the processes that get no requests yet."""
    return model.current.id if model.current is not None and is_proof_under_way(model) else None


def _on_loads(before: Model, after: Model) -> Iterator[Effect]:
    state = after.state
    if after.removal is not None:
        if before.removal is None:
            yield EndLoads(after.removal.error)
    elif state is ModelState.FAILED and before.state is not state:
        yield EndLoads(after.error)
        if after.error is not None and not after.spec.stay.by_command:  # else where llamasup ends
            yield Announce(LoadFailed(after.spec.id, after.error))
    elif state is ModelState.RESIDENT and before.state is not state:
        yield EndLoads()
    elif state is ModelState.LOADING and (error := _new_failure(before, after)) is not None:
        yield EndLoads(error)


def _new_failure(before: Model, after: Model) -> LlamasupError | None:
    """The failure of processes that try again by themselves."""
    current = after.current
    return None if current is None or current is before.current else current.error
