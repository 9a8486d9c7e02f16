"""The requests in flight and the last finished ones, for the control API.

Listing the requests in flight walks over the connections, and reads the slots of the llama-servers. Between
two listings, nothing is counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import monotonic
from typing import Any, Final

import msgspec

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.observability.access_record import access_record
from llamasup.core.observability.counters import CANCELLED, HeldSlots, RequestRecord
from llamasup.core.proxy.live.state import (
    InFlight,
    LiveConnection,
    LivePhase,
    LiveRequest,
    slots_of,
    with_progress,
)
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.errors import RequestUnknown

__all__ = ["FRESH_S", "MAX_ENDED", "LiveRequests"]

MAX_ENDED: Final = 200  # finished requests that are kept; about 1 KiB each
FRESH_S: Final = 0.25  # several clients share one query to each llama-server
_CANCELLED = HttpError(
    499,  # as google.rpc.Code maps CANCELLED; clients repeat a 409 or a 5xx by themselves
    "this request was cancelled by an administrator of the server",
    type="cancelled_error",
    cause="cancelled",
    remedy="contact the administrator before you send it again",
)

QuerySlots = Callable[[Endpoint], Awaitable[Sequence[SlotProgress] | None]]


class LiveRequests:
    """``connections``: all open ones.

    ``query_slots`` returns the busy slots of the llama-server of an endpoint, in the order of their tasks;
    None: it gave no answer. ``needs_key``: whether a client without a key is unknown.
    """

    def __init__(
        self,
        connections: Iterable[LiveConnection],
        query_slots: QuerySlots,
        clock: Callable[[], float] = monotonic,
        *,
        needs_key: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connections = connections
        self.ended_so_far = 0
        """How many requests have been noted."""
        self._ended: deque[tuple[datetime, RequestRecord]] = deque(maxlen=MAX_ENDED)
        self._query_slots = query_slots
        self._clock = clock
        self._needs_key = needs_key
        self._answers: dict[Endpoint, Sequence[SlotProgress]] = {}
        self._answered_s = float("-inf")
        self._querying = asyncio.Lock()
        self._first_tokens: dict[tuple[Endpoint, int], tuple[float, int]] = {}

    def _is_kept_refusal(self, record: RequestRecord) -> bool:
        """Whether it is a refusal of a known client. Unknown clients may cause any number of refusals."""
        is_unknown = record.status in (401, 403) or self._needs_key()
        is_known = record.client.startswith("key:") or not is_unknown
        return record.outcome == "refused" and bool(record.cause) and is_known

    async def in_flight(self, *, settled_s: float = 0.0) -> tuple[LiveRequest, ...]:
        """The requests in flight, oldest first. llama-server is asked for the slots only if a request has had
        its slot for ``settled_s``; without an answer, no token counts are known.
        """
        found = self._in_flight(self._clock())
        if await self._refresh(found, settled_s):
            found = self._in_flight(self._clock())
        slots = self._slots(found)
        shown = [self._shown(one, slots) for one in found]
        return tuple(sorted(shown, key=lambda request: -request.age_s))

    def note_ended(self, record: RequestRecord) -> None:
        """Keep a finished request, if it was for a model, or if a client may ask why it was refused."""
        if record.model or self._is_kept_refusal(record):
            self.ended_so_far += 1
            self._ended.append((datetime.now(UTC), record))

    def last_ended(self, count: int) -> tuple[dict[str, Any], ...]:
        """The last ``count`` finished requests for models, newest first."""
        last = islice(reversed(self._ended), count)
        return tuple(access_record(record, ended) for ended, record in last)

    def held_slots(self) -> Sequence[HeldSlots]:
        """The slots that are held now."""
        held = (connection.held_slots() for connection in self._connections)
        return [one for one in held if one is not None]

    def waiting_since(self) -> Sequence[float]:
        """Since when each request waits that has no slot yet (monotonic)."""
        since = (connection.waits_since() for connection in self._connections)
        return [since_s for since_s in since if since_s]

    def cancel(self, request_id: str) -> tuple[LiveRequest, ...]:
        """Cancel the requests with this id; a client may have given it to several. Returns them.

        Raises RequestUnknown.
        """
        cancelled = []
        for connection, one in self._of_models(self._clock()):
            if one.request.id == request_id:
                cancelled.append(one.request)
                connection.interrupt(_CANCELLED, CANCELLED)
        if not cancelled:
            raise RequestUnknown(
                f"No request in flight has the id {request_id[:100]!r}.",
                remedy="It may have finished. `llamasup top` shows the requests in flight.",
            )
        return tuple(cancelled)

    async def shown(self, ended: int) -> Mapping[str, Any]:
        """The requests in flight, and the last ``ended`` finished ones (docs/control.md)."""
        live = await self.in_flight()
        last = list(self.last_ended(ended))
        return {
            "live": msgspec.to_builtins(list(live)),
            "ended": msgspec.to_builtins(last),
            "ended_total": self.ended_so_far,
        }

    def shown_cancel(self, request_id: str) -> Mapping[str, Any]:
        """Cancel requests, as ``cancel`` does. Returns them as the control API shows them."""
        return {"cancelled": msgspec.to_builtins(list(self.cancel(request_id)))}

    def _of_models(self, now: float) -> Iterator[tuple[LiveConnection, InFlight]]:
        """The requests in flight, without those of the control API."""
        for connection in self._connections:
            one = connection.live(now)
            if one is not None and one.request.model != "":
                yield connection, one

    def _in_flight(self, now: float) -> Sequence[InFlight]:
        return [one for _, one in self._of_models(now)]

    async def _refresh(self, in_flight: Sequence[InFlight], settled_s: float) -> bool:
        """Read the slots of the busy servers, unless the last answers are fresh. False: without waiting."""
        now_s = self._clock()
        leases = [one.lease for one in in_flight if one.lease is not None]
        endpoints = {lease.endpoint for lease in leases if 0.0 < lease.since_s <= now_s - settled_s}
        if not endpoints:
            self._answers = {}
            return False
        async with self._querying:
            if self._clock() - self._answered_s >= FRESH_S:
                answers = await asyncio.gather(*map(self._query_slots, endpoints))
                answered = zip(endpoints, answers, strict=True)
                self._answers = {endpoint: slots for endpoint, slots in answered if slots is not None}
                self._answered_s = self._clock()
                self._remember_first_tokens()
        return True

    def _remember_first_tokens(self) -> None:
        """Store when each slot was first seen generating, to compute its speed."""
        self._first_tokens = {
            (endpoint, slot.task): self._first_tokens.get(
                (endpoint, slot.task), (self._answered_s, slot.decoded)
            )
            for endpoint, slots in self._answers.items()
            for slot in slots
            if slot.decoded
        }

    def _slots(self, in_flight: Sequence[InFlight]) -> Mapping[Lease, Sequence[SlotProgress]]:
        sending = {one.lease for one in in_flight if one.lease and one.request.phase is LivePhase.SENDING}
        found: dict[Lease, Sequence[SlotProgress]] = {}
        for endpoint, slots in self._answers.items():
            found.update(slots_of(endpoint, sending, slots))
        return found

    def _shown(self, one: InFlight, slots: Mapping[Lease, Sequence[SlotProgress]]) -> LiveRequest:
        own = slots.get(one.lease) if one.lease is not None else None
        if own is None or one.lease is None:
            return one.request
        return with_progress(one.request, own, self._speed(one.lease.endpoint, own, one.first_byte_s))

    def _speed(self, endpoint: Endpoint, slots: Sequence[SlotProgress], first_byte_s: float) -> float | None:
        """Tokens per second since the answer began, or since the first query that saw a token."""
        decoded = sum(slot.decoded for slot in slots)
        if first_byte_s:
            since_s, at_first = first_byte_s, len(slots)
        else:
            first = [self._first_tokens.get((endpoint, slot.task), (self._answered_s, 0)) for slot in slots]
            since_s, at_first = min(at for at, _ in first), sum(tokens for _, tokens in first)
        elapsed_s = self._answered_s - since_s
        return round((decoded - at_first) / elapsed_s, 2) if elapsed_s > 0 and decoded > at_first else None
