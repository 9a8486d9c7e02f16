"""The queue of a model: requests wait for a generation that serves, or for a permit.

``queue_order.py`` decides the order. The number of requests and their waits are bounded, and a client can
leave at any time. Nothing here touches a connection: the listeners of the proxy do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import inf
from secrets import token_bytes
from time import monotonic
from typing import Final

from llamasup.core.http.heads import HttpError, Priority
from llamasup.core.queueing.endpoint import (
    UNLIMITED,
    Endpoint,
    Reservation,
    Serving,
    eligible_of,
    next_readmission_s,
    share_again,
    with_free_permit,
)
from llamasup.core.queueing.outcomes import Outlook, QueueListener, free_in_s, no_room, wait_timed_out
from llamasup.core.queueing.queue_order import FairQueue, Queued
from llamasup.core.queueing.suspects import Next, Suspects, alone_s, next_step
from llamasup.core.system.event_loops import CallLater, DeadlineTimer, call_later

MAX_WAITING: Final = 256  # each holds a connection and its body
MAX_BYTES: Final = 256 << 20  # of bodies: a MiB each, which is a long prompt with an image
GRACE_S: Final = 0.5
"""A generation that broke a request is ejected for so long. The exit of a child is noticed within 0.1 s, so
a generation that serves after this time was not dying."""


class QueueEntry(Queued):
    """One request, through all its waits. Times are monotonic, in seconds.

    ``needs_permit``: it is work for the model itself. ``waited_s``: the waits for a generation, without those
    for a permit. ``position``: its position when it first queued (1: the next), 0 if it never did. ``notes``:
    what ``prefer`` keeps of its body while it waits. ``ends``: of the servers that were working on it, as in
    ``Suspicion``; with one, it is a suspect. ``ran_s``: how long it ran before the last one. ``crowded``:
    with others, it has filled the context that they share. ``replayed``: it was sent again.
    """

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
        self.ends: tuple[Callable[[], None], ...] = ()
        self.ran_s = 0.0
        self.crowded = self.replayed = False
        self.since_s = 0.0  # when this wait began
        self.deadline_s = 0.0
        self.unserved_s = 0.0  # the queue's unserved clock when it entered

    def __repr__(self) -> str:
        return f"<QueueEntry of {self.client!r}: {self.priority.name.lower()}, {self.jobs} jobs>"

    @property
    def runs_alone(self) -> bool:
        return self.crowded or bool(self.ends)

    def begin(self, now_s: float, timeout_s: float) -> None:
        self.since_s = now_s
        self.deadline_s = now_s + timeout_s


Preference = Callable[[QueueEntry], bool]


def _least_busy(entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
    return min(endpoints, key=lambda endpoint: endpoint.busy)


class RequestQueue:
    """The requests of one model that wait.

    ``get_serving`` returns the endpoints that serve (at least one), or why none does.

    ``choose`` picks one of several endpoints that can take a request. ``prefer`` gets all that serve, if some
    of them are busy, and returns which entries suit a free one; None: all. ``on_wanted`` is called for each
    request that queues, or may not queue, while nothing serves; ``on_unserved`` for each that leaves the
    queue unserved, with its rejection if it got one. ``timeout_s`` 0: no request queues. One timer covers the
    earliest deadline of all entries.
    """

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
        on_unserved: Callable[[HttpError | None], None] | None = None,
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
        self._clock = clock
        self.suspects = Suspects(token_bytes(16))
        self._queue: FairQueue[QueueEntry] = FairQueue()
        self._unlimited: list[QueueEntry] = []  # they need no permit: the next generation serves them all
        self._suspected: list[QueueEntry] = []  # they are served alone, before all others
        self._reservation = Reservation()  # of an endpoint for the next suspect
        self._bytes = 0
        self._in_serve = False  # inside _serve: a served request may end at once and free its permit
        self._successor: RequestQueue | None = None  # the queue of the model that replaces this one
        self._entering = False  # inside ``on_wanted`` of a new entry: no listener is called
        self._timer = DeadlineTimer(self.changed, call_later=call_later, clock=clock)
        # The unserved clock runs while no generation serves.
        self._unserved_s = 0.0
        self._clock_read_s = clock()
        self._is_served = True

    def __repr__(self) -> str:
        return f"<RequestQueue: {len(self)} waiting>"

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._queue) + len(self._unlimited) + len(self._suspected)

    @property
    def oldest_s(self) -> float:
        """The start of the longest wait (monotonic); inf if the queue is empty."""
        return min((entry.since_s for entry in self._entries()), default=float("inf"))

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may. A large request may be refused earlier."""
        return len(self) >= self._max_waiting

    @property
    def lets_wait(self) -> bool:
        """Whether any request may wait."""
        return self._timeout_s > 0.0 and self._max_waiting > 0

    def set_limits(self, *, timeout_s: float, max_waiting: int, continues_streams: bool = False) -> None:
        """Set the limits for new entries; waiting ones stay."""
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self.continues_streams = continues_streams

    # --- for the proxy
    def enter(self, entry: QueueEntry) -> HttpError | None:
        """Queue a new request. Returns the reason if it may not wait."""
        if self._successor is not None:
            return self._successor.enter(entry)
        state = self._get_serving()
        if isinstance(state, HttpError) and not state.queueable:
            return state
        evicted = None
        if not self._timeout_s or self._is_full(entry):
            evicted, why = self._to_evict(entry), no_room(state, len(self), may_wait=self._timeout_s > 0.0)
            if evicted is None:
                if isinstance(state, HttpError) and self._on_wanted is not None:
                    self._on_wanted()
                return why
            self._remove(evicted)
        now_s = self._clock()
        entry.begin(now_s, self._timeout_s)
        self._admit(entry, state, now_s)
        if evicted is not None:  # last, because the next request of its connection may enter at once
            evicted.listener.refused(why)
            self._notify_unserved(why)
        return None

    def requeue(
        self, entry: QueueEntry, broken: Endpoint, *, sent: bool, alone: bool = False, ran_s: float = 0.0
    ) -> bool:
        """Queue a request again that ``broken`` dropped: without an answer, or to continue its answer.

        ``sent``: the generation may have begun with the request. If the generation ended by itself, the
        request may be the reason, and ``next_step`` decides (``alone`` is that of its lease; ``ran_s`` is how
        long it ran). Otherwise the request is queued again once. A request that never reached a server may
        come back until its deadline, and past the limit for waiting requests.
        """
        if self._successor is not None:
            return self._successor.requeue(entry, broken, sent=sent, alone=alone, ran_s=ran_s)
        spare = broken.max_concurrent if broken.max_concurrent < UNLIMITED else 0
        if self.unqueueable_reason() is not None or self._is_full(entry, spare):
            return False
        now_s = self._clock()
        if not self._timeout_s and not self.serves_besides(broken):
            return False  # no request may wait, and no other server takes it at once
        broken.ejected_until_s = now_s + GRACE_S
        if sent:
            # A node isolates its own suspects. Without a queue, no request can wait to be alone.
            may_be_poison = broken.node is None and (broken.crashed or not broken.closed)
            if may_be_poison and self._timeout_s:
                if next_step(len(entry.ends) + 1, alone=alone) is not Next.ALONE:
                    return False
                entry.ends, entry.ran_s = (*entry.ends, broken.explain), ran_s
            elif entry.replayed:
                return False
            entry.replayed = True
            entry.begin(now_s, self._timeout_s)  # a new wait: the first one may have ended long ago
        elif not entry.deadline_s:
            entry.begin(now_s, self._timeout_s)
        elif entry.deadline_s <= now_s:
            return False
        if entry.turn is None:
            entry.turn = 0  # it never queued: it goes first
        self._admit(entry, self._get_serving(), now_s)
        return True

    def isolate(self, entry: QueueEntry) -> bool:
        """Queue a request again, once and past the limits, that has filled a context together with others."""
        if self._successor is not None:
            return self._successor.isolate(entry)
        if entry.crowded or not self._timeout_s or self.unqueueable_reason() is not None:
            return False
        now_s = self._clock()
        entry.crowded = entry.replayed = True
        entry.begin(now_s, self._timeout_s)
        self._admit(entry, self._get_serving(), now_s)
        return True

    def leave(self, entry: QueueEntry) -> None:
        """Remove the entry of a client that has left. May be repeated."""
        if entry.queue is not None and entry.queue is not self:
            entry.queue.leave(entry)
        elif entry.waits:
            self._remove(entry)
            self._notify_unserved(None)
            self.permit_freed()

    def outlook(self, entry: QueueEntry) -> Outlook:
        """Return the position of a waiting entry, and its expected wait."""
        if entry.queue is not None and entry.queue is not self:
            return entry.queue.outlook(entry)
        state = self._get_serving()
        position = self._position(entry)
        if isinstance(state, HttpError):
            wait_s = state.retry_after_s or None if state.eta_s is None else state.eta_s
            return Outlook(position, wait_s, loads=True, percent=state.percent, eta_s=state.eta_s)
        return Outlook(position, free_in_s(state, position) or None, loads=False)

    def unqueueable_reason(self) -> HttpError | None:
        """Say why no generation will come, so that no request may wait. None: requests may wait."""
        if self._successor is not None:
            return self._successor.unqueueable_reason()
        state = self._get_serving()
        return state if isinstance(state, HttpError) and not state.queueable else None

    def transfer_to(self, successor: RequestQueue) -> None:
        """Move all entries, past any limit, to the queue of the model that replaces this one.

        They keep their deadlines. Later calls go to that queue as well.
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
        return any(other is not endpoint for other in eligible_of(self._get_serving(), self._clock()))

    def replaces(self, refusing: Endpoint) -> bool:
        """Whether requests that ``refusing`` refuses are served by another endpoint, or can wait for one."""
        if self._successor is not None:
            return self._successor.replaces(refusing)
        is_own = refusing.on_permit_free == self.permit_freed
        return self.serves_besides(refusing) or (not is_own and self.unqueueable_reason() is None)

    # --- for the processes of the model
    def changed(self) -> None:
        """Serve, reject or keep the entries after ``get_serving`` has a new answer."""
        if not len(self):
            return
        now_s = self._clock()
        if self._entering:
            self._timer.schedule(now_s)
        else:
            self._reconcile(now_s)

    def permit_freed(self) -> None:
        """Give a free permit to the next entry."""
        if (self._queue or self._suspected or self._reservation.endpoint) and not self._in_serve:
            self._serve(self._clock())

    # --- private
    def _is_full(self, entry: QueueEntry, spare: int = 0) -> bool:
        return len(self) >= self._max_waiting + spare or self._bytes + entry.body_bytes > MAX_BYTES

    def _to_evict(self, entry: QueueEntry) -> QueueEntry | None:
        """The waiting request that makes room for ``entry``; None: none does."""
        if not self.lets_wait:
            return None
        evicted = self._queue.to_evict(entry)
        if evicted is None or self._bytes - evicted.body_bytes + entry.body_bytes > MAX_BYTES:
            return None
        return evicted

    def _position(self, entry: QueueEntry) -> int:
        if entry.runs_alone:
            return self._suspected.index(entry) + 1
        return len(self._suspected) + self._queue.position(entry) if entry.needs_permit else 1

    def _admit(self, entry: QueueEntry, state: Serving, now_s: float) -> None:
        eligible = eligible_of(state, now_s)
        self._update_unserved_clock(now_s, serves=bool(eligible))
        entry.waits = True
        entry.queue = self
        entry.unserved_s = self._unserved_s
        self._bytes += entry.body_bytes
        if entry.runs_alone or not entry.needs_permit:
            waiting = self._suspected if entry.runs_alone else self._unlimited
            insort(waiting, entry, key=lambda waits: waits.arrived_s)
        else:
            self._queue.add(entry)
        entry.position = entry.position or self._position(entry)
        at_once = with_free_permit(eligible) if entry.needs_permit and not entry.runs_alone else eligible
        self._timer.schedule(now_s if at_once else min(entry.deadline_s, next_readmission_s(state, now_s)))
        if isinstance(state, HttpError) and self._on_wanted is not None:
            self._entering = True
            try:
                self._on_wanted()
            finally:
                self._entering = False

    def _remove(self, entry: QueueEntry) -> None:
        without_permit = self._suspected if entry.runs_alone else self._unlimited
        (self._queue if entry.needs_permit and not entry.runs_alone else without_permit).remove(entry)
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
        self._update_unserved_clock(now_s, serves=bool(eligible_of(state, now_s)))
        is_tried = share_again(state, now_s)
        if not isinstance(state, HttpError):
            self._serve(now_s)
        elif not state.queueable:
            self._reject(tuple(self._entries()), state)
        if is_tried:
            for entry in self._suspected:  # it waits for another suspect, which may take long
                entry.deadline_s = max(entry.deadline_s, now_s + self._timeout_s)
        late = tuple(entry for entry in self._entries() if entry.deadline_s <= now_s)
        if late:
            reachable = bool(eligible_of(state, now_s))
            self._reject(late, wait_timed_out(state, len(self._queue), self._timeout_s, reachable=reachable))
            self.permit_freed()  # an endpoint may be reserved for one of them
        if len(self):
            earliest_s = min(entry.deadline_s for entry in self._entries())
            self._timer.schedule(min(earliest_s, next_readmission_s(state, now_s)))

    def _entries(self) -> Iterator[QueueEntry]:
        return chain(self._suspected, self._unlimited, self._queue)

    def _serve(self, now_s: float) -> None:
        """Serve entries while permits are free. Each may make others leave or come back."""
        if self._in_serve:
            return
        self._in_serve = True
        try:
            while eligible := eligible_of(self._get_serving(), now_s):
                if self._serve_suspect(eligible, now_s):
                    continue
                if self._unlimited:
                    entry = self._unlimited.pop(0)
                elif self._queue and (free := with_free_permit(eligible)):
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

    def _serve_suspect(self, eligible: tuple[Endpoint, ...], now_s: float) -> bool:
        """Serve the first suspect, if an endpoint is idle. Returns whether it is served."""
        if not self._suspected:
            self._reservation.move_to(None)
            return False
        endpoint = self._reservation.place(eligible)
        if endpoint is None:
            return False
        entry = self._suspected.pop(0)
        self._account_removed(entry, now_s)
        entry.notes = None
        lease = endpoint.lease(infers=True)
        lease.isolate(inf if entry.crowded else now_s + alone_s(len(entry.ends), entry.ran_s))
        if len(self) and lease.alone_until_s < float("inf"):
            self._timer.schedule(lease.alone_until_s)
        entry.listener.served(lease)
        return True

    def _reject(self, entries: tuple[QueueEntry, ...], why: HttpError) -> None:
        for entry in entries:
            if entry.waits:
                self._remove(entry)
                entry.listener.refused(why)
                self._notify_unserved(why)

    def _notify_unserved(self, why: HttpError | None) -> None:
        if self._on_unserved is not None:
            self._on_unserved(why)
