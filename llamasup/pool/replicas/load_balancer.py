"""Chooses the replica for a request: the one with its beginning in a cache, unless it is much busier.

Imported only for models with several replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from llamasup.pool.replicas.affinity import PromptMarks
from llamasup.pool.replicas.conversation import Conversation, read_conversation
from llamasup.queueing.endpoint import Endpoint
from llamasup.queueing.request_queue import Preference, QueueEntry

__all__ = ["MAX_BUSIER", "MIN_FIT", "Candidate", "LoadBalancer", "choose", "homes"]

MIN_FIT: Final = 0.1
"""The least part of a prompt that makes a cache useful; llama-server itself reuses a slot from there on
(--slot-prompt-similarity, b11434)."""
MAX_BUSIER: Final = 0.5
"""How much more of its permits the replica with the cache may use than the least busy (docs/replicas.md)."""
MAX_READ_BYTES: Final = 256 << 10
"""Of waiting bodies, for one free permit: a megabyte takes 1 to 20 ms."""


class LoadBalancer:
    """Forgets the conversations of a generation when it closes, because its caches are gone."""

    __slots__ = ("_marks", "_turns")

    def __init__(self) -> None:
        self._marks: dict[Endpoint, PromptMarks] = {}
        self._turns = 0

    def pick(
        self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes, others: Sequence[Endpoint] = ()
    ) -> Endpoint:
        """One of ``endpoints``, which are open and can all take the request; or one of ``others`` whose cache
        has its beginning.
        """
        return self._pick(endpoints, read_conversation(body) if infers else None, others)

    def pick_for(self, entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
        """As ``pick``, for a request that has waited."""
        return self._pick(endpoints, _notes_of(entry).conversation if entry.needs_permit else None)

    def preference(self, serving: Sequence[Endpoint]) -> Preference:
        """Which waiting requests have most of their beginning in the cache of a free endpoint, or in none.
        Long bodies are read a few at a time; until then they count as the latter.
        """
        staying = frozenset(serving)
        free = [each for each in serving if each.busy < each.max_concurrent]
        least = min((_load(each) for each in free), default=0.0)
        taking = frozenset(each for each in free if _load(each) - least <= MAX_BUSIER)
        unread_bytes = 0

        def suits(entry: QueueEntry) -> bool:
            nonlocal unread_bytes
            if _read_notes(entry) is None:
                unread_bytes += len(entry.listener.body)
                if unread_bytes > MAX_READ_BYTES:
                    return True
            notes = _notes_of(entry)
            # The caches change with each request: to compare them again costs one of them for each request.
            if self._turns >= notes.compare_at_turn or not staying.issuperset(notes.homes):
                fits = [self._marks_of(each).fit(notes.conversation) for each in serving]
                notes.homes = frozenset(serving[index] for index in homes(fits))
                notes.compare_at_turn = self._turns + len(serving)
            return not notes.homes or not notes.homes.isdisjoint(taking)

        return suits

    def _pick(
        self,
        endpoints: Sequence[Endpoint],
        conversation: Conversation | None,
        others: Sequence[Endpoint] = (),
    ) -> Endpoint:
        if others and conversation is not None:
            matching = [each for each in others if self._marks_of(each).fit(conversation) >= MIN_FIT]
            endpoints = (*endpoints, *matching)
        marks = [self._marks_of(endpoint) for endpoint in endpoints]
        chosen = choose(
            [
                Candidate(_load(endpoint), before.fit(conversation), before.turn)
                for endpoint, before in zip(endpoints, marks, strict=True)
            ]
        )
        self._turns += 1
        marks[chosen].add(conversation, self._turns)
        return endpoints[chosen]

    def _marks_of(self, endpoint: Endpoint) -> PromptMarks:
        before = self._marks.get(endpoint)
        if before is None:
            before = self._marks[endpoint] = PromptMarks()
            endpoint.when_closed(partial(self._forget, endpoint))
        return before

    def _forget(self, endpoint: Endpoint) -> None:
        del self._marks[endpoint]


class _Notes(Struct):
    """What is known of a waiting request. ``homes``: the endpoints that have most of it in their caches."""

    body: bytes
    conversation: Conversation | None
    homes: frozenset[Endpoint] = frozenset()
    compare_at_turn: int = 0


def _notes_of(entry: QueueEntry) -> _Notes:
    """Read once while it waits: other requests leave the queue before it."""
    notes = _read_notes(entry)
    if notes is None:
        body = entry.listener.body
        notes = entry.notes = _Notes(body, read_conversation(body))
    return notes


def _read_notes(entry: QueueEntry) -> _Notes | None:
    notes = entry.notes
    return notes if isinstance(notes, _Notes) and notes.body is entry.listener.body else None


def _load(endpoint: Endpoint) -> float:
    return endpoint.busy / endpoint.slots


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
