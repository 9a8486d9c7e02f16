"""Whether a server that is ready still lives: what to look at, and what follows from what was seen.

Decides only; ``runtime.watch`` looks. Two ways to be of no use although the process runs:

- *unresponsive*: ``/health`` is not answered. Skipped while the proxy sees the server work.
- *wedged*: ``/health`` says 200, but what is in flight does not move, or every answer is an error (llama.cpp
  #27388, #27505, #23268, #13281). That is only a suspicion: one token is asked for, and only if it does not
  come either is the server condemned.

What is no hang: a slow model (what it once took between two tokens it may take again), a long prompt (b11434
shows progress once per batch of 2,048 tokens, which is minutes on a CPU; all that can be seen meanwhile is
that the process works), a client that does not read, a ping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.health import Health, Proof
from llamasup.llama_server.progress import ServerWork
from llamasup.system.hardware.facts import CpuUsage

__all__ = ["LivenessPolicy", "Look", "Need", "Order", "Traffic", "Vigil", "judge", "needs"]


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """Every number of the watch. Times in seconds."""

    interval_s: float = 5.0
    """Between two looks. One costs 0.4 ms of CPU (measured), so an idle supervisor spends 0.01 % on it."""
    health_timeout_s: float = 2.0
    """b11434 answers within 1 ms, in the middle of a batch and with 200 requests open too."""
    most_misses: int = 3
    stall_s: float = 60.0
    """In flight, past the prompt, and nothing moves. The slowest machines that people use give a token in
    some seconds; those that do not are covered by ``pace``."""
    pace: float = 4.0
    """A pause is suspicious only when it is this many times the longest that was survived."""
    prefill_stall_s: float = 180.0
    """At a prompt, and the process does nothing: it waits for a device, which takes no longer than this for a
    batch of 2,048 tokens, were it as slow as 11 tokens a second."""
    busy_prefill_stall_s: float = 1800.0
    """At a prompt, and the process works: 2,048 tokens at one a second, the pace of a model far too large for
    its CPU. Not without limit, since a device wait that spins looks the same."""
    busy_cores: float = 0.1
    """A process works if it uses this much of a core; one that is stopped or waits uses nothing."""
    busy_read_bytes_s: float = 1e6
    """Or reads this fast: a model larger than memory comes from the disk for every batch."""
    most_failures: int = 3
    """Answers of 500 and more, in a row."""
    proof_timeout_s: float = 30.0
    ping_bytes: int = 16
    """Per request and look: a ping is 8 bytes in its frame, one in 30 s (b11434). The smallest event that
    holds a token is larger."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the proxy has seen: requests in flight, bytes of bodies, answers that hold what the model made,
    and how many since the last of those were 500 and more."""

    in_flight: int = 0
    bytes_relayed: int = 0
    answered: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at ``at_s``. None: not asked, or no answer."""

    at_s: float
    traffic: Traffic
    health: Health | None = None
    work: ServerWork | None = None
    cpu_usage: CpuUsage | None = None
    proof: Proof | None = None


@dataclass(frozen=True, slots=True)
class Vigil:
    """What is kept from look to look."""

    at_s: float
    stalled_s: float = 0.0
    """How long requests have been in flight since anything last moved. A client that gives up ends nothing:
    those who wait 30 s and try again would hide a wedge for ever."""
    idle_s: float = 0.0
    """For how much of that, up to now, the process has done nothing."""
    longest_pause_s: float = 0.0
    """Of those outside a prefill, after which it went on; at first, what the warm-up took."""
    misses: int = 0
    traffic: Traffic = Traffic()
    work: ServerWork | None = None
    cpu_usage: CpuUsage | None = None
    decoding: bool = True
    """Whether in this pause the slots have always said that nobody is at a prompt."""
    suspected_at_s: float | None = None
    """Since when a proof is awaited."""
    excused: int = 0
    """Failures in a row that a proof has made good."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the next look has to ask for."""

    health: bool
    work: bool


class Order(Enum):
    NOTHING = "nothing"
    PROVE = "prove"  # ask for one token
    DROP_PROOF = "drop the proof"  # what was suspected moves again


def needs(vigil: Vigil, traffic: Traffic, policy: LivenessPolicy) -> Need:
    """As little as will do: nothing of a server that is seen to work, ``/health`` of an idle one."""
    if _flows(vigil.traffic, traffic, policy):
        return Need(health=False, work=False)
    return Need(health=True, work=traffic.in_flight > 0)


def judge(vigil: Vigil, look: Look, policy: LivenessPolicy) -> tuple[Vigil, Order | Diagnosis]:
    """What to do after a look; a Diagnosis condemns the server."""
    busy = _is_busy(vigil, look, policy)
    moved = _moved(vigil, look, policy)
    vigil = replace(
        _after_pause(vigil, look) if moved else _in_pause(vigil, look, busy=busy),
        at_s=look.at_s,
        misses=_misses(vigil, look, busy=busy),
        traffic=look.traffic,
        cpu_usage=look.cpu_usage,
        excused=min(vigil.excused, look.traffic.failures),
    )
    if vigil.misses >= policy.most_misses:
        return vigil, _unresponsive(look, policy)
    if vigil.misses:
        return vigil, Order.NOTHING  # the next looks tell more than a token that cannot come
    # Each proof buys twice as many errors: a client that asks for what cannot be (501) goes on doing so.
    failing = look.traffic.failures >= max(policy.most_failures, 2 * vigil.excused)
    if vigil.suspected_at_s is not None:
        return _judge_suspect(vigil, look, policy, cleared=moved and not failing)
    if failing or _is_stalled(vigil, policy):
        return replace(vigil, suspected_at_s=look.at_s), Order.PROVE
    return vigil, Order.NOTHING


