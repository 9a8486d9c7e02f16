"""The supervision table: sequences of events, with the effects and states that they lead to."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment, Change, PlanLimits
from llamasup.core.supervision import states as lc
from llamasup.core.supervision.backoff import HALF_OPEN_S, RestartPolicy
from llamasup.core.supervision.state_machine import TABLE, InvalidTransition, advance, is_stale
from llamasup.core.supervision.states import LIVE, Effect, Event, Instance, Policy, State, violations
from tests.kit.extent import examples

POLICY = Policy()
ABORTED = Diagnosis("aborted", "it gave up", "", (), False, 75)
CRASH = Diagnosis("killed", "killed from outside", "", (), False, 75)
BAD_FLAG = Diagnosis("bad_flag", "unknown flag", "", (), True, 2)
SMALLER = Adjustment(1, 3, (Change("--parallel", "4", "2"),), PlanLimits(parallel=2))
TOO_MUCH = Diagnosis("out_of_memory_host", "out of memory", "", (), True, 71, adjustment=SMALLER)
WEDGED = Diagnosis("wedged", "nothing moves", "", (), False, 75)
CONTINUING = replace(POLICY, continue_streams=True)
KEEP_TRYING = Policy(restart=RestartPolicy(half_open_s=HALF_OPEN_S))


class Life:
    """One instance and a clock that the test moves."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.policy = policy
        self.instance = Instance()
        self.now_s = 1000.0
        self.effects: tuple[Effect, ...] = ()

    def __call__(self, *events: Event, at_s: float | None = None) -> tuple[Effect, ...]:
        """Feed events. Returns the effects of the last one."""
        if at_s is not None:
            self.now_s = at_s
        for event in events:
            self.instance, self.effects = advance(
                self.instance, event, self.policy, now_s=self.now_s, roll=0.5
            )
        return self.effects

    def state(self) -> State:
        return self.instance.state

    def next_start_s(self) -> float | None:
        return self.instance.next_start_s

    def wake(self) -> tuple[Effect, ...]:
        return self(lc.TimerFired(self.instance.timer_id))


def starting(*events: Event, policy: Policy = POLICY, keeps_slots: bool = False) -> Life:
    """A server whose child has been spawned, after these events."""
    life = Life(policy)
    life(lc.StartRequested(), lc.Spawned(1, 42, keeps_slots=keeps_slots), *events)
    return life


def ready(*events: Event, policy: Policy = POLICY) -> Life:
    """A server that was ready, after these events."""
    life = starting(lc.Loading(1), lc.Healthy(1), lc.WarmupSucceeded(1), policy=policy)
    assert life.state() is State.READY
    life(*events)
    return life


def with_slots(*events: Event, policy: Policy = POLICY) -> Life:
    """A warming server whose slots are saved."""
    return starting(lc.Loading(1), lc.Healthy(1), *events, policy=policy, keeps_slots=True)


# --- crashes that one request explains


@pytest.mark.parametrize("policy", [POLICY, KEEP_TRYING])
def test_requests_that_end_servers_never_give_the_model_up(policy: Policy) -> None:
    """Each ends a server beside others, and the next one alone."""
    life = ready(policy=policy)
    for generation in range(1, 41, 2):
        report = life(lc.Exited(generation, CRASH))[1]
        assert isinstance(report, lc.Report)
        assert report.restart_in_s == 0.0
        counted = len(life.instance.crashes)
        serves(life, generation + 1)
        life(lc.Exited(generation + 1, ABORTED, explained=True), lc.CrashExplained(generation))
        assert life.state() is State.STARTING
        assert (counted, len(life.instance.crashes)) == (1, 0)
        serves(life, generation + 2)
    assert life.state() is State.READY


def test_explained_crash_neither_counts_nor_hides_others() -> None:
    life = ready()
    for generation in range(1, 6):
        life(lc.Exited(generation, CRASH), lc.StartRequested())
        serves(life, generation + 1)
    life(lc.Exited(6, ABORTED, explained=True), lc.CrashExplained(1))
    assert (life.state(), len(life.instance.crashes)) == (State.BACKOFF, 4)
    for generation in (7, 8):
        life(lc.StartRequested())
        serves(life, generation)
        life(lc.Exited(generation, CRASH))
    assert life.state() is State.FAILED


def test_end_by_another_program_is_no_explained_crash() -> None:
    life = ready(lc.Exited(1, CRASH, explained=True))
    assert len(life.instance.crashes) == 1


