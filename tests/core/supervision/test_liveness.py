"""The liveness watch: observations in, actions or a failure out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.answers import Health, ServerProgress, TokenProbe
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision.liveness import (
    Action,
    Checks,
    LivenessPolicy,
    LivenessState,
    Observation,
    Traffic,
    assess,
    required_checks,
)
from llamasup.core.system.hardware.facts import CpuUsage

POLICY = LivenessPolicy()
DECODING = ServerProgress({"0/7": 100}, prefilling=False)
PREFILLING = ServerProgress({"0/7": 0}, prefilling=True)
SLOTS_IDLE = ServerProgress({}, prefilling=False)
NOTHING_KNOWN = ServerProgress()
ONE = Traffic(in_flight=1)
IDLE = Traffic()
NO_TOKEN = TokenProbe("/completion was not answered")


class Watched:
    """A watched server: each call is one observation, 5 s after the one before."""

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
        may_block: bool = False,
    ) -> Action | Diagnosis:
        self.cpu_s += cores * after_s
        self.read_bytes += int(read_bytes_s * after_s)
        spent = CpuUsage(self.cpu_s, self.read_bytes, stopped) if cpu_usage else None
        observed = Observation(self.state.at_s + after_s, traffic, health, progress, spent, probe, may_block)
        self.state, action = assess(self.state, observed, POLICY)
        return action

    def until_probed(
        self, traffic: Traffic = ONE, progress: ServerProgress | None = None, **seen: float
    ) -> float:
        """Observe until a token probe starts; returns how long there was no progress."""
        for _ in range(1000):
            action = self(traffic, progress, **seen)  # type: ignore[arg-type]
            if action is Action.PROBE:
                return self.state.stalled_s
            assert action is Action.NOTHING
        raise AssertionError("never probed")


def failed(action: Action | Diagnosis) -> Diagnosis:
    assert isinstance(action, Diagnosis)
    assert not action.deterministic
    return action


# --- checks ---------------------------------------------------------------------------------------------


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
def test_working_server_is_not_checked(before: Traffic, now: Traffic, checks: Checks) -> None:
    assert required_checks(LivenessState(0.0, traffic=before), now, POLICY) == checks


# --- S7: unresponsive -----------------------------------------------------------------------------------


def test_three_missed_health_checks_are_a_failure() -> None:
    server = Watched()
    assert server(IDLE, health=Health.SILENT) is Action.NOTHING
    assert server(IDLE, health=Health.SILENT) is Action.NOTHING
    diagnosis = failed(server(IDLE, health=Health.SILENT))
    assert diagnosis.cause == "unresponsive"
    assert "did not answer 3 /health requests in a row." in diagnosis.message


@pytest.mark.parametrize("sign", [Health.OK, Health.LOADING, None])
def test_any_answer_resets_the_missed_checks(sign: Health | None) -> None:
    """None: llamasup did not check, because tokens flowed."""
    server = Watched()
    for _ in range(5):
        server(IDLE, health=Health.SILENT)
        server(IDLE, health=Health.SILENT)
        assert server(IDLE, health=sign) is Action.NOTHING


def test_diagnosis_names_a_stopped_process() -> None:
    server = Watched()
    for _ in range(2):
        server(ONE, health=Health.SILENT, stopped=True)
    diagnosis = failed(server(ONE, health=Health.SILENT, stopped=True))
    assert "the process is stopped" in diagnosis.message
    assert "SIGSTOP" in diagnosis.remedy


def test_missed_checks_count_before_a_failed_probe() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_probed(ONE, DECODING)
    assert server(ONE, health=Health.SILENT, probe=NO_TOKEN) is Action.NOTHING
    assert server(ONE, health=Health.SILENT, probe=NO_TOKEN) is Action.NOTHING
    assert failed(server(ONE, health=Health.SILENT, probe=NO_TOKEN)).cause == "unresponsive"


def test_silence_of_a_busy_server_with_requests_is_not_a_miss() -> None:
    """Builds of 2024 answer /health only between two batches."""
    server = Watched()
    server(ONE)
    for _ in range(100):
        assert server(ONE, health=Health.SILENT, cores=2.0) is Action.NOTHING


def test_silence_of_a_busy_server_without_requests_is_a_miss() -> None:
    server = Watched()
    actions = [server(IDLE, health=Health.SILENT, cores=2.0) for _ in range(3)]
    assert failed(actions[-1]).cause == "unresponsive"


def test_silence_of_a_program_that_may_block_is_judged_by_its_requests_and_its_work() -> None:
    server = Watched()
    for _ in range(10):  # it works on a request, and answers nothing else
        assert server(ONE, health=Health.SILENT, may_block=True) is Action.NOTHING
    for _ in range(10):  # its client has left
        assert server(IDLE, health=Health.SILENT, may_block=True, cores=1.0) is Action.NOTHING
    server(IDLE, may_block=True)
    actions = [server(IDLE, health=Health.SILENT, may_block=True) for _ in range(3)]
    assert failed(actions[-1]).cause == "unresponsive"
    stopped = [server(ONE, health=Health.SILENT, may_block=True, stopped=True) for _ in range(3)]
    assert failed(stopped[-1]).cause == "unresponsive"


# --- S8: wedged -----------------------------------------------------------------------------------------


def test_idle_server_is_never_probed() -> None:
    server = Watched()
    for _ in range(1000):
        assert server(IDLE) is Action.NOTHING


def test_stalled_decode_is_probed_after_a_minute_and_fails_without_a_token() -> None:
    server = Watched()
    server(ONE, DECODING)
    assert server.until_probed(ONE, DECODING) == 60.0
    actions = [server(ONE, DECODING) for _ in range(6)]
    diagnosis = failed(actions[-1])
    assert actions[:-1] == [Action.NOTHING] * 5
    assert diagnosis.cause == "wedged"
    assert (
        "requests have made no progress for 90 s, and a test request for one token got no answer within 30 s"
        in diagnosis.message
    )


def test_cpu_time_is_not_progress_of_a_decode() -> None:
    """A process that waits for a device may spin without end."""
    server = Watched()
    server(ONE, DECODING)
    assert server.until_probed(ONE, DECODING, cores=8.0) == 60.0


def test_failed_token_probe_is_a_failure_at_once() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_probed(ONE, DECODING)
    assert NO_TOKEN.problem is not None
    assert NO_TOKEN.problem in failed(server(ONE, DECODING, probe=NO_TOKEN)).message


def test_successful_token_probe_restarts_the_minute() -> None:
    """One stuck request on a working server, such as a client that does not read."""
    server = Watched()
    server(ONE, DECODING)
    for _ in range(5):
        server.until_probed(ONE, DECODING)
        assert server(ONE, DECODING, probe=TokenProbe(None)) is Action.NOTHING
        assert server.state.stalled_s == 0.0


def stream(traffic: Traffic, step: int) -> Iterator[tuple[Traffic, ServerProgress | None]]:
    """A stream with one token at every ``step``-th check."""
    tokens = 0
    while True:
        for _ in range(step - 1):
            yield traffic, ServerProgress({"0/7": tokens}, prefilling=False)
        tokens += 1
        traffic = replace(traffic, bytes_relayed=traffic.bytes_relayed + 200)
        yield traffic, ServerProgress({"0/7": tokens}, prefilling=False)


@pytest.mark.parametrize("step", [1, 2, 11])
def test_stream_with_progress_is_never_probed(step: int) -> None:
    server = Watched()
    tokens = stream(ONE, step)
    for _ in range(500):
        assert server(*next(tokens)) is Action.NOTHING


def test_stream_of_only_pings_is_probed() -> None:
    server, pinged = Watched(), ONE
    for observed in range(13):
        if observed % 6 == 0:  # every 30 s
            pinged = replace(pinged, bytes_relayed=pinged.bytes_relayed + 8)
        action = server(pinged, DECODING)
    assert action is Action.PROBE


def test_slot_shows_progress_of_an_unstreamed_answer() -> None:
    server = Watched()
    for tokens in range(200):
        assert server(ONE, ServerProgress({"0/7": tokens}, prefilling=False)) is Action.NOTHING


def test_metrics_show_progress_of_builds_without_slots() -> None:
    server = Watched()
    for total in range(200):
        assert server(ONE, ServerProgress(total=float(total))) is Action.NOTHING


def test_disconnecting_clients_do_not_hide_a_wedged_server() -> None:
    """Each client waits 20 s and gets a slot, but no token."""
    server, actions = Watched(), []
    for client in range(4):
        progress = ServerProgress({f"0/{client}": 0}, prefilling=False)
        actions += [server(ONE, progress) for _ in range(4)]
        actions.append(server(IDLE, None))
    assert Action.PROBE in actions


def test_probe_continues_after_the_last_client_disconnects() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_probed(ONE, DECODING)
    assert server(IDLE) is Action.NOTHING
    assert failed(server(IDLE, probe=NO_TOKEN)).cause == "wedged"


# --- slow, but not hung ---------------------------------------------------------------------------------


def test_slow_warm_up_allows_slow_tokens() -> None:
    server = Watched(warm_up_s=100.0)
    tokens = stream(ONE, 25)  # one in 125 s
    for _ in range(500):
        assert server(*next(tokens)) is Action.NOTHING


def test_slow_model_is_probed_after_four_times_its_longest_pause() -> None:
    server = Watched(warm_up_s=100.0)
    server(ONE, DECODING)
    assert server.until_probed(ONE, DECODING) == 400.0
    actions = [server(ONE, DECODING) for _ in range(80)]
    assert actions[:-1] == [Action.NOTHING] * 79
    assert "within 400 s" in failed(actions[-1]).message


def test_progress_cancels_the_probe_and_sets_a_longer_limit() -> None:
    server = Watched()
    server(ONE, DECODING)
    server.until_probed(ONE, DECODING)
    server(ONE, DECODING)
    moved = ServerProgress({"0/7": 101}, prefilling=False)
    assert server(ONE, moved) is Action.CANCEL_PROBE
    assert server.until_probed(ONE, moved) == 4 * 70.0


def test_progress_of_the_probe_itself_does_not_count() -> None:
    server = Watched()
    server(ONE, replace(DECODING, total=10.0))
    server.until_probed(ONE, replace(DECODING, total=10.0))
    after = ServerProgress({"0/7": 100, "1/8": 5}, prefilling=True, total=15.0)
    assert server(ONE, after) is Action.NOTHING
    assert failed(server(ONE, after, probe=NO_TOKEN)).cause == "wedged"


@pytest.mark.parametrize("progress", [PREFILLING, NOTHING_KNOWN, None])
@pytest.mark.parametrize(
    ("seen", "limit_s"),
    [({"cores": 1.0}, 1800.0), ({"read_bytes_s": 500e6}, 1800.0), ({}, 180.0), ({"cpu_usage": False}, 180.0)],
    ids=["computes", "reads", "idle", "unknown"],
)
def test_limit_of_a_prefill_depends_on_the_process(
    progress: ServerProgress | None, seen: dict[str, float], limit_s: float
) -> None:
    assert Watched().until_probed(ONE, progress, **seen) == limit_s


def test_request_without_a_slot_is_probed_after_a_minute() -> None:
    """Its task was lost, or a client does not read: the token probe shows which."""
    assert Watched().until_probed(ONE, SLOTS_IDLE) == 60.0


def test_short_idle_times_do_not_count_as_stalled() -> None:
    """On a busy machine the process may get no core between two checks."""
    server = Watched()
    for _ in range(50):
        assert server(ONE, PREFILLING, cores=1.0) is Action.NOTHING
        assert server(ONE, PREFILLING) is Action.NOTHING


def test_idle_time_counts_from_the_end_of_the_work() -> None:
    server = Watched()
    for _ in range(200):
        server(ONE, PREFILLING, cores=1.0)
    assert server.until_probed(ONE, PREFILLING) == 1000.0 + 180.0


def test_prefill_with_progress_has_no_limit() -> None:
    server = Watched()
    for batch in range(20):
        for _ in range(30):  # 150 s each
            progress = ServerProgress({"0/7": 2048 * batch}, prefilling=True)
            assert server(ONE, progress) is Action.NOTHING
    assert server.state.longest_pause_s == 0.0  # a batch does not count as a pause


def test_prefill_in_another_slot_delays_the_limit() -> None:
    server = Watched()
    both = ServerProgress({"0/7": 100, "1/8": 0}, prefilling=True)
    server(Traffic(2), both)
    assert server.until_probed(Traffic(2), both, cores=2.0) == 1800.0


def test_two_checks_at_the_same_time_are_valid() -> None:
    server = Watched()
    assert server(ONE, PREFILLING, after_s=0.0) is Action.NOTHING


# --- answers that are errors ----------------------------------------------------------------------------


def failures(count: int) -> Traffic:
    return Traffic(in_flight=0, bytes_relayed=100 * count, answered=count, failures=count)


def test_three_errors_start_a_probe_which_decides() -> None:
    server = Watched()
    assert server(failures(2), health=None) is Action.NOTHING
    assert server(failures(3), health=None) is Action.PROBE
    assert server(failures(9), health=None) is Action.NOTHING  # more errors are no progress
    diagnosis = failed(server(failures(9), probe=NO_TOKEN))
    assert diagnosis.cause == "wedged"
    assert "its last 9 answers were errors" in diagnosis.message


def test_each_successful_probe_doubles_the_error_limit() -> None:
    """A client may repeat an unsupported request (501) again and again."""
    server, probes = Watched(), 0
    for count in range(1, 101):
        if server(failures(count), health=None) is Action.PROBE:
            probes += 1
            assert server(failures(count), probe=TokenProbe(None)) is Action.NOTHING
    assert probes == 6  # at 3, 6, 12, 24, 48 and 96


def test_good_answer_resets_the_error_limit() -> None:
    server = Watched()
    server(failures(3), health=None)
    server(failures(3), probe=TokenProbe(None))
    server(replace(failures(4), failures=0), health=None)
    assert server(replace(failures(7), failures=3), health=None) is Action.PROBE


def test_good_answer_cancels_the_probe() -> None:
    server = Watched()
    server(failures(3), health=None)
    assert server(replace(failures(4), failures=0), health=None) is Action.CANCEL_PROBE


# --- the policy -----------------------------------------------------------------------------------------


def test_default_limits_match_the_docs() -> None:
    assert (POLICY.interval_s, POLICY.health_timeout_s, POLICY.max_missed_checks) == (5.0, 2.0, 3)
    assert (POLICY.stall_s, POLICY.max_failures) == (60.0, 3)
