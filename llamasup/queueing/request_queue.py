"""The queue of a model: requests wait for a generation that serves (S9, S10), or for a permit.

``queue_order.py`` decides the order. The number of requests and their waits are bounded, and a client can
leave at any time. Nothing here touches a connection: the listeners of the proxy do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import monotonic
from typing import Final, Protocol

from msgspec import Struct

from llamasup.http.heads import Priority
from llamasup.queueing.endpoint import UNLIMITED, Endpoint, Lease, Serving
from llamasup.queueing.queue_order import FairQueue, Queued
from llamasup.queueing.rejections import busy_queue_full, free_in_s, load_queue_full, wait_timed_out
from llamasup.queueing.retry_budget import RetryBudget, RetryPolicy, spend
from llamasup.queueing.unavailable import Unavailable
from llamasup.system.timers import CallLater, DeadlineTimer, call_later

__all__ = [
    "GRACE_S",
    "MAX_BYTES",
    "MAX_WAITING",
    "Outlook",
    "Preference",
    "QueueEntry",
    "QueueListener",
    "RequestQueue",
]

MAX_WAITING: Final = 256  # S9; each holds a connection and its body
MAX_BYTES: Final = 256 << 20  # of bodies: a MiB each, which is a long prompt with an image
GRACE_S: Final = 0.5
"""How long a generation that broke a request is ejected. The exit of a child is noticed within 0.1 s (S1), so
a generation that serves after this time was not dying."""


class QueueListener(Protocol):
    """Gets the outcome of each wait of its entry, once, and never during ``enter`` or ``requeue``."""

    @property
    def body(self) -> bytes:
        """The request's body, to choose one of several replicas."""
        ...

    def served(self, lease: Lease) -> None: ...

    def refused(self, why: Unavailable) -> None: ...


class Outlook(Struct, frozen=True):
    """``position``: 1 for the next. ``wait_s``: the expected wait, an estimate; None: not known.

    ``loads``: it waits for a generation, and not only for a permit. ``percent``: how much of it is loaded.
    ``eta_s``: when it will serve; None: not known.
    """

    position: int
    wait_s: float | None
    loads: bool
    percent: float | None = None
    eta_s: float | None = None


class QueueEntry(Queued):
    """One request, through all its waits. Times are monotonic, in seconds.

    ``needs_permit``: it is work for the model itself. ``waited_s``: the waits for a generation, without those
    for a permit. ``position``: its position when it first queued (1: the next), 0 if it never did. ``notes``:
    what ``prefer`` keeps of its body while it waits.
    """

    __slots__ = (
        "body_bytes",
        "deadline_s",
        "listener",
        "needs_permit",
        "notes",
        "position",
        "queue",
        "replayed",
        "since_s",
        "unserved_s",
        "waited_s",
        "waits",
    )

    def __init__(
        self,
        listener: QueueListener,
        arrived_s: float,
        body_bytes: int,
        *,
        client: str = "",
        priority: Priority = Priority.NORMAL,
        needs_permit: bool = True,
    ) -> None:
        super().__init__(arrived_s, client, priority)
        self.listener = listener
        self.body_bytes = body_bytes
        self.needs_permit = needs_permit
        self.waits = False
        self.queue: RequestQueue | None = None  # the one that it entered last
        self.waited_s = 0.0
        self.position = 0
        self.notes: object = None
        self.replayed = False  # requeued once because its generation ended
        self.since_s = 0.0  # when this wait began
        self.deadline_s = 0.0
        self.unserved_s = 0.0  # the queue's unserved clock when it entered

    def __repr__(self) -> str:
        return f"<QueueEntry of {self.client!r}: {self.priority.name.lower()}, {self.jobs} jobs>"

    def begin(self, now_s: float, timeout_s: float) -> None:
        self.since_s = now_s
        self.deadline_s = now_s + timeout_s


Preference = Callable[[QueueEntry], bool]


