"""Chooses the process for a request: a process that caches its beginning, unless that process is much busier
(pure).

What is in the prompt cache of a process is estimated from its earlier requests; llama-server is never asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from llamasup.core.pool.replicas.conversation import Conversation

MAX_MARKS: Final = 4096
"""Marks of one process, in half a megabyte: two hundred conversations of twenty messages. That is more than
its caches hold (8 GiB by default, b11434: a GiB for 8,192 tokens of a model of 7 billion parameters).
"""
MIN_FIT: Final = 0.1
"""The least part of a prompt that makes a cache useful; llama-server itself reuses a slot from there on
(--slot-prompt-similarity, b11434)."""
MAX_BUSIER: Final = 0.5
"""The replica with the cache may use this much more of its permits than the least busy replica.
``scripts/simulate/affinity.py`` compares other limits."""

_Process = TypeVar("_Process", bound=Hashable)


class PromptMarks:
    """The marks of one process, least recently used first. ``turn``: the number of its last request."""

    def __init__(self) -> None:
        self._marks: OrderedDict[int, None] = OrderedDict()
        self.turn = 0

    def __len__(self) -> int:
        return len(self._marks)

    def fit(self, conversation: Conversation | None) -> float:
        """The part of the request, 0 to 1, that an earlier conversation began with."""
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


class Candidate(Struct, frozen=True):
    """A process that can take the request. ``load``: the part of its permits that is taken."""

    load: float
    fit: float = 0.0
    turn: int = 0


def choose(candidates: Sequence[Candidate], most_busier: float = MAX_BUSIER) -> int:
    """The index of the candidate with the longest match that is not much busier than the least busy.

    Without a match the least busy, and of equal ones the least recently used: new conversations spread over
    all caches.
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


def homes(fits: Sequence[float]) -> list[int]:
    """The indices of the processes with the longest match (``Candidate.fit``); none if it is too short."""
    best = max(fits, default=0.0)
    return [index for index, fit in enumerate(fits) if fit == best] if best >= MIN_FIT else []


def _by_load(candidate: Candidate) -> tuple[float, int]:
    return candidate.load, candidate.turn


class Affinity(Generic[_Process]):
    """The conversations of each process. ``forget`` a process when it ends, because its caches are gone."""

    def __init__(self) -> None:
        self._marks: dict[_Process, PromptMarks] = {}
        self.turns = 0  # the requests that it has chosen a process for

    def add(self, process: _Process) -> bool:
        """Whether the process is new."""
        if process in self._marks:
            return False
        self._marks[process] = PromptMarks()
        return True

    def fits(self, process: _Process, conversation: Conversation) -> bool:
        """Whether the cache of a process that was added has a useful part of the conversation."""
        return self._marks[process].fit(conversation) >= MIN_FIT

    def homes(self, processes: Sequence[_Process], conversation: Conversation | None) -> frozenset[_Process]:
        """The ``processes`` that cache the longest useful part of the request. All were added."""
        fits = [self._marks[process].fit(conversation) for process in processes]
        return frozenset(processes[index] for index in homes(fits))

    def pick(self, loads: Sequence[tuple[_Process, float]], conversation: Conversation | None) -> _Process:
        """Choose a process for a request. ``loads``: each process that can take the request, with the part of
        its permits that is taken. All of them were added.
        """
        before = [self._marks[process] for process, _ in loads]
        chosen = choose(
            [
                Candidate(load, marks.fit(conversation), marks.turn)
                for (_, load), marks in zip(loads, before, strict=True)
            ]
        )
        process = loads[chosen][0]
        self.note(process, conversation)
        return process

    def note(self, process: _Process, conversation: Conversation | None) -> None:
        """A process that was added gets a request with this conversation."""
        self.turns += 1
        self._marks[process].add(conversation, self.turns)

    def forget(self, process: _Process) -> None:
        del self._marks[process]

    def keep(self, processes: Collection[_Process]) -> None:
        """Forget all others."""
        for process in self._marks.keys() - set(processes):
            del self._marks[process]