def serves(life: Life, generation: int) -> None:
    if life.state() is State.BACKOFF:
        life.wake()
    life(lc.Spawned(generation, 42), lc.Healthy(generation), lc.WarmupSucceeded(generation))
    assert life.state() is State.READY


# --- transcripts ----------------------------------------------------------------------------------------


def test_start_goes_through_loading_and_warming_to_ready() -> None:
    life = Life()
    assert life(lc.StartRequested()) == (lc.Spawn(1), lc.WakeAt(1, 1120.0))
    assert life(lc.Spawned(1, 42)) == (lc.Probe(1),)
    assert life(lc.Loading(1)) == (lc.WakeAt(2, 1120.0),)
    assert life.state() is State.LOADING
    assert life(lc.Healthy(1)) == (lc.WarmUp(1), lc.WakeAt(3, 1120.0))
    assert life.state() is State.WARMING
    assert life(lc.WarmupSucceeded(1)) == (lc.Watch(1),)
    assert life.state() is State.READY


def test_healthy_server_is_ready_without_warm_up() -> None:
    life = Life(Policy(warm_up=False))
    assert life(lc.StartRequested(), lc.Spawned(1, 42), lc.Healthy(1)) == (lc.Watch(1),)
    assert life.state() is State.READY


def test_start_with_progress_has_no_limit() -> None:
    life = starting()
    for minute in range(1, 30):
        assert life(lc.Progressed(1), at_s=1000.0 + 60 * minute)[0] == lc.WakeAt(
            minute + 1, 1120.0 + 60 * minute
        )
    assert life.state() is State.STARTING


def test_start_without_progress_is_killed_and_counts_as_crash() -> None:
    life = starting(lc.Loading(1))
    life.now_s = 1120.0
    assert lc.Kill(1) in life.wake()
    assert life.state() is State.STOPPING
    report = life(lc.Exited(1, CRASH))[0]
    assert isinstance(report, lc.Report)
    assert report.diagnosis.cause == "hung_start"
    assert life.state() is State.BACKOFF


def test_a_start_that_hung_is_followed_by_the_plan_that_the_planner_adjusted() -> None:
    life = starting(lc.Loading(1))
    life.now_s = 1120.0
    life.wake()
    report, *effects = life(lc.Exited(1, replace(CRASH, adjustment=SMALLER)))
    assert isinstance(report, lc.Report)
    assert report.diagnosis.cause == "hung_start"
    assert report.diagnosis.adjustment == SMALLER
    assert report.by_us
    assert lc.Spawn(2) in effects
    assert life.instance.crashes == ()


def test_start_deadline_does_not_affect_a_ready_server() -> None:
    life = starting(lc.Healthy(1))
    old_ticket = life.instance.timer_id
    life(lc.WarmupSucceeded(1))
    assert life(lc.TimerFired(old_ticket)) == ()
    assert life.state() is State.READY


def test_stop_drains_then_terminates() -> None:
    life = ready()
    assert life(lc.StopRequested())[0] == lc.AwaitIdle(1)
    assert life.state() is State.DRAINING
    close, terminate, _wake = life(lc.Drained(1))
    assert isinstance(close, lc.CloseEndpoint)
    assert terminate == lc.Terminate(1)
    assert life(lc.Exited(1, CRASH)) == ()
    assert life.state() is State.STOPPED


LOADING = (lc.Loading(1),)
SAVING = (lc.WarmupSucceeded(1), lc.SlotsRestored(1), lc.StopRequested(), lc.Drained(1))


@pytest.mark.parametrize(
    ("life", "event", "order", "after"),
    [
        (starting(*LOADING), lc.StopRequested(), lc.Terminate(1), State.STOPPED),
        (starting(*LOADING), lc.RestartRequested(), lc.Terminate(1), State.STARTING),
        # a second Ctrl-C during any stop
        (ready(), lc.KillRequested(), lc.Kill(1), State.STOPPED),
        (ready(lc.StopRequested()), lc.KillRequested(), lc.Kill(1), State.STOPPED),
        (ready(lc.StopRequested(), lc.Drained(1)), lc.KillRequested(), lc.Kill(1), State.STOPPED),
        (with_slots(*SAVING), lc.KillRequested(), lc.Kill(1), State.STOPPED),
        # the drain timeout: nothing is saved, unless streams are continued
        (ready(lc.StopRequested()), None, lc.Terminate(1), State.STOPPED),
        (with_slots(*SAVING[:3]), None, lc.Terminate(1), State.STOPPED),
        (ready(lc.RestartRequested(), policy=CONTINUING), None, lc.Terminate(1), State.STARTING),
        # a hang does not change what is requested
        (ready(lc.StopRequested()), lc.LivenessFailed(1, WEDGED), lc.Kill(1), State.STOPPED),
        (ready(lc.RestartRequested()), lc.LivenessFailed(1, WEDGED), lc.Kill(1), State.STARTING),
    ],
)
def test_end_that_is_requested_is_no_crash(
    life: Life, event: Event | None, order: Effect, after: State
) -> None:
    """``event`` is None: the timer fires."""
    assert order in (life.wake() if event is None else life(event))
    life(lc.Exited(1, CRASH))
    assert (life.state(), life.instance.crashes) == (after, ())


