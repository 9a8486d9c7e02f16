"""The order of a queue: by priority class, then each client in turn, then by arrival (pure).

A request of several jobs uses several turns of its client: the other clients get that many turns first. A
request that suits the free server may go before others, as long as its client gets hardly more than theirs.
In a full queue, the last request of the client with the most requests makes room for a client with fewer.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, Generic, TypeVar

from llamasup.core.http.heads import Priority

PASSES: Final = 8
"""How often in a row a higher class may go first. With all three waiting, the class ``low`` gets at least one
service in eleven: it makes slow progress next to users who never pause. The class ``batch`` gets none."""
LOOKAHEAD: Final = 8
"""Among how many requests one is chosen that suits the free server (docs/replicas.md)."""
MAX_PASSED: Final = 4
"""How often a request is passed over for one that suits the free server."""
MAX_LEAD: Final = 4
"""How many permits more than the clients that it passes over a client may have got."""
MAX_REMEMBERED: Final = 1024
"""Clients that are not waiting."""


def granted(asked: Priority | None, best: Priority) -> Priority:
    """Return the priority of a request that asks for ``asked`` (default: normal), at most ``best``."""
    return max(Priority.NORMAL if asked is None else asked, best)


class Queued:
    """An item of a ``FairQueue``.

    ``jobs``: the permits that the request takes, up to all permits. ``turn``: the turn of its client in which
    it was last served; None before. A requeued item has that turn again; 0 goes first. ``passed``: how often
    it was passed over.
    """

    def __init__(self, arrived_s: float, client: str = "", priority: Priority = Priority.NORMAL) -> None:
        self.arrived_s = arrived_s
        self.client = client
        self.priority = priority
        self.jobs = 1
        self.passed = 0
        self.turn: int | None = None


T = TypeVar("T", bound=Queued)


class _Line(Generic[T]):
    """The items of one client in one class; never empty. The lowest ``turn`` is next, then the earliest.

    ``permits``: how many it got, counted from what the least served client had when it came.
    """

    def __init__(self, turn: int, permits: int) -> None:
        self.turn = turn
        self.permits = permits
        self.items: list[T] = []  # in order of arrival


class FairQueue(Generic[T]):
    """Unbounded (``request_queue.py`` bounds it); it has at most one line for each item."""

    def __init__(self) -> None:
        self._lines: dict[Priority, dict[str, _Line[T]]] = {priority: {} for priority in Priority}
        self._passed = dict.fromkeys(Priority, 0)  # how often a higher class went first
        # Each service advances the turn by four. Between the turns of two waiting clients there is one for a
        # client that arrives, and behind it one for the client of a request of several jobs.
        self._turn = 0
        # Future turns of clients that used more than their share and are not waiting now.
        self._owed: dict[tuple[Priority, str], int] = {}
        self._count = 0
        # Of each class, the permits of the least served client that waits or waited last; and of the clients
        # that are not waiting now.
        self._least = dict.fromkeys(Priority, 0)
        self._permits: dict[tuple[Priority, str], int] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in arbitrary order."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line.items

    def add(self, item: T) -> None:
        """Add to the line of the item's client. A client that is new in the class gets the last turn."""
        lines = self._lines[item.priority]
        line = lines.get(item.client)
        if line is None:
            turn = item.turn
            if turn is None:
                turn = max(self._turn + 1, self._owed.pop((item.priority, item.client), 0))
            line = lines[item.client] = _Line(turn, self._permits_of(item))
        elif item.turn is not None:
            line.turn = min(line.turn, item.turn)
        insort(line.items, item, key=lambda queued: queued.arrived_s)
        self._count += 1

    def pop(self, max_concurrent: int = 1, suits: Callable[[T], bool] | None = None) -> T:
        """Remove and return the next item, for a server with so many permits. Raises IndexError if empty.

        ``suits``: whether an item suits this server; None: all do.
        """
        priority = self._next_class()
        lines = self._lines[priority]
        line = min(lines.values(), key=_turn)
        item = line.items[0]
        if suits is not None and self._count > 1:
            item = _first_that_suits(lines, suits)
            line = lines[item.client]
        item.turn = line.turn
        self._turn += 4
        permits = min(item.jobs, max_concurrent)
        more_turns = (permits - 1) * (len(lines) - 1)
        # A client that goes before others may owe turns already.
        begin = self._turn if suits is None else max(self._turn, line.turn)
        line.turn = begin + (4 * more_turns + 2 if more_turns else 0)
        line.permits += permits
        self._least[priority] = max(self._least[priority], min(each.permits for each in lines.values()))
        self.remove(item)
        self._passed[priority] = 0
        for lower in Priority:
            if priority < lower < Priority.BATCH and self._lines[lower]:
                self._passed[lower] += 1
        return item

    def remove(self, item: T) -> None:
        """Remove an item. Raises KeyError or ValueError if it is not in the queue."""
        lines = self._lines[item.priority]
        line = lines[item.client]
        line.items.remove(item)
        self._count -= 1
        if not line.items:
            del lines[item.client]
            self._permits[item.priority, item.client] = line.permits
            if len(self._permits) > MAX_REMEMBERED:
                self._permits.pop(next(iter(self._permits)))
            if line.turn > self._turn + 1:
                self._owed = {key: turn for key, turn in self._owed.items() if turn > self._turn}
                self._owed[item.priority, item.client] = line.turn
            if not lines:
                self._passed[item.priority] = 0

    def position(self, item: T) -> int:
        """The position of an item: 1 for the next.

        Later items of other clients and lower classes may still go first.
        """
        lines = self._lines[item.priority]
        own = lines[item.client]
        ahead = own.items.index(item)
        before = ahead
        for line in lines.values():
            if line is not own:
                before += min(len(line.items), ahead + (_turn(line) < _turn(own)))
        for higher in Priority:
            if higher < item.priority:
                before += sum(len(line.items) for line in self._lines[higher].values())
        return before + 1

    def to_evict(self, newcomer: T) -> T | None:
        """The item that makes room for ``newcomer``: the last one of the client with the most items, if that
        client then still has as many as the client of ``newcomer``. None: no item may be evicted.

        An item of a higher class, or one that has been requeued, is never evicted.
        """
        counts: Counter[str] = Counter()
        for lines in self._lines.values():
            for client, line in lines.items():
                counts[client] += len(line.items)
        most = counts[newcomer.client] + 1
        lasts = [
            line.items[-1]
            for priority, lines in self._lines.items()
            if priority >= newcomer.priority
            for client, line in lines.items()
            if counts[client] > most and line.items[-1].turn is None
        ]
        return max(lasts, key=lambda item: (counts[item.client], item.priority, item.arrived_s), default=None)

    def _permits_of(self, item: T) -> int:
        """A client that comes back keeps what it got, but the time without requests gives it no credit."""
        least = self._least[item.priority]
        return max(self._permits.pop((item.priority, item.client), least), least - MAX_LEAD)

    def _next_class(self) -> Priority:
        waiting = [priority for priority in Priority if self._lines[priority]]
        most_passed = max(waiting, key=lambda priority: (self._passed[priority], priority), default=None)
        if most_passed is None:
            raise IndexError("pop from an empty queue")
        return most_passed if self._passed[most_passed] >= PASSES else waiting[0]


