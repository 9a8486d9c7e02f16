"""What the watch takes for life, and what for a hang: looks in, orders out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from llamasup.llama_server.answers import Health, ServerProgress, TokenProbe
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.supervision.liveness import (
    Action,
    Checks,
    LivenessPolicy,
    LivenessState,
    Observation,
    Traffic,
    assess,
    required_checks,
)
from llamasup.system.hardware.facts import CpuUsage

POLICY = LivenessPolicy()
DECODING = ServerProgress({"0/7": 100}, prefilling=False)
PREFILLING = ServerProgress({"0/7": 0}, prefilling=True)
SLOTS_IDLE = ServerProgress({}, prefilling=False)
NOTHING_KNOWN = ServerProgress()
ONE = Traffic(in_flight=1)
IDLE = Traffic()
NO_TOKEN = TokenProbe("/completion was not answered")


class Watched:
    """A server under watch: one look every 5 s, as a test says what it sees."""

    def __init__(self, *, warm_up_s: float = 0.0) -> None:
        self.state = LivenessState(1000.0, longest_pause_s=warm_up_s)
        self.cpu_s = 0.0
        self.read_bytes = 0

    def __call__(
        self,
        traffic: Traffic = ONE,
        progress: ServerProgress | None = None,
        *,
        health: Health | None = Health.OK,
        cores: float = 0.0,
        read_bytes_s: float = 0.0,
        cpu_usage: bool = True,
        stopped: bool = False,
        probe: TokenProbe | None = None,
        after_s: float = 5.0,
    ) -> Action | Diagnosis:
        self.cpu_s += cores * after_s
        self.read_bytes += int(read_bytes_s * after_s)
        spent = CpuUsage(self.cpu_s, self.read_bytes, stopped) if cpu_usage else None
        look = Observation(self.state.at_s + after_s, traffic, health, progress, spent, probe)
        self.state, action = assess(self.state, look, POLICY)
        return action

    def until_suspected(
        self, traffic: Traffic = ONE, progress: ServerProgress | None = None, **seen: float
    ) -> float:
        """Observation on until a proof is asked for: for how long nothing had moved then."""
        for _ in range(1000):
            action = self(traffic, progress, **seen)  # type: ignore[arg-type]
            if action is Action.PROBE:
                return self.state.stalled_s
            assert action is Action.NOTHING
        raise AssertionError("never suspected")


def failed(action: Action | Diagnosis) -> Diagnosis:
    assert isinstance(action, Diagnosis)
    assert not action.deterministic
    return action


# --- what is asked --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "checks"),
    [
        (IDLE, IDLE, Checks(health=True, progress=False)),
        (ONE, ONE, Checks(health=True, progress=True)),
        (ONE, replace(ONE, bytes_relayed=500), Checks(health=False, progress=False)),
        (ONE, replace(ONE, bytes_relayed=8), Checks(health=True, progress=True)),  # a ping
        (ONE, Traffic(0, 0, answered=1), Checks(health=False, progress=False)),
        (Traffic(8), Traffic(8, bytes_relayed=64), Checks(health=True, progress=True)),  # eight pings
        (Traffic(8), Traffic(8, bytes_relayed=500), Checks(health=False, progress=False)),
    ],
)
def test_of_a_server_that_is_seen_to_work_nothing_is_asked(
    before: Traffic, now: Traffic, checks: Checks
) -> None:
    assert required_checks(LivenessState(0.0, traffic=before), now, POLICY) == checks


# --- S7: unresponsive -----------------------------------------------------------------------------------


def test_three_misses_in_a_row_condemn() -> None:
    server = Watched()
    assert server(IDLE, health=Health.SILENT) is Action.NOTHING
    assert server(IDLE, health=Health.SILENT) is Action.NOTHING
    diagnosis = failed(server(IDLE, health=Health.SILENT))
    assert diagnosis.cause == "unresponsive"
    assert "did not answer 3 /health requests in a row." in diagnosis.message


@pytest.mark.parametrize("sign", [Health.OK, Health.LOADING, None])
def test_any_sign_of_life_starts_the_count_anew(sign: Health | None) -> None:
    """None: not asked, because tokens flowed."""
    server = Watched()
    for _ in range(5):
        server(IDLE, health=Health.SILENT)
        server(IDLE, health=Health.SILENT)
        assert server(IDLE, health=sign) is Action.NOTHING


def test_a_stopped_process_is_named() -> None:
    server = Watched()
    for _ in range(2):
        server(ONE, health=Health.SILENT, stopped=True)
    diagnosis = failed(server(ONE, health=Health.SILENT, stopped=True))
    assert "the process is stopped" in diagnosis.message
    assert "SIGSTOP" in diagnosis.remedy


def test_a_server_that_misses_is_judged_by_its_misses_alone() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_suspected(ONE, DECODING)
    assert server(ONE, health=Health.SILENT, probe=NO_TOKEN) is Action.NOTHING
    assert server(ONE, health=Health.SILENT, probe=NO_TOKEN) is Action.NOTHING
    assert failed(server(ONE, health=Health.SILENT, probe=NO_TOKEN)).cause == "unresponsive"


def test_silence_of_a_server_that_works_hard_is_no_miss() -> None:
    """Builds of 2024 answer /health between two batches only."""
    server = Watched()
    server(ONE)
    for _ in range(100):
        assert server(ONE, health=Health.SILENT, cores=2.0) is Action.NOTHING


def test_silence_of_a_server_that_works_hard_at_nothing_is() -> None:
    server = Watched()
    actions = [server(IDLE, health=Health.SILENT, cores=2.0) for _ in range(3)]
    assert failed(actions[-1]).cause == "unresponsive"


# --- S8: wedged -----------------------------------------------------------------------------------------


def test_nothing_in_flight_is_never_suspicious() -> None:
    server = Watched()
    for _ in range(1000):
        assert server(IDLE) is Action.NOTHING


def test_a_decode_that_does_not_move_for_a_minute_is_suspected_and_without_a_token_condemned() -> None:
    server = Watched()
    server(ONE, DECODING)
    assert server.until_suspected(ONE, DECODING) == 60.0
    actions = [server(ONE, DECODING) for _ in range(6)]
    diagnosis = failed(actions[-1])
    assert actions[:-1] == [Action.NOTHING] * 5
    assert diagnosis.cause == "wedged"
    assert (
        "requests have made no progress for 90 s, and a test request for one token got no answer within 30 s"
        in diagnosis.message
    )


def test_a_spinning_process_is_wedged_all_the_same() -> None:
    """CPU time is no progress: a device wait may spin for ever."""
    server = Watched()
    server(ONE, DECODING)
    assert server.until_suspected(ONE, DECODING, cores=8.0) == 60.0


def test_a_token_request_that_fails_condemns_at_once() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_suspected(ONE, DECODING)
    assert NO_TOKEN.problem is not None
    assert NO_TOKEN.problem in failed(server(ONE, DECODING, probe=NO_TOKEN)).message


def test_a_token_acquits_and_the_minute_begins_anew() -> None:
    """One stuck request on a server that works: a client that does not read, for one."""
    server = Watched()
    server(ONE, DECODING)
    for _ in range(5):
        server.until_suspected(ONE, DECODING)
        assert server(ONE, DECODING, probe=TokenProbe(None)) is Action.NOTHING
        assert server.state.stalled_s == 0.0


def stream(traffic: Traffic, step: int) -> Iterator[tuple[Traffic, ServerProgress | None]]:
    """A stream that gives one token at every ``step``-th look."""
    tokens = 0
    while True:
        for _ in range(step - 1):
            yield traffic, ServerProgress({"0/7": tokens}, prefilling=False)
        tokens += 1
        traffic = replace(traffic, bytes_relayed=traffic.bytes_relayed + 200)
        yield traffic, ServerProgress({"0/7": tokens}, prefilling=False)


@pytest.mark.parametrize("step", [1, 2, 11])
def test_a_stream_that_progresses_is_never_suspected(step: int) -> None:
    server = Watched()
    tokens = stream(ONE, step)
    for _ in range(500):
        assert server(*next(tokens)) is Action.NOTHING


def test_a_stream_of_pings_alone_is() -> None:
    server, pinged = Watched(), ONE
    for look in range(13):
        if look % 6 == 0:  # every 30 s
            pinged = replace(pinged, bytes_relayed=pinged.bytes_relayed + 8)
        action = server(pinged, DECODING)
    assert action is Action.PROBE


def test_an_answer_that_is_not_streamed_shows_in_its_slot_only() -> None:
    server = Watched()
    for tokens in range(200):
        assert server(ONE, ServerProgress({"0/7": tokens}, prefilling=False)) is Action.NOTHING


def test_the_counters_show_the_progress_of_builds_without_slots() -> None:
    server = Watched()
    for total in range(200):
        assert server(ONE, ServerProgress(total=float(total))) is Action.NOTHING


def test_requests_that_give_up_one_after_the_other_do_not_hide_a_wedge() -> None:
    """Clients that wait 20 s each; every one gets a slot and no token."""
    server, actions = Watched(), []
    for client in range(4):
        progress = ServerProgress({f"0/{client}": 0}, prefilling=False)
        actions += [server(ONE, progress) for _ in range(4)]
        actions.append(server(IDLE, None))
    assert Action.PROBE in actions


def test_a_suspect_whose_last_client_left_is_proven_all_the_same() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_suspected(ONE, DECODING)
    assert server(IDLE) is Action.NOTHING
    assert failed(server(IDLE, probe=NO_TOKEN)).cause == "wedged"


# --- what is slow and no hang ---------------------------------------------------------------------------


def test_a_model_that_takes_minutes_for_a_token_shows_it_in_its_warm_up() -> None:
    server = Watched(warm_up_s=100.0)
    tokens = stream(ONE, 25)  # one in 125 s
    for _ in range(500):
        assert server(*next(tokens)) is Action.NOTHING


def test_and_its_wedge_is_suspected_after_four_times_that() -> None:
    server = Watched(warm_up_s=100.0)
    server(ONE, DECODING)
    assert server.until_suspected(ONE, DECODING) == 400.0
    actions = [server(ONE, DECODING) for _ in range(80)]
    assert actions[:-1] == [Action.NOTHING] * 79
    assert "within 400 s" in failed(actions[-1]).message


def test_a_suspect_that_moves_again_is_let_go_and_its_pace_is_remembered() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_suspected(ONE, DECODING)
    server(ONE, DECODING)
    moved = ServerProgress({"0/7": 101}, prefilling=False)
    assert server(ONE, moved) is Action.CANCEL_PROBE
    assert server.until_suspected(ONE, moved) == 4 * 70.0


def test_what_the_proof_itself_moves_is_no_progress_of_the_suspect() -> None:
    server = Watched()
    server(ONE, replace(DECODING, total=10.0))
    server.until_suspected(ONE, replace(DECODING, total=10.0))
    after = ServerProgress({"0/7": 100, "1/8": 5}, prefilling=True, total=15.0)
    assert server(ONE, after) is Action.NOTHING
    assert failed(server(ONE, after, probe=NO_TOKEN)).cause == "wedged"


@pytest.mark.parametrize("progress", [PREFILLING, NOTHING_KNOWN, None])
def test_a_batch_of_a_long_prompt_may_take_half_an_hour_of_work(progress: ServerProgress | None) -> None:
    server = Watched()
    assert server.until_suspected(ONE, progress, cores=1.0) == 1800.0


def test_a_model_that_comes_from_the_disk_for_every_batch_works() -> None:
    server = Watched()
    assert server.until_suspected(ONE, PREFILLING, read_bytes_s=500e6) == 1800.0


@pytest.mark.parametrize("progress", [PREFILLING, NOTHING_KNOWN, None])
def test_a_prompt_at_which_nothing_works_is_suspected_after_minutes(progress: ServerProgress | None) -> None:
    server = Watched()
    assert server.until_suspected(ONE, progress) == 180.0


def test_a_process_that_catches_its_breath_works_on() -> None:
    """On a machine with too much to do it may get no core between two looks."""
    server = Watched()
    for _ in range(50):
        assert server(ONE, PREFILLING, cores=1.0) is Action.NOTHING
        assert server(ONE, PREFILLING) is Action.NOTHING


def test_a_process_that_stops_working_is_suspected_after_minutes_of_that() -> None:
    server = Watched()
    for _ in range(200):
        server(ONE, PREFILLING, cores=1.0)
    assert server.until_suspected(ONE, PREFILLING) == 1000.0 + 180.0


def test_a_process_that_may_not_be_looked_at_is_taken_for_idle() -> None:
    server = Watched()
    assert server.until_suspected(ONE, PREFILLING, cpu_usage=False) == 180.0


def test_a_prefill_that_shows_its_batches_takes_as_long_as_it_takes() -> None:
    server = Watched()
    for batch in range(20):
        for _ in range(30):  # 150 s each
            progress = ServerProgress({"0/7": 2048 * batch}, prefilling=True)
            assert server(ONE, progress) is Action.NOTHING
    assert server.state.longest_pause_s == 0.0  # a batch says nothing of the pace of tokens


def test_a_prompt_in_another_slot_holds_up_a_stream() -> None:
    server = Watched()
    both = ServerProgress({"0/7": 100, "1/8": 0}, prefilling=True)
    server(Traffic(2), both)
    assert server.until_suspected(Traffic(2), both, cores=2.0) == 1800.0


def test_a_request_that_no_slot_works_at_is_suspicious() -> None:
    """Its task was lost, or a client does not read: a token tells which."""
    server = Watched()
    assert server.until_suspected(ONE, SLOTS_IDLE) == 60.0


def test_a_look_at_the_same_moment_is_no_measure_of_work() -> None:
    server = Watched()
    assert server(ONE, PREFILLING, after_s=0.0) is Action.NOTHING


# --- answers that are errors ----------------------------------------------------------------------------


def failures(count: int) -> Traffic:
    return Traffic(in_flight=0, bytes_relayed=100 * count, answered=count, failures=count)


def test_three_errors_in_a_row_ask_for_a_token_and_without_it_condemn() -> None:
    server = Watched()
    assert server(failures(2), health=None) is Action.NOTHING
    assert server(failures(3), health=None) is Action.PROBE
    assert server(failures(9), health=None) is Action.NOTHING  # more errors are no progress
    diagnosis = failed(server(failures(9), probe=NO_TOKEN))
    assert diagnosis.cause == "wedged"
    assert "its last 9 answers were errors" in diagnosis.message


def test_errors_of_a_server_that_gives_a_token_are_the_clients_own() -> None:
    """501 for what this model cannot do; whoever asks for it asks again and again."""
    server, proofs = Watched(), 0
    for count in range(1, 101):
        if server(failures(count), health=None) is Action.PROBE:
            proofs += 1
            assert server(failures(count), probe=TokenProbe(None)) is Action.NOTHING
    assert proofs == 6  # at 3, 6, 12, 24, 48 and 96


def test_after_a_good_answer_three_errors_count_again() -> None:
    server = Watched()
    server(failures(3), health=None)
    server(failures(3), probe=TokenProbe(None))
    server(replace(failures(4), failures=0), health=None)
    assert server(replace(failures(7), failures=3), health=None) is Action.PROBE


def test_a_good_answer_clears_a_server_suspected_for_its_errors() -> None:
    server = Watched()
    server(failures(3), health=None)
    assert server(replace(failures(4), failures=0), health=None) is Action.CANCEL_PROBE


# --- the policy -----------------------------------------------------------------------------------------


def test_the_numbers_are_those_that_are_promised() -> None:
    assert (POLICY.interval_s, POLICY.health_timeout_s, POLICY.max_missed_checks) == (5.0, 2.0, 3)
    assert (POLICY.stall_s, POLICY.max_failures) == (60.0, 3)
