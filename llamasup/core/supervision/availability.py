"""Answers requests that an instance cannot serve now: why, and whether they may wait for it (S9)."""

from __future__ import annotations

from typing import assert_never

from llamasup.core.models.redaction import redact_paths
from llamasup.core.queueing.unavailable import Unavailable
from llamasup.core.queueing.wait_estimate import retry_after_s
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import Instance, State

STOPPING = Unavailable(503, "The server is stopping", cause="stopping")
NOT_RUNNING = Unavailable(
    503, "The model is not loaded", cause="stopped", remedy="load it: llamasup load", absent=True
)
_LOADING = "Loading model"


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
    ready_in_s: float,
    start_in_s: float,
    load_s: float,
    wait_timeout_s: float,
    answers_while_loading: bool,
) -> Unavailable:
    """The answer to a request that finds no open endpoint.

    ``load``: how far the current start is. ``ready_in_s``: its estimated rest. ``start_in_s``: until the
    next start. ``load_s``: the time of a load; 0: not known. ``answers_while_loading``: llama-server answers
    during its first load itself, so no request waits for that.
    """
    match instance.state:
        case State.STARTING | State.LOADING if answers_while_loading:
            return _loading(load, ready_in_s, queueable=False)
        case State.STARTING | State.LOADING | State.WARMING | State.READY:
            return _loading(load, ready_in_s, queueable=True)
        case State.DRAINING | State.STOPPING if is_last(instance):
            return STOPPING
        case State.DRAINING | State.STOPPING:
            return Unavailable(
                503,
                "The server is restarting",
                cause="restarting",
                retry_after_s=retry_after_s(load_s),
                queueable=True,
            )
        case State.STOPPED:
            return NOT_RUNNING
        case State.BACKOFF | State.FAILED as state:
            last = instance.last
            in_time = start_in_s <= wait_timeout_s
            return Unavailable(
                503,
                (last and redact_paths(last.message, ())) or "llama-server ended",
                cause=last.cause if last else "",
                remedy=redact_paths(last.remedy, ()) if last else "",
                retry_after_s=retry_after_s(start_in_s + load_s),
                queueable=state is State.BACKOFF and in_time and not answers_while_loading,
            )
        case _ as unreachable:
            assert_never(unreachable)


def _loading(load: LoadProgress, ready_in_s: float, *, queueable: bool) -> Unavailable:
    return Unavailable(
        503,
        _LOADING,
        cause="loading",
        retry_after_s=retry_after_s(ready_in_s),
        queueable=queueable,
        percent=load.percent,
        eta_s=load.eta_s,
    )
