"""The values of the supervision table (``state_machine.py``): states of an instance, events and effects.

``History`` keeps the last events of one instance, for ``status``, bug reports and exceptions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.settings.model import NO_REPAIRS, SLOTS_BYTES, Repairs
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.liveness import LivenessPolicy


class State(StrEnum):
    STOPPED = "stopped"  # no child, and no start requested
    STARTING = "starting"  # the child is spawned and has not answered yet
    LOADING = "loading"  # it answers that the model is loading
    WARMING = "warming"  # it answers that it is ready; the warm-up checks that
    READY = "ready"  # it serves requests
    DRAINING = "draining"  # no new requests; running ones finish
    STOPPING = "stopping"  # it got SIGTERM or SIGKILL and has not exited yet
    BACKOFF = "backoff"  # it crashed; the next start waits
    FAILED = "failed"  # no restart, because it would fail again; or one start every few minutes (half-open)


LLAMA_SERVER: Final = "llama-server"

LIVE = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.DRAINING, State.STOPPING})
"""The states in which a child exists that has not been reaped."""


class PolicyOptions(Struct, frozen=True, kw_only=True):
    """The part of a policy that the options of a service set. All times in seconds."""

    warm_up: bool = True
    stall_timeout_s: float = 120.0
    """Longest time without progress while starting (S6); the start itself has no limit."""
    wait_timeout_s: float = 120.0
    """How long a request may wait for a load, a restart or a permit (S9); 0: not at all."""
    max_concurrent: int | None = None
    """How many jobs run at the same time; None: as many as the plan has slots."""
    max_queued: int = 256
    """How many requests may wait for a load or a permit; 0: none."""
    continue_streams: bool = False
    """Whether streamed answers are continued by the next generation (``features/continuation/``)."""
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    slots_timeout_s: float = 10.0
    """Time limit for saving slots before the server ends, and for restoring them before it serves."""
    slots_disk_bytes: int = SLOTS_BYTES
    """Limit for the saved slots of all models on the disk (``Settings.keep_slots``)."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)


class Policy(PolicyOptions, frozen=True, kw_only=True):
    """All times in seconds."""

    limits_to_slots: bool = True
    """Whether the slots limit the running jobs; else only ``max_concurrent`` does."""
    waits_for_first_load: bool = True
    """If false, llama-server itself answers during its first load: with 503, at once."""
    knows_all_keys: bool = True
    """If false, a server that rejects the warm-up's API key (401) is served without a warm-up."""
    repairs: Repairs = NO_REPAIRS
    """The repairs of its requests and answers."""
    terminate_again_s: float = 0.5
    """A SIGTERM within 0.5 ms of the ready line is lost (12 of 40 tries at b11434); a second one is not."""
    kill_again_s: float = 5.0
    """A killed process can stay in uninterruptible I/O; SIGKILL is sent again at this interval."""

    @property
    def first_term_timeout_s(self) -> float:
        return min(self.terminate_again_s, self.stop_timeout_s)

    def permits(self, slots: int | None) -> int | None:
        """The number of jobs that a plan with ``slots`` runs at the same time; None: no limit.

        Without a queue in llamasup (``wait_timeout_s`` 0) the slots are no limit, because llama-server has
        a queue of its own; ``max_concurrent`` is.
        """
        if self.max_concurrent is not None:
            return self.max_concurrent
        return slots if self.limits_to_slots and self.wait_timeout_s > 0.0 else None


