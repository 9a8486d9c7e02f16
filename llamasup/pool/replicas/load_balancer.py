"""Chooses the replica for a request by affinity. Imported only for models with several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llamasup.pool.replicas.affinity import Affinity
from llamasup.pool.replicas.conversation import read_conversation
from llamasup.queueing.endpoint import Endpoint

__all__ = ["LoadBalancer"]


class LoadBalancer:
    """Forgets the conversations of a generation when it closes, because its caches are gone."""

    __slots__ = ("_affinity",)

    def __init__(self) -> None:
        self._affinity: Affinity[Endpoint] = Affinity()

    def pick(
        self, endpoints: Sequence[Endpoint], *, infers: bool, body: bytes, others: Sequence[Endpoint] = ()
    ) -> Endpoint:
        """One of ``endpoints``, which are open and can all take the request; or one of ``others`` whose cache
        has its beginning.
        """
        conversation = read_conversation(body) if infers else None
        for endpoint in (*endpoints, *others):
            if self._affinity.add(endpoint):
                endpoint.when_closed(partial(self._affinity.forget, endpoint))
        if others and conversation is not None:
            matching = [each for each in others if self._affinity.fits(each, conversation)]
            endpoints = (*endpoints, *matching)
        return self._affinity.pick([(each, each.busy / each.slots) for each in endpoints], conversation)
