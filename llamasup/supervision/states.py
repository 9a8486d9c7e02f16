"""One supervised child as values: its states, what happens to it, and what is done about it.

The words of the table in ``core.lifecycle``, which says what follows from what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.slots.policy import MAX_BYTES
from llamasup.supervision.backoff import RestartPolicy
from llamasup.supervision.liveness import LivenessPolicy

__all__ = [
    "LIVE",
    "AwaitIdle",
    "CloseEndpoint",
    "Drained",
    "Effect",
    "Event",
    "Exited",
    "Healthy",
    "Instance",
    "Kill",
    "KillRequested",
    "LivenessFailed",
    "Loading",
    "Policy",
    "Probe",
    "Progressed",
    "Report",
    "RestartRequested",
    "RestoreSlots",
    "SaveSlots",
    "SlotRestoreCorrupted",
    "SlotsRestored",
    "SlotsSaved",
    "Spawn",
    "SpawnFailed",
    "Spawned",
    "StartRequested",
    "StartupFailureLogged",
    "State",
    "StopRequested",
    "Terminate",
    "TimerFired",
    "WakeAt",
    "WarmUp",
    "WarmupFailed",
    "WarmupSucceeded",
    "Watch",
]


class State(StrEnum):
    STOPPED = "stopped"  # no child, none wanted
    STARTING = "starting"  # the child is spawned; nothing heard of it yet
    LOADING = "loading"  # it lives and answers that it loads
    WARMING = "warming"  # it says that it is ready; one real token will prove it
    READY = "ready"  # requests are served
    DRAINING = "draining"  # no new requests; those in flight finish
    STOPPING = "stopping"  # told to end; waiting for its exit
    BACKOFF = "backoff"  # it crashed; the next start waits
    FAILED = "failed"  # given up: starting it again would fail again; or tried once in minutes (half-open)


LIVE = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.DRAINING, State.STOPPING})
"""The states in which a child exists that has not been reaped."""


@dataclass(frozen=True, slots=True)
class Policy:
    """All times in seconds."""

    warm_up: bool = True
    stall_timeout_s: float = 120.0
    """Longest time without any sign of progress while starting (S6); not a limit on the start itself."""
    wait_timeout_s: float = 120.0
    """How long a request may wait for a load, a restart or a place (S9); 0: not at all."""
    max_concurrent: int | None = None
    """How many requests it infers for at the same time; None: as many as the plan has slots."""
    limits_to_slots: bool = True
    """If not, only ``max_concurrent`` limits that."""
    max_queued: int = 256
    """How many requests may wait for a load or for a place; 0: none."""
    waits_for_first_load: bool = True
    """If not, llama-server itself answers while it loads for the first time: with 503, at once."""
    knows_all_keys: bool = True
    """If not, a server that asks for an unknown one is served without the proof of a first token."""
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    terminate_again_s: float = 0.5
    """A SIGTERM within 0.5 ms of the ready line is lost (12 of 40 tries at b11434); a second one is not."""
    kill_again_s: float = 5.0
    """A SIGKILLed process can linger in uninterruptible I/O; it is killed again at this interval."""
    slots_timeout_s: float = 10.0
    """How long what its slots hold may be saved before it ends, and restored before it serves."""
    slots_disk_bytes: int = MAX_BYTES
    """What all saved slots together, of whichever model, may take on the disk."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)

    @property
    def first_term_timeout_s(self) -> float:
        return min(self.terminate_again_s, self.stop_timeout_s)

    def permits(self, slots: int | None) -> int | None:
        """How many requests a plan with ``slots`` infers for at a time; None: any number.

        Who is not to wait here (``wait_timeout_s`` 0) is not refused for want of a slot either, unless there
        is a limit that somebody asked for: llama-server has a queue of its own.
        """
        if self.max_concurrent is not None:
            return self.max_concurrent
        return slots if self.limits_to_slots and self.wait_timeout_s > 0.0 else None


