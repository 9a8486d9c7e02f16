"""The states, events and effects of one model of a pool (pure). ``model_table.py`` has the transitions.

Times are not here: the pool decides when a model is loaded, evicted or tried again, and posts an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Protocol

from msgspec import Struct

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.supervision.events import PublishedEvent
from llamasup.errors import LlamasupError


class ModelState(StrEnum):
    ABSENT = "absent"  # no process; a load may wait for memory
    SIZING = "sizing"  # no process; it is downloaded, and its memory is estimated
    LOADING = "loading"  # its processes start, or restart after a crash
    RESIDENT = "resident"  # a process serves
    CORDONED = "cordoned"  # gets no new requests, so that it can be evicted after those in flight
    ROLLING_OUT = "rolling_out"  # the processes of a new spec replace the old ones
    UNLOADING = "unloading"  # its processes stop; their memory is not free yet
    FAILED = "failed"  # cannot be loaded for now
    REMOVED = "removed"  # no longer served, or llamasup stops; the processes may still stop


class ProcessesStatus(StrEnum):
    """All replicas together."""

    STARTING = "starting"
    SERVING = "serving"  # at least one
    FAILED = "failed"
    STOPPING = "stopping"  # until their memory is free
    STOPPED = "stopped"


HOLDING = frozenset({ProcessesStatus.STARTING, ProcessesStatus.SERVING, ProcessesStatus.STOPPING})
"""The processes hold their memory."""


class RolloutStep(StrEnum):
    """The first two come before ROLLING_OUT, while the old processes keep their state."""

    SIZING = "sizing"  # the new spec
    WAITING = "waiting"  # the pool swaps one model at a time
    BESIDE = "beside"  # the new processes start, the old ones serve
    PROVING = "proving"  # both are ready; an unproven build proves itself, and the old processes serve
    DRAINING = "draining"  # the new processes serve, the old ones finish their requests
    STOPPING = "stopping"  # the old processes stop, because both do not fit
    FREED = "freed"  # their memory is free
    STARTING = "starting"  # the new processes start in it
    RESTORING = "restoring"  # they failed: the old spec is started again


IN_TURN = frozenset({RolloutStep.STOPPING, RolloutStep.FREED, RolloutStep.STARTING, RolloutStep.RESTORING})
"""No process serves; requests wait."""

Purpose = Literal["load", "rollout", "measure"]


class Estimate(Protocol):
    """The facts about a spec before its first start. ``needs``: bytes by device, of all replicas."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def needs(self) -> Mapping[str, int]: ...
    def is_of(self, spec: ModelSpec, /) -> bool:
        """Whether processes started from this match ``spec``."""
        ...


class Sizing(Struct, frozen=True):
    """A sizing under way. ``outdated``: the budget has changed since it began."""

    ticket: int
    purpose: Purpose
    outdated: bool = False
    download: HttpError | None = None
    """The answer to requests while it is downloaded."""


class Processes(Struct, frozen=True):
    """The processes of one spec, one per replica. ``id`` is unique for the model."""

    id: int
    status: ProcessesStatus = ProcessesStatus.STARTING


class Rollout(Struct, frozen=True):
    """A change of spec under way.

    ``target``: the new spec, once it is sized. ``before``: what a failed start of it restores. ``build``:
    that of the old processes, while the new ones start beside them.
    """

    step: RolloutStep = RolloutStep.SIZING
    target: Estimate | None = None
    before: Estimate | None = None
    build: str = ""
    error: LlamasupError | None = None


class Model(Struct, frozen=True):
    """The state of one model.

    ``sized``: of ``current``, or for the next load. ``old``: processes that a rollout replaces.
    """

    spec: ModelSpec
    state: ModelState = ModelState.ABSENT
    sized: Estimate | None = None
    sizing: Sizing | None = None
    current: Processes | None = None
    old: Processes | None = None
    old_sized: Estimate | None = None
    rollout: Rollout | None = None
    error: LlamasupError | None = None
    """Why it cannot be loaded for now (FAILED)."""
    answer: HttpError | None = None
    """The answer to requests in REMOVED; in FAILED, the error of its server, if any."""
    for_id: str = ""
    """The model that gets its memory (CORDONED, UNLOADING)."""
    stopping: bool = False
    """Whether llamasup stops (REMOVED)."""
    made: int = 0
    """The last number of a sizing or of processes."""

    @property
    def holding(self) -> tuple[Processes, ...]:
        """The processes that hold memory."""
        return tuple(
            processes
            for processes in (self.current, self.old)
            if processes is not None and processes.status in HOLDING
        )

    def is_old(self, id_: int) -> bool:
        """Whether a rollout replaces these processes."""
        return self.old is not None and self.old.id == id_

    def __repr__(self) -> str:
        step = "" if self.rollout is None else f", rollout {self.rollout.step}"
        return f"<Model {self.spec.id!r}: {self.state}{step}, {self.current}, old {self.old}>"


