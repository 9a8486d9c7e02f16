"""What follows from one event in one state of a supervised child: the steps that ``core.lifecycle`` tables.

Each is pure: the moment in, the next instance and the effects to carry out in order. None asks which state it
is in; that is what the table is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.supervision.backoff import recent_crashes, restart_delay_s
from llamasup.supervision.states import (
    AwaitIdle,
    CloseEndpoint,
    Effect,
    Event,
    Exited,
    Instance,
    Kill,
    LivenessFailed,
    Policy,
    Probe,
    Report,
    RestoreSlots,
    SaveSlots,
    Spawn,
    Spawned,
    SpawnFailed,
    StartupFailureLogged,
    State,
    Terminate,
    WakeAt,
    WarmUp,
    WarmupFailed,
    Watch,
)

__all__ = [
    "Outcome",
    "Step",
    "Transition",
    "died",
    "drain",
    "drain_and_restart",
    "drain_spoilt",
    "ended",
    "ended_in_drain",
    "fail_and_kill",
    "healthy",
    "idle",
    "ignore",
    "kill",
    "kill_for_good",
    "kill_spoilt",
    "loading",
    "progressed",
    "resend_sigterm",
    "restart_now",
    "serve",
    "settle",
    "spawned",
    "spoilt",
    "start_afresh",
    "stop_for_good",
    "terminate",
    "terminate_and_restart",
    "then_restart",
    "try_again",
    "warmup_succeeded",
    "warmup_timeout",
]

Outcome = tuple[Instance, tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class Transition:
    instance: Instance
    event: Event
    policy: Policy
    now_s: float
    roll: float

    def deadline(self, instance: Instance, after_s: float) -> tuple[Instance, WakeAt]:
        """A fresh timer; it makes every earlier one stale."""
        timer_id = instance.timer_id + 1
        return replace(instance, timer_id=timer_id), WakeAt(timer_id, self.now_s + after_s)


Step = Callable[[Transition], Outcome]


def ignore(moment: Transition) -> Outcome:
    return moment.instance, ()


def _spawn(moment: Transition) -> Outcome:
    generation = moment.instance.generation + 1
    fresh = replace(
        moment.instance,
        state=State.STARTING,
        generation=generation,
        alive=True,
        restart_pending=False,
        kill_reason=None,
        ready=False,
        keeps_slots=False,
        moves_slots=False,
        next_start_s=None,
    )
    fresh, wake = moment.deadline(fresh, moment.policy.stall_timeout_s)
    return fresh, (Spawn(generation), wake)


def start_afresh(moment: Transition) -> Outcome:
    """A start that a person asks for forgets the crashes before it."""
    return _spawn(replace(moment, instance=replace(moment.instance, crashes=(), half_open_since_s=None)))


def try_again(moment: Transition) -> Outcome:
    """One start out of a crash loop: if it lives, all is well again; if not, back at once."""
    return restart_now(replace(moment, instance=replace(moment.instance, half_open_since_s=moment.now_s)))


def restart_now(moment: Transition) -> Outcome:
    return _spawn(replace(moment, instance=replace(moment.instance, restarts=moment.instance.restarts + 1)))


def spawned(moment: Transition) -> Outcome:
    assert isinstance(moment.event, Spawned)
    known = replace(moment.instance, keeps_slots=moment.event.keeps_slots)
    return known, (Probe(known.generation),)


def loading(moment: Transition) -> Outcome:
    loading, wake = moment.deadline(
        replace(moment.instance, state=State.LOADING), moment.policy.stall_timeout_s
    )
    return loading, (wake,)


def progressed(moment: Transition) -> Outcome:
    if moment.instance.moves_slots:
        return ignore(moment)  # that has a deadline of its own
    instance, wake = moment.deadline(moment.instance, moment.policy.stall_timeout_s)
    return instance, (wake,)


def healthy(moment: Transition) -> Outcome:
    if not moment.policy.warm_up:
        return warmup_succeeded(moment)
    warming, wake = moment.deadline(
        replace(moment.instance, state=State.WARMING), moment.policy.stall_timeout_s
    )
    return warming, (WarmUp(warming.generation), wake)


def warmup_succeeded(moment: Transition) -> Outcome:
    if not moment.instance.keeps_slots:
        return serve(moment)
    # Before the first request: afterwards its slot might be one that is restored.
    restoring, wake = moment.deadline(
        replace(moment.instance, state=State.WARMING, moves_slots=True), moment.policy.slots_timeout_s
    )
    return restoring, (RestoreSlots(restoring.generation), wake)


def serve(moment: Transition) -> Outcome:
    # A new ticket without a timer: the start deadline must not strike a server that serves.
    serving = replace(
        moment.instance,
        state=State.READY,
        ready=True,
        moves_slots=False,
        timer_id=moment.instance.timer_id + 1,
    )
    return serving, (Watch(serving.generation),)


def drain(moment: Transition, *, restart_pending: bool = False) -> Outcome:
    draining, wake = moment.deadline(
        replace(moment.instance, state=State.DRAINING, restart_pending=restart_pending),
        moment.policy.drain_timeout_s,
    )
    return draining, (AwaitIdle(draining.generation), wake)


def warmup_timeout(moment: Transition) -> Outcome:
    # Slots that are not restored in time are not waited for: a request in their place computes anew.
    return serve(moment) if moment.instance.moves_slots else fail_and_kill(moment)


def idle(moment: Transition) -> Outcome:
    if not moment.instance.keeps_slots:
        return terminate(moment)
    saving, wake = moment.deadline(replace(moment.instance, moves_slots=True), moment.policy.slots_timeout_s)
    return saving, (SaveSlots(saving.generation), wake)


def drain_and_restart(moment: Transition) -> Outcome:
    return drain(moment, restart_pending=True)


def terminate(moment: Transition) -> Outcome:
    policy = moment.policy
    # Only just after its ready line can a SIGTERM be lost, and a second one ends llama-server at once: a
    # server that has been ready keeps its whole time to end.
    term_resent = moment.instance.ready
    patience_s = policy.stop_timeout_s if term_resent else policy.first_term_timeout_s
    stopping, wake = moment.deadline(
        replace(moment.instance, state=State.STOPPING, term_resent=term_resent), patience_s
    )
    generation = stopping.generation
    return stopping, (CloseEndpoint(generation, "the server is stopping"), Terminate(generation), wake)


def resend_sigterm(moment: Transition) -> Outcome:
    if moment.instance.term_resent:
        return kill(moment)
    patience_s = moment.policy.stop_timeout_s - moment.policy.first_term_timeout_s
    stopping, wake = moment.deadline(replace(moment.instance, term_resent=True), patience_s)
    return stopping, (Terminate(stopping.generation), wake)


def terminate_and_restart(moment: Transition) -> Outcome:
    return terminate(replace(moment, instance=replace(moment.instance, restart_pending=True)))


def kill(moment: Transition) -> Outcome:
    stopping, wake = moment.deadline(
        replace(moment.instance, state=State.STOPPING, term_resent=True), moment.policy.kill_again_s
    )
    generation = stopping.generation
    return stopping, (CloseEndpoint(generation, "the server is stopping"), Kill(generation), wake)


def _nothing_to_keep(moment: Transition) -> Transition:
    return replace(moment, instance=replace(moment.instance, keeps_slots=False))


def spoilt(moment: Transition) -> Outcome:
    """While they are being saved, that ends with the endpoint."""
    if moment.instance.moves_slots:
        return terminate(_nothing_to_keep(moment))
    return _nothing_to_keep(moment).instance, ()


def kill_spoilt(moment: Transition) -> Outcome:
    clean = _nothing_to_keep(moment)
    return kill(replace(clean, instance=replace(clean.instance, restart_pending=True)))


def drain_spoilt(moment: Transition) -> Outcome:
    return drain_and_restart(_nothing_to_keep(moment))


def kill_for_good(moment: Transition) -> Outcome:
    return kill(replace(moment, instance=replace(moment.instance, restart_pending=False, kill_reason=None)))


def stop_for_good(moment: Transition) -> Outcome:
    return replace(moment.instance, restart_pending=False, kill_reason=None), ()


def then_restart(moment: Transition) -> Outcome:
    return replace(moment.instance, restart_pending=True, kill_reason=None), ()


def fail_and_kill(moment: Transition) -> Outcome:
    """It lives, but it is of no use: end it, and count that as its crash."""
    if isinstance(moment.event, WarmupFailed | StartupFailureLogged | LivenessFailed):
        kill_reason = moment.event.diagnosis
    else:
        seconds = moment.policy.stall_timeout_s
        kill_reason = Diagnosis(
            cause="hung_start",
            message=f"llama-server made no progress for {seconds:.0f} s while starting",
            remedy="See its log; a very slow disk or a device driver that hangs are the usual reasons.",
            lines=(),
            deterministic=False,
            exit_code=75,
        )
    return kill(replace(moment, instance=replace(moment.instance, kill_reason=kill_reason)))


def ended(moment: Transition) -> Outcome:
    """The child that we were ending is gone."""
    instance = replace(moment.instance, alive=False)
    if instance.kill_reason is not None:
        return _crashed(replace(moment, instance=instance), instance.kill_reason, by_us=True)
    if instance.restart_pending:
        return restart_now(replace(moment, instance=instance))
    return _rest(instance, State.STOPPED), ()


def ended_in_drain(moment: Transition) -> Outcome:
    instance, effects = ended(moment)
    return instance, (CloseEndpoint(moment.instance.generation, "llama-server ended"), *effects)


def died(moment: Transition) -> Outcome:
    """The child has ended unasked."""
    assert isinstance(moment.event, Exited | SpawnFailed)
    instance = replace(moment.instance, alive=False)
    after, effects = _crashed(replace(moment, instance=instance), moment.event.diagnosis)
    return after, (CloseEndpoint(instance.generation, moment.event.diagnosis.message), *effects)


def _crashed(moment: Transition, diagnosis: Diagnosis, *, by_us: bool = False) -> Outcome:
    instance, policy = moment.instance, moment.policy.restart
    if diagnosis.adjustment is not None:
        # The next plan is another one, so this is no crash loop; the planner bounds how often (S5).
        smaller = replace(instance, last=diagnosis, kill_reason=None, restart_pending=False)
        after, effects = restart_now(replace(moment, instance=smaller))
        return after, (Report(instance.generation, diagnosis, 0.0, by_us), *effects)
    crashes = (*recent_crashes(instance.crashes, moment.now_s, policy), moment.now_s)
    instance = replace(instance, crashes=crashes, last=diagnosis, kill_reason=None, restart_pending=False)
    on_trial = (
        instance.half_open_since_s is not None and moment.now_s - instance.half_open_since_s < policy.window_s
    )
    if diagnosis.deterministic:
        return _rest(instance, State.FAILED), (Report(instance.generation, diagnosis, None, by_us),)
    if on_trial or len(crashes) > policy.most_crashes:
        return _give_up(replace(moment, instance=instance), diagnosis, by_us=by_us)
    instance = replace(instance, half_open_since_s=None)
    delay_s = restart_delay_s(len(crashes), was_ready=instance.ready, roll=moment.roll, policy=policy)
    report = Report(instance.generation, diagnosis, delay_s, by_us)
    if delay_s == 0.0:
        after, effects = restart_now(replace(moment, instance=instance))
        return after, (report, *effects)
    waiting, wake = moment.deadline(replace(instance, state=State.BACKOFF), delay_s)
    return replace(waiting, next_start_s=wake.at_s), (report, wake)


def _give_up(moment: Transition, diagnosis: Diagnosis, *, by_us: bool) -> Outcome:
    """A crash loop: for good, or till the next single try."""
    instance, delay_s = _rest(moment.instance, State.FAILED), moment.policy.restart.half_open_s
    report = Report(instance.generation, diagnosis, delay_s, by_us)
    if delay_s is None:
        return instance, (report,)
    waiting, wake = moment.deadline(instance, delay_s)
    return replace(waiting, next_start_s=wake.at_s), (report, wake)


def settle(moment: Transition) -> Outcome:
    return _rest(moment.instance, State.STOPPED), ()


def _rest(instance: Instance, state: State) -> Instance:
    return replace(instance, state=state, timer_id=instance.timer_id + 1, next_start_s=None)
