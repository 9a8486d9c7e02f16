"""Chooses the replica for a request, and the waiting request for a free replica, by affinity.

Imported only for models with several replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from llamasup.core.pool.replicas.affinity import MAX_BUSIER, Affinity
from llamasup.core.pool.replicas.conversation import Conversation, read_conversation
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.queueing.request_queue import Preference, QueueEntry

MAX_READ_BYTES: Final = 256 << 10
"""The most bytes of waiting bodies that are read for one free permit: a megabyte takes 1 to 20 ms."""


class LoadBalancer:
    """Forgets the conversations of a generation when it closes, because its caches are gone."""

    def __init__(self) -> None:
        self._affinity: Affinity[Endpoint] = Affinity()

    def pick(
        self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes, others: Sequence[Endpoint] = ()
    ) -> Endpoint:
        """One of ``endpoints``, which are open and can all take the request; or one of ``others`` whose cache
        has its beginning.
        """
        return self._pick(endpoints, read_conversation(body) if infers else None, others)

    def pick_for(self, entry: QueueEntry, endpoints: Sequence[Endpoint]) -> Endpoint:
        """``pick`` for a request that has waited."""
        return self._pick(endpoints, _notes_of(entry).conversation if entry.needs_permit else None)

    def preference(self, serving: Sequence[Endpoint]) -> Preference:
        """Prefer waiting requests that have most of their beginning in the cache of a free endpoint, or in no
        cache. Long bodies are read a few at a time; until then they count as in no cache.
        """
        affinity = self._affinity
        self._add(serving)
        free = [each for each in serving if each.busy < each.max_concurrent]
        least = min((_load(each) for each in free), default=0.0)
        taking = frozenset(each for each in free if _load(each) - least <= MAX_BUSIER)
        staying = frozenset(serving)
        unread_bytes = 0

        def suits(entry: QueueEntry) -> bool:
            nonlocal unread_bytes
            if _read_notes(entry) is None:
                unread_bytes += len(entry.listener.body)
                if unread_bytes > MAX_READ_BYTES:
                    return True
            notes = _notes_of(entry)
            # The caches change with each request: to compare them again costs one of them for each request.
            if affinity.turns >= notes.compare_at_turn or not staying.issuperset(notes.homes):
                notes.homes = affinity.homes(serving, notes.conversation)
                notes.compare_at_turn = affinity.turns + len(serving)
            return not notes.homes or not notes.homes.isdisjoint(taking)

        return suits

    def _pick(
        self,
        endpoints: Sequence[Endpoint],
        conversation: Conversation | None,
        others: Sequence[Endpoint] = (),
    ) -> Endpoint:
        self._add((*endpoints, *others))
        if others and conversation is not None:
            matching = [each for each in others if self._affinity.fits(each, conversation)]
            endpoints = (*endpoints, *matching)
        return self._affinity.pick([(each, _load(each)) for each in endpoints], conversation)

    def _add(self, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            if self._affinity.add(endpoint):
                endpoint.when_closed(partial(self._affinity.forget, endpoint))


def _load(endpoint: Endpoint) -> float:
    return endpoint.busy / endpoint.slots


class _Notes(Struct):
    """The notes on a waiting request. ``homes``: the endpoints that have most of it in their caches."""

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
