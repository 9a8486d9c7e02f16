"""The life of one supervised child as a table: events in, the next state and effects out.

Decides what is done when; never does it. ``advance`` is pure: time and chance are arguments. The owner
of the instance (``runtime.instance``) carries the effects out and feeds what comes of them back as events.

Every event about a child carries that child's generation. Events of an earlier generation, of a child
that is already reaped, and of timers that were set in an earlier state are stale; they are dropped in
one place, ``_is_stale``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from llamasup.core.backoff import recent_crashes, restart_delay_s
from llamasup.core.diagnosis import Diagnosis
from llamasup.core.instance import (
    AwaitIdle,
    CloseEndpoint,
    Doomed,
    Effect,
    Event,
    Exited,
    Healthy,
    Hung,
    Idle,
    Instance,
    Kill,
    KillAsked,
    Loading,
    Policy,
    Probe,
    Progressed,
    Report,
    RestartAsked,
    RestoreSlots,
    SaveSlots,
    SlotsRestored,
    SlotsSaved,
    SlotsSpoilt,
    Spawn,
    Spawned,
    SpawnFailed,
    StartAsked,
    State,
    StopAsked,
    Terminate,
    WakeAt,
    Warmed,
    WarmUp,
    WarmupFailed,
    Watch,
    Woke,
)

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
    return step(_Moment(instance, event, policy, now_s, roll))


def _is_stale(instance: Instance, event: Event) -> bool:
    match event:
        case StartAsked() | StopAsked() | KillAsked() | RestartAsked():
            return False
        case Woke(ticket):
            return ticket != instance.ticket
        case _:
            return event.generation != instance.generation or not instance.alive


@dataclass(frozen=True, slots=True)
class _Moment:
    instance: Instance
    event: Event
    policy: Policy
    now_s: float
    roll: float

    def deadline(self, instance: Instance, after_s: float) -> tuple[Instance, WakeAt]:
        """A fresh timer; it makes every earlier one stale."""
        ticket = instance.ticket + 1
        return replace(instance, ticket=ticket), WakeAt(ticket, self.now_s + after_s)


_Step = Callable[[_Moment], tuple[Instance, tuple[Effect, ...]]]


# --- steps -------------------------------------------------------------------------------------------


def _stay(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return moment.instance, ()


def _spawn(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    generation = moment.instance.generation + 1
    fresh = replace(
        moment.instance,
        state=State.STARTING,
        generation=generation,
        alive=True,
        wanted=False,
        verdict=None,
        ready=False,
        keeps_slots=False,
        moves_slots=False,
        next_start_s=None,
    )
    fresh, wake = moment.deadline(fresh, moment.policy.stall_timeout_s)
    return fresh, (Spawn(generation), wake)


def _start_afresh(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """A start that a person asks for forgets the crashes before it."""
    return _spawn(replace(moment, instance=replace(moment.instance, crashes=(), trial_s=None)))


def _try_again(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """One start out of a crash loop: if it lives, all is well again; if not, back at once."""
    return _restart_now(replace(moment, instance=replace(moment.instance, trial_s=moment.now_s)))


def _restart_now(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _spawn(replace(moment, instance=replace(moment.instance, restarts=moment.instance.restarts + 1)))


def _spawned(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    assert isinstance(moment.event, Spawned)
    known = replace(moment.instance, keeps_slots=moment.event.keeps_slots)
    return known, (Probe(known.generation),)


def _loading(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    loading, wake = moment.deadline(
        replace(moment.instance, state=State.LOADING), moment.policy.stall_timeout_s
    )
    return loading, (wake,)


def _progressed(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    if moment.instance.moves_slots:
        return _stay(moment)  # that has a deadline of its own
    instance, wake = moment.deadline(moment.instance, moment.policy.stall_timeout_s)
    return instance, (wake,)


def _healthy(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    if not moment.policy.warm_up:
        return _proven(moment)
    warming, wake = moment.deadline(
        replace(moment.instance, state=State.WARMING), moment.policy.stall_timeout_s
    )
    return warming, (WarmUp(warming.generation), wake)


def _proven(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    if not moment.instance.keeps_slots:
        return _serve(moment)
    # Before the first request: afterwards its slot might be one that is restored.
    restoring, wake = moment.deadline(
        replace(moment.instance, state=State.WARMING, moves_slots=True), moment.policy.slots_timeout_s
    )
    return restoring, (RestoreSlots(restoring.generation), wake)


def _serve(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    # A new ticket without a timer: the start deadline must not strike a server that serves.
    serving = replace(
        moment.instance,
        state=State.READY,
        ready=True,
        moves_slots=False,
        ticket=moment.instance.ticket + 1,
    )
    return serving, (Watch(serving.generation),)


def _drain(moment: _Moment, *, wanted: bool = False) -> tuple[Instance, tuple[Effect, ...]]:
    draining, wake = moment.deadline(
        replace(moment.instance, state=State.DRAINING, wanted=wanted), moment.policy.drain_timeout_s
    )
    return draining, (AwaitIdle(draining.generation), wake)


def _out_of_patience(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    # Slots that are not restored in time are not waited for: a request in their place computes anew.
    return _serve(moment) if moment.instance.moves_slots else _condemn(moment)


def _idle(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    if not moment.instance.keeps_slots:
        return _terminate(moment)
    saving, wake = moment.deadline(replace(moment.instance, moves_slots=True), moment.policy.slots_timeout_s)
    return saving, (SaveSlots(saving.generation), wake)


def _drain_and_restart(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _drain(moment, wanted=True)


def _terminate(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    policy = moment.policy
    # Only just after its ready line can a SIGTERM be lost, and a second one ends llama-server at once: a
    # server that has been ready keeps its whole time to end.
    insisted = moment.instance.ready
    patience_s = policy.stop_timeout_s if insisted else policy.first_patience_s
    stopping, wake = moment.deadline(
        replace(moment.instance, state=State.STOPPING, insisted=insisted), patience_s
    )
    generation = stopping.generation
    return stopping, (CloseEndpoint(generation, "the server is stopping"), Terminate(generation), wake)


def _insist(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    if moment.instance.insisted:
        return _kill(moment)
    patience_s = moment.policy.stop_timeout_s - moment.policy.first_patience_s
    stopping, wake = moment.deadline(replace(moment.instance, insisted=True), patience_s)
    return stopping, (Terminate(stopping.generation), wake)


def _terminate_and_restart(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _terminate(replace(moment, instance=replace(moment.instance, wanted=True)))


def _kill(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    stopping, wake = moment.deadline(
        replace(moment.instance, state=State.STOPPING, insisted=True), moment.policy.kill_again_s
    )
    generation = stopping.generation
    return stopping, (CloseEndpoint(generation, "the server is stopping"), Kill(generation), wake)


def _spoilt(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """Its slots are nothing to keep."""
    return replace(moment.instance, keeps_slots=False), ()


def _kill_spoilt(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _kill(replace(moment, instance=replace(_spoilt(moment)[0], wanted=True)))


def _drain_spoilt(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _drain_and_restart(replace(moment, instance=_spoilt(moment)[0]))


def _kill_for_good(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _kill(replace(moment, instance=replace(moment.instance, wanted=False, verdict=None)))


def _stop_for_good(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return replace(moment.instance, wanted=False, verdict=None), ()


def _then_restart(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return replace(moment.instance, wanted=True, verdict=None), ()


def _condemn(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """It lives, but it is of no use: end it, and count that as its crash."""
    if isinstance(moment.event, WarmupFailed | Doomed | Hung):
        verdict = moment.event.diagnosis
    else:
        seconds = moment.policy.stall_timeout_s
        verdict = Diagnosis(
            cause="hung_start",
            message=f"llama-server made no progress for {seconds:.0f} s while starting",
            remedy="See its log; a very slow disk or a device driver that hangs are the usual reasons.",
            lines=(),
            deterministic=False,
            exit_code=75,
        )
    return _kill(replace(moment, instance=replace(moment.instance, verdict=verdict)))


def _ended(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """The child that we were ending is gone."""
    instance = replace(moment.instance, alive=False)
    if instance.verdict is not None:
        return _crashed(replace(moment, instance=instance), instance.verdict, by_us=True)
    if instance.wanted:
        return _restart_now(replace(moment, instance=instance))
    return _rest(instance, State.STOPPED), ()


def _ended_in_drain(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    instance, effects = _ended(moment)
    return instance, (CloseEndpoint(moment.instance.generation, "llama-server ended"), *effects)


def _died(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    """The child has ended unasked."""
    assert isinstance(moment.event, Exited | SpawnFailed)
    instance = replace(moment.instance, alive=False)
    after, effects = _crashed(replace(moment, instance=instance), moment.event.diagnosis)
    return after, (CloseEndpoint(instance.generation, moment.event.diagnosis.message), *effects)


def _crashed(
    moment: _Moment, diagnosis: Diagnosis, *, by_us: bool = False
) -> tuple[Instance, tuple[Effect, ...]]:
    instance, policy = moment.instance, moment.policy.restart
    if diagnosis.adjustment is not None:
        # The next plan is another one, so this is no crash loop; the planner bounds how often (S5).
        smaller = replace(instance, last=diagnosis, verdict=None, wanted=False)
        after, effects = _restart_now(replace(moment, instance=smaller))
        return after, (Report(instance.generation, diagnosis, 0.0, by_us), *effects)
    crashes = (*recent_crashes(instance.crashes, moment.now_s, policy), moment.now_s)
    instance = replace(instance, crashes=crashes, last=diagnosis, verdict=None, wanted=False)
    on_trial = instance.trial_s is not None and moment.now_s - instance.trial_s < policy.window_s
    if diagnosis.deterministic:
        return _rest(instance, State.FAILED), (Report(instance.generation, diagnosis, None, by_us),)
    if on_trial or len(crashes) > policy.most_crashes:
        return _give_up(replace(moment, instance=instance), diagnosis, by_us=by_us)
    instance = replace(instance, trial_s=None)
    delay_s = restart_delay_s(len(crashes), was_ready=instance.ready, roll=moment.roll, policy=policy)
    report = Report(instance.generation, diagnosis, delay_s, by_us)
    if delay_s == 0.0:
        after, effects = _restart_now(replace(moment, instance=instance))
        return after, (report, *effects)
    waiting, wake = moment.deadline(replace(instance, state=State.BACKOFF), delay_s)
    return replace(waiting, next_start_s=wake.at_s), (report, wake)


def _give_up(moment: _Moment, diagnosis: Diagnosis, *, by_us: bool) -> tuple[Instance, tuple[Effect, ...]]:
    """A crash loop: for good, or till the next single try."""
    instance, delay_s = _rest(moment.instance, State.FAILED), moment.policy.restart.half_open_s
    report = Report(instance.generation, diagnosis, delay_s, by_us)
    if delay_s is None:
        return instance, (report,)
    waiting, wake = moment.deadline(instance, delay_s)
    return replace(waiting, next_start_s=wake.at_s), (report, wake)


def _rest_now(moment: _Moment) -> tuple[Instance, tuple[Effect, ...]]:
    return _rest(moment.instance, State.STOPPED), ()


def _rest(instance: Instance, state: State) -> Instance:
    return replace(instance, state=state, ticket=instance.ticket + 1, next_start_s=None)


# --- the table ---------------------------------------------------------------------------------------

TABLE: Mapping[State, Mapping[type, _Step]] = MappingProxyType(
    {
        State.STOPPED: {
            StartAsked: _start_afresh,
            StopAsked: _stay,
            KillAsked: _stay,
            RestartAsked: _start_afresh,
        },
        State.STARTING: {
            StartAsked: _stay,
            StopAsked: _terminate,
            KillAsked: _kill,
            RestartAsked: _terminate_and_restart,
            Spawned: _spawned,
            SpawnFailed: _died,
            Loading: _loading,
            Progressed: _progressed,
            Healthy: _healthy,
            Doomed: _condemn,
            Exited: _died,
            Woke: _condemn,
        },
        State.LOADING: {
            StartAsked: _stay,
            StopAsked: _terminate,
            KillAsked: _kill,
            RestartAsked: _terminate_and_restart,
            Loading: _stay,
            Progressed: _progressed,
            Healthy: _healthy,
            Doomed: _condemn,
            Exited: _died,
            Woke: _condemn,
        },
        State.WARMING: {
            StartAsked: _stay,
            StopAsked: _terminate,
            KillAsked: _kill,
            RestartAsked: _terminate_and_restart,
            Progressed: _progressed,
            Warmed: _proven,
            WarmupFailed: _condemn,
            SlotsRestored: _serve,
            SlotsSpoilt: _kill_spoilt,
            Doomed: _stay,
            Exited: _died,
            Woke: _out_of_patience,
        },
        State.READY: {
            StartAsked: _stay,
            StopAsked: _drain,
            KillAsked: _kill,
            RestartAsked: _drain_and_restart,
            Progressed: _stay,
            SlotsRestored: _stay,
            SlotsSpoilt: _drain_spoilt,
            Doomed: _stay,
            Hung: _condemn,
            Exited: _died,
        },
        State.DRAINING: {
            StartAsked: _then_restart,
            StopAsked: _stop_for_good,
            KillAsked: _kill_for_good,
            RestartAsked: _then_restart,
            Progressed: _stay,
            SlotsRestored: _stay,
            SlotsSpoilt: _spoilt,
            SlotsSaved: _terminate,
            Doomed: _stay,
            Hung: _kill,
            Idle: _idle,
            Exited: _ended_in_drain,
            Woke: _terminate,
        },
        State.STOPPING: {
            StartAsked: _then_restart,
            StopAsked: _stop_for_good,
            KillAsked: _kill_for_good,
            RestartAsked: _then_restart,
            Spawned: _stay,
            SpawnFailed: _ended,
            Loading: _stay,
            Progressed: _stay,
            Healthy: _stay,
            Warmed: _stay,
            WarmupFailed: _stay,
            SlotsRestored: _stay,
            SlotsSpoilt: _stay,
            SlotsSaved: _stay,
            Doomed: _stay,
            Hung: _stay,
            Idle: _stay,
            Exited: _ended,
            Woke: _insist,
        },
        State.BACKOFF: {
            StartAsked: _restart_now,
            StopAsked: _rest_now,
            KillAsked: _rest_now,
            RestartAsked: _restart_now,
            Woke: _restart_now,
        },
        State.FAILED: {
            StartAsked: _start_afresh,
            StopAsked: _rest_now,
            KillAsked: _rest_now,
            RestartAsked: _start_afresh,
            Woke: _try_again,
        },
    }
)
