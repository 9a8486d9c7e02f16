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
    Drained,
    Effect,
    Event,
    Exited,
    Healthy,
    Instance,
    KillRequested,
    LivenessFailed,
    Loading,
    Policy,
    Progressed,
    RestartRequested,
    SlotRestoreCorrupted,
    SlotsRestored,
    SlotsSaved,
    Spawned,
    SpawnFailed,
    StartRequested,
    StartupFailureLogged,
    State,
    StopRequested,
    TimerFired,
    WarmupFailed,
    WarmupSucceeded,
)
from llamasup.supervision.transitions import Step, Transition

__all__ = ["TABLE", "InvalidTransition", "advance"]


class InvalidTransition(RuntimeError):
    """An event that the table has no row for: a bug of the caller."""

    def __init__(self, instance: Instance, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in state {instance.state}: {event!r} at {instance!r}")


# --- the one door ------------------------------------------------------------------------------------


def advance(
    instance: Instance, event: Event, policy: Policy, *, now_s: float, roll: float
) -> tuple[Instance, tuple[Effect, ...]]:
    """The next instance and the effects to carry out, in order.

    ``now_s`` is a monotonic time in seconds; ``roll`` is uniform in [0, 1), for the jitter.
    Raises InvalidTransition where the table has no row.
    """
    if _is_stale(instance, event):
        return instance, ()
    step = TABLE[instance.state].get(type(event))
    if step is None:
        raise InvalidTransition(instance, event)
    return step(Transition(instance, event, policy, now_s, roll))


def _is_stale(instance: Instance, event: Event) -> bool:
    match event:
        case StartRequested() | StopRequested() | KillRequested() | RestartRequested():
            return False
        case TimerFired(timer_id):
            return timer_id != instance.timer_id
        case _:
            return event.generation != instance.generation or not instance.alive


# --- the table ---------------------------------------------------------------------------------------

TABLE: Mapping[State, Mapping[type, Step]] = MappingProxyType(
    {
        State.STOPPED: {
            StartRequested: do.start_afresh,
            StopRequested: do.ignore,
            KillRequested: do.ignore,
            RestartRequested: do.start_afresh,
        },
        State.STARTING: {
            StartRequested: do.ignore,
            StopRequested: do.terminate,
            KillRequested: do.kill,
            RestartRequested: do.terminate_and_restart,
            Spawned: do.spawned,
            SpawnFailed: do.died,
            Loading: do.loading,
            Progressed: do.progressed,
            Healthy: do.healthy,
            StartupFailureLogged: do.fail_and_kill,
            Exited: do.died,
            TimerFired: do.fail_and_kill,
        },
        State.LOADING: {
            StartRequested: do.ignore,
            StopRequested: do.terminate,
            KillRequested: do.kill,
            RestartRequested: do.terminate_and_restart,
            Loading: do.ignore,
            Progressed: do.progressed,
            Healthy: do.healthy,
            StartupFailureLogged: do.fail_and_kill,
            Exited: do.died,
            TimerFired: do.fail_and_kill,
        },
        State.WARMING: {
            StartRequested: do.ignore,
            StopRequested: do.terminate,
            KillRequested: do.kill,
            RestartRequested: do.terminate_and_restart,
            Progressed: do.progressed,
            WarmupSucceeded: do.warmup_succeeded,
            WarmupFailed: do.fail_and_kill,
            SlotsRestored: do.serve,
            SlotRestoreCorrupted: do.kill_spoilt,
            StartupFailureLogged: do.ignore,
            Exited: do.died,
            TimerFired: do.warmup_timeout,
        },
        State.READY: {
            StartRequested: do.ignore,
            StopRequested: do.drain,
            KillRequested: do.kill,
            RestartRequested: do.drain_and_restart,
            Progressed: do.ignore,
            SlotsRestored: do.ignore,
            SlotRestoreCorrupted: do.drain_spoilt,
            StartupFailureLogged: do.ignore,
            LivenessFailed: do.fail_and_kill,
            Exited: do.died,
        },
        State.DRAINING: {
            StartRequested: do.then_restart,
            StopRequested: do.stop_for_good,
            KillRequested: do.kill_for_good,
            RestartRequested: do.then_restart,
            Progressed: do.ignore,
            SlotsRestored: do.ignore,
            SlotRestoreCorrupted: do.spoilt,
            SlotsSaved: do.terminate,
            StartupFailureLogged: do.ignore,
            LivenessFailed: do.kill,
            Drained: do.idle,
            Exited: do.ended_in_drain,
            TimerFired: do.terminate,
        },
        State.STOPPING: {
            StartRequested: do.then_restart,
            StopRequested: do.stop_for_good,
            KillRequested: do.kill_for_good,
            RestartRequested: do.then_restart,
            Spawned: do.ignore,
            SpawnFailed: do.ended,
            Loading: do.ignore,
            Progressed: do.ignore,
            Healthy: do.ignore,
            WarmupSucceeded: do.ignore,
            WarmupFailed: do.ignore,
            SlotsRestored: do.ignore,
            SlotRestoreCorrupted: do.ignore,
            SlotsSaved: do.ignore,
            StartupFailureLogged: do.ignore,
            LivenessFailed: do.ignore,
            Drained: do.ignore,
            Exited: do.ended,
            TimerFired: do.resend_sigterm,
        },
        State.BACKOFF: {
            StartRequested: do.restart_now,
            StopRequested: do.settle,
            KillRequested: do.settle,
            RestartRequested: do.restart_now,
            TimerFired: do.restart_now,
        },
        State.FAILED: {
            StartRequested: do.start_afresh,
            StopRequested: do.settle,
            KillRequested: do.settle,
            RestartRequested: do.start_afresh,
            TimerFired: do.try_again,
        },
    }
)