def test_child_that_ignores_sigterm_is_killed_repeatedly() -> None:
    life = ready(lc.StopRequested())
    assert life(lc.Drained(1))[-1] == lc.WakeAt(life.instance.timer_id, 1010.0)
    assert lc.Kill(1) in life.wake()
    assert lc.Kill(1) in life.wake()
    life(lc.Exited(1, CRASH))
    assert life.state() is State.STOPPED


def test_child_that_is_becoming_ready_gets_sigterm_twice() -> None:
    """b11434 can lose a SIGTERM right at its ready line."""
    life = starting(lc.Healthy(1))
    assert life(lc.StopRequested())[-1] == lc.WakeAt(life.instance.timer_id, 1000.5)
    life.now_s = 1000.5
    assert life.wake() == (lc.Terminate(1), lc.WakeAt(life.instance.timer_id, 1010.0))
    assert lc.Kill(1) in life.wake()


def test_crash_of_ready_server_restarts_at_once() -> None:
    life = ready()
    close, report, spawn, _wake = life(lc.Exited(1, CRASH))
    assert close == lc.CloseEndpoint(1, "killed from outside", CRASH)
    assert report == lc.Report(1, CRASH, 0.0)
    assert spawn == lc.Spawn(2)
    assert life.instance.restarts == 1


LOST = Diagnosis("rpc_worker_lost", "a worker does not answer", "", (), False, 75)
ABSENT = Diagnosis("rpc_worker_missing", "does not fit without the worker", "", (), False, 75)


def test_hang_with_a_worker_that_does_not_answer_is_reported_as_its_loss() -> None:
    life = ready(lc.LivenessFailed(1, WEDGED))
    report, _spawn, _wake = life(lc.Exited(1, LOST))
    assert report == lc.Report(1, LOST, 0.0, by_us=True)


def test_hang_is_reported_as_such_if_the_process_ended_otherwise() -> None:
    life = ready(lc.LivenessFailed(1, WEDGED))
    assert life(lc.Exited(1, CRASH))[0] == lc.Report(1, WEDGED, 0.0, by_us=True)


def test_start_waits_for_a_missing_worker_without_an_end() -> None:
    life = ready(lc.Exited(1, LOST))
    waits = []
    for generation in range(2, 12):
        report = life(lc.SpawnFailed(generation, ABSENT))[1]
        assert isinstance(report, lc.Report)
        waits.append(report.restart_in_s)
        assert life.state() is State.BACKOFF
        life.wake()
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert len(life.instance.crashes) == 1  # the loss of the worker
    life(lc.Spawned(12, 43))
    assert life.instance.waits == 0


def test_requested_start_does_not_wait_longer_for_earlier_waits() -> None:
    life = ready(lc.Exited(1, LOST))
    for generation in (2, 3):
        life(lc.SpawnFailed(generation, ABSENT))
        life.wake()
    life(lc.StopRequested(), lc.Exited(4, LOST), lc.StartRequested())
    assert life.instance.waits == 0


def test_backoff_grows_until_the_sixth_crash_gives_up() -> None:
    life = ready(lc.Exited(1, CRASH))
    waits = []
    for generation in itertools.count(2):
        report = life(lc.Exited(generation, CRASH))[1]
        assert isinstance(report, lc.Report)
        if report.restart_in_s is None:
            break
        waits.append(report.restart_in_s)
        assert life.state() is State.BACKOFF
        assert lc.Spawn(generation + 1) in life.wake()
    assert waits == [1, 2, 4, 8]
    assert len(life.instance.crashes) == 6
    assert life.state() is State.FAILED