def is_outdated(model: Model) -> bool:
    """Whether its spec changed after its processes were started."""
    return model.sized is not None and not model.sized.is_of(model.spec)


def is_proof_under_way(model: Model) -> bool:
    """Whether processes of an unproven build start or prove themselves beside those that serve."""
    rollout = model.rollout
    if rollout is None or rollout.target is None or model.state is not ModelState.ROLLING_OUT:
        return False
    return rollout.target.spec.unproven and rollout.step in {RolloutStep.BESIDE, RolloutStep.PROVING}


def phase_of(model: Model) -> Phase:
    """The model as others see it. During the proof of a build, the old processes serve as before."""
    match model.state:
        case ModelState.ABSENT | ModelState.SIZING:
            return Phase.ABSENT
        case ModelState.ROLLING_OUT:
            if is_proof_under_way(model) and model.old is not None:
                is_serving = model.old.status is ProcessesStatus.SERVING
                return Phase.RESIDENT if is_serving else Phase.LOADING
            return Phase.LOADING  # it must not be evicted during a swap, also while the old processes serve
        case ModelState.REMOVED:
            return Phase.UNLOADING if model.holding else Phase.ABSENT
        case ModelState.FAILED if model.current in model.holding:
            return Phase.UNLOADING  # a replica that tries again by itself is stopped
        case _:
            return Phase(model.state.value)


def old_needs_of(model: Model) -> Mapping[str, int]:
    """The part of ``needs_of`` that is free again at the end of a rollout."""
    if model.old is not None and model.old_sized is not None:
        return model.old_sized.needs
    rollout = model.rollout
    if rollout is None or rollout.before is None or rollout.step is RolloutStep.RESTORING:
        return {}
    new = {} if model.sized is None else model.sized.needs  # its failure would restore the old spec
    spare = {device: size - new.get(device, 0) for device, size in rollout.before.needs.items()}
    return {device: size for device, size in spare.items() if size > 0}


def needs_of(model: Model) -> Mapping[str, int]:
    """Bytes by device that the model holds, or would hold if it were loaded."""
    new = {} if model.sized is None else model.sized.needs
    old = old_needs_of(model)
    return {device: new.get(device, 0) + old.get(device, 0) for device in {*new, *old}}


def charged(model: Model) -> Mapping[str, int]:
    """Bytes by device that no other model may use."""
    return {} if phase_of(model) in {Phase.ABSENT, Phase.FAILED} else needs_of(model)


# --- events: requests --------------------------------------------------------------------------------


class Wanted(Struct, frozen=True):
    """A request or a ``load`` command needs the model."""


class Unwanted(Struct, frozen=True):
    """Nothing needs the model any more."""


class RetryRequested(Struct, frozen=True):
    """A ``load`` command, or the time after a failure has passed."""


class UnloadRequested(Struct, frozen=True):
    """A command or the policy unloads it. ``reason`` and ``for_id``: see ``ModelUnloading``."""

    reason: str = "asked"
    for_id: str = ""


class RemoveRequested(Struct, frozen=True):
    """It is no longer served. ``answer`` and ``error``: for requests and ``load`` commands that wait."""

    answer: HttpError
    error: LlamasupError


class StopRequested(Struct, frozen=True):
    """llamasup stops. ``now``: do not wait for requests."""

    answer: HttpError
    error: LlamasupError
    now: bool = False


class SpecChanged(Struct, frozen=True):
    """The file or the settings changed: other processes are needed."""

    spec: ModelSpec


class SpecUpdated(Struct, frozen=True):
    """The spec changed, and its processes stay as they are."""

    spec: ModelSpec


class BudgetChanged(Struct, frozen=True):
    """Another plan may fit now."""


# --- events: decisions of the pool ---------------------------------------------------------------------


class LoadGranted(Struct, frozen=True):
    pass