@dataclass(frozen=True, slots=True)
class Instance:
    """What is known of one instance. ``generation`` counts its children, the current or last one included."""

    state: State = State.STOPPED
    generation: int = 0
    alive: bool = False
    timer_id: int = 0
    """Number of the newest timer; the wake-ups of older ones are stale."""
    restart_pending: bool = False
    """Whether another child follows when the current one has ended."""
    term_resent: bool = False
    """Whether the child has been told twice to end, or been killed."""
    kill_reason: Diagnosis | None = None
    """Why we are ending the child ourselves, where it is its fault; counts as its crash."""
    ready: bool = False
    """Whether the current or last child ever became ready."""
    keeps_slots: bool = False
    """Whether what the slots of the current child hold outlives it."""
    moves_slots: bool = False
    """Whether that is being saved or restored now."""
    crashes: tuple[float, ...] = ()
    restarts: int = 0
    last: Diagnosis | None = None
    next_start_s: float | None = None
    """When it will be started without being asked: in BACKOFF, and in FAILED where that is tried."""
    half_open_since_s: float | None = None
    """When it was started out of FAILED; a crash soon after leads back there (half-open)."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will happen until somebody asks."""
        return self.state is State.STOPPED or (self.state is State.FAILED and self.next_start_s is None)


# --- events: asked by people -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartRequested:
    pass


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop kindly: drain, then SIGTERM."""


@dataclass(frozen=True, slots=True)
class KillRequested:
    """Stop now: a second Ctrl-C."""


@dataclass(frozen=True, slots=True)
class RestartRequested:
    pass


# --- events: facts about the child -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawned:
    generation: int
    pid: int
    keeps_slots: bool = False


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    generation: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Loading:
    """It answers, and says that the model is loading."""

    generation: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """A sign of life while starting: log lines, memory that grows, bytes read."""

    generation: int


@dataclass(frozen=True, slots=True)
class Healthy:
    """``/health`` says 200."""

    generation: int


@dataclass(frozen=True, slots=True)
class WarmupSucceeded:
    """It produced a real token (or vector, or score)."""

    generation: int


@dataclass(frozen=True, slots=True)
class WarmupFailed:
    generation: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class SlotsRestored:
    """All that there was to restore is, or there was nothing."""

    generation: int


@dataclass(frozen=True, slots=True)
class SlotRestoreCorrupted:
    """It took up only a part of a slot. What it wrote stays where later requests compute with it, and nothing
    but a new start removes it (#27068).
    """

    generation: int


@dataclass(frozen=True, slots=True)
class SlotsSaved:
    """As far as they could be."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartupFailureLogged:
    """It still loads, and has said itself that this cannot end well."""

    generation: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class LivenessFailed:
    """It lives, but serves no more: it does not answer, or what it works at does not move (S7, S8)."""

    generation: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is in flight any more."""

    generation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """It has ended and is reaped."""

    generation: int
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer_id: int


Event = (
    StartRequested
    | StopRequested
    | KillRequested
    | RestartRequested
    | Spawned
    | SpawnFailed
    | Loading
    | Progressed
    | Healthy
    | WarmupSucceeded
    | WarmupFailed
    | SlotsRestored
    | SlotRestoreCorrupted
    | SlotsSaved
    | StartupFailureLogged
    | LivenessFailed
    | Drained
    | Exited
    | TimerFired
)


# --- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    generation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Watch it until it says that it is ready."""

    generation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    generation: int


@dataclass(frozen=True, slots=True)
class RestoreSlots:
    generation: int


@dataclass(frozen=True, slots=True)
class SaveSlots:
    generation: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Look after it while it serves: does it still live?"""

    generation: int


@dataclass(frozen=True, slots=True)
class AwaitIdle:
    generation: int


@dataclass(frozen=True, slots=True)
class CloseEndpoint:
    """End what is in flight: llama-server itself would keep open streams till the next ping (b11434)."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Terminate:
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    generation: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    timer_id: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Tell people that a child failed. ``restart_in_s`` is None when it will not be restarted.

    ``by_us``: it did not die, but was of no use and was killed for that.
    """

    generation: int
    diagnosis: Diagnosis
    restart_in_s: float | None
    by_us: bool = False


Effect = (
    Spawn
    | Probe
    | WarmUp
    | RestoreSlots
    | Watch
    | AwaitIdle
    | SaveSlots
    | CloseEndpoint
    | Terminate
    | Kill
    | WakeAt
    | Report
)