def test_crashes_far_apart_are_no_crash_loop() -> None:
    life = ready()
    for generation in range(1, 20):
        life(lc.Exited(generation, CRASH), at_s=life.now_s + 601)
        assert life.instance.generation == generation + 1
        life(lc.Spawned(generation + 1, 42), lc.Healthy(generation + 1), lc.WarmupSucceeded(generation + 1))
    assert life.state() is State.READY


def test_deterministic_failure_is_not_restarted() -> None:
    life = starting()
    assert life(lc.Exited(1, BAD_FLAG))[1:] == (lc.Report(1, BAD_FLAG, None),)
    assert life.state() is State.FAILED
    assert life.instance.last == BAD_FLAG


def test_failed_spawn_is_reported_like_a_crash() -> None:
    life = Life()
    life(lc.StartRequested())
    assert life(lc.SpawnFailed(1, BAD_FLAG))[1:] == (lc.Report(1, BAD_FLAG, None),)
    assert life.state() is State.FAILED


def test_failed_warm_up_kills_the_server_and_is_reported() -> None:
    no_token = replace(CRASH, cause="warm_up_failed")
    life = starting(lc.Healthy(1))
    assert lc.Kill(1) in life(lc.WarmupFailed(1, no_token))
    assert life(lc.Exited(1, CRASH))[0] == lc.Report(1, no_token, 0.5, by_us=True)


def test_restart_drains_the_old_child_first() -> None:
    life = ready(lc.RestartRequested())
    assert life.state() is State.DRAINING
    life(lc.Drained(1))
    assert lc.Spawn(2) in life(lc.Exited(1, CRASH))


@pytest.mark.parametrize("asked", [lc.StartRequested(), lc.RestartRequested()])
def test_request_during_a_stop_starts_again_after_the_exit(asked: lc.Event) -> None:
    life = ready(lc.StopRequested(), asked)
    assert life.state() is State.DRAINING
    life(lc.Drained(1))
    assert lc.Spawn(2) in life(lc.Exited(1, CRASH))


def test_stop_cancels_a_restart() -> None:
    life = ready(lc.RestartRequested(), lc.StopRequested(), lc.Drained(1), lc.Exited(1, CRASH))
    assert life.state() is State.STOPPED


def test_exit_while_draining_is_not_a_crash() -> None:
    life = ready(lc.StopRequested())
    (close,) = life(lc.Exited(1, CRASH))
    assert isinstance(close, lc.CloseEndpoint)
    assert (life.state(), life.instance.crashes) == (State.STOPPED, ())


def test_start_request_during_backoff_starts_at_once() -> None:
    life = starting(lc.Exited(1, CRASH))
    assert life.state() is State.BACKOFF
    assert lc.Spawn(2) in life(lc.StartRequested())


def test_start_request_resets_the_crash_count() -> None:
    life = starting(lc.Exited(1, BAD_FLAG))
    assert lc.Spawn(2) in life(lc.StartRequested())
    assert life.instance.crashes == ()


def test_events_of_an_earlier_generation_are_dropped() -> None:
    life = ready(lc.Exited(1, CRASH))
    before = life.instance
    for stale in (lc.Healthy(1), lc.WarmupSucceeded(1), lc.Exited(1, CRASH), lc.Drained(1)):
        assert life(stale) == ()
    assert life.instance == before


def test_events_of_a_reaped_child_are_dropped() -> None:
    life = ready(lc.KillRequested(), lc.Exited(1, CRASH))
    assert life(lc.Healthy(1)) == ()
    assert life.state() is State.STOPPED


def test_events_of_a_child_that_has_exited_are_dropped_except_how_it_ended() -> None:
    life = ready()
    kept = (lc.Exited(1, CRASH), lc.SpawnFailed(1, CRASH), lc.SlotRestoreCorrupted(1))
    dropped = (lc.Healthy(1), lc.WarmupFailed(1, CRASH), lc.LivenessFailed(1, WEDGED), lc.Drained(1))
    assert not any(is_stale(life.instance, event, child_exited=True) for event in kept)
    assert all(is_stale(life.instance, event, child_exited=True) for event in dropped)
    assert not is_stale(life.instance, lc.StopRequested(), child_exited=True)
    assert advance(life.instance, dropped[2], POLICY, now_s=0.0, roll=0.5, child_exited=True)[1] == ()


def test_event_without_a_row_raises() -> None:
    life = ready()
    with pytest.raises(InvalidTransition, match=r"WarmupSucceeded in state ready"):
        life(lc.WarmupSucceeded(1))


