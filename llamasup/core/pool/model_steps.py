"""The changes of one model of a pool: wishes, decisions and facts (pure).

A step takes a model, and returns the next one. In states where it means nothing, or if it comes too late, it
returns the same model. No step reads the clock or the memory of other models. ``rollout_steps.py`` has the
steps of a swap, and ``effects.py`` derives from the two models what has to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.eviction_policy import Cordon, Evict, Load, Reject, Uncordon
from llamasup.core.pool.model_states import (
    HOLDING,
    LOADED,
    Estimate,
    Model,
    ModelState,
    Processes,
    ProcessesStatus,
    Purpose,
    Removal,
    Rollout,
    RolloutEnd,
    RolloutStep,
    Sizing,
    is_outdated,
)
from llamasup.errors import DoesNotFit, LlamasupError

Step = Callable[[Model], Model]
"""A function of this module or of ``rollout_steps.py``, with its other arguments."""

# --- parts of steps


def stopping(processes: Processes | None) -> Processes | None:
    """Order processes to stop, if they hold memory."""
    if processes is None or processes.status not in HOLDING:
        return processes
    return replace(processes, status=ProcessesStatus.STOPPING)


def stop_all(model: Model) -> Model:
    return replace(model, current=stopping(model.current), old=stopping(model.old))


def fail(model: Model, error: LlamasupError) -> Model:
    return replace(model, sizing=None, error=error)


def forget_spec(model: Model) -> Model:
    """Forget everything about the spec of a model without processes."""
    return replace(model, sizing=None, current=None, sized=None, error=None, answer=None)


def forget_failure(model: Model) -> Model:
    """Allow another load. Its file may be gone, and may have to be downloaded again."""
    return replace(model, error=None, answer=None) if model.holding else forget_spec(model)


def _begin_sizing(model: Model, purpose: Purpose) -> Model:
    """Size the newest spec."""
    ticket = model.made + 1
    return replace(model, made=ticket, sizing=Sizing(ticket, purpose))


def begin_rollout(model: Model, error: LlamasupError | None = None) -> Model:
    """Size the newest spec. If the processes already have it, finish the rollout with ``error``."""
    if not is_outdated(model):
        return end_rollout(model, error)
    return _begin_sizing(replace(model, rollout=Rollout()), "rollout")


def end_rollout(model: Model, error: LlamasupError | None = None) -> Model:
    """End the rollout, if there is one, wherever it is."""
    if model.rollout is None:
        return model
    return replace(model, rollout=None, rollout_end=RolloutEnd(error), sizing=None)


# --- wishes


def want(model: Model) -> Model:
    """A request or a ``load`` command needs the model."""
    if model.state is not ModelState.ABSENT or (model.sized is not None and not is_outdated(model)):
        return model
    return _begin_sizing(forget_spec(model), "load")


def unwant(model: Model) -> Model:
    """Nothing needs the model any more."""
    return forget_spec(model) if model.state is ModelState.SIZING else model


def retry(model: Model) -> Model:
    """A ``load`` command came, or the time after a failure has passed."""
    return forget_failure(model) if model.state is ModelState.FAILED else model


def unload(model: Model, reason: str = "asked", for_id: str = "") -> Model:
    """A command or the policy unloads it. The latest command wins: a rollout ends, wherever it is."""
    if model.state in {ModelState.SIZING, ModelState.FAILED}:
        return forget_failure(model)
    if model.state not in LOADED | {ModelState.ROLLING_OUT}:
        return model
    model = stop_all(end_rollout(model))
    return replace(model, reason=reason, for_id=for_id, error=None, answer=None)


def remove(model: Model, answer: HttpError, error: LlamasupError) -> Model:
    """It is no longer served. ``answer`` and ``error``: for requests and ``load`` commands that wait."""
    if model.removal is not None:
        return model
    reason = "removed" if model.holding else model.reason
    return _end(replace(model, reason=reason), answer, Removal(error))


def stop(model: Model, answer: HttpError, error: LlamasupError, *, now: bool = False) -> Model:
    """llamasup stops. A second stop can be one that stops them ``now``."""
    if model.removal is not None:
        return replace(model, removal=replace(model.removal, now=model.removal.now or now))
    return _end(model, answer, Removal(error, stops=True, now=now))


def _end(model: Model, answer: HttpError, removal: Removal) -> Model:
    model = stop_all(end_rollout(model))
    return replace(model, removal=removal, answer=answer, sizing=None, error=None, for_id="")


def update_spec(model: Model, spec: ModelSpec) -> Model:
    """The spec changed, and its processes stay as they are."""
    return replace(model, spec=spec)


def change_spec(model: Model, spec: ModelSpec) -> Model:
    """The file or the settings changed: other processes are needed. A model without processes forgets the old
    file, and the next request sizes the new one.
    """
    state, model = model.state, replace(model, spec=spec)
    if state in LOADED:
        return begin_rollout(model)
    if state in {ModelState.ABSENT, ModelState.SIZING, ModelState.FAILED}:
        return forget_failure(model)
    return model  # the swap, or the next load, will find it outdated


def change_budget(model: Model) -> Model:
    """Another plan may fit: what was sized with the old budget, and is not started yet, is sized again."""
    if model.state in {ModelState.ABSENT, ModelState.FAILED}:
        return forget_failure(model)
    if model.sizing is not None:
        model = replace(model, sizing=replace(model.sizing, outdated=True))
    if model.rollout is not None and model.rollout.step is RolloutStep.WAITING:
        return begin_rollout(model)
    return model


# --- decisions of the policy


def step_of(action: Load | Evict | Cordon | Uncordon | Reject) -> Step:
    match action:
        case Load():
            return load
        case Evict(_, reason, for_id):
            return partial(unload, reason=reason, for_id=for_id)
        case Cordon(_, for_id):
            return partial(cordon, for_id=for_id)
        case Uncordon():
            return uncordon
        case Reject(id_, reason):
            refused = DoesNotFit(f"Model {id_!r} does not fit: {reason}.", remedy=_DOES_NOT_FIT_REMEDY)
            return partial(refuse, error=refused)
        case _ as unreachable:
            assert_never(unreachable)


_DOES_NOT_FIT_REMEDY = (
    "Reduce its size (ctx_size, parallel), pin fewer models, or raise a limit (memory, max_loaded, groups)."
)


def load(model: Model) -> Model:
    """The processes of an earlier load start again; then their generation counts on."""
    if model.state is not ModelState.ABSENT or model.sized is None:
        return model
    id_ = model.made + 1 if model.current is None else model.current.id
    return replace(model, current=Processes(id_), made=max(model.made, id_), for_id="", reason="")


def refuse(model: Model, error: LlamasupError) -> Model:
    """It can never be loaded with this budget."""
    return fail(model, error) if model.state is ModelState.ABSENT else model


def cordon(model: Model, for_id: str) -> Model:
    return replace(model, for_id=for_id) if model.state is ModelState.RESIDENT else model


def uncordon(model: Model) -> Model:
    return replace(model, for_id="") if model.state is ModelState.CORDONED else model


# --- facts about sizings


def take_size(model: Model, ticket: int, found: Estimate | LlamasupError) -> Model:
    """The sizing with this ticket has ended. After a failed measurement, the estimate from before stays."""
    sizing = model.sizing
    if sizing is None or sizing.ticket != ticket:
        return model
    model = replace(model, sizing=None)
    if sizing.outdated:
        return _begin_sizing(model, sizing.purpose)
    if isinstance(found, LlamasupError):
        if sizing.purpose == "load":
            return fail(model, found)
        return end_rollout(model, found) if sizing.purpose == "rollout" else model
    if sizing.purpose == "rollout":
        return replace(model, rollout=Rollout(RolloutStep.WAITING, found))
    return replace(model, sized=found)


def note_download(model: Model, ticket: int, answer: HttpError) -> Model:
    """A download has progressed. ``answer``: to requests that may not wait."""
    if model.sizing is None or model.sizing.ticket != ticket:
        return model
    return replace(model, sizing=replace(model.sizing, download=answer))


def measure(model: Model, id_: int) -> Model:
    """Size the model with the measurement of a load by these processes."""
    is_known = any(each.id == id_ and each.status is not ProcessesStatus.STOPPING for each in model.processes)
    if not is_known or model.state in {ModelState.FAILED, ModelState.REMOVED}:
        return model
    if model.sizing is not None or model.rollout is not None or model.sized is None or is_outdated(model):
        return model
    return _begin_sizing(model, "measure")