class Refused(Struct, frozen=True):
    """It can never be loaded with this budget."""

    error: LlamasupError


class Cordoned(Struct, frozen=True):
    for_id: str


class Uncordoned(Struct, frozen=True):
    pass


class SwapGranted(Struct, frozen=True):
    """It is this model's turn. ``fits``: the new processes fit into the free memory, beside the old ones if
    those serve.
    """

    fits: bool


# --- events: facts about a sizing ----------------------------------------------------------------------


class SizingFact(Struct, frozen=True):
    """A fact about the sizing with this ticket."""

    ticket: int


class Sized(SizingFact, frozen=True):
    sized: Estimate


class SizingFailed(SizingFact, frozen=True):
    error: LlamasupError


class DownloadProgressed(SizingFact, frozen=True):
    """A download has progressed. ``answer``: to requests that may not wait."""

    answer: HttpError


# --- events: facts about processes ---------------------------------------------------------------------


class ProcessesFact(Struct, frozen=True):
    """A fact about these processes."""

    id: int


class ProcessesStarting(ProcessesFact, frozen=True):
    """No process serves (any more); at least one starts, or will."""


class ProcessesServing(ProcessesFact, frozen=True):
    """At least one process serves. ``complete``: no other replica is still starting."""

    complete: bool = True


class ProcessesFailed(ProcessesFact, frozen=True):
    """No process serves or starts. ``answer``: of its server. ``settled``: none tries again by itself."""

    error: LlamasupError
    answer: HttpError
    settled: bool = True


class ProcessesReleased(ProcessesFact, frozen=True):
    """They have stopped, and their memory is free."""


class Measured(ProcessesFact, frozen=True):
    """A load has measured the memory of the model."""


class Proven(ProcessesFact, frozen=True):
    """The build of these processes may serve."""


class Disproven(ProcessesFact, frozen=True):
    """The build of these processes is refused, or could not be judged."""

    error: LlamasupError


Event = (
    Wanted
    | Unwanted
    | RetryRequested
    | UnloadRequested
    | RemoveRequested
    | StopRequested
    | SpecChanged
    | SpecUpdated
    | BudgetChanged
    | LoadGranted
    | Refused
    | Cordoned
    | Uncordoned
    | SwapGranted
    | Sized
    | SizingFailed
    | DownloadProgressed
    | ProcessesStarting
    | ProcessesServing
    | ProcessesFailed
    | ProcessesReleased
    | Measured
    | Proven
    | Disproven
)


# --- effects -------------------------------------------------------------------------------------------


class Size(Struct, frozen=True):
    """Download the model if it is missing, and estimate its memory."""

    ticket: int
    spec: ModelSpec


class CancelSizing(Struct, frozen=True):
    ticket: int


class Start(Struct, frozen=True):
    """Start these processes; make them first if they are new. ``withheld``: they get no requests yet."""

    id: int
    sized: Estimate
    withheld: bool = False


class Prove(Struct, frozen=True):
    """Compare these processes with the old ones; then ``Proven`` or ``Disproven``."""

    id: int
    old_id: int


class Admit(Struct, frozen=True):
    """Send requests to these processes, which were withheld."""

    id: int
    sized: Estimate


class Withdraw(Struct, frozen=True):
    """Send these processes no more requests."""

    id: int


class Stop(Struct, frozen=True):
    """Stop these processes after their requests, or ``now``; then ``ProcessesReleased``."""

    id: int
    sized: Estimate | None
    now: bool = False


class Drop(Struct, frozen=True):
    """Forget these stopped processes."""

    id: int


class SizedUp(Struct, frozen=True):
    """The sizing for a load has succeeded."""


class EndLoads(Struct, frozen=True):
    """End the waiting ``load`` commands, with the error if there is one."""

    error: LlamasupError | None = None


class EndRollout(Struct, frozen=True):
    error: LlamasupError | None = None


class Reload(Struct, frozen=True):
    """Load the model again because it was loaded before the rollout, which ends with that load."""


class Announce(Struct, frozen=True):
    event: PublishedEvent


class Forget(Struct, frozen=True):
    """The removed model holds nothing any more."""


Effect = (
    Size
    | CancelSizing
    | Start
    | Prove
    | Admit
    | Withdraw
    | Stop
    | Drop
    | SizedUp
    | EndLoads
    | EndRollout
    | Reload
    | Announce
    | Forget
)