# --- hangs ----------------------------------------------------------------------------------------------


def test_hung_server_is_killed_and_restarted_at_once() -> None:
    life = ready()
    effects = life(lc.LivenessFailed(1, WEDGED))
    assert effects[0] == lc.CloseEndpoint(1, "nothing moves", WEDGED)
    assert lc.Kill(1) in effects
    assert not any(
        isinstance(effect, lc.Terminate) for effect in effects
    )  # a hung server would not react to SIGTERM
    report, spawn, _wake = life(lc.Exited(1, CRASH))
    assert report == lc.Report(1, WEDGED, 0.0, by_us=True)
    assert spawn == lc.Spawn(2)
    assert len(life.instance.crashes) == 1


def test_repeated_hangs_are_a_crash_loop() -> None:
    life = ready()
    for generation in itertools.count(1):
        life(lc.LivenessFailed(generation, WEDGED), lc.Exited(generation, CRASH))
        if life.state() is State.FAILED:
            break
        if life.state() is State.BACKOFF:
            life.wake()
        life(lc.Spawned(generation + 1, 42), lc.Healthy(generation + 1), lc.WarmupSucceeded(generation + 1))
    assert (life.instance.generation, life.instance.last) == (6, WEDGED)


def test_stop_while_killing_a_hung_server_stops() -> None:
    life = ready(lc.LivenessFailed(1, WEDGED), lc.StopRequested())
    assert life(lc.Exited(1, CRASH)) == ()
    assert life.state() is State.STOPPED


def test_hang_while_stopping_is_ignored() -> None:
    life = ready(lc.StopRequested(), lc.Drained(1))
    assert life(lc.LivenessFailed(1, WEDGED)) == ()


# --- half-open ------------------------------------------------------------------------------------------


def crash_loop(policy: Policy) -> Life:
    """An instance that has just failed in its sixth crash, at 1000 s."""
    life = ready(policy=policy)
    for generation in itertools.count(1):
        effects = life(lc.Exited(generation, CRASH))
        if life.state() is State.FAILED:
            assert effects[1] == lc.Report(generation, CRASH, policy.restart.half_open_s)
            return life
        if life.state() is State.BACKOFF:
            life.wake()
    raise AssertionError("counted to infinity")


def test_crash_loop_without_half_open_is_final() -> None:
    life = crash_loop(POLICY)
    assert not any(isinstance(effect, lc.WakeAt) for effect in life.effects)
    assert life.instance.is_settled


def test_half_open_start_that_crashes_leads_back_to_failed() -> None:
    life = crash_loop(KEEP_TRYING)
    for trial in range(1, 5):  # much longer than the window in which crashes count
        assert life.next_start_s() == 1000.0 + 300 * trial
        assert not life.instance.is_settled
        life.now_s = 1000.0 + 300 * trial
        assert lc.Spawn(6 + trial) in life.wake()
        assert life.next_start_s() is None
        life(lc.Spawned(6 + trial, 42), lc.Healthy(6 + trial), lc.WarmupSucceeded(6 + trial))
        report = life(lc.Exited(6 + trial, CRASH))[1]
        assert report == lc.Report(6 + trial, CRASH, 300.0)
        assert life.state() is State.FAILED


def test_half_open_start_that_survives_is_ready() -> None:
    life = crash_loop(KEEP_TRYING)
    life.now_s = 1300.0
    life.wake()
    life(lc.Spawned(7, 42), lc.Healthy(7), lc.WarmupSucceeded(7))
    assert life.state() is State.READY
    effects = life(lc.Exited(7, CRASH), at_s=1900.0)  # ten minutes later: an ordinary crash
    assert lc.Spawn(8) in effects
    assert life.instance.half_open_since_s is None


def test_deterministic_failure_is_never_half_open() -> None:
    life = starting(policy=KEEP_TRYING)
    assert life(lc.Exited(1, BAD_FLAG))[1:] == (lc.Report(1, BAD_FLAG, None),)
    assert life.instance.is_settled


def test_deterministic_failure_ends_half_open_starts() -> None:
    life = crash_loop(KEEP_TRYING)
    life.now_s = 1300.0
    life.wake()
    life(lc.Spawned(7, 42), lc.Exited(7, BAD_FLAG))
    assert life.instance.is_settled


@pytest.mark.parametrize("asked", [lc.StopRequested(), lc.KillRequested()])
def test_stop_ends_half_open_starts(asked: Event) -> None:
    life = crash_loop(KEEP_TRYING)
    timer_id = life.instance.timer_id
    life(asked)
    assert life(lc.TimerFired(timer_id)) == ()
    assert (life.state(), life.instance.is_settled) == (State.STOPPED, True)


