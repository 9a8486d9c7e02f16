"""Which of a model's processes gets a request: the one that knows its beginning, unless it is much busier.

Guesses what prompt caches hold from what was asked of each; llama-server is never asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llamasup.pool.replicas.conversation import Conversation

__all__ = ["MAX_BUSIER", "MAX_MARKS", "MIN_FIT", "AskedBefore", "Candidate", "choose"]

MAX_MARKS: Final = 4096
"""Remembered of one process, in half a megabyte: two hundred conversations of twenty messages. That is more
than its caches hold (8 GiB by default, b11434: a GiB for 8,192 tokens of a model of 7 billion parameters), so
that what is forgotten here is most likely gone there too."""
MIN_FIT: Final = 0.1
"""The share of a prompt that makes a cache worth going to. From there on llama-server itself takes a slot for
what is in it (--slot-prompt-similarity, b11434)."""
MAX_BUSIER: Final = 0.5
"""By how much of its places the one with the cache may be busier than the least busy (docs/replicas.md)."""


class AskedBefore:
    """Marks of the conversations that one process was given; those not used for longest go first.

    ``turn``: the count of requests at which it was last given one.
    """

    __slots__ = ("_marks", "turn")

    def __init__(self) -> None:
        self._marks: OrderedDict[int, None] = OrderedDict()
        self.turn = 0

    def __len__(self) -> int:
        return len(self._marks)

    def fit(self, conversation: Conversation | None) -> float:
        """The share of it, 0 to 1, with which something began that was asked before."""
        if conversation is None or not self._marks:
            return 0.0
        for mark, size in zip(reversed(conversation.marks), reversed(conversation.sizes), strict=True):
            if mark in self._marks:
                return size / conversation.size
        return 0.0

    def add(self, conversation: Conversation | None, turn: int) -> None:
        self.turn = turn
        if conversation is None:
            return
        for mark in conversation.marks:
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that can take the request. ``load``: the share of its places that are taken; ``fit`` and
    ``turn`` as ``AskedBefore`` has them.
    """

    load: float
    fit: float = 0.0
    turn: int = 0


def choose(candidates: Sequence[Candidate], most_busier: float = MAX_BUSIER) -> int:
    """The index of the one that gets the request.

    The longest match, of those that are not much busier than the least busy. Without a match the least busy;
    of equal ones that which was given nothing for longest, so that new conversations spread over all caches.
    """
    least = min(candidate.load for candidate in candidates)
    close = [
        index
        for index, candidate in enumerate(candidates)
        if candidate.fit >= MIN_FIT and candidate.load - least <= most_busier
    ]
    if close:
        return min(close, key=lambda index: (-candidates[index].fit, *_by_load(candidates[index])))
    return min(range(len(candidates)), key=lambda index: _by_load(candidates[index]))


def _by_load(candidate: Candidate) -> tuple[float, int]:
    return candidate.load, candidate.turn
