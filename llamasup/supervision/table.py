"""The life of one supervised child as a table: events in, the next state and effects out.

Decides what is done when; never does it. ``advance`` is pure: time and chance are arguments. The owner
of the instance (``runtime.instance``) carries the effects out and feeds what comes of them back as events.

Every event about a child carries that child's generation. Events of an earlier generation, of a child
that is already reaped, and of timers that were set in an earlier state are stale; they are dropped in
one place, ``_is_stale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llamasup.supervision import transitions as do
from llamasup.supervision.states import (
    Doomed,
    Effect,
    Event,
    Exited,
    Healthy,
    Hung,
    Idle,
    Instance,
    KillAsked,
    Loading,
    Policy,
    Progressed,
    RestartAsked,
    SlotsRestored,
    SlotsSaved,
    SlotsSpoilt,
    Spawned,
    SpawnFailed,
    StartAsked,
    State,
    StopAsked,
    Warmed,
    WarmupFailed,
    Woke,
)
from llamasup.supervision.transitions import Moment, Step

__all__ = ["TABLE", "ImpossibleEvent", "advance"]


class ImpossibleEvent(RuntimeError):
    """An event that the table has no row for: a bug of the caller."""

    def __init__(self, instance: Instance, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in state {instance.state}: {event!r} at {instance!r}")


# --- the one door ------------------------------------------------------------------------------------


def advance(
    instance: Instance, event: Event, policy: Policy, *, now_s: float, roll: float
) -> tuple[Instance, tuple[Effect, ...]]:
    """The next instance and the effects to carry out, in order.

    ``now_s`` is a monotonic time in seconds; ``roll`` is uniform in [0, 1), for the jitter.
    Raises ImpossibleEvent where the table has no row.
    """
    if _is_stale(instance, event):
        return instance, ()
    step = TABLE[instance.state].get(type(event))
    if step is None:
        raise ImpossibleEvent(instance, event)
    return step(Moment(instance, event, policy, now_s, roll))


def _is_stale(instance: Instance, event: Event) -> bool:
    match event:
        case StartAsked() | StopAsked() | KillAsked() | RestartAsked():
            return False
        case Woke(ticket):
            return ticket != instance.ticket
        case _:
            return event.generation != instance.generation or not instance.alive


# --- the table ---------------------------------------------------------------------------------------

TABLE: Mapping[State, Mapping[type, Step]] = MappingProxyType(
    {
        State.STOPPED: {
            StartAsked: do.start_afresh,
            StopAsked: do.stay,
            KillAsked: do.stay,
            RestartAsked: do.start_afresh,
        },
        State.STARTING: {
            StartAsked: do.stay,
            StopAsked: do.terminate,
            KillAsked: do.kill,
            RestartAsked: do.terminate_and_restart,
            Spawned: do.spawned,
            SpawnFailed: do.died,
            Loading: do.loading,
            Progressed: do.progressed,
            Healthy: do.healthy,
            Doomed: do.condemn,
            Exited: do.died,
            Woke: do.condemn,
        },
        State.LOADING: {
            StartAsked: do.stay,
            StopAsked: do.terminate,
            KillAsked: do.kill,
            RestartAsked: do.terminate_and_restart,
            Loading: do.stay,
            Progressed: do.progressed,
            Healthy: do.healthy,
            Doomed: do.condemn,
            Exited: do.died,
            Woke: do.condemn,
        },
        State.WARMING: {
            StartAsked: do.stay,
            StopAsked: do.terminate,
            KillAsked: do.kill,
            RestartAsked: do.terminate_and_restart,
            Progressed: do.progressed,
            Warmed: do.proven,
            WarmupFailed: do.condemn,
            SlotsRestored: do.serve,
            SlotsSpoilt: do.kill_spoilt,
            Doomed: do.stay,
            Exited: do.died,
            Woke: do.out_of_patience,
        },
        State.READY: {
            StartAsked: do.stay,
            StopAsked: do.drain,
            KillAsked: do.kill,
            RestartAsked: do.drain_and_restart,
            Progressed: do.stay,
            SlotsRestored: do.stay,
            SlotsSpoilt: do.drain_spoilt,
            Doomed: do.stay,
            Hung: do.condemn,
            Exited: do.died,
        },
        State.DRAINING: {
            StartAsked: do.then_restart,
            StopAsked: do.stop_for_good,
            KillAsked: do.kill_for_good,
            RestartAsked: do.then_restart,
            Progressed: do.stay,
            SlotsRestored: do.stay,
            SlotsSpoilt: do.spoilt,
            SlotsSaved: do.terminate,
            Doomed: do.stay,
            Hung: do.kill,
            Idle: do.idle,
            Exited: do.ended_in_drain,
            Woke: do.terminate,
        },
        State.STOPPING: {
            StartAsked: do.then_restart,
            StopAsked: do.stop_for_good,
            KillAsked: do.kill_for_good,
            RestartAsked: do.then_restart,
            Spawned: do.stay,
            SpawnFailed: do.ended,
            Loading: do.stay,
            Progressed: do.stay,
            Healthy: do.stay,
            Warmed: do.stay,
            WarmupFailed: do.stay,
            SlotsRestored: do.stay,
            SlotsSpoilt: do.stay,
            SlotsSaved: do.stay,
            Doomed: do.stay,
            Hung: do.stay,
            Idle: do.stay,
            Exited: do.ended,
            Woke: do.insist,
        },
        State.BACKOFF: {
            StartAsked: do.restart_now,
            StopAsked: do.rest_now,
            KillAsked: do.rest_now,
            RestartAsked: do.restart_now,
            Woke: do.restart_now,
        },
        State.FAILED: {
            StartAsked: do.start_afresh,
            StopAsked: do.rest_now,
            KillAsked: do.rest_now,
            RestartAsked: do.start_afresh,
            Woke: do.try_again,
        },
    }
)
