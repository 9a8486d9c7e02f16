"""The last hour in steps of ten seconds, for the charts of the console: ``GET history`` (docs/control.md).

It is filled when a request ends and when a server changes its state, so it needs no timer. The work of a
request is divided among the steps in which it was done. Requests that still wait are added when the chart is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

STEP_S = 10
STEPS = 360  # an hour


class LastHour:
    """The steps of the last hour. Times are seconds of one clock that does not jump."""

    def __init__(self, now_s: float) -> None:
        self._newest = int(now_s // STEP_S)  # the number of the newest step; it is at its number modulo STEPS
        self._tokens = [0.0] * STEPS
        self._queue_s = [0.0] * STEPS  # the waiting time of all requests: its average number is this by time
        self._first_byte_s = [0.0] * STEPS  # sums
        self._answers = [0] * STEPS
        self._memory_bytes = [0] * STEPS  # the most in the step
        self._level_bytes = 0

    def add_request(
        self,
        now_s: float,
        *,
        duration_s: float,
        queue_s: float,
        first_byte_s: float | None,
        tokens: int,
    ) -> None:
        """Add a finished request. ``queue_s`` and ``first_byte_s`` count from its beginning."""
        self._move_to(now_s)
        began_s = now_s - duration_s
        if tokens:
            _spread(self._tokens, tokens, began_s + (first_byte_s or 0.0), now_s, self._newest)
        if queue_s > 0.0:
            _spread(self._queue_s, queue_s, began_s, min(began_s + queue_s, now_s), self._newest)
        if first_byte_s is not None:
            place = self._newest % STEPS
            self._first_byte_s[place] += first_byte_s
            self._answers[place] += 1

    def note_memory(self, now_s: float, held_bytes: int) -> None:
        """Note the memory that the models take from now on."""
        self._move_to(now_s)
        self._level_bytes = held_bytes
        place = self._newest % STEPS
        self._memory_bytes[place] = max(self._memory_bytes[place], held_bytes)

    def series(
        self, now_s: float, waiting_since_s: Iterable[float] = ()
    ) -> Mapping[str, Sequence[float | None]]:
        """Return the steps, the oldest first; the last step has not finished.

        ``age_s`` is the age of the beginning of each step. ``waiting_since_s`` has a time for each request
        that waits now.
        """
        self._move_to(now_s)
        queue_s = self._queue_s.copy()
        for since_s in waiting_since_s:
            _spread(queue_s, now_s - since_s, since_s, now_s, self._newest)
        numbers = range(self._newest - STEPS + 1, self._newest + 1)
        places = [number % STEPS for number in numbers]
        in_step_s = [float(STEP_S)] * (STEPS - 1) + [max(now_s - self._newest * STEP_S, 1.0)]
        return {
            "age_s": [now_s - number * STEP_S for number in numbers],
            "tokens_per_s": [
                round(self._tokens[at] / seconds, 3) for at, seconds in zip(places, in_step_s, strict=True)
            ],
            "queued": [
                round(queue_s[at] / seconds, 3) for at, seconds in zip(places, in_step_s, strict=True)
            ],
            "first_byte_s": [
                round(self._first_byte_s[at] / self._answers[at], 4) if self._answers[at] else None
                for at in places
            ],
            "memory_bytes": [self._memory_bytes[at] for at in places],
        }

    def _move_to(self, now_s: float) -> None:
        """Clear the steps that begin until now."""
        newest = int(now_s // STEP_S)
        for number in range(max(self._newest, newest - STEPS) + 1, newest + 1):
            place = number % STEPS
            self._tokens[place] = self._queue_s[place] = self._first_byte_s[place] = 0.0
            self._answers[place] = 0
            self._memory_bytes[place] = self._level_bytes
        self._newest = newest


def _spread(ring: list[float], amount: float, from_s: float, to_s: float, newest: int) -> None:
    """Add ``amount`` to the steps between two times, in proportion to the time in each. The part that is
    older than an hour is lost.
    """
    first, last = int(from_s // STEP_S), int(to_s // STEP_S)
    if last <= newest - STEPS:
        return
    if first >= last:  # most requests
        ring[last % STEPS] += amount
        return
    per_s = amount / (to_s - from_s)
    for number in range(max(first, newest - STEPS + 1), last + 1):
        begin_s = max(from_s, number * STEP_S)
        end_s = min(to_s, (number + 1) * STEP_S)
        ring[number % STEPS] += per_s * (end_s - begin_s)