def test_start_request_in_failed_is_not_half_open() -> None:
    life = crash_loop(KEEP_TRYING)
    assert lc.Spawn(7) in life(lc.StartRequested())
    life(lc.Spawned(7, 42), lc.Exited(7, CRASH))
    assert life.state() is State.BACKOFF


# --- saved slots --------------------------------------------------------------------------------------


def test_slots_are_restored_after_warm_up_and_before_ready() -> None:
    life = with_slots()
    assert life.state() is State.WARMING
    assert life(lc.WarmupSucceeded(1)) == (lc.RestoreSlots(1), lc.WakeAt(life.instance.timer_id, 1010.0))
    assert life.state() is State.WARMING
    assert life(lc.SlotsRestored(1)) == (lc.Watch(1),)
    assert life.state() is State.READY


def test_slots_are_restored_without_warm_up() -> None:
    life = with_slots(policy=Policy(warm_up=False))
    assert life.effects[0] == lc.RestoreSlots(1)
    life(lc.SlotsRestored(1))
    assert life.state() is State.READY


def test_restore_timeout_is_fixed_and_leads_to_ready() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    assert life(lc.Progressed(1), at_s=1009.0) == ()
    assert life.wake() == (lc.Watch(1),)
    assert life.state() is State.READY
    assert life(lc.SlotsRestored(1)) == ()


def test_corrupted_restore_replaces_the_server_without_a_crash() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    assert lc.Kill(1) in life(lc.SlotRestoreCorrupted(1))
    assert life(lc.Exited(1, CRASH))[0] == lc.Spawn(2)
    assert life.instance.crashes == ()


def test_corrupted_restore_of_ready_server_drains_and_saves_nothing() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    life.wake()
    assert life(lc.SlotRestoreCorrupted(1))[0] == lc.AwaitIdle(1)
    assert lc.Terminate(1) in life(lc.Drained(1))
    assert life(lc.Exited(1, CRASH))[0] == lc.Spawn(2)


def test_corrupted_restore_while_draining_saves_nothing() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    life.wake()
    life(lc.StopRequested())
    assert life(lc.SlotRestoreCorrupted(1)) == ()
    assert lc.Terminate(1) in life(lc.Drained(1))
    assert life(lc.Exited(1, CRASH)) != (lc.Spawn(2),)
    assert life.state() is State.STOPPED


def test_corrupted_restore_while_saving_discards_the_slots() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    life.wake()
    life(lc.StopRequested())
    assert lc.SaveSlots(1) in life(lc.Drained(1))
    effects = life(lc.SlotRestoreCorrupted(1))  # on its way when the last request ended
    assert effects[:2] == (lc.CloseEndpoint(1, "the server is stopping"), lc.Terminate(1))
    assert life.state() is State.STOPPING


def test_drained_server_saves_its_slots_before_sigterm() -> None:
    life = with_slots(lc.WarmupSucceeded(1), lc.SlotsRestored(1), lc.StopRequested())
    assert life(lc.Drained(1)) == (lc.SaveSlots(1), lc.WakeAt(life.instance.timer_id, 1010.0))
    assert life.state() is State.DRAINING
    assert lc.Terminate(1) in life(lc.SlotsSaved(1))
    assert life.state() is State.STOPPING


def test_save_timeout_terminates() -> None:
    life = with_slots(lc.WarmupSucceeded(1), lc.SlotsRestored(1), lc.StopRequested(), lc.Drained(1))
    assert lc.Terminate(1) in life.wake()
    assert life(lc.SlotsSaved(1)) == ()


def cut_streams() -> Life:
    """A server whose drain timeout has ended streams that the next one continues."""
    life = with_slots(lc.WarmupSucceeded(1), lc.SlotsRestored(1), lc.RestartRequested(), policy=CONTINUING)
    effects = life.wake()
    assert effects[:2] == (lc.CloseEndpoint(1, "the server is stopping"), lc.SaveSlots(1))
    assert effects[2] == lc.WakeAt(life.instance.timer_id, life.now_s + CONTINUING.slots_timeout_s)
    return life


def test_drain_timeout_saves_the_slots_of_streams_that_are_continued() -> None:
    assert lc.Terminate(1) in cut_streams().wake()  # their save has a timeout
    life = cut_streams()
    assert life(lc.Drained(1)) == ()  # the requests have left
    assert lc.Terminate(1) in life(lc.SlotsSaved(1))
    assert life(lc.Exited(1, CRASH))[-2:][0] == lc.Spawn(2)


