"""Explains why an instance does not serve: to requests (S9) with an answer, to commands with an error.

Both follow from the state of the instance and the diagnosis of its last child (pure).
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from llamasup.core.http.heads import HttpError
from llamasup.core.models.redaction import redact_paths
from llamasup.core.planning.ladder import OUT_OF_MEMORY
from llamasup.core.queueing.wait_estimate import retry_after_s, until_loaded_s
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import Instance, State
from llamasup.errors import DoesNotFit, GaveUp, LlamasupError, ServerFailed

STOPPING = HttpError(503, "The server is stopping", cause="stopping")
NOT_RUNNING = HttpError(
    503, "The model is not loaded", cause="stopped", remedy="load it: llamasup load", absent=True
)
_LACKS_MEMORY = frozenset({DoesNotFit.cause, *OUT_OF_MEMORY})


def is_last(instance: Instance) -> bool:
    """Whether no server will follow: none runs and no start is due, or the last one is ending."""
    is_ending = instance.state in {State.DRAINING, State.STOPPING}
    return instance.is_settled or (
        is_ending and instance.kill_reason is None and not instance.restart_pending
    )


def unavailable(
    instance: Instance,
    *,
    load: LoadProgress,
    start_in_s: float,
    load_s: float | None,
    wait_timeout_s: float,
    answers_while_loading: bool,
) -> HttpError:
    """The answer to a request that finds no open endpoint.

    ``load``: the progress of the current start. ``start_in_s``: until the next start. ``load_s``: the time of
    a load; None: not known. ``answers_while_loading``: llama-server answers during its first load itself, so
    no request waits for that.
    """
    match instance.state:
        case State.STARTING | State.LOADING if answers_while_loading:
            return _loading(load, load_s, queueable=False)
        case State.STARTING | State.LOADING | State.WARMING | State.READY:
            return _loading(load, load_s, queueable=True)
        case State.DRAINING | State.STOPPING if is_last(instance):
            return STOPPING
        case State.DRAINING | State.STOPPING:
            return HttpError(
                503,
                "The server is restarting",
                cause="restarting",
                retry_after_s=retry_after_s(load_s or 0.0),
                queueable=True,
            )
        case State.STOPPED:
            return NOT_RUNNING
        case State.BACKOFF | State.FAILED as state:
            last = instance.last
            in_time = start_in_s <= wait_timeout_s
            return HttpError(
                503,
                (last and redact_paths(last.message, ())) or f"{instance.program} ended",
                cause=last.cause if last else "",
                remedy=redact_paths(last.remedy, ()) if last else "",
                retry_after_s=retry_after_s(start_in_s + (load_s or 0.0)),
                queueable=state is State.BACKOFF and in_time and not answers_while_loading,
            )
        case _ as unreachable:
            assert_never(unreachable)


def _loading(load: LoadProgress, load_s: float | None, *, queueable: bool) -> HttpError:
    ready_in_s = until_loaded_s(load_s, load.elapsed_s) if load.eta_s is None else load.eta_s
    return HttpError(
        503,
        "Loading model",
        cause="loading",
        retry_after_s=retry_after_s(ready_in_s),
        queueable=queueable,
        percent=load.percent,
        eta_s=load.eta_s,
    )


def lacks_memory(error: LlamasupError) -> bool:
    """Whether memory was too small (as llamasup, llama-server or the kernel found), which may pass."""
    return error.cause in _LACKS_MEMORY


def failure_of(
    last: Instance, exit_code: int | None = None, *, log: Path | None = None
) -> ServerFailed | GaveUp:
    """The error for a failed instance.

    ``exit_code``: the child's own, if llamasup has to end with the same one. ``log``: the file to read if
    llamasup ends, because its command ``logs`` no longer shows it.
    """
    diagnosis = last.last
    remedy = "See its log (llamasup logs)." if diagnosis is None else diagnosis.remedy
    if log is not None:
        remedy = remedy.replace("(llamasup logs)", f"({log})")
    if diagnosis is None:
        return GaveUp(f"{last.program} failed for an unknown reason.", remedy=remedy)
    if diagnosis.deterministic:
        return ServerFailed(
            diagnosis.message,
            cause=diagnosis.cause,
            exit_code=diagnosis.exit_code if exit_code is None else exit_code,
            remedy=remedy,
            lines=diagnosis.lines,
        )
    count = len(last.crashes)
    crashes = (
        "1 crash" if count == 1 else f"{count} crashes"
    )  # earlier ones expire during half-open intervals
    return GaveUp(
        f"Gave up after {crashes} of {last.program}. The last one: {diagnosis.message}",
        remedy=remedy,
        lines=diagnosis.lines,
    )
