"""The answers to requests while a model does not serve (pure)."""

from __future__ import annotations

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.model_states import IN_TURN, Model, ModelState
from llamasup.core.queueing.wait_estimate import retry_after_s
from llamasup.core.system.text import memory_text
from llamasup.errors import LlamasupError


def pause_of(model: Model, *, awaited: bool = False) -> HttpError | None:
    """The answer to all requests, whether a process serves or not. None: the processes answer. ``awaited``:
    a command loads it.
    """
    match model.state:
        case ModelState.REMOVED:
            return model.answer
        case ModelState.UNLOADING if model.spec.stay.by_command and not awaited:
            return None
        case ModelState.CORDONED | ModelState.UNLOADING:
            return _being_unloaded(model.spec, model.for_id)
        case ModelState.ROLLING_OUT if model.rollout is not None and model.rollout.step in IN_TURN:
            return _CHANGING
        case _:
            return None


def reason_of(model: Model) -> HttpError | None:
    """The answer while no process serves or starts. If it is None, the answer of the last process is used."""
    if model.spec.stay.by_command:
        return None
    if model.error is not None:
        return as_unavailable(model.error, model.spec, model.answer)
    if model.sizing is not None and model.sizing.download is not None:
        return model.sizing.download
    return not_loaded(model.spec)


def as_unavailable(error: LlamasupError, spec: ModelSpec, why: HttpError | None = None) -> HttpError:
    """The response for a model that cannot be loaded; ``why``: the error of its server, if any."""
    why = why or HttpError(503, error.message, cause=error.cause, remedy=error.remedy)
    return replace(why, message=spec.public_problem(why.message), remedy=spec.redacted(why.remedy))


def not_loaded(spec: ModelSpec) -> HttpError:
    """The response to a request that may not wait for the load."""
    return HttpError(
        503,
        f"The model {spec.id!r} is not loaded",
        cause="loading",
        remedy="try again: the first request that may wait loads it",
        retry_after_s=1.0,
        queueable=True,
        absent=True,
    )


def downloading(spec: ModelSpec, done: int, total: int | None, bytes_per_s: int) -> HttpError:
    of = "" if total is None else f" of {memory_text(total)}"
    remaining_s = (total - done) / bytes_per_s if total is not None and bytes_per_s else None
    return HttpError(
        503,
        f"The model {spec.id!r} is being downloaded: {memory_text(done)}{of}",
        cause="downloading",
        retry_after_s=retry_after_s(remaining_s or 1.0),
        queueable=True,
        eta_s=remaining_s,
    )


def _being_unloaded(spec: ModelSpec, for_id: str) -> HttpError:
    purpose = f" to make room for {for_id!r}" if for_id else ""
    return HttpError(
        503,
        f"The model {spec.id!r} is being unloaded{purpose}",
        cause="unloading",
        retry_after_s=1.0,
        queueable=True,
        absent=True,
    )


_CHANGING = HttpError(503, "The model is being updated", cause="changing", retry_after_s=1.0, queueable=True)
