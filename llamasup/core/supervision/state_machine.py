"""The supervision of one child as a table: state and event in, next state and effects out.

``advance`` is pure: time and randomness are arguments. The runner (``runner.py``) carries out the effects
and posts their results as new events.

Every event about a child carries its generation. ``is_stale`` names the events that are dropped: events of an
earlier generation, of a child that has exited, and of old timers.

The steps come first, then the ``TABLE`` that chooses one by state and event. A step is a pure function from a
``Transition`` to the next instance and the effects, in order; it never reads the current state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import WORKER_LOST, Diagnosis, may_be_of_a_request
from llamasup.core.supervision import states
from llamasup.core.supervision.backoff import recent_crashes, restart_delay_s
from llamasup.core.supervision.states import Event, Instance, Outcome, Policy, State, Transition
from llamasup.errors import WorkerMissing

Step = Callable[[Transition], Outcome]
Rows = Mapping[type[Event], Step]

_STOPPING: Final = "the server is stopping"


def ignore(transition: Transition) -> Outcome:
    return transition.instance, ()


def _spawn(transition: Transition) -> Outcome:
    starting, wake = transition.deadline(
        transition.policy.stall_timeout_s,
        state=State.STARTING,
        generation=transition.instance.generation + 1,
        alive=True,
        restart_pending=False,
        kill_reason=None,
        ready=False,
        keeps_slots=False,
        transferring_slots=False,
        next_start_s=None,
    )
    return starting, (states.Spawn(starting.generation), wake)


def reset_and_start(transition: Transition) -> Outcome:
    """A requested start resets the crash count."""
    return _spawn(transition.with_instance(crashes=(), waits=0, half_open_since_s=None))


def try_half_open(transition: Transition) -> Outcome:
    """One start after a crash loop: if it crashes soon, no other follows until the next interval."""
    return restart_now(transition.with_instance(half_open_since_s=transition.now_s))


def restart_now(transition: Transition) -> Outcome:
    return _spawn(transition.with_instance(restarts=transition.instance.restarts + 1))


def spawned(transition: Transition) -> Outcome:
    assert isinstance(transition.event, states.Spawned)
    known = replace(transition.instance, keeps_slots=transition.event.keeps_slots, waits=0)
    return known, (states.Probe(known.generation),)


def loading(transition: Transition) -> Outcome:
    loading, wake = transition.deadline(transition.policy.stall_timeout_s, state=State.LOADING)
    return loading, (wake,)


def progressed(transition: Transition) -> Outcome:
    if transition.instance.transferring_slots:
        return ignore(transition)  # a transfer has its own deadline
    instance, wake = transition.deadline(transition.policy.stall_timeout_s)
    return instance, (wake,)


def healthy(transition: Transition) -> Outcome:
    if not transition.policy.warm_up:
        return warmup_succeeded(transition)
    warming, wake = transition.deadline(transition.policy.stall_timeout_s, state=State.WARMING)
    return warming, (states.WarmUp(warming.generation), wake)


def warmup_succeeded(transition: Transition) -> Outcome:
    if not transition.instance.keeps_slots:
        return serve(transition)
    # Before the first request, which could use a slot that is to be restored.
    restoring, wake = transition.deadline(
        transition.policy.slots_timeout_s, state=State.WARMING, transferring_slots=True
    )
    return restoring, (states.RestoreSlots(restoring.generation), wake)


def serve(transition: Transition) -> Outcome:
    # A new id without a timer: the start deadline must not stop a server that serves.
    serving = replace(
        transition.instance,
        state=State.READY,
        ready=True,
        transferring_slots=False,
        timer_id=transition.instance.timer_id + 1,
    )
    return serving, (states.Watch(serving.generation),)


def drain(transition: Transition, *, restart_pending: bool = False) -> Outcome:
    draining, wake = transition.deadline(
        transition.policy.drain_timeout_s, state=State.DRAINING, restart_pending=restart_pending
    )
    return draining, (states.AwaitIdle(draining.generation), wake)


def warmup_timeout(transition: Transition) -> Outcome:
    # A request that would use a slot that was not restored in time computes its prompt again.
    return serve(transition) if transition.instance.transferring_slots else fail_and_kill(transition)


def drained(transition: Transition) -> Outcome:
    if transition.instance.transferring_slots:
        return ignore(transition)
    if not transition.instance.keeps_slots:
        return terminate(transition)
    saving, wake = _save_slots(transition)
    return saving, (states.SaveSlots(saving.generation), wake)


def drain_timeout(transition: Transition) -> Outcome:
    instance = transition.instance
    if instance.transferring_slots or not (instance.keeps_slots and transition.policy.continue_streams):
        return terminate(transition)
    # The streams continue on the next server, which restores what this server has computed for them.
    saving, wake = _save_slots(transition)
    generation = saving.generation
    return saving, (states.CloseEndpoint(generation, _STOPPING), states.SaveSlots(generation), wake)


def _save_slots(transition: Transition) -> tuple[Instance, states.WakeAt]:
    return transition.deadline(transition.policy.slots_timeout_s, transferring_slots=True)


def drain_and_restart(transition: Transition) -> Outcome:
    return drain(transition, restart_pending=True)


def terminate(transition: Transition) -> Outcome:
    policy = transition.policy
    # A SIGTERM can be lost only just after the ready line. A second one ends llama-server at once, so a
    # server that was ready gets only one, and the whole stop timeout.
    term_resent = transition.instance.ready
    timeout_s = policy.stop_timeout_s if term_resent else policy.first_term_timeout_s
    stopping, wake = transition.deadline(timeout_s, state=State.STOPPING, term_resent=term_resent)
    generation = stopping.generation
    return stopping, (states.CloseEndpoint(generation, _STOPPING), states.Terminate(generation), wake)


def resend_sigterm(transition: Transition) -> Outcome:
    if transition.instance.term_resent:
        return kill(transition)
    timeout_s = transition.policy.stop_timeout_s - transition.policy.first_term_timeout_s
    stopping, wake = transition.deadline(timeout_s, term_resent=True)
    return stopping, (states.Terminate(stopping.generation), wake)


def terminate_and_restart(transition: Transition) -> Outcome:
    return terminate(transition.with_instance(restart_pending=True))


def kill(transition: Transition) -> Outcome:
    stopping, wake = transition.deadline(
        transition.policy.kill_again_s, state=State.STOPPING, term_resent=True
    )
    generation, kill_reason = stopping.generation, stopping.kill_reason
    reason = _STOPPING if kill_reason is None else kill_reason.message
    return stopping, (states.CloseEndpoint(generation, reason, kill_reason), states.Kill(generation), wake)


def _without_slots(transition: Transition) -> Transition:
    return transition.with_instance(keeps_slots=False)


def discard_slots(transition: Transition) -> Outcome:
    """Do not save the corrupted slots; ending the endpoint also ends a save that is running."""
    if transition.instance.transferring_slots:
        return terminate(_without_slots(transition))
    return _without_slots(transition).instance, ()


def kill_corrupted(transition: Transition) -> Outcome:
    clean = _without_slots(transition)
    return kill(clean.with_instance(restart_pending=True))


def drain_corrupted(transition: Transition) -> Outcome:
    return drain_and_restart(_without_slots(transition))


def kill_and_cancel_restart(transition: Transition) -> Outcome:
    return kill(transition.with_instance(restart_pending=False, kill_reason=None))


def cancel_restart(transition: Transition) -> Outcome:
    return replace(transition.instance, restart_pending=False, kill_reason=None), ()


def restart_after_exit(transition: Transition) -> Outcome:
    return replace(transition.instance, restart_pending=True, kill_reason=None), ()


def fail_and_kill(transition: Transition) -> Outcome:
    """Kill a child that runs but does not work, and count that as a crash."""
    if isinstance(
        transition.event, states.WarmupFailed | states.StartupFailureLogged | states.LivenessFailed
    ):
        kill_reason = transition.event.diagnosis
    else:
        seconds, program = transition.policy.stall_timeout_s, transition.instance.program
        kill_reason = Diagnosis(
            cause="hung_start",
            message=f"{program} made no progress for {seconds:.0f} s while starting and was killed.",
            remedy="See its log (llamasup logs). Usual causes: a very slow disk, a GPU driver that hangs.",
            lines=(),
            deterministic=False,
            exit_code=75,
        )
    return kill(transition.with_instance(kill_reason=kill_reason))


def expected_exit(transition: Transition) -> Outcome:
    """The child exited after llamasup ended it."""
    transition = transition.with_instance(alive=False)
    if transition.instance.kill_reason is not None:
        return _crashed(transition, _reason_of_kill(transition), by_us=True)
    return restart_now(transition) if transition.instance.restart_pending else settle(transition)


def _reason_of_kill(transition: Transition) -> Diagnosis:
    """The reason why llamasup killed the server, with what is known only after its end.

    A llama-server whose RPC worker hangs seems to hang itself; the workers are asked after its end. After a
    start that hung, the planner is asked.
    """
    event, kill_reason = transition.event, transition.instance.kill_reason
    assert kill_reason is not None
    assert isinstance(event, states.Exited | states.SpawnFailed)
    if event.diagnosis.cause == WORKER_LOST:
        return event.diagnosis
    return replace(kill_reason, adjustment=kill_reason.adjustment or event.diagnosis.adjustment)


def exit_while_draining(transition: Transition) -> Outcome:
    instance, effects = expected_exit(transition)
    why = f"{instance.program} ended"
    return instance, (states.CloseEndpoint(transition.instance.generation, why), *effects)


def unexpected_exit(transition: Transition) -> Outcome:
    """The child exited by itself."""
    assert isinstance(transition.event, states.Exited | states.SpawnFailed)
    diagnosis = transition.event.diagnosis
    instance, effects = _crashed(transition.with_instance(alive=False), diagnosis)
    close = states.CloseEndpoint(transition.instance.generation, diagnosis.message, diagnosis)
    return instance, (close, *effects)


def _crashed(transition: Transition, diagnosis: Diagnosis, *, by_us: bool = False) -> Outcome:
    crashed = transition.with_instance(last=diagnosis, kill_reason=None, restart_pending=False)
    (instance, effects), restart_in_s = _after_crash(crashed, diagnosis)
    return instance, (states.Report(transition.instance.generation, diagnosis, restart_in_s, by_us), *effects)


def _after_crash(transition: Transition, diagnosis: Diagnosis) -> tuple[Outcome, float | None]:
    """Decide on the next start, and return the time until then; None if there is no next start."""
    instance, policy, now_s = transition.instance, transition.policy.restart, transition.now_s
    if diagnosis.adjustment is not None:
        # The next start has a smaller plan, so this is no crash; the planner limits the steps (S5).
        return restart_now(transition), 0.0
    if diagnosis.cause == WorkerMissing.cause:
        # No crash either: starts are tried until the worker is back.
        waits = instance.waits + 1
        delay_s = restart_delay_s(waits, was_ready=False, roll=transition.roll, policy=policy)
        return _wait(transition.with_instance(waits=waits), State.BACKOFF, delay_s)
    crashes = recent_crashes(instance.crashes, now_s, policy)
    event = transition.event
    is_explained = isinstance(event, states.Exited) and event.explained and may_be_of_a_request(diagnosis)
    if not is_explained:  # else the first end that its request caused counts, until that is explained, too
        crashes = (*crashes, (now_s, instance.generation))
    transition = transition.with_instance(crashes=crashes)
    if diagnosis.deterministic:
        return _wait(transition, State.FAILED, None)
    since_s = instance.half_open_since_s
    is_half_open = since_s is not None and now_s - since_s < policy.window_s
    if not is_explained and (is_half_open or len(crashes) > policy.most_crashes):
        # A crash loop: no more starts, or a single one after the half-open interval.
        return _wait(transition, State.FAILED, policy.half_open_s)
    if not is_explained:
        transition = transition.with_instance(half_open_since_s=None)
    count = max(1, len(crashes))
    delay_s = restart_delay_s(count, was_ready=instance.ready, roll=transition.roll, policy=policy)
    if delay_s == 0.0:
        return restart_now(transition), 0.0
    return _wait(transition, State.BACKOFF, delay_s)


def _wait(transition: Transition, state: State, delay_s: float | None) -> tuple[Outcome, float | None]:
    """Start again after ``delay_s``; None: never."""
    if delay_s is None:
        return (_settled(transition.instance, state), ()), None
    waiting, wake = transition.deadline(delay_s, state=state, next_start_s=transition.now_s + delay_s)
    return (waiting, (wake,)), delay_s


def settle(transition: Transition) -> Outcome:
    return _settled(transition.instance, State.STOPPED), ()


def _settled(instance: Instance, state: State) -> Instance:
    return replace(instance, state=state, timer_id=instance.timer_id + 1, next_start_s=None)


def forget_crash(transition: Transition) -> Outcome:
    assert isinstance(transition.event, states.CrashExplained)
    explained = transition.event.generation
    kept = tuple(crash for crash in transition.instance.crashes if crash[1] != explained)
    return replace(transition.instance, crashes=kept), ()


# The rows that states share while a child starts, and while it ends.
_STARTING: Rows = {
    states.StartRequested: ignore,
    states.StopRequested: terminate,
    states.KillRequested: kill,
    states.RestartRequested: terminate_and_restart,
    states.Progressed: progressed,
    states.Exited: unexpected_exit,
}
_ENDING: Rows = {
    states.StartRequested: restart_after_exit,
    states.StopRequested: cancel_restart,
    states.KillRequested: kill_and_cancel_restart,
    states.RestartRequested: restart_after_exit,
}
# Facts about a child that is killed or terminated already.
_TOO_LATE: Rows = dict.fromkeys(
    (
        *(states.Spawned, states.Loading, states.Progressed, states.Healthy, states.StartupFailureLogged),
        *(states.WarmupSucceeded, states.WarmupFailed, states.LivenessFailed, states.Drained),
        *(states.SlotsRestored, states.SlotRestoreCorrupted, states.SlotsSaved),
    ),
    ignore,
)

_BY_STATE: Mapping[State, Rows] = {
    State.STOPPED: {
        states.StartRequested: reset_and_start,
        states.StopRequested: ignore,
        states.KillRequested: ignore,
        states.RestartRequested: reset_and_start,
    },
    State.STARTING: {
        **_STARTING,
        states.Spawned: spawned,
        states.SpawnFailed: unexpected_exit,
        states.Loading: loading,
        states.Healthy: healthy,
        states.StartupFailureLogged: fail_and_kill,
        states.TimerFired: fail_and_kill,
    },
    State.LOADING: {
        **_STARTING,
        states.Loading: ignore,
        states.Healthy: healthy,
        states.StartupFailureLogged: fail_and_kill,
        states.TimerFired: fail_and_kill,
    },
    State.WARMING: {
        **_STARTING,
        states.WarmupSucceeded: warmup_succeeded,
        states.WarmupFailed: fail_and_kill,
        states.SlotsRestored: serve,
        states.SlotRestoreCorrupted: kill_corrupted,
        states.StartupFailureLogged: ignore,
        states.TimerFired: warmup_timeout,
    },
    State.READY: {
        states.StartRequested: ignore,
        states.StopRequested: drain,
        states.KillRequested: kill,
        states.RestartRequested: drain_and_restart,
        states.Progressed: ignore,
        states.SlotsRestored: ignore,
        states.SlotRestoreCorrupted: drain_corrupted,
        states.StartupFailureLogged: ignore,
        states.LivenessFailed: fail_and_kill,
        states.Exited: unexpected_exit,
    },
    State.DRAINING: {
        **_ENDING,
        states.Progressed: ignore,
        states.SlotsRestored: ignore,
        states.SlotRestoreCorrupted: discard_slots,
        states.SlotsSaved: terminate,
        states.StartupFailureLogged: ignore,
        states.LivenessFailed: kill,
        states.Drained: drained,
        states.Exited: exit_while_draining,
        states.TimerFired: drain_timeout,
    },
    State.STOPPING: {
        **_ENDING,
        **_TOO_LATE,
        states.SpawnFailed: expected_exit,
        states.Exited: expected_exit,
        states.TimerFired: resend_sigterm,
    },
    State.BACKOFF: {
        states.StartRequested: restart_now,
        states.StopRequested: settle,
        states.KillRequested: settle,
        states.RestartRequested: restart_now,
        states.TimerFired: restart_now,
    },
    State.FAILED: {
        states.StartRequested: reset_and_start,
        states.StopRequested: settle,
        states.KillRequested: settle,
        states.RestartRequested: reset_and_start,
        states.TimerFired: try_half_open,
    },
}
TABLE: Mapping[State, Rows] = MappingProxyType(
    {state: {states.CrashExplained: forget_crash, **rows} for state, rows in _BY_STATE.items()}
)


class InvalidTransition(RuntimeError):
    """An event that the table has no row for: a bug of the caller."""

    def __init__(self, instance: Instance, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in state {instance.state}: {event!r} at {instance!r}")


def advance(
    instance: Instance,
    event: Event,
    policy: Policy,
    *,
    now_s: float,
    roll: float,
    child_exited: bool = False,
) -> Outcome:
    """The next instance and the effects to carry out, in order.

    ``now_s`` is a monotonic time in seconds; ``roll`` is uniform in [0, 1), for the jitter.
    ``child_exited``: the child has exited, and its ``Exited`` event is on the way.
    Raises InvalidTransition if the table has no row.
    """
    if is_stale(instance, event, child_exited=child_exited):
        return instance, ()
    step = TABLE[instance.state].get(type(event))
    if step is None:
        raise InvalidTransition(instance, event)
    return step(Transition(instance, event, policy, now_s, roll))


def is_stale(instance: Instance, event: Event, *, child_exited: bool = False) -> bool:
    """Whether ``advance`` drops the event, because its child has ended or its timer was replaced."""
    match event:
        case states.TimerFired(timer_id):
            return timer_id != instance.timer_id
        case states.Exited() | states.SpawnFailed() | states.SlotRestoreCorrupted():
            # Corrupted slots are the reason for the exit, which is then no crash.
            return event.generation != instance.generation or not instance.alive
        case states.CrashExplained():
            return False
        case states.ChildEvent():
            return event.generation != instance.generation or not instance.alive or child_exited
        case _:
            return False  # a request
