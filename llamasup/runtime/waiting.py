"""Where requests wait: for a generation that serves (S9, S10), and for one of the places that it has.

One queue for both reasons. Who is next is decided in ``core.fair_queue``; each waits for a limited time, and
there is a limit to how many do. Whoever waits can leave at any time. Nothing here touches a connection: the
proxy's waiters do.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from time import monotonic
from typing import Final, Protocol

from llamasup.core.fair_queue import FairQueue, Priority, Queued
from llamasup.core.retry import RetryBudget, RetryPolicy, spend
from llamasup.core.wait_estimate import retry_after_s, until_served_s
from llamasup.runtime.endpoint import BUSY, UNLIMITED, Endpoint, Lease, Unavailable

__all__ = ["GRACE_S", "MOST_BYTES", "MOST_WAITING", "Ticket", "Waiter", "WaitingRoom"]

MOST_WAITING: Final = 256  # S9; each holds a connection and its body
MOST_BYTES: Final = 256 << 20  # of bodies: a MiB each, which is a long prompt with an image
GRACE_S: Final = 0.5
"""For how long a generation that broke a request off gets none of those who wait. The end of a child is seen
within 0.1 s (S1), so whatever still serves after this was not dying."""


class Waiter(Protocol):
    """Hears, once for each time that its ticket waits, how that came out. Never while it enters."""

    def served(self, lease: Lease) -> None: ...

    def refused(self, why: Unavailable) -> None: ...


class Ticket(Queued):
    """One request's claim, through all the times that it waits. Times are monotonic, in seconds.

    ``needs_place``: it is work for the model itself. ``waited_s`` counts only the waiting for a generation;
    ``position`` is the one that it had when it began to wait (1: the next), 0 if it never did.
    """

    __slots__ = (
        "body_bytes",
        "deadline_s",
        "needs_place",
        "position",
        "replayed",
        "unserved_s",
        "waited_s",
        "waiter",
        "waits",
    )

    def __init__(
        self,
        waiter: Waiter,
        arrived_s: float,
        body_bytes: int,
        *,
        client: str = "",
        priority: Priority = Priority.NORMAL,
        needs_place: bool = True,
    ) -> None:
        super().__init__(arrived_s, client, priority)
        self.waiter = waiter
        self.body_bytes = body_bytes
        self.needs_place = needs_place
        self.waits = False
        self.waited_s = 0.0  # in all
        self.position = 0
        self.replayed = False  # a generation that it had been sent to ended, and it was put back
        self.deadline_s = 0.0
        self.unserved_s = 0.0  # the room's reading when it entered


class _Timer(Protocol):
    def cancel(self) -> None: ...


def _call_later(delay_s: float, callback: Callable[[], None]) -> _Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class WaitingRoom:
    """``look`` says what the instance can do now: the endpoint that serves, or why none does.

    ``timeout_s`` 0: nobody waits. One timer for all: the earliest of what is due.
    """

    __slots__ = (
        "_budget",
        "_bytes",
        "_call_later",
        "_clock",
        "_held_until_s",
        "_look",
        "_most",
        "_placeless",
        "_policy",
        "_queue",
        "_read_at_s",
        "_serves",
        "_serving",
        "_shunned",
        "_timeout_s",
        "_timer",
        "_timer_at_s",
        "_unserved_s",
    )

    def __init__(
        self,
        look: Callable[[], Endpoint | Unavailable],
        *,
        timeout_s: float,
        most: int = MOST_WAITING,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = monotonic,
        call_later: Callable[[float, Callable[[], None]], _Timer] = _call_later,
    ) -> None:
        self._look = look
        self._timeout_s = timeout_s
        self._most = most
        self._policy = RetryPolicy() if policy is None else policy
        self._clock = clock
        self._call_later = call_later
        self._budget = RetryBudget(self._policy.floor, clock())
        # At most ``most`` in both together.
        self._queue: FairQueue[Ticket] = FairQueue()
        self._placeless: list[Ticket] = []  # who need no place: all are served as soon as a generation serves
        self._bytes = 0
        self._serving = False  # within _serve: who is served may be gone at once, and make room for the next
        self._shunned = 0  # the last generation that broke a request off
        self._held_until_s = 0.0
        self._timer: _Timer | None = None
        self._timer_at_s = 0.0
        # A clock that runs while no generation serves.
        self._unserved_s = 0.0
        self._read_at_s = clock()
        self._serves = True

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue) + len(self._placeless)

    # --- what the proxy does

    def enter(self, ticket: Ticket) -> Unavailable | None:
        """Let a request that just came wait; or the reason why it may not."""
        state = self._look()
        if isinstance(state, Unavailable):
            if not state.may_wait or not self._timeout_s:
                return state
            if self._is_full(ticket):
                return self._too_many(state)
        elif not self._timeout_s or self._is_full(ticket):
            return self._too_busy(state)
        now_s = self._clock()
        ticket.deadline_s = now_s + self._timeout_s
        self._admit(ticket, state, now_s)
        return None

    def put_back(self, ticket: Ticket, broken: Endpoint, *, sent: bool) -> bool:
        """Take a request back that ``broken`` has dropped before any byte of a response.

        ``sent``: that generation may have begun with it. This is allowed once for a request, and within the
        budget (S10); one that never reached a server may come back until its time is up. A full room takes as
        many as had a place all the same: they had their turn, and it was not their fault.
        """
        spare = broken.places if broken.places < UNLIMITED else 0
        if self.verdict() is not None or not self._timeout_s or self._is_full(ticket, spare):
            return False
        now_s = self._clock()
        if sent:
            if ticket.replayed or not self._may_replay(broken, now_s):
                return False
            ticket.replayed = True
            ticket.deadline_s = now_s + self._timeout_s  # for a new wait: the first may be long ago
        elif not ticket.deadline_s:
            ticket.deadline_s = now_s + self._timeout_s
        elif ticket.deadline_s <= now_s:
            return False
        if ticket.turn is None:
            ticket.turn = 0  # it was served before anybody had to wait
        if broken.generation >= self._shunned:
            self._shunned = broken.generation
            self._held_until_s = now_s + GRACE_S
        self._admit(ticket, self._look(), now_s)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Its client has gone. May be repeated."""
        if ticket.waits:
            self._remove(ticket)

    def verdict(self) -> Unavailable | None:
        """Why nobody may wait, where that is so: no generation will come by itself."""
        state = self._look()
        return state if isinstance(state, Unavailable) and not state.may_wait else None

    # --- what the instance does

    def changed(self) -> None:
        """The instance is in another state: serve those who wait, refuse them, or let them wait on."""
        if len(self):
            self._settle(self._clock())

    def place_free(self) -> None:
        """One of the generation's places is free: it belongs to the next of those who wait for one."""
        if self._queue and not self._serving:
            state = self._look()
            if isinstance(state, Endpoint):
                self._serve(state, self._clock())

    def close(self, why: Unavailable) -> None:
        """There is no instance any more."""
        self._look = lambda: why
        self.changed()

    # --- within

    def _is_full(self, ticket: Ticket, spare: int = 0) -> bool:
        return len(self) >= self._most + spare or self._bytes + ticket.body_bytes > MOST_BYTES

    def _may_replay(self, broken: Endpoint, now_s: float) -> bool:
        self._budget, granted = spend(
            self._budget, self._policy, generation=broken.generation, answered=broken.answered, now_s=now_s
        )
        return granted

    def _lacks_place(self, ticket: Ticket, endpoint: Endpoint) -> bool:
        return ticket.needs_place and endpoint.busy >= endpoint.places

    def _is_held(self, endpoint: Endpoint, now_s: float) -> bool:
        return endpoint.generation == self._shunned and now_s < self._held_until_s

    def _admit(self, ticket: Ticket, state: Endpoint | Unavailable, now_s: float) -> None:
        serves = isinstance(state, Endpoint) and not self._is_held(state, now_s)
        self._read(now_s, serves=serves)
        ticket.waits = True
        ticket.unserved_s = self._unserved_s
        self._bytes += ticket.body_bytes
        if ticket.needs_place:
            self._queue.add(ticket)
            position = self._queue.position(ticket)
        else:
            insort(self._placeless, ticket, key=lambda waits: waits.arrived_s)
            position = 1
        ticket.position = ticket.position or position
        at_once = serves and isinstance(state, Endpoint) and not self._lacks_place(ticket, state)
        due_s = ticket.deadline_s if serves else min(ticket.deadline_s, self._release_s(now_s))
        self._wake_at(now_s if at_once else due_s, now_s)

    def _remove(self, ticket: Ticket) -> None:
        if ticket.needs_place:
            self._queue.remove(ticket)
        else:
            self._placeless.remove(ticket)
        self._left(ticket, self._clock())

    def _left(self, ticket: Ticket, now_s: float) -> None:
        """It is in no queue any more."""
        self._read(now_s, serves=self._serves)
        self._bytes -= ticket.body_bytes
        ticket.waits = False
        ticket.waited_s += self._unserved_s - ticket.unserved_s
        if self._timer is not None and not len(self):
            self._timer.cancel()
            self._timer = None

    def _read(self, now_s: float, *, serves: bool) -> None:
        """Read the clock of waiting for a generation, and stop it or let it run from here on."""
        if not self._serves:
            self._unserved_s += now_s - self._read_at_s
        self._read_at_s = now_s
        self._serves = serves

    def _settle(self, now_s: float) -> None:
        state = self._look()
        self._read(now_s, serves=isinstance(state, Endpoint) and not self._is_held(state, now_s))
        if isinstance(state, Endpoint):
            self._serve(state, now_s)
        elif not state.may_wait:
            self._refuse(tuple(self._all()), state)
        late = tuple(ticket for ticket in self._all() if ticket.deadline_s <= now_s)
        if late:
            self._refuse(late, self._too_long(state, now_s))
        if len(self):
            earliest_s = min(ticket.deadline_s for ticket in self._all())
            self._wake_at(min(earliest_s, self._release_s(now_s)), now_s)

    def _all(self) -> Iterator[Ticket]:
        return chain(self._placeless, self._queue)

    def _serve(self, endpoint: Endpoint, now_s: float) -> None:
        """Give away all the places that are free. Serving one may make others leave, or come back."""
        if self._serving:
            return
        self._serving = True
        try:
            while not endpoint.closed and not self._is_held(endpoint, now_s):
                if self._placeless:
                    ticket = self._placeless.pop(0)
                elif self._queue and endpoint.busy < endpoint.places:
                    ticket = self._queue.pop()
                else:
                    return
                self._left(ticket, now_s)
                ticket.waiter.served(endpoint.lease(infers=ticket.needs_place))
        finally:
            self._serving = False

    def _refuse(self, tickets: tuple[Ticket, ...], why: Unavailable) -> None:
        for ticket in tickets:
            if ticket.waits:
                self._remove(ticket)
                ticket.waiter.refused(why)

    # --- what those hear who are not served

    def _too_many(self, state: Unavailable) -> Unavailable:
        return replace(
            state,
            message=f"{state.message}; {len(self)} requests wait for it already",
            cause="waiting_room_full",
            remedy="try again later",
        )

    def _too_busy(self, endpoint: Endpoint) -> Unavailable:
        waiting = f", and {len(self)} more wait" if len(self) else ""
        return replace(
            BUSY,
            message=f"The model is busy with {_requests(endpoint.busy)}{waiting}",
            cause="queue_full",
            remedy="try again later",
            retry_after_s=self._free_in_s(endpoint),
            may_wait=False,
        )

    def _too_long(self, state: Endpoint | Unavailable, now_s: float) -> Unavailable:
        if isinstance(state, Endpoint) and (self._is_held(state, now_s) or state.busy < state.places):
            state = Unavailable(
                503, "llama-server accepts no connections", cause="upstream_unreachable", retry_after_s=1.0
            )
        elif isinstance(state, Endpoint):
            state = replace(
                BUSY,
                status=503,
                type="unavailable_error",
                message=f"The model is busy with {_requests(state.busy)}",
                retry_after_s=self._free_in_s(state),
            )
        return replace(
            state,
            message=f"{state.message}; this request has waited for {self._timeout_s:g} s",
            remedy=state.remedy or "try again, or let requests wait for longer with --wait-timeout",
        )

    def _free_in_s(self, endpoint: Endpoint) -> float:
        """When a request that came now would be served, if it were the last of all."""
        return retry_after_s(until_served_s(len(self._queue) + 1, endpoint.places, endpoint.held_s))

    # --- the timer

    def _release_s(self, now_s: float) -> float:
        """When the generation that broke something off gets requests again; nothing is due then otherwise."""
        return self._held_until_s if now_s < self._held_until_s else float("inf")

    def _wake_at(self, at_s: float, now_s: float) -> None:
        if self._timer is not None:
            if self._timer_at_s <= at_s:
                return
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = self._call_later(max(0.0, at_s - now_s), self._woke)

    def _woke(self) -> None:
        self._timer = None
        self._settle(self._clock())


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
