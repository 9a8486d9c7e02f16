"""Gives each request to one of a model's processes, and remembers what each of them was asked.

Loaded for models with several processes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llamasup.pool.replicas.affinity import AskedBefore, Candidate, choose
from llamasup.pool.replicas.conversation import read_conversation
from llamasup.queueing.endpoint import Endpoint

__all__ = ["LoadBalancer"]


class LoadBalancer:
    """What one generation was asked is forgotten when it closes: so are its caches."""

    __slots__ = ("_asked", "_turns")

    def __init__(self) -> None:
        self._asked: dict[Endpoint, AskedBefore] = {}
        self._turns = 0

    def pick(self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes) -> Endpoint:
        """Of ``endpoints``, all open, each of which can take it."""
        conversation = read_conversation(body) if infers else None
        asked = [self._asked_of(endpoint) for endpoint in endpoints]
        chosen = choose(
            [
                Candidate(_load(endpoint), before.fit(conversation), before.turn)
                for endpoint, before in zip(endpoints, asked, strict=True)
            ]
        )
        self._turns += 1
        asked[chosen].add(conversation, self._turns)
        return endpoints[chosen]

    def _asked_of(self, endpoint: Endpoint) -> AskedBefore:
        before = self._asked.get(endpoint)
        if before is None:
            before = self._asked[endpoint] = AskedBefore()
            endpoint.when_closed(partial(self._forget, endpoint))
        return before

    def _forget(self, endpoint: Endpoint) -> None:
        del self._asked[endpoint]


def _load(endpoint: Endpoint) -> float:
    return endpoint.busy / endpoint.slots