class Instance(Struct, frozen=True):
    """The state of one instance. ``generation`` is the number of its current or last child."""

    state: State = State.STOPPED
    generation: int = 0
    alive: bool = False
    timer_id: int = 0
    """Number of the newest timer; events of older timers are stale."""
    restart_pending: bool = False
    """Whether a new child starts once the current one has exited."""
    term_resent: bool = False
    """Whether the child got a second SIGTERM or a SIGKILL."""
    kill_reason: Diagnosis | None = None
    """Why llamasup kills a child that failed; counts as a crash."""
    ready: bool = False
    """Whether the current or last child ever became ready."""
    keeps_slots: bool = False
    """Whether the slots of the current child are saved before it ends."""
    transferring_slots: bool = False
    """Whether slots are being saved or restored now."""
    crashes: tuple[tuple[float, int], ...] = ()
    """The times of recent crashes, with their generations; without those that one request has caused."""
    waits: int = 0
    """How often a start has waited for an RPC worker since the last child."""
    restarts: int = 0
    last: Diagnosis | None = None
    next_start_s: float | None = None
    """When the next start comes by itself: in BACKOFF, and in FAILED if half-open."""
    half_open_since_s: float | None = None
    """When it was started from FAILED (half-open); a crash soon after leads back to FAILED."""
    program: str = LLAMA_SERVER
    """The name of its program in messages."""

    @property
    def is_settled(self) -> bool:
        """Whether it stays in this state until a request changes it."""
        return self.state is State.STOPPED or (self.state is State.FAILED and self.next_start_s is None)


def violations(instance: Instance) -> Iterator[str]:
    """The broken invariants, as sentences: what is true of every instance after every event.

    The tests check them, and so does asyncio's debug mode.
    """
    state, alive = instance.state, instance.alive
    if alive != (state in LIVE):
        yield f"a child {'exists' if alive else 'is missing'} in state {state}"
    if instance.next_start_s is not None and state not in {State.BACKOFF, State.FAILED}:
        yield f"a start is due in state {state}"
    if state is State.BACKOFF and instance.next_start_s is None:
        yield "no start is due in state backoff"
    if instance.restart_pending and state not in {State.DRAINING, State.STOPPING}:
        yield f"a restart is pending in state {state}"
    if instance.kill_reason is not None and state is not State.STOPPING:
        yield f"a kill reason is left in state {state}"
    if state is State.FAILED and instance.last is None:
        yield "no diagnosis in state failed"
    if instance.transferring_slots and not alive:
        yield "slots of no child are transferred"


# --- events: requests --------------------------------------------------------------------------------


class StartRequested(Struct, frozen=True):
    pass


class StopRequested(Struct, frozen=True):
    """Stop gracefully: drain, then SIGTERM."""


class KillRequested(Struct, frozen=True):
    """Stop at once, as after a second Ctrl-C."""


class RestartRequested(Struct, frozen=True):
    pass


# --- events about the child --------------------------------------------------------------------------


class ChildEvent(Struct, frozen=True):
    generation: int


class Diagnosed(ChildEvent, frozen=True):
    diagnosis: Diagnosis


class Spawned(ChildEvent, frozen=True):
    pid: int
    keeps_slots: bool = False


class SpawnFailed(Diagnosed, frozen=True):
    pass


class Loading(ChildEvent, frozen=True):
    """The answer of ``/health`` is that the model is loading."""


class Progressed(ChildEvent, frozen=True):
    """A sign of progress while starting: log lines, growing memory or bytes read."""


class Healthy(ChildEvent, frozen=True):
    """The answer of ``/health`` is 200."""


class WarmupSucceeded(ChildEvent, frozen=True):
    """The child produced a token, an embedding or a score."""


class WarmupFailed(Diagnosed, frozen=True):
    pass


class SlotsRestored(ChildEvent, frozen=True):
    """All saved slots are restored, or there were none."""


class SlotRestoreCorrupted(ChildEvent, frozen=True):
    """The child restored only a part of a slot. That part stays in the KV cache, where later requests would
    use it; only a new start removes it (#27068).
    """


class SlotsSaved(ChildEvent, frozen=True):
    """The slots are saved, as far as that was possible."""


class StartupFailureLogged(Diagnosed, frozen=True):
    """The log of a loading child shows that the start will fail."""


class LivenessFailed(Diagnosed, frozen=True):
    """The child runs but no longer serves: it does not answer, or its requests make no progress (S7, S8)."""


class Drained(ChildEvent, frozen=True):
    """The last running request has ended."""


class Exited(Diagnosed, frozen=True):
    """The child has exited and is reaped. ``explained``: a request that ran alone has ended two."""

    explained: bool = False