def _first_that_suits(lines: Mapping[str, _Line[T]], suits: Callable[[T], bool]) -> T:
    """The first of the next items that suits and may go before the others. The search ends at an item that
    may not be passed over: it was often enough, or it has been requeued. Without a result, the first of all.
    """
    passed: list[T] = []
    for line, item in islice(_in_order(lines), LOOKAHEAD):
        before = [other for other in passed if _turn(lines[other.client]) <= _turn(line)]
        is_due = item.turn is not None or item.passed >= MAX_PASSED
        if (is_due or suits(item)) and _may_go_before(line, [lines[other.client] for other in before]):
            for other in before:
                # Its client's next turn is later now: once is enough where others have turns in between.
                is_own = other.client == item.client and len(lines) > 1
                other.passed += MAX_PASSED if is_own else 1
            return item
        if is_due:
            break
        passed.append(item)
    return passed[0]


def _may_go_before(line: _Line[T], others: Iterable[_Line[T]]) -> bool:
    return all(other is line or line.permits - other.permits < MAX_LEAD for other in others)


def _in_order(lines: Mapping[str, _Line[T]]) -> Iterator[tuple[_Line[T], T]]:
    """About the order in which the items are next: the first of each line, then the second of each."""
    ordered = sorted(lines.values(), key=_turn)
    for depth in range(max(len(line.items) for line in ordered)):
        for line in ordered:
            if depth < len(line.items):
                yield line, line.items[depth]


def _turn(line: _Line[T]) -> tuple[int, float]:
    return line.turn, line.items[0].arrived_s
