"""Where requests wait that came before their model serves, or that its end threw back (S9, S10).

They are served in the order in which they arrived, each waits for a limited time, and there is a limit to how
many do. Whoever waits can leave at any time. Nothing here touches a connection: the proxy's waiters do.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final, Protocol

from llamasup.core.retry import RetryBudget, RetryPolicy, spend
from llamasup.runtime.endpoint import Endpoint, Lease, Unavailable

__all__ = ["GRACE_S", "MOST_BYTES", "MOST_WAITING", "Ticket", "Waiter", "WaitingRoom"]

MOST_WAITING: Final = 256  # S9; each holds a connection and its body
MOST_BYTES: Final = 256 << 20  # of bodies: a MiB each, which is a long prompt with an image
GRACE_S: Final = 0.5
"""How long a request that a generation broke off keeps away from it. The end of a child is seen within
0.1 s (S1), so whatever still serves after this was not dying."""


class Waiter(Protocol):
    """Hears, once for each time that its ticket waits, how that came out. Never while it enters."""

    def served(self, lease: Lease) -> None: ...

    def refused(self, why: Unavailable) -> None: ...


class Ticket:
    """One request's claim, through all the times that it waits. Times are monotonic, in seconds."""

    __slots__ = (
        "arrived_s",
        "body_bytes",
        "deadline_s",
        "entered_s",
        "held_until_s",
        "replayed",
        "shunned",
        "waited_s",
        "waiter",
        "waits",
    )

    def __init__(self, waiter: Waiter, arrived_s: float, body_bytes: int) -> None:
        self.waiter = waiter
        self.arrived_s = arrived_s
        self.body_bytes = body_bytes
        self.waits = False
        self.waited_s = 0.0  # in all
        self.replayed = False  # a generation that it had been sent to ended, and it was put back
        self.deadline_s = 0.0
        self.entered_s = 0.0
        self.shunned = 0  # the generation that broke it off
        self.held_until_s = 0.0


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
        "_look",
        "_most",
        "_policy",
        "_tickets",
        "_timeout_s",
        "_timer",
        "_timer_at_s",
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
        self._tickets: list[Ticket] = []  # in order of arrival; at most ``most``
        self._bytes = 0
        self._timer: _Timer | None = None
        self._timer_at_s = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._tickets)

    # --- what the proxy does

    def enter(self, ticket: Ticket) -> Unavailable | None:
        """Let a request that just came wait; or the reason why it may not."""
        state = self._look()
        if isinstance(state, Unavailable):
            if not state.may_wait or not self._timeout_s:
                return state
            if self._is_full(ticket):
                return replace(
                    state,
                    message=f"{state.message}; {len(self._tickets)} requests wait for it already",
                    cause="waiting_room_full",
                    remedy="try again later",
                )
        now_s = self._clock()
        ticket.deadline_s = now_s + self._timeout_s
        self._admit(ticket, state, now_s)
        return None

    def put_back(self, ticket: Ticket, broken: Endpoint, *, sent: bool) -> bool:
        """Take a request back that ``broken`` has dropped before any byte of a response.

        ``sent``: that generation may have begun with it. This is allowed once for a request, and within the
        budget (S10); one that never reached a server may come back until its time is up.
        """
        if self.verdict() is not None or not self._timeout_s or self._is_full(ticket):
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
        ticket.shunned = broken.generation
        ticket.held_until_s = now_s + GRACE_S
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
        if self._tickets:
            self._settle(self._clock())

    def close(self, why: Unavailable) -> None:
        """There is no instance any more."""
        self._look = lambda: why
        self.changed()

    # --- within

    def _is_full(self, ticket: Ticket) -> bool:
        return len(self._tickets) >= self._most or self._bytes + ticket.body_bytes > MOST_BYTES

    def _may_replay(self, broken: Endpoint, now_s: float) -> bool:
        self._budget, granted = spend(
            self._budget, self._policy, generation=broken.generation, answered=broken.answered, now_s=now_s
        )
        return granted

    def _admit(self, ticket: Ticket, state: Endpoint | Unavailable, now_s: float) -> None:
        ticket.waits = True
        ticket.entered_s = now_s
        self._bytes += ticket.body_bytes
        insort(self._tickets, ticket, key=_arrival)
        served_now = isinstance(state, Endpoint) and state.generation != ticket.shunned
        self._wake_at(now_s if served_now else _due_s(ticket, now_s), now_s)

    def _remove(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self._bytes -= ticket.body_bytes
        ticket.waits = False
        ticket.waited_s += self._clock() - ticket.entered_s
        if not self._tickets and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, now_s: float) -> None:
        state = self._look()
        if isinstance(state, Endpoint):
            self._serve(state, now_s)
        elif not state.may_wait:
            self._refuse(tuple(self._tickets), state)
        late = tuple(ticket for ticket in self._tickets if ticket.deadline_s <= now_s)
        if late:
            self._refuse(late, self._too_long(state))
        if self._tickets:
            self._wake_at(min(_due_s(ticket, now_s) for ticket in self._tickets), now_s)

    def _serve(self, endpoint: Endpoint, now_s: float) -> None:
        for ticket in tuple(self._tickets):
            if endpoint.closed:
                return
            held = ticket.shunned == endpoint.generation and now_s < ticket.held_until_s
            if ticket.waits and not held:  # serving one may make another leave
                self._remove(ticket)
                ticket.waiter.served(endpoint.lease())

    def _refuse(self, tickets: tuple[Ticket, ...], why: Unavailable) -> None:
        for ticket in tickets:
            if ticket.waits:
                self._remove(ticket)
                ticket.waiter.refused(why)

    def _too_long(self, state: Endpoint | Unavailable) -> Unavailable:
        if isinstance(state, Endpoint):
            state = Unavailable(
                503, "llama-server accepts no connections", cause="upstream_unreachable", retry_after_s=1.0
            )
        return replace(
            state,
            message=f"{state.message}; this request has waited for {self._timeout_s:g} s",
            remedy=state.remedy or "try again, or let requests wait for longer with --wait-timeout",
        )

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


def _arrival(ticket: Ticket) -> float:
    return ticket.arrived_s


def _due_s(ticket: Ticket, now_s: float) -> float:
    """When something is to be done about it, if nothing happens to the instance until then."""
    if now_s < ticket.held_until_s < ticket.deadline_s:
        return ticket.held_until_s
    return ticket.deadline_s
