"""The facts about one model of a pool, and the state that follows from them (pure).

Times are not here: the pool decides when a model is loaded, evicted or tried again. ``model_steps.py`` has
the changes of a model, and ``effects.py`` what has to be done for a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, Protocol

from msgspec import Struct

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import remaining
from llamasup.core.pool.eviction_policy import Phase
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


LOADED = frozenset({ModelState.LOADING, ModelState.RESIDENT, ModelState.CORDONED})


class ProcessesStatus(StrEnum):
    """All replicas together."""

    STARTING = "starting"  # no process serves (any more); at least one starts, or will
    SERVING = "serving"  # at least one
    FAILED = "failed"  # no process serves or starts
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

Place = ModelState | RolloutStep
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
    """The processes of one spec, one per replica, as last seen or ordered. ``id`` is unique for the model.

    ``complete``: no other replica is still starting (SERVING). ``error``, ``answer``: of a failed server.
    ``settled``: no failed replica tries again by itself.
    """

    id: int
    status: ProcessesStatus = ProcessesStatus.STARTING
    complete: bool = True
    error: LlamasupError | None = None
    answer: HttpError | None = None
    settled: bool = True


class Rollout(Struct, frozen=True):
    """A change of spec under way.

    ``target``: the new spec, once it is sized. ``before``: what a failed start of it restores. ``build``:
    that of the old processes, while the new processes start.
    """

    step: RolloutStep = RolloutStep.SIZING
    target: Estimate | None = None
    before: Estimate | None = None
    build: str = ""
    error: LlamasupError | None = None

    @property
    def is_unproven(self) -> bool:
        return self.target is not None and self.target.spec.unproven


class RolloutEnd(Struct, frozen=True):
    """The end of a rollout. ``reload``: it ends with a load, because the model was loaded before."""

    error: LlamasupError | None = None
    reload: bool = False


class Removal(Struct, frozen=True):
    """The model is no longer served. ``error``: for ``load`` commands that wait. ``stops``: llamasup stops.
    ``now``: its processes do not wait for requests.
    """

    error: LlamasupError
    stops: bool = False
    now: bool = False


class Model(Struct, frozen=True):
    """The facts about one model. Its state follows from them.

    ``sized``: of ``current``, or for the next load. ``old``: processes that a rollout replaces.
    """

    spec: ModelSpec
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
    removal: Removal | None = None
    made: int = 0
    """The last number of a sizing or of processes."""
    reason: str = ""
    """Why its processes were stopped since the last load: see ``ModelUnloading``."""
    rollout_end: RolloutEnd = RolloutEnd()
    """The end of the last rollout."""

    @property
    def state(self) -> ModelState:
        if self.removal is not None:
            return ModelState.REMOVED
        if self.rollout is not None and self.rollout.step not in {RolloutStep.SIZING, RolloutStep.WAITING}:
            return ModelState.ROLLING_OUT
        if self.error is not None:
            return ModelState.FAILED
        if self.sizing is not None and self.sizing.purpose == "load":
            return ModelState.SIZING
        status = None if self.current is None else self.current.status
        if status is ProcessesStatus.STARTING or status is ProcessesStatus.SERVING:
            if self.for_id:
                return ModelState.CORDONED
            return ModelState.LOADING if status is ProcessesStatus.STARTING else ModelState.RESIDENT
        return ModelState.UNLOADING if self.holding else ModelState.ABSENT

    @property
    def place(self) -> Place:
        """Return the state, or the step of ROLLING_OUT."""
        state = self.state
        return self.rollout.step if state is ModelState.ROLLING_OUT and self.rollout is not None else state

    @property
    def processes(self) -> tuple[Processes, ...]:
        return tuple(each for each in (self.current, self.old) if each is not None)

    @property
    def holding(self) -> tuple[Processes, ...]:
        """The processes that hold memory."""
        return tuple(each for each in self.processes if each.status in HOLDING)

    @property
    def is_urgent(self) -> bool:
        """Whether its processes stop without waiting for requests."""
        return self.removal is not None and self.removal.now

    def __repr__(self) -> str:
        step = "" if self.rollout is None else f", rollout {self.rollout.step}"
        return f"<Model {self.spec.id!r}: {self.state}{step}, {self.current}, old {self.old}>"


def is_outdated(model: Model) -> bool:
    """Whether its spec changed after its processes were started."""
    return model.sized is not None and not model.sized.is_of(model.spec)


def is_proof_under_way(model: Model) -> bool:
    """Whether processes of an unproven build start or prove themselves while other processes serve."""
    is_beside = model.place in {RolloutStep.BESIDE, RolloutStep.PROVING}
    return is_beside and model.rollout is not None and model.rollout.is_unproven


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


def free_for(model: Model | None, others: Iterable[Model], budget: Mapping[str, int]) -> Mapping[str, int]:
    """Subtract the other models and the old replicas of this one from the budget. None: it is not served."""
    return remaining(budget, (*map(charged, others), {} if model is None else old_needs_of(model)))
