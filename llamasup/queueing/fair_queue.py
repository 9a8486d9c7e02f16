"""Who is next: one class after the other, in a class each client in turn, of a client in order of arrival.

A request of several jobs uses several turns of its client: the other clients get that many turns first.

Decides the order of service and nothing else: who may wait, and for how long, is said elsewhere.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from llamasup.http.heads import Priority

__all__ = ["PASSES", "FairQueue", "Queued", "granted"]

PASSES: Final = 8
"""How often in a row those who wait in a class may see a higher one go first. At least one service in
eleven is theirs then (with all three waiting): a batch job goes on, slowly, beside people who never pause."""


def granted(asked: Priority | None, best: Priority) -> Priority:
    """What a request gets that asks for ``asked`` and may have ``best`` at most. Nobody gets more than normal
    unasked."""
    return max(Priority.NORMAL if asked is None else asked, best)


class Queued:
    """What can wait in a ``FairQueue``: whose it is, in which class, and since when.

    ``jobs``: how many places the request takes, up to the number of places.

    ``turn`` is the one of its client's in which it was last served; None before. Put back, it has that
    turn again; 0 is before all who wait.
    """

    __slots__ = ("arrived_s", "client", "jobs", "priority", "turn")

    def __init__(self, arrived_s: float, client: str = "", priority: Priority = Priority.NORMAL) -> None:
        self.arrived_s = arrived_s
        self.client = client
        self.priority = priority
        self.jobs = 1
        self.turn: int | None = None


T = TypeVar("T", bound=Queued)


class _Line(Generic[T]):
    """Of one client in one class; never empty. The lowest ``turn`` is next, of equal ones who came first."""

    __slots__ = ("items", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.items: list[T] = []  # in order of arrival


class FairQueue(Generic[T]):
    """Not bounded by itself. It has no more lines than there are items in it."""

    __slots__ = ("_count", "_lines", "_owed", "_passed", "_turn")

    def __init__(self) -> None:
        self._lines: dict[Priority, dict[str, _Line[T]]] = {priority: {} for priority in Priority}
        self._passed = dict.fromkeys(Priority, 0)  # how often others went first while somebody waited
        # Each service advances the turn by four. Between the turns of two waiting clients there is one for a
        # client that arrives, and behind it one for the client of a request of several jobs.
        self._turn = 0
        # Future turns of clients that used more than their share and are not waiting now.
        self._owed: dict[tuple[Priority, str], int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """All of them, in no order of meaning."""
        for lines in self._lines.values():
            for line in lines.values():
                yield from line.items

    def add(self, item: T) -> None:
        """To its place in its client's line. A client who is new in the class has the last turn of all."""
        lines = self._lines[item.priority]
        line = lines.get(item.client)
        if line is None:
            turn = item.turn
            if turn is None:
                turn = max(self._turn + 1, self._owed.pop((item.priority, item.client), 0))
            line = lines[item.client] = _Line(turn)
        elif item.turn is not None:
            line.turn = min(line.turn, item.turn)
        insort(line.items, item, key=_arrival)
        self._count += 1

    def pop(self, max_concurrent: int = 1) -> T:
        """Remove and return the next item, for a server with ``places``. Raises IndexError if the queue is
        empty.
        """
        priority = self._next_class()
        lines = self._lines[priority]
        line = min(lines.values(), key=_turn)
        item = line.items[0]
        item.turn = line.turn
        self._turn += 4
        more_turns = (min(item.jobs, max_concurrent) - 1) * (len(lines) - 1)
        line.turn = self._turn + (4 * more_turns + 2 if more_turns else 0)
        self.remove(item)
        self._passed[priority] = 0
        for lower in Priority:
            if lower > priority and self._lines[lower]:
                self._passed[lower] += 1
        return item

    def remove(self, item: T) -> None:
        """It does not wait any more. Raises KeyError or ValueError where it did not."""
        lines = self._lines[item.priority]
        line = lines[item.client]
        line.items.remove(item)
        self._count -= 1
        if not line.items:
            del lines[item.client]
            if line.turn > self._turn + 1:
                self._owed = {key: turn for key, turn in self._owed.items() if turn > self._turn}
                self._owed[item.priority, item.client] = line.turn
            if not lines:
                self._passed[item.priority] = 0

    def position(self, item: T) -> int:
        """1 for the next. As it is now: who comes later may get a turn before, and lower classes theirs."""
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

    def _next_class(self) -> Priority:
        waiting = [priority for priority in Priority if self._lines[priority]]
        most_passed = max(waiting, key=lambda priority: (self._passed[priority], priority), default=None)
        if most_passed is None:
            raise IndexError("nobody waits")
        return most_passed if self._passed[most_passed] >= PASSES else waiting[0]


def _arrival(item: Queued) -> float:
    return item.arrived_s


def _turn(line: _Line[T]) -> tuple[int, float]:
    return line.turn, line.items[0].arrived_s
