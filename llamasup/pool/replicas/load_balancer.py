"""Distributes the requests of a model over its replicas, and remembers the conversations of each.

Imported only for models with several replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llamasup.pool.replicas.affinity import Candidate, PromptMarks, choose
from llamasup.pool.replicas.conversation import read_conversation
from llamasup.queueing.endpoint import Endpoint

__all__ = ["LoadBalancer"]


class LoadBalancer:
    """Forgets the conversations of a generation when it closes, because its caches are gone."""

    __slots__ = ("_marks", "_turns")

    def __init__(self) -> None:
        self._marks: dict[Endpoint, PromptMarks] = {}
        self._turns = 0

    def pick(self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes) -> Endpoint:
        """One of ``endpoints``, which are open and can all take the request."""
        conversation = read_conversation(body) if infers else None
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


def _load(endpoint: Endpoint) -> float:
    return endpoint.busy / endpoint.slots