def test_exit_while_saving_is_not_a_crash() -> None:
    life = with_slots(lc.WarmupSucceeded(1), lc.SlotsRestored(1), lc.StopRequested(), lc.Drained(1))
    assert life(lc.Exited(1, CRASH)) == (lc.CloseEndpoint(1, "llama-server ended"),)
    assert life.state() is State.STOPPED


def test_exit_while_restoring_is_a_crash() -> None:
    life = with_slots(lc.WarmupSucceeded(1))
    life(lc.Exited(1, CRASH))
    assert life.state() is State.BACKOFF
    assert len(life.instance.crashes) == 1


# --- sweeps ---------------------------------------------------------------------------------------------


def test_every_state_handles_every_request() -> None:
    assert set(TABLE) == set(State)
    requests = {lc.StartRequested, lc.StopRequested, lc.KillRequested, lc.RestartRequested}
    for state, row in TABLE.items():
        assert requests <= set(row), state
        assert set(row) <= set(get_args(Event)), state


def test_every_live_state_handles_the_exit() -> None:
    assert all(lc.Exited in TABLE[state] for state in LIVE)


def _events_of(generation: int, timer_id: int) -> st.SearchStrategy[Event]:
    of_slots = (lc.SlotsRestored, lc.SlotRestoreCorrupted, lc.SlotsSaved)
    child = (lc.Loading, lc.Progressed, lc.Healthy, lc.WarmupSucceeded, lc.Drained, *of_slots)
    by_verdict = (lc.Exited, lc.SpawnFailed, lc.WarmupFailed, lc.StartupFailureLogged, lc.LivenessFailed)
    return st.one_of(
        st.sampled_from([lc.StartRequested(), lc.StopRequested(), lc.KillRequested(), lc.RestartRequested()]),
        st.sampled_from(child).map(lambda kind: kind(generation)),
        st.booleans().map(lambda keeps: lc.Spawned(generation, 42, keeps_slots=keeps)),
        st.sampled_from([CRASH, BAD_FLAG, TOO_MUCH]).flatmap(
            lambda verdict: st.sampled_from(by_verdict).map(lambda kind: kind(generation, verdict))
        ),
        st.just(lc.TimerFired(timer_id)),
    )


class AnyLife(RuleBasedStateMachine):
    """Any events in any order: never two children, every child is reaped, and every state can be left."""

    policy = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.instance = Instance()
        self.now_s = 0.0
        self.spawned: list[int] = []
        self.reaped: list[int] = []
        self.timers: dict[int, float] = {}
        self.orders: set[tuple[type, int]] = set()

    def feed(self, event: Event) -> None:
        stale = is_stale(self.instance, event)
        if not stale and type(event) not in TABLE[self.instance.state]:
            return  # impossible in the runner, such as WarmupSucceeded before WarmUp
        self.instance, effects = advance(self.instance, event, self.policy, now_s=self.now_s, roll=0.5)
        if not stale and isinstance(event, lc.Exited | lc.SpawnFailed):
            self.reaped.append(event.generation)
        for effect in effects:
            match effect:
                case lc.Spawn(generation):
                    assert generation == self.instance.generation
                    self.spawned.append(generation)
                case lc.WakeAt(timer_id, at_s):
                    self.timers[timer_id] = at_s
                case lc.Report():
                    pass
                case _:
                    self.orders.add((type(effect), effect.generation))

    @rule(choice=st.data(), seconds=st.floats(0, 700))
    def anything_happens(self, choice: st.DataObject, seconds: float) -> None:
        self.now_s += seconds
        generation = choice.draw(
            st.sampled_from([self.instance.generation, max(self.instance.generation - 1, 0)])
        )
        timer_id = choice.draw(st.sampled_from([self.instance.timer_id, self.instance.timer_id - 1]))
        self.feed(choice.draw(_events_of(generation, timer_id)))

    @rule(bad_end=st.sampled_from([CRASH, BAD_FLAG, TOO_MUCH]))
    def a_stop_leads_to_rest(self, bad_end: Diagnosis) -> None:
        """Even if the child never reacts, the timers lead to a kill, and the kill leads to its exit."""
        self.feed(lc.StopRequested())
        for _ in range(4):
            if (lc.Kill, self.instance.generation) in self.orders or not self.instance.alive:
                break
            self.now_s = max(self.now_s, self.timers[self.instance.timer_id])
            self.feed(lc.TimerFired(self.instance.timer_id))
        if self.instance.alive:
            assert (lc.Kill, self.instance.generation) in self.orders
            self.feed(lc.Exited(self.instance.generation, bad_end))
        self.rests()

    @rule()
    def a_kill_leads_to_rest(self) -> None:
        self.feed(lc.KillRequested())
        if self.instance.alive:
            assert (lc.Kill, self.instance.generation) in self.orders
            self.feed(lc.Exited(self.instance.generation, CRASH))
        self.rests()

    def rests(self) -> None:
        assert self.instance.state is State.STOPPED
        assert self.instance.is_settled
        assert self.reaped == self.spawned

    @invariant()
    def never_two_children_and_every_one_is_reaped(self) -> None:
        alive = [self.instance.generation] if self.instance.alive else []
        assert self.reaped + alive == self.spawned
        assert list(violations(self.instance)) == []

    @invariant()
    def a_state_in_which_nothing_more_happens_is_one_of_rest(self) -> None:
        """Every other state has a live child or a timer."""
        timed = self.instance.timer_id in self.timers
        assert self.instance.is_settled or self.instance.alive or timed
        assert (self.instance.next_start_s is not None) == (timed and not self.instance.alive)