def _judge_suspect(
    vigil: Vigil, look: Look, policy: LivenessPolicy, *, cleared: bool
) -> tuple[Vigil, Order | Diagnosis]:
    assert vigil.suspected_at_s is not None
    if look.proof is not None and look.proof.missing is None:
        excused = look.traffic.failures
        return replace(vigil, suspected_at_s=None, stalled_s=0.0, idle_s=0.0, excused=excused), Order.NOTHING
    if cleared:
        return replace(vigil, suspected_at_s=None), Order.DROP_PROOF
    if look.proof is not None:
        return vigil, _wedged(vigil, look.proof.missing or "")
    timeout_s = max(policy.proof_timeout_s, policy.pace * vigil.longest_pause_s)
    if look.at_s - vigil.suspected_at_s >= timeout_s:
        return vigil, _wedged(vigil, f"one token did not come within {timeout_s:.0f} s")
    return vigil, Order.NOTHING


# --- what moves ------------------------------------------------------------------------------------------


def _flows(before: Traffic, now: Traffic, policy: LivenessPolicy) -> bool:
    """Whether the proxy itself has seen more than pings since."""
    pings = policy.ping_bytes * max(now.in_flight, 1)
    return now.answered > before.answered or now.bytes_relayed - before.bytes_relayed > pings


def _moved(vigil: Vigil, look: Look, policy: LivenessPolicy) -> bool:
    if _flows(vigil.traffic, look.traffic, policy):
        return True
    before, now = vigil.work or ServerWork(), look.work or ServerWork()
    if vigil.suspected_at_s is not None:
        # The proof moves the counters itself, and has a slot of its own: only what was there before tells.
        return any(now.tokens.get(task, 0) > tokens for task, tokens in before.tokens.items())
    # A request that is new in its slot has moved if it has come to anything.
    if any(tokens > before.tokens.get(task, 0) for task, tokens in now.tokens.items()):
        return True
    return before.total is not None and now.total is not None and now.total > before.total


def _misses(vigil: Vigil, look: Look, *, busy: bool) -> int:
    if look.health is not Health.SILENT:
        return 0
    # Builds of 2024 answer no /health in the middle of a batch.
    return vigil.misses if busy and look.traffic.in_flight else vigil.misses + 1


def _is_busy(vigil: Vigil, look: Look, policy: LivenessPolicy) -> bool:
    if vigil.cpu_usage is None or look.cpu_usage is None or look.at_s <= vigil.at_s:
        return False
    seconds = look.at_s - vigil.at_s
    cores = (look.cpu_usage.cpu_s - vigil.cpu_usage.cpu_s) / seconds
    read_bytes_s = (look.cpu_usage.read_bytes - vigil.cpu_usage.read_bytes) / seconds
    return cores >= policy.busy_cores or read_bytes_s >= policy.busy_read_bytes_s


def _after_pause(vigil: Vigil, look: Look) -> Vigil:
    pause_s = vigil.stalled_s + look.at_s - vigil.at_s if vigil.traffic.in_flight and vigil.decoding else 0.0
    return replace(
        vigil,
        stalled_s=0.0,
        idle_s=0.0,
        longest_pause_s=max(pause_s, vigil.longest_pause_s),
        work=look.work or vigil.work,
        decoding=True,
    )


def _in_pause(vigil: Vigil, look: Look, *, busy: bool) -> Vigil:
    if look.traffic.in_flight == 0:
        return vigil
    seconds = look.at_s - vigil.at_s
    vigil = replace(
        vigil, stalled_s=vigil.stalled_s + seconds, idle_s=0.0 if busy else vigil.idle_s + seconds
    )
    if vigil.suspected_at_s is not None:
        return vigil  # what the proof does must not be taken for what was there before
    decoding = vigil.decoding and look.work is not None and look.work.prefilling is False
    return replace(vigil, work=look.work or vigil.work, decoding=decoding)


def _is_stalled(vigil: Vigil, policy: LivenessPolicy) -> bool:
    known_s = policy.pace * vigil.longest_pause_s
    if vigil.decoding:
        return vigil.stalled_s >= max(policy.stall_s, known_s)
    if vigil.idle_s >= max(policy.prefill_stall_s, known_s):
        return True
    return vigil.stalled_s >= max(policy.busy_prefill_stall_s, known_s)


# --- what is said ----------------------------------------------------------------------------------------


def _unresponsive(look: Look, policy: LivenessPolicy) -> Diagnosis:
    if look.cpu_usage is not None and look.cpu_usage.stopped:
        why, remedy = ": it is stopped", "Find out who sent it SIGSTOP."
    else:
        why = ""
        remedy = "If it happens again, look for a machine that swaps or a driver that hangs (dmesg)."
    return _hang(
        "unresponsive",
        f"llama-server runs, but did not answer /health {policy.most_misses} times in a row{why}.",
        remedy,
    )


def _wedged(vigil: Vigil, missing: str) -> Diagnosis:
    if vigil.stalled_s:
        what = f"nothing in flight has moved for {vigil.stalled_s:.0f} s"
    else:
        what = f"its last {vigil.traffic.failures} answers were errors"
    return _hang(
        "wedged",
        f"llama-server answers /health, but {what}, and {missing}.",
        "If it happens again, try another llama.cpp build, or fewer special flags after --.",
    )


def _hang(cause: str, message: str, remedy: str) -> Diagnosis:
    return Diagnosis(cause, message, remedy, lines=(), deterministic=False, exit_code=75)
