"""The outcomes of a wait in a request queue, and its outlook until then.

A request that is not served is rejected: the queue is full, the model is busy, or the wait timed out.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import BUSY, Endpoint, Lease, Serving
from llamasup.core.queueing.wait_estimate import retry_after_s, until_served_s


class QueueListener(Protocol):
    """Gets the outcome of each wait of its entry, once, and never during ``enter`` or ``requeue``."""

    @property
    def body(self) -> bytes:
        """The request's body, to choose one of several replicas."""
        ...

    def served(self, lease: Lease) -> None: ...

    def refused(self, why: HttpError) -> None: ...


class Outlook(Struct, frozen=True):
    """The expectation of a waiting request. Its ``position`` is 1 if it is the next.

    ``wait_s``: an estimate of the wait. ``loads``: it waits for a generation, and not only for a permit.
    ``percent``: how much of the generation is loaded. ``eta_s``: when it will serve. None: not known.
    """

    position: int
    wait_s: float | None
    loads: bool
    percent: float | None = None
    eta_s: float | None = None


_LONGER = "try again, or raise the time that requests may wait (--wait-timeout; wait_timeout in the config)"


def no_room(state: Serving, waiting: int, *, may_wait: bool) -> HttpError:
    """Refuse a request that may not wait: ``waiting`` requests fill the queue, or no request may wait."""
    if isinstance(state, HttpError):
        return load_queue_full(state, waiting) if may_wait else state
    more = f", and {waiting} more {'waits' if waiting == 1 else 'wait'}" if waiting else ""
    free_s = free_in_s(state, 1)  # there is room again when the next permit is free
    return replace(
        BUSY,
        message=f"The model is busy with {_requests(state)}{more}",
        cause="queue_full",
        remedy="try again later",
        retry_after_s=retry_after_s(free_s),
        eta_s=free_s or None,
        queueable=False,
    )


def load_queue_full(why: HttpError, waiting: int) -> HttpError:
    """Refuse a request because the queue is full and nothing serves."""
    others = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
    return replace(
        why,
        message=f"{why.message}; {others} for it already",
        cause="waiting_room_full",
        remedy="try again later",
    )


def wait_timed_out(state: Serving, queued: int, timeout_s: float, *, reachable: bool) -> HttpError:
    """Refuse a request at its deadline. ``reachable``: an endpoint serves that is not ejected."""
    if isinstance(state, HttpError):
        why = state
    elif not reachable:
        why = HttpError(
            503, "llama-server accepts no connections", cause="upstream_unreachable", retry_after_s=1.0
        )
    else:
        why = replace(
            BUSY,
            status=503,
            type="unavailable_error",
            message=f"The model is busy with {_requests(state)}",
            retry_after_s=retry_after_s(free_in_s(state, queued + 1)),
            eta_s=free_in_s(state, queued + 1) or None,
        )
    return replace(
        why,
        message=f"{why.message}; this request has waited for {timeout_s:g} s",
        remedy=why.remedy or _LONGER,
    )


def free_in_s(endpoints: tuple[Endpoint, ...], position: int) -> float:
    """Estimate when the entry at ``position`` of the queue gets a permit; 0: not known."""
    held_s = [endpoint.held_s for endpoint in endpoints if endpoint.held_s is not None]
    mean_s = sum(held_s) / len(held_s) if held_s else None
    max_concurrent = sum(endpoint.max_concurrent for endpoint in endpoints)
    return until_served_s(position, max_concurrent, mean_s)


def _requests(endpoints: tuple[Endpoint, ...]) -> str:
    count = sum(endpoint.served for endpoint in endpoints)
    return "1 request" if count == 1 else f"{count} requests"
