"""One model of a pool as a table: state and event in, next state and effects out (pure).

``advance_model`` is the only writer of a ``Model``. The pool (``pool.py``) posts the events and carries out
the effects, those outside llamasup through its driver. ``is_stale`` names the events that are dropped: those
of a sizing or of processes that the model does not have any more, and those of processes that stop.

The rows of ROLLING_OUT are those of its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llamasup.core.pool import model_steps as steps
from llamasup.core.pool import rollout_steps as rollout
from llamasup.core.pool.model_states import (
    BudgetChanged,
    Cordoned,
    Disproven,
    DownloadProgressed,
    Event,
    LoadGranted,
    Measured,
    Model,
    ModelState,
    ProcessesFact,
    ProcessesFailed,
    ProcessesReleased,
    ProcessesServing,
    ProcessesStarting,
    ProcessesStatus,
    Proven,
    Refused,
    RemoveRequested,
    RetryRequested,
    RolloutStep,
    Sized,
    SizingFact,
    SizingFailed,
    SpecChanged,
    SpecUpdated,
    StopRequested,
    SwapGranted,
    Uncordoned,
    UnloadRequested,
    Unwanted,
    Wanted,
    is_proof_under_way,
)
from llamasup.core.pool.model_steps import Outcome, Step, ignore

Place = ModelState | RolloutStep
Rows = Mapping[type[Event], Step]


class InvalidModelEvent(Exception):
    """The table has no row for this state and event: the caller has a bug."""

    def __init__(self, model: Model, event: Event) -> None:
        super().__init__(f"{model!r} cannot get {event!r}")


# Requests and decisions that change nothing here, or that came too late.
_IDLE: Rows = dict.fromkeys(
    (
        *(Wanted, Unwanted, RetryRequested, LoadGranted, Refused, Cordoned, Uncordoned, SwapGranted),
        *(UnloadRequested, BudgetChanged, Measured),
    ),
    ignore,
)
_ENDING: Rows = {RemoveRequested: steps.remove, StopRequested: steps.stop}
_ANY: Rows = {**_IDLE, **_ENDING, SpecUpdated: steps.update_spec}
_SIZING: Rows = {
    Sized: steps.sized,
    SizingFailed: steps.sizing_failed,
    DownloadProgressed: steps.download_progressed,
    BudgetChanged: steps.budget_changed,
    Measured: steps.measure,
}
_STRAY: Rows = {
    ProcessesStarting: steps.stop_stray,
    ProcessesServing: steps.stop_stray,
    ProcessesFailed: ignore,
}
_LOADED: Rows = {
    **_ANY,
    **_SIZING,
    UnloadRequested: steps.unload,
    SpecChanged: steps.roll_out,
    SwapGranted: rollout.swap,
    ProcessesStarting: steps.starting,
    ProcessesServing: steps.serving,
    ProcessesFailed: steps.processes_failed,
}
_SWAPPING: Rows = {**_ANY, UnloadRequested: steps.unload, SpecChanged: steps.update_spec}

TABLE: Mapping[Place, Rows] = MappingProxyType(
    {
        ModelState.ABSENT: {
            **_ANY,
            **_SIZING,
            **_STRAY,
            Wanted: steps.want,
            LoadGranted: steps.load,
            Refused: steps.refuse,
            SpecChanged: steps.change_absent_spec,
            BudgetChanged: steps.forget_spec,
        },
        ModelState.SIZING: {
            **_ANY,
            **_SIZING,
            Unwanted: steps.unwanted,
            UnloadRequested: steps.unwanted,
            SpecChanged: steps.change_absent_spec,
        },
        ModelState.LOADING: _LOADED,
        ModelState.RESIDENT: {**_LOADED, Cordoned: steps.cordon},
        ModelState.CORDONED: {**_LOADED, Uncordoned: steps.uncordon},
        RolloutStep.BESIDE: {
            **_SWAPPING,
            ProcessesStarting: rollout.still_starting,
            ProcessesServing: rollout.promote,
            ProcessesFailed: rollout.new_failed_beside,
            ProcessesReleased: steps.release_only,
            Disproven: rollout.disproven,
        },
        RolloutStep.PROVING: {
            **_SWAPPING,
            ProcessesStarting: rollout.starting_while_proving,
            ProcessesServing: rollout.still_serving,
            ProcessesFailed: rollout.new_failed_beside,
            ProcessesReleased: steps.release_only,
            Proven: rollout.proven,
            Disproven: rollout.disproven,
        },
        RolloutStep.DRAINING: {
            **_SWAPPING,
            ProcessesStarting: rollout.still_starting,
            ProcessesServing: rollout.still_serving,
            ProcessesFailed: rollout.failed_while_draining,
            ProcessesReleased: rollout.drained,
        },
        RolloutStep.STOPPING: {**_SWAPPING, ProcessesReleased: rollout.stopped_old},
        RolloutStep.FREED: {**_SWAPPING, SwapGranted: rollout.start_new},
        RolloutStep.STARTING: {
            **_SWAPPING,
            ProcessesStarting: rollout.still_starting,
            ProcessesServing: rollout.new_serving,
            ProcessesFailed: rollout.new_failed_in_turn,
        },
        RolloutStep.RESTORING: {
            **_SWAPPING,
            ProcessesStarting: rollout.still_starting,
            ProcessesServing: rollout.restored,
            ProcessesFailed: rollout.restore_failed,
        },
        ModelState.UNLOADING: {
            **_ANY,
            **_SIZING,
            **_STRAY,
            SpecChanged: steps.update_spec,
            ProcessesReleased: steps.released,
        },
        ModelState.FAILED: {
            **_ANY,
            **_STRAY,
            RetryRequested: steps.forget_failure,
            UnloadRequested: steps.forget_failure,
            BudgetChanged: steps.forget_failure,
            SpecChanged: steps.change_failed_spec,
            ProcessesReleased: steps.release_only,
        },
        ModelState.REMOVED: {
            **_ANY,
            **_STRAY,
            RemoveRequested: ignore,
            SpecChanged: steps.update_spec,
            ProcessesReleased: steps.removed_released,
        },
    }
)


def place_of(model: Model) -> Place:
    """The key of the model's rows."""
    if model.state is ModelState.ROLLING_OUT:
        assert model.rollout is not None
        return model.rollout.step
    return model.state


def is_stale(model: Model, event: Event) -> bool:
    match event:
        case SizingFact(ticket):
            return model.sizing is None or model.sizing.ticket != ticket
        case ProcessesReleased(id_):
            return id_ not in _ids(model, stopping=True)
        case Proven(id_):
            return place_of(model) is not RolloutStep.PROVING or not _is_current(model, id_)
        case Disproven(id_):
            return not is_proof_under_way(model) or not _is_current(model, id_)
        case ProcessesFact(id_):
            return id_ not in _ids(model, stopping=False)
        case _:
            return False


def _is_current(model: Model, id_: int) -> bool:
    return model.current is not None and model.current.id == id_


def _ids(model: Model, *, stopping: bool) -> set[int]:
    return {
        processes.id
        for processes in (model.current, model.old)
        if processes is not None and (processes.status is ProcessesStatus.STOPPING) is stopping
    }


def advance_model(model: Model, event: Event) -> Outcome:
    """The next state of the model, and the effects in order."""
    if is_stale(model, event):
        return model, ()
    step = TABLE[place_of(model)].get(type(event))
    if step is None:
        raise InvalidModelEvent(model, event)
    return step(model, event)
