"""The steps of a model outside a swap: a model and an event in, the next model and the effects out (pure).

``model_table.py`` chooses the step. No step reads the clock or the memory of other models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from llamasup.core.pool.model_states import (
    Announce,
    CancelSizing,
    Cordoned,
    DownloadProgressed,
    Drop,
    Effect,
    EndLoads,
    EndRollout,
    Forget,
    Model,
    ModelState,
    Processes,
    ProcessesFailed,
    ProcessesReleased,
    ProcessesServing,
    ProcessesStatus,
    Purpose,
    Refused,
    RemoveRequested,
    Rollout,
    RolloutStep,
    Size,
    Sized,
    SizedUp,
    Sizing,
    SizingFailed,
    SpecChanged,
    SpecUpdated,
    Start,
    Stop,
    StopRequested,
    UnloadRequested,
    is_outdated,
)
from llamasup.core.supervision.events import LoadFailed, ModelUnloading
from llamasup.errors import LlamasupError

Outcome = tuple[Model, tuple[Effect, ...]]
Step = Callable[[Model, Any], Outcome]
Effects = tuple[Effect, ...]


def ignore(model: Model, _: object) -> Outcome:
    return model, ()


# --- parts of steps


def _begin_sizing(model: Model, purpose: Purpose) -> Outcome:
    """Size the newest spec."""
    ticket = model.made + 1
    return replace(model, made=ticket, sizing=Sizing(ticket, purpose)), (Size(ticket, model.spec),)


def _cancel_sizing(model: Model) -> Outcome:
    if model.sizing is None:
        return model, ()
    return replace(model, sizing=None), (CancelSizing(model.sizing.ticket),)


def end_rollout(model: Model, error: LlamasupError | None = None) -> Outcome:
    """End the rollout, if there is one, wherever it is."""
    if model.rollout is None:
        return model, ()
    model, cancelled = _cancel_sizing(model)
    return replace(model, rollout=None), (*cancelled, EndRollout(error))


def with_status(model: Model, id_: int, status: ProcessesStatus) -> Model:
    """The model with this status of its current or old processes."""
    if model.is_old(id_):
        return replace(model, old=Processes(id_, status))
    return replace(model, current=Processes(id_, status))


def stop_processes(model: Model, *, ends: bool = False, now: bool = False) -> Outcome:
    """Stop all processes that hold memory. ``ends``: llamasup ends, and nothing waits for their memory."""
    effects: list[Effect] = []
    for processes in model.holding:
        sized = model.old_sized if model.is_old(processes.id) else model.sized
        model = with_status(model, processes.id, ProcessesStatus.STOPPING)
        effects.append(Stop(processes.id, None if ends else sized, now))
    return model, tuple(effects)


def release(model: Model, id_: int) -> Outcome:
    """The memory of these processes is free. Old ones will not start again."""
    if model.is_old(id_):
        return replace(model, old=None, old_sized=None), (Drop(id_),)
    return with_status(model, id_, ProcessesStatus.STOPPED), ()


def settle(model: Model) -> Outcome:
    """The state that follows from the current processes."""
    assert model.current is not None
    if model.current.status is ProcessesStatus.SERVING:
        return replace(model, state=ModelState.RESIDENT, for_id=""), (EndLoads(),)
    return replace(model, state=ModelState.LOADING, for_id=""), ()


def fail(model: Model, error: LlamasupError) -> Outcome:
    """The failure of ``run`` and ``wrap`` is announced where llamasup ends."""
    model, cancelled = _cancel_sizing(model)
    announced = () if model.spec.stay.by_command else (Announce(LoadFailed(model.spec.id, error)),)
    return replace(model, state=ModelState.FAILED, error=error), (*cancelled, EndLoads(error), *announced)


# --- without processes


def forget_spec(model: Model, _: object = None) -> Outcome:
    """Forget everything about the spec of a model without processes."""
    model, cancelled = _cancel_sizing(model)
    dropped = () if model.current is None else (Drop(model.current.id),)
    changes = {"current": None, "sized": None, "error": None, "answer": None}
    return replace(model, state=ModelState.ABSENT, **changes), (*cancelled, *dropped)


def want(model: Model, _: object) -> Outcome:
    if model.sized is not None and not is_outdated(model):
        return model, ()
    model, dropped = forget_spec(model)
    model, size = _begin_sizing(model, "load")
    return replace(model, state=ModelState.SIZING), (*dropped, *size)


def unwanted(model: Model, _: object) -> Outcome:
    model, cancelled = _cancel_sizing(model)
    return replace(model, state=ModelState.ABSENT), cancelled


def load(model: Model, _: object) -> Outcome:
    """The processes of an earlier load start again; then their generation counts on."""
    if model.sized is None:
        return model, ()
    id_ = model.made + 1 if model.current is None else model.current.id
    loading = replace(model, state=ModelState.LOADING, current=Processes(id_), made=max(model.made, id_))
    return loading, (Start(id_, model.sized),)


def refuse(model: Model, event: Refused) -> Outcome:
    return fail(model, event.error)


def forget_failure(model: Model, event: object) -> Outcome:
    """Allow another load. Its file may be gone, and may have to be downloaded again."""
    if model.holding:
        return replace(model, state=ModelState.UNLOADING, error=None, answer=None), ()
    return forget_spec(model, event)


def change_failed_spec(model: Model, event: SpecChanged) -> Outcome:
    return forget_failure(replace(model, spec=event.spec), event)


def stop_stray(model: Model, event: ProcessesServing) -> Outcome:
    """A process started that has no memory of its own, such as by a restart that came too late."""
    ends = model.state is ModelState.REMOVED
    model, stops = stop_processes(with_status(model, event.id, ProcessesStatus.STARTING), ends=ends)
    if ends:
        return model, stops
    return replace(model, state=ModelState.UNLOADING, error=None, answer=None), stops


# --- sizings


def sized(model: Model, event: Sized) -> Outcome:
    sizing = model.sizing
    assert sizing is not None  # otherwise the event is stale
    model = replace(model, sizing=None)
    if sizing.outdated:
        return _begin_sizing(model, sizing.purpose)
    if sizing.purpose == "load":
        return replace(model, state=ModelState.ABSENT, sized=event.sized), (SizedUp(),)
    if sizing.purpose == "rollout":
        return replace(model, rollout=Rollout(RolloutStep.WAITING, event.sized)), ()
    return replace(model, sized=event.sized), ()


def sizing_failed(model: Model, event: SizingFailed) -> Outcome:
    sizing = model.sizing
    assert sizing is not None  # otherwise the event is stale
    model = replace(model, sizing=None)
    if sizing.outdated:
        return _begin_sizing(model, sizing.purpose)
    if sizing.purpose == "load":
        return fail(model, event.error)
    if sizing.purpose == "rollout":
        return end_rollout(model, event.error)
    return model, ()  # the estimate from before the load stays


def download_progressed(model: Model, event: DownloadProgressed) -> Outcome:
    assert model.sizing is not None  # otherwise the event is stale
    return replace(model, sizing=replace(model.sizing, download=event.answer)), ()


def budget_changed(model: Model, _: object) -> Outcome:
    """Another plan may fit: what was sized with the old budget, and is not started yet, is sized again."""
    if model.sizing is not None:
        model = replace(model, sizing=replace(model.sizing, outdated=True))
    if model.rollout is not None and model.rollout.step is RolloutStep.WAITING:
        return begin_rollout(model)
    return model, ()


def measure(model: Model, _: object) -> Outcome:
    """Size the model with the measurement of its load."""
    if model.sizing is not None or model.rollout is not None or model.sized is None or is_outdated(model):
        return model, ()
    return _begin_sizing(model, "measure")


# --- with processes


def starting(model: Model, event: ProcessesServing) -> Outcome:
    model = with_status(model, event.id, ProcessesStatus.STARTING)
    return (model, ()) if model.state is ModelState.CORDONED else settle(model)


def serving(model: Model, event: ProcessesServing) -> Outcome:
    model = with_status(model, event.id, ProcessesStatus.SERVING)
    return (model, ()) if model.state is ModelState.CORDONED else settle(model)


def processes_failed(model: Model, event: ProcessesFailed) -> Outcome:
    """A replica that would try again by itself is stopped: its memory may not be its own then. A model that
    shares no memory tries again.
    """
    if model.spec.stay.by_command and not event.settled:
        model, _ = settle(with_status(model, event.id, ProcessesStatus.STARTING))
        return model, (EndLoads(event.error),)
    is_replaced = model.rollout is not None
    model, ended = end_rollout(model)
    stops: Effects = ()
    if event.settled:
        model = with_status(model, event.id, ProcessesStatus.FAILED)
    else:
        model, stops = stop_processes(model)
    if is_replaced:  # the new spec may work: it is loaded if the model is still wanted
        model, dropped = forget_failure(model, event)
        return model, (*ended, *stops, *dropped)
    failed, effects = fail(replace(model, answer=event.answer, for_id=""), event.error)
    return failed, (*stops, *effects)


def cordon(model: Model, event: Cordoned) -> Outcome:
    return replace(model, state=ModelState.CORDONED, for_id=event.for_id), ()


def uncordon(model: Model, _: object) -> Outcome:
    return settle(model)


def unload(model: Model, event: UnloadRequested) -> Outcome:
    """The latest command wins: a rollout ends, wherever it is."""
    model, ended = end_rollout(model)
    model, stops = stop_processes(model)
    state = ModelState.UNLOADING if stops else ModelState.ABSENT
    announced = Announce(ModelUnloading(model.spec.id, event.reason, event.for_id))
    unloading = replace(model, state=state, for_id=event.for_id, error=None, answer=None)
    return unloading, (announced, *ended, *stops)


def released(model: Model, event: ProcessesReleased) -> Outcome:
    model, dropped = release(model, event.id)
    if model.holding:
        return model, dropped
    model = replace(model, state=ModelState.ABSENT, for_id="")
    if not is_outdated(model):
        return model, dropped
    model, forgotten = forget_spec(model)
    return model, (*dropped, *forgotten)


def release_only(model: Model, event: ProcessesReleased) -> Outcome:
    return release(model, event.id)


# --- changes and the end


def update_spec(model: Model, event: SpecUpdated | SpecChanged) -> Outcome:
    return replace(model, spec=event.spec), ()


def change_absent_spec(model: Model, event: SpecChanged) -> Outcome:
    """Forget the old file, and its sizing if one is under way. The next request sizes the new file."""
    return forget_spec(replace(model, spec=event.spec))


def roll_out(model: Model, event: SpecChanged) -> Outcome:
    return begin_rollout(replace(model, spec=event.spec))


def begin_rollout(model: Model, error: LlamasupError | None = None) -> Outcome:
    """Size the newest spec, unless the processes are of it: then the rollout ends with ``error``."""
    if not is_outdated(model):
        return end_rollout(model, error)
    model, cancelled = _cancel_sizing(model)
    model, size = _begin_sizing(model, "rollout")
    return replace(model, rollout=Rollout()), (*cancelled, *size)


def remove(model: Model, event: RemoveRequested) -> Outcome:
    held = model.holding
    model, effects = _end(model, event)
    if not held:
        return model, (*effects, Forget())
    return model, (Announce(ModelUnloading(model.spec.id, "removed")), *effects)


def stop(model: Model, event: StopRequested) -> Outcome:
    """Stop all processes. A second stop can be one that stops them ``now``."""
    if model.state is ModelState.REMOVED:
        return stop_processes(model, ends=True, now=event.now)
    model, effects = _end(model, event, ends=True, now=event.now)
    return replace(model, stopping=True), effects


def _end(
    model: Model, event: RemoveRequested | StopRequested, *, ends: bool = False, now: bool = False
) -> Outcome:
    model, ended = end_rollout(model)
    model, cancelled = _cancel_sizing(model)
    model, stops = stop_processes(model, ends=ends, now=now)
    removed = replace(model, state=ModelState.REMOVED, answer=event.answer, error=None, for_id="")
    return removed, (*ended, *cancelled, EndLoads(event.error), *stops)


def removed_released(model: Model, event: ProcessesReleased) -> Outcome:
    model, dropped = release(model, event.id)
    return model, dropped if model.stopping or model.holding else (*dropped, Forget())