class AnyLifeThatIsTriedAgain(AnyLife):
    policy = KEEP_TRYING


for machine in (AnyLife, AnyLifeThatIsTriedAgain):
    machine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40)
TestAnyLife = AnyLife.TestCase
TestAnyLifeThatIsTriedAgain = AnyLifeThatIsTriedAgain.TestCase


# --- fallback steps -------------------------------------------------------------------------------------


def test_start_that_ran_out_of_memory_is_followed_by_a_smaller_one() -> None:
    life = starting(lc.Loading(1))
    effects = life(lc.Exited(1, TOO_MUCH))
    assert lc.Report(1, TOO_MUCH, 0.0) in effects
    assert lc.Spawn(2) in effects
    assert life.state() is State.STARTING
    assert life.instance.last == TOO_MUCH


def test_fallback_steps_are_no_crash_loop_and_end_in_failed() -> None:
    life = Life()
    life(lc.StartRequested())
    for generation in range(1, 9):  # more than the crashes of a crash loop
        life(lc.Spawned(generation, 42), lc.Exited(generation, TOO_MUCH))
    assert life.instance.crashes == ()
    life(lc.Spawned(9, 42), lc.Exited(9, replace(TOO_MUCH, adjustment=None)))
    assert life.state() is State.FAILED


@pytest.mark.parametrize("loading", [True, False])
def test_logged_startup_failure_kills_the_child(loading: bool) -> None:
    life = starting(*([lc.Loading(1)] if loading else []))
    assert lc.Kill(1) in life(lc.StartupFailureLogged(1, TOO_MUCH))
    effects = life(lc.Exited(1, CRASH))
    assert lc.Report(1, TOO_MUCH, 0.0, by_us=True) in effects
    assert lc.Spawn(2) in effects


def test_logged_startup_failure_of_ready_server_is_ignored() -> None:
    life = ready()
    assert life(lc.StartupFailureLogged(1, TOO_MUCH)) == ()
    assert life.state() is State.READY


def test_stop_before_a_fallback_step_stops() -> None:
    life = Life()
    life(
        lc.StartRequested(),
        lc.Spawned(1, 42),
        lc.Loading(1),
        lc.StartupFailureLogged(1, TOO_MUCH),
        lc.StopRequested(),
    )
    assert life(lc.Exited(1, CRASH)) == ()
    assert life.state() is State.STOPPED


# --- permits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "slots", "max_concurrent"),
    [
        (Policy(), 4, 4),
        (Policy(), None, None),
        (Policy(max_concurrent=2), 4, 2),
        (Policy(max_concurrent=2), None, 2),
        (Policy(limits_to_slots=False), 4, None),
        (Policy(limits_to_slots=False, max_concurrent=3), 4, 3),
        (Policy(wait_timeout_s=0.0), 4, None),  # llama-server queues the requests
        (Policy(wait_timeout_s=0.0, max_concurrent=4), 4, 4),
    ],
)
def test_permits_are_the_slots_unless_configured(
    policy: Policy, slots: int | None, max_concurrent: int | None
) -> None:
    assert policy.permits(slots) == max_concurrent
