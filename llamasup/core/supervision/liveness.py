"""Judges whether a ready server still makes progress: the checks to make, and what their results mean (pure).

``probes.py`` makes the checks. A server whose process runs can fail in two ways:

- *unresponsive*: it does not answer ``/health``. Not checked while the proxy sees its responses arrive.
- *wedged*: ``/health`` answers 200, but running requests make no progress, or every answer is an error
  (llama.cpp #27388, #27505, #23268, #13281). Then llamasup requests one token; without a token, the server
  has failed.

These are not hangs: a slow model (a pause as long as an earlier one is normal), a long prompt (b11434 shows
progress once per batch of 2,048 tokens, which is minutes on a CPU; until then only the CPU time of the
process shows that it works), and a client that does not read.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.answers import Health, ServerProgress, TokenProbe
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.system.hardware.facts import CpuUsage


class LivenessPolicy(Struct, frozen=True):
    """All times in seconds."""

    interval_s: float = 5.0
    """Between two checks. A check costs 0.4 ms of CPU (measured): 0.01 % for an idle supervisor."""
    health_timeout_s: float = 2.0
    """b11434 answers within 1 ms, also in the middle of a batch and with 200 open requests."""
    max_missed_checks: int = 3
    stall_s: float = 60.0
    """Limit without progress after the prompt. Even slow machines compute a token in some seconds;
    ``pause_factor`` covers slower ones."""
    pause_factor: float = 4.0
    """A pause is suspicious only if it is this many times the longest that ended by itself."""
    prefill_stall_s: float = 180.0
    """Limit at a prompt while the process is idle and waits for a device: a batch of 2,048 tokens at 11
    tokens a second."""
    busy_prefill_stall_s: float = 1800.0
    """Limit at a prompt while the process works: 2,048 tokens at one a second, the speed of a model far too
    large for its CPU. There is a limit because a process that spins on a device looks the same."""
    busy_cores: float = 0.1
    """A process that uses this much of a core works; a stopped or waiting one uses nothing."""
    busy_read_bytes_s: float = 1e6
    """A process that reads this fast also works: a model larger than memory is read again for every batch."""
    max_failures: int = 3
    """Consecutive answers with status 500 or above."""
    token_timeout_s: float = 30.0
    ping_bytes: int = 16
    """Per request and check: a ping is 8 bytes in its frame, one in 30 s (b11434). An event with a token is
    larger."""


class Traffic(Struct, frozen=True):
    """The proxy's counts: requests in flight, body bytes, answers with output of the model, and the
    consecutive failures (status 500 or above) after the last of these.
    """

    in_flight: int = 0
    bytes_relayed: int = 0
    answered: int = 0
    failures: int = 0


class Observation(Struct, frozen=True):
    """The results of the checks at ``at_s``. None: not checked, or no answer. ``may_block``: the program may
    answer nothing while it works, so its requests decide.
    """

    at_s: float
    traffic: Traffic
    health: Health | None = None
    progress: ServerProgress | None = None
    cpu_usage: CpuUsage | None = None
    probe: TokenProbe | None = None
    may_block: bool = False


class LivenessState(Struct, frozen=True):
    """The memory of the watch from one check to the next."""

    at_s: float
    stalled_s: float = 0.0
    """How long requests have been in flight since the last progress. A client that disconnects does not
    reset it: clients that give up after 30 s and try again would hide a wedged server."""
    idle_s: float = 0.0
    """How much of that the process has been idle, up to now."""
    longest_pause_s: float = 0.0
    """The longest pause outside a prefill that ended by itself; at first, the time of the warm-up."""
    missed_checks: int = 0
    traffic: Traffic = Traffic()
    progress: ServerProgress | None = None
    cpu_usage: CpuUsage | None = None
    decoding: bool = True
    """Whether no slot has been at a prompt during this pause."""
    probing_since_s: float | None = None
    """When the running token probe began."""
    forgiven_failures: int = 0
    """Consecutive failures before the last successful token probe."""


class Checks(Struct, frozen=True):
    """The checks to make next."""

    health: bool
    progress: bool


class Action(Enum):
    NOTHING = "nothing"
    PROBE = "probe"  # ask for one token
    CANCEL_PROBE = "cancel the probe"  # the requests make progress again


def required_checks(state: LivenessState, traffic: Traffic, policy: LivenessPolicy) -> Checks:
    """Choose the fewest checks: none while responses arrive, and only ``/health`` of an idle server."""
    if _has_traffic(state.traffic, traffic, policy):
        return Checks(health=False, progress=False)
    return Checks(health=True, progress=traffic.in_flight > 0)


def assess(
    state: LivenessState, observed: Observation, policy: LivenessPolicy
) -> tuple[LivenessState, Action | Diagnosis]:
    """Decide what to do after a check; a Diagnosis means that the server has failed."""
    busy = _is_busy(state, observed, policy)
    progressed = _made_progress(state, observed, policy)
    state = replace(
        _after_pause(state, observed) if progressed else _in_pause(state, observed, busy=busy),
        at_s=observed.at_s,
        missed_checks=_count_misses(state, observed, busy=busy),
        traffic=observed.traffic,
        cpu_usage=observed.cpu_usage,
        forgiven_failures=min(state.forgiven_failures, observed.traffic.failures),
    )
    if state.missed_checks >= policy.max_missed_checks:
        return state, _unresponsive(observed, policy)
    if state.missed_checks:
        return state, Action.NOTHING  # without /health a token probe would only fail
    # Each successful probe doubles the limit: a client may keep sending unsupported requests (501).
    failing = observed.traffic.failures >= max(policy.max_failures, 2 * state.forgiven_failures)
    if state.probing_since_s is not None:
        return _assess_probe(state, observed, policy, resumed=progressed and not failing)
    if failing or _is_stalled(state, policy):
        return replace(state, probing_since_s=observed.at_s), Action.PROBE
    return state, Action.NOTHING


def _assess_probe(
    state: LivenessState, observed: Observation, policy: LivenessPolicy, *, resumed: bool
) -> tuple[LivenessState, Action | Diagnosis]:
    assert state.probing_since_s is not None
    if observed.probe is not None and observed.probe.problem is None:
        forgiven_failures = observed.traffic.failures
        return replace(
            state, probing_since_s=None, stalled_s=0.0, idle_s=0.0, forgiven_failures=forgiven_failures
        ), Action.NOTHING
    if resumed:
        return replace(state, probing_since_s=None), Action.CANCEL_PROBE
    if observed.probe is not None:
        return state, _wedged(state, observed.probe.problem or "")
    timeout_s = max(policy.token_timeout_s, policy.pause_factor * state.longest_pause_s)
    if observed.at_s - state.probing_since_s >= timeout_s:
        return state, _wedged(state, f"a test request for one token got no answer within {timeout_s:.0f} s")
    return state, Action.NOTHING


# --- progress --------------------------------------------------------------------------------------------


def _has_traffic(before: Traffic, now: Traffic, policy: LivenessPolicy) -> bool:
    """Whether the proxy has relayed more than pings since."""
    pings = policy.ping_bytes * max(now.in_flight, 1)
    return now.answered > before.answered or now.bytes_relayed - before.bytes_relayed > pings


def _made_progress(state: LivenessState, observed: Observation, policy: LivenessPolicy) -> bool:
    if _has_traffic(state.traffic, observed.traffic, policy):
        return True
    before, now = state.progress or ServerProgress(), observed.progress or ServerProgress()
    if state.probing_since_s is not None:
        # The probe itself changes the counters and uses another slot: only the earlier requests count.
        return any(now.tokens.get(task, 0) > tokens for task, tokens in before.tokens.items())
    # A request that is new in its slot made progress if it has any tokens.
    if any(tokens > before.tokens.get(task, 0) for task, tokens in now.tokens.items()):
        return True
    return before.total is not None and now.total is not None and now.total > before.total


def _count_misses(state: LivenessState, observed: Observation, *, busy: bool) -> int:
    if observed.health is not Health.SILENT:
        return 0
    is_stopped = observed.cpu_usage is not None and observed.cpu_usage.stopped
    if observed.may_block and observed.traffic.in_flight and not is_stopped:
        return 0
    # Builds of 2024 answer no /health in the middle of a batch.
    works = busy and (observed.may_block or observed.traffic.in_flight)
    return state.missed_checks if works else state.missed_checks + 1


def _is_busy(state: LivenessState, observed: Observation, policy: LivenessPolicy) -> bool:
    if state.cpu_usage is None or observed.cpu_usage is None or observed.at_s <= state.at_s:
        return False
    seconds = observed.at_s - state.at_s
    cores = (observed.cpu_usage.cpu_s - state.cpu_usage.cpu_s) / seconds
    read_bytes_s = (observed.cpu_usage.read_bytes - state.cpu_usage.read_bytes) / seconds
    return cores >= policy.busy_cores or read_bytes_s >= policy.busy_read_bytes_s


def _after_pause(state: LivenessState, observed: Observation) -> LivenessState:
    pause_s = (
        state.stalled_s + observed.at_s - state.at_s if state.traffic.in_flight and state.decoding else 0.0
    )
    return replace(
        state,
        stalled_s=0.0,
        idle_s=0.0,
        longest_pause_s=max(pause_s, state.longest_pause_s),
        progress=observed.progress or state.progress,
        decoding=True,
    )


def _in_pause(state: LivenessState, observed: Observation, *, busy: bool) -> LivenessState:
    if observed.traffic.in_flight == 0:
        return state
    seconds = observed.at_s - state.at_s
    state = replace(
        state, stalled_s=state.stalled_s + seconds, idle_s=0.0 if busy else state.idle_s + seconds
    )
    if state.probing_since_s is not None:
        return state  # do not count the probe's own progress
    decoding = state.decoding and observed.progress is not None and observed.progress.prefilling is False
    return replace(state, progress=observed.progress or state.progress, decoding=decoding)


def _is_stalled(state: LivenessState, policy: LivenessPolicy) -> bool:
    known_s = policy.pause_factor * state.longest_pause_s
    if state.decoding:
        return state.stalled_s >= max(policy.stall_s, known_s)
    if state.idle_s >= max(policy.prefill_stall_s, known_s):
        return True
    return state.stalled_s >= max(policy.busy_prefill_stall_s, known_s)


# --- diagnoses -------------------------------------------------------------------------------------------


def _unresponsive(observed: Observation, policy: LivenessPolicy) -> Diagnosis:
    if observed.cpu_usage is not None and observed.cpu_usage.stopped:
        why, remedy = ": the process is stopped", "Find the program that sent it SIGSTOP."
    else:
        why = ""
        remedy = "If this happens again, check whether the machine swaps or a GPU driver hangs (dmesg)."
    return _hang(
        "unresponsive",
        f"llama-server did not answer {policy.max_missed_checks} /health requests in a row{why}.",
        remedy,
    )


def _wedged(state: LivenessState, problem: str) -> Diagnosis:
    if state.stalled_s:
        symptom = f"its requests have made no progress for {state.stalled_s:.0f} s"
    else:
        symptom = f"its last {state.traffic.failures} answers were errors"
    return _hang(
        "wedged",
        f"llama-server answers /health, but {symptom}, and {problem}.",
        "If this happens again, try another llama.cpp build or fewer llama-server arguments after --.",
    )


def _hang(cause: str, message: str, remedy: str) -> Diagnosis:
    return Diagnosis(cause, message, remedy, lines=(), deterministic=False, exit_code=75)