def _least_busy(entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
    return min(endpoints, key=lambda endpoint: endpoint.busy)


class RequestQueue:
    """``get_serving`` returns the endpoints that serve (at least one), or why none does.

    ``choose`` picks one of several endpoints that can take a request. ``prefer`` gets all that serve, if some
    of them are busy, and returns which entries suit a free one; None: all. ``on_wanted`` is called for each
    request that queues, or may not queue, while nothing serves; ``on_unserved`` for each that leaves the
    queue unserved, with its rejection if it got one. ``timeout_s`` 0: no request queues. One timer covers the
    earliest deadline of all entries.
    """

    __slots__ = (
        "_budget",
        "_bytes",
        "_choose",
        "_clock",
        "_clock_read_s",
        "_entering",
        "_get_serving",
        "_in_serve",
        "_is_served",
        "_max_waiting",
        "_on_unserved",
        "_on_wanted",
        "_policy",
        "_prefer",
        "_queue",
        "_successor",
        "_timeout_s",
        "_timer",
        "_unlimited",
        "_unserved_s",
        "continues_streams",
    )

    def __init__(
        self,
        get_serving: Callable[[], Serving],
        *,
        timeout_s: float,
        max_waiting: int = MAX_WAITING,
        continues_streams: bool = False,
        choose: Callable[[QueueEntry, Sequence[Endpoint]], Endpoint] = _least_busy,
        prefer: Callable[[Sequence[Endpoint]], Preference | None] | None = None,
        on_wanted: Callable[[], None] | None = None,
        on_unserved: Callable[[Unavailable | None], None] | None = None,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater = call_later,
    ) -> None:
        self._get_serving = get_serving
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self.continues_streams = continues_streams
        """Whether a request returns to the queue if its server ends while it streams the answer."""
        self._choose = choose
        self._prefer = prefer
        self._on_wanted = on_wanted
        self._on_unserved = on_unserved
        self._policy = RetryPolicy() if policy is None else policy
        self._clock = clock
        self._budget = RetryBudget(self._policy.floor, clock())
        self._queue: FairQueue[QueueEntry] = FairQueue()
        self._unlimited: list[QueueEntry] = []  # they need no permit: the next generation serves them all
        self._bytes = 0
        self._in_serve = False  # inside _serve: a served request may end at once and free its permit
        self._successor: RequestQueue | None = None  # the queue of the model that replaces this one
        self._entering = False  # inside ``on_wanted`` of a new entry: no listener is called
        self._timer = DeadlineTimer(self._on_timer, call_later=call_later, clock=clock)
        # The unserved clock runs while no generation serves.
        self._unserved_s = 0.0
        self._clock_read_s = clock()
        self._is_served = True

    def __repr__(self) -> str:
        return f"<RequestQueue: {len(self)} waiting>"

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._queue) + len(self._unlimited)

    @property
    def oldest_s(self) -> float:
        """The start of the longest wait (monotonic); inf if the queue is empty."""
        return min((entry.since_s for entry in self._entries()), default=float("inf"))

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may. A large one may also be refused before."""
        return len(self) >= self._max_waiting

    def set_limits(self, *, timeout_s: float, max_waiting: int, continues_streams: bool = False) -> None:
        """Limits for new entries; waiting ones stay."""
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self.continues_streams = continues_streams

    # --- for the proxy
    def enter(self, entry: QueueEntry) -> Unavailable | None:
        """Queue a new request. Returns the reason if it may not wait."""
        if self._successor is not None:
            return self._successor.enter(entry)
        state = self._get_serving()
        if isinstance(state, Unavailable):
            if not state.queueable:
                return state
            if not self._timeout_s or self._is_full(entry):
                if self._on_wanted is not None:
                    self._on_wanted()
                return load_queue_full(state, len(self)) if self._timeout_s else state
        elif not self._timeout_s or self._is_full(entry):
            return busy_queue_full(state, len(self), len(self._queue))
        now_s = self._clock()
        entry.begin(now_s, self._timeout_s)
        self._admit(entry, state, now_s)
        return None

    def requeue(self, entry: QueueEntry, broken: Endpoint, *, sent: bool) -> bool:
        """Queue a request again that ``broken`` dropped: before the first byte of a response, or to continue
        its answer.

        ``sent``: that generation may have begun with it. This is allowed once for a request, and within the
        retry budget (S10). A request that never reached a server may come back until its deadline. A full
        queue accepts as many as had a permit.
        """
        if self._successor is not None:
            return self._successor.requeue(entry, broken, sent=sent)
        spare = broken.max_concurrent if broken.max_concurrent < UNLIMITED else 0
        if self.unqueueable_reason() is not None or self._is_full(entry, spare):
            return False
        now_s = self._clock()
        if not self._timeout_s and not self.serves_besides(broken):
            return False  # no request may wait, and no other server takes it at once
        if sent:
            if entry.replayed or not self._may_replay(broken, now_s):
                return False
            entry.replayed = True
            entry.begin(now_s, self._timeout_s)  # a new wait: the first one may have ended long ago
        elif not entry.deadline_s:
            entry.begin(now_s, self._timeout_s)
        elif entry.deadline_s <= now_s:
            return False
        if entry.turn is None:
            entry.turn = 0  # it never queued: it goes first
        broken.ejected_until_s = now_s + GRACE_S
        self._admit(entry, self._get_serving(), now_s)
        return True

    def leave(self, entry: QueueEntry) -> None:
        """The client has gone. May be repeated."""
        if entry.queue is not None and entry.queue is not self:
            entry.queue.leave(entry)
        elif entry.waits:
            self._remove(entry)
            self._notify_unserved(None)

    def outlook(self, entry: QueueEntry) -> Outlook:
        """The position of a waiting entry, and its expected wait."""
        if entry.queue is not None and entry.queue is not self:
            return entry.queue.outlook(entry)
        state = self._get_serving()
        position = self._queue.position(entry) if entry.needs_permit else 1
        if isinstance(state, Unavailable):
            wait_s = state.retry_after_s or None if state.eta_s is None else state.eta_s
            return Outlook(position, wait_s, loads=True, percent=state.percent, eta_s=state.eta_s)
        return Outlook(position, free_in_s(state, position) or None, loads=False)

    def unqueueable_reason(self) -> Unavailable | None:
        """Why no request may wait, because no generation will come; None if requests may wait."""
        if self._successor is not None:
            return self._successor.unqueueable_reason()
        state = self._get_serving()
        return state if isinstance(state, Unavailable) and not state.queueable else None

    def transfer_to(self, successor: RequestQueue) -> None:
        """Move all entries, with their deadlines and past any limit, to the queue of the model that replaces
        this one. Later calls go there, too.
        """
        self._successor = successor
        self.move_to(successor)

    def move_to(self, other: RequestQueue) -> None:
        """Move all entries, with their deadlines and past any limit, to ``other``. New ones may come here."""
        for entry in tuple(self._entries()):
            self._remove(entry)
            other._admit(entry, other._get_serving(), other._clock())
        other.changed()

    def serves_besides(self, endpoint: Endpoint) -> bool:
        """Whether another endpoint than this one serves."""
        if self._successor is not None:
            return self._successor.serves_besides(endpoint)
        return any(other is not endpoint for other in _eligible(self._get_serving(), self._clock()))

    # --- for the processes of the model
    def changed(self) -> None:
        """``get_serving`` has a new answer: serve, reject or keep the entries."""
        if not len(self):
            return
        now_s = self._clock()
        if self._entering:
            self._timer.schedule(now_s)
        else:
            self._reconcile(now_s)

    def permit_freed(self) -> None:
        """Give a free permit to the next entry."""
        if self._queue and not self._in_serve:
            self._serve(self._clock())

    # --- private
    def _is_full(self, entry: QueueEntry, spare: int = 0) -> bool:
        return len(self) >= self._max_waiting + spare or self._bytes + entry.body_bytes > MAX_BYTES

    def _may_replay(self, broken: Endpoint, now_s: float) -> bool:
        self._budget, granted = spend(
            self._budget, self._policy, completed=broken.take_completed(), now_s=now_s
        )
        return granted

    def _admit(self, entry: QueueEntry, state: Serving, now_s: float) -> None:
        eligible = _eligible(state, now_s)
        self._update_unserved_clock(now_s, serves=bool(eligible))
        entry.waits = True
        entry.queue = self
        entry.unserved_s = self._unserved_s
        self._bytes += entry.body_bytes
        if entry.needs_permit:
            self._queue.add(entry)
            position = self._queue.position(entry)
        else:
            insort(self._unlimited, entry, key=lambda waits: waits.arrived_s)
            position = 1
        entry.position = entry.position or position
        at_once = _with_free_permit(eligible) if entry.needs_permit else eligible
        self._timer.schedule(now_s if at_once else min(entry.deadline_s, _next_readmission_s(state, now_s)))
        if isinstance(state, Unavailable) and self._on_wanted is not None:
            self._entering = True
            try:
                self._on_wanted()
            finally:
                self._entering = False

    def _remove(self, entry: QueueEntry) -> None:
        if entry.needs_permit:
            self._queue.remove(entry)
        else:
            self._unlimited.remove(entry)
        entry.notes = None
        self._account_removed(entry, self._clock())

    def _account_removed(self, entry: QueueEntry, now_s: float) -> None:
        """Account for an entry that was removed from its queue."""
        self._update_unserved_clock(now_s, serves=self._is_served)
        self._bytes -= entry.body_bytes
        entry.waits = False
        entry.waited_s += self._unserved_s - entry.unserved_s
        if not len(self):
            self._timer.stop()

    def _update_unserved_clock(self, now_s: float, *, serves: bool) -> None:
        """Advance the unserved clock, and let it run from now on unless a generation ``serves``."""
        if not self._is_served:
            self._unserved_s += now_s - self._clock_read_s
        self._clock_read_s = now_s
        self._is_served = serves

    def _reconcile(self, now_s: float) -> None:
        state = self._get_serving()
        self._update_unserved_clock(now_s, serves=bool(_eligible(state, now_s)))
        if not isinstance(state, Unavailable):
            self._serve(now_s)
        elif not state.queueable:
            self._reject(tuple(self._entries()), state)
        late = tuple(entry for entry in self._entries() if entry.deadline_s <= now_s)
        if late:
            reachable = bool(_eligible(state, now_s))
            self._reject(late, wait_timed_out(state, len(self._queue), self._timeout_s, reachable=reachable))
        if len(self):
            earliest_s = min(entry.deadline_s for entry in self._entries())
            self._timer.schedule(min(earliest_s, _next_readmission_s(state, now_s)))

    def _entries(self) -> Iterator[QueueEntry]:
        return chain(self._unlimited, self._queue)

    def _serve(self, now_s: float) -> None:
        """Serve entries while permits are free. Each may make others leave or come back."""
        if self._in_serve:
            return
        self._in_serve = True
        try:
            while eligible := _eligible(self._get_serving(), now_s):
                if self._unlimited:
                    entry = self._unlimited.pop(0)
                elif self._queue and (free := _with_free_permit(eligible)):
                    some_are_busy = len(free) < len(eligible)
                    suits = self._prefer(eligible) if self._prefer and some_are_busy else None
                    entry = self._queue.pop(max(endpoint.max_concurrent for endpoint in free), suits)
                    eligible = free
                else:
                    return
                self._account_removed(entry, now_s)
                endpoint = self._choose(entry, eligible)
                entry.notes = None
                entry.listener.served(endpoint.lease(infers=entry.needs_permit))
        finally:
            self._in_serve = False

    def _reject(self, entries: tuple[QueueEntry, ...], why: Unavailable) -> None:
        for entry in entries:
            if entry.waits:
                self._remove(entry)
                entry.listener.refused(why)
                self._notify_unserved(why)

    def _notify_unserved(self, why: Unavailable | None) -> None:
        if self._on_unserved is not None:
            self._on_unserved(why)

    # --- the timer

    def _on_timer(self) -> None:
        self._reconcile(self._clock())


def _eligible(state: Serving, now_s: float) -> tuple[Endpoint, ...]:
    """The endpoints that are neither closed nor ejected."""
    if isinstance(state, Unavailable):
        return ()
    return tuple(endpoint for endpoint in state if not endpoint.closed and endpoint.ejected_until_s <= now_s)


def _with_free_permit(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    return tuple(endpoint for endpoint in endpoints if endpoint.busy < endpoint.max_concurrent)


def _next_readmission_s(state: Serving, now_s: float) -> float:
    """When the next ejection ends; inf if no endpoint is ejected."""
    endpoints = () if isinstance(state, Unavailable) else state
    return min((e.ejected_until_s for e in endpoints if e.ejected_until_s > now_s), default=float("inf"))