class CrashExplained(ChildEvent, frozen=True):
    """One request has ended this child, and a later one."""


class TimerFired(Struct, frozen=True):
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
    | CrashExplained
    | TimerFired
)


# --- effects -----------------------------------------------------------------------------------------


class _ChildEffect(Struct, frozen=True):
    generation: int


class Spawn(_ChildEffect, frozen=True):
    pass


class Probe(_ChildEffect, frozen=True):
    """Probe ``/health`` until it answers 200, and watch for progress."""


class WarmUp(_ChildEffect, frozen=True):
    pass


class RestoreSlots(_ChildEffect, frozen=True):
    pass


class SaveSlots(_ChildEffect, frozen=True):
    pass


class Watch(_ChildEffect, frozen=True):
    """Check liveness while it serves."""


class AwaitIdle(_ChildEffect, frozen=True):
    pass


class CloseEndpoint(_ChildEffect, frozen=True):
    """End running requests: llama-server itself would keep streams open until the next ping (b11434).

    Their clients get the reason, and ``diagnosis`` if the server did not end as requested.
    """

    reason: str
    diagnosis: Diagnosis | None = None


class Terminate(_ChildEffect, frozen=True):
    pass


class Kill(_ChildEffect, frozen=True):
    pass


class WakeAt(Struct, frozen=True):
    timer_id: int
    at_s: float


class Report(_ChildEffect, frozen=True):
    """Publish that a child failed. ``restart_in_s`` None: no restart. ``by_us``: llamasup killed it."""

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


# --- transitions --------------------------------------------------------------------------------------

Outcome = tuple[Instance, tuple[Effect, ...]]


class Transition(Struct, frozen=True):
    """The input of a step. ``now_s``: monotonic. ``roll``: uniform in [0, 1), for the jitter."""

    instance: Instance
    event: Event
    policy: Policy
    now_s: float
    roll: float

    def with_instance(self, **changes: Any) -> Transition:
        return replace(self, instance=replace(self.instance, **changes))

    def deadline(self, after_s: float, **changes: Any) -> tuple[Instance, WakeAt]:
        """Change the instance and set a new timer, which makes every earlier one stale."""
        timer_id = self.instance.timer_id + 1
        return replace(self.instance, timer_id=timer_id, **changes), WakeAt(timer_id, self.now_s + after_s)


# --- the last events -------------------------------------------------------------------------------

MAX_RECORDS = 50


class Record(Struct, frozen=True):
    """An event, and the state that it led to. ``count``: so many times in a row, the last one at ``time``.

    ``cause``: of a diagnosis. Never a message, because that may quote llama-server's log.
    """

    time: datetime
    event: str
    state: State
    generation: int
    cause: str = ""
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "time": self.time.isoformat(timespec="milliseconds"),
            "event": self.event,
            "state": self.state.value,
            "generation": self.generation,
        }
        if self.cause:
            shown["cause"] = self.cause
        if self.count > 1:
            shown["count"] = self.count
        return shown


class History:
    """The last ``MAX_RECORDS`` records, oldest first."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)

    def add(self, time: datetime, event: Event, state: State, generation: int) -> None:
        """Add a record of ``event``. ``state`` and ``generation`` are those after it."""
        cause: str = event.diagnosis.cause if hasattr(event, "diagnosis") else ""
        record = Record(time, _name(event), state, generation, cause)
        if self._records and replace(self._records[-1], time=time, count=1) == record:
            record = replace(record, count=self._records.pop().count + 1)
        self._records.append(record)

    @property
    def records(self) -> Sequence[Record]:
        return tuple(self._records)

    def as_json(self) -> list[dict[str, Any]]:
        return [record.as_json() for record in self._records]

    def __str__(self) -> str:
        """A line for each record."""
        return "\n".join(
            " ".join(str(field) for field in record.as_json().values()) for record in self._records
        )


def _name(event: Event) -> str:
    """``warmup_succeeded`` for ``WarmupSucceeded``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
