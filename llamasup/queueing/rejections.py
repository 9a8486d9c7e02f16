"""What a request hears that is not served: there are too many, all are busy, it took too long.

Words and hints alone; who hears them is for the waiting room to say.
"""

from __future__ import annotations

from dataclasses import replace

from llamasup.queueing.endpoint import BUSY, Endpoint, Serving, Unavailable
from llamasup.queueing.wait_estimate import retry_after_s, until_served_s

__all__ = ["queue_full", "server_busy", "wait_timed_out"]


_LONGER = "try again, or let requests wait for longer (--wait-timeout, in a config wait_timeout)"


def queue_full(why: Unavailable, waiting: int) -> Unavailable:
    """The room is full, and nothing serves; ``waiting``: how many are in it."""
    return replace(
        why,
        message=f"{why.message}; {waiting} requests wait for it already",
        cause="waiting_room_full",
        remedy="try again later",
    )


def server_busy(endpoints: tuple[Endpoint, ...], waiting: int, queued: int) -> Unavailable:
    """All places are taken, and the room is full. ``queued``: how many of ``waiting`` wait for a place."""
    more = f", and {waiting} more wait" if waiting else ""
    return replace(
        BUSY,
        message=f"The model is busy with {_requests(endpoints)}{more}",
        cause="queue_full",
        remedy="try again later",
        retry_after_s=_free_in_s(endpoints, queued),
        may_wait=False,
    )


def wait_timed_out(state: Serving, queued: int, timeout_s: float, *, reachable: bool) -> Unavailable:
    """One has waited for all of its time. ``reachable``: something serves that broke nothing off just now."""
    if isinstance(state, Unavailable):
        why = state
    elif not reachable:
        why = Unavailable(
            503, "llama-server accepts no connections", cause="upstream_unreachable", retry_after_s=1.0
        )
    else:
        why = replace(
            BUSY,
            status=503,
            type="unavailable_error",
            message=f"The model is busy with {_requests(state)}",
            retry_after_s=_free_in_s(state, queued),
        )
    return replace(
        why,
        message=f"{why.message}; this request has waited for {timeout_s:g} s",
        remedy=why.remedy or _LONGER,
    )


def _free_in_s(endpoints: tuple[Endpoint, ...], queued: int) -> float:
    """When a request that came now would be served, if it were the last of all."""
    held_s = [endpoint.held_s for endpoint in endpoints if endpoint.held_s is not None]
    mean_s = sum(held_s) / len(held_s) if held_s else None
    max_concurrent = sum(endpoint.max_concurrent for endpoint in endpoints)
    return retry_after_s(until_served_s(queued + 1, max_concurrent, mean_s))


def _requests(endpoints: tuple[Endpoint, ...]) -> str:
    count = sum(endpoint.served for endpoint in endpoints)
    return "1 request" if count == 1 else f"{count} requests"
