"""A model that this node and other nodes have. A request is sent, or waits, where ``choose_side`` says."""

from __future__ import annotations

from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.served_load import ServedLoad
from llamasup.core.queueing.unavailable import Unavailable
from llamasup.core.settings.repairs import Repairs
from llamasup.features.peers.choice import Choice, Where, choose_side
from llamasup.features.peers.remote_model import RemoteModel


class SharedModel:
    """A ``ServedModel``. Requests that another node has forwarded go to ``here`` without it."""

    def __init__(self, here: ReplicaSet, elsewhere: RemoteModel) -> None:
        self.here = here
        self.elsewhere = elsewhere
        elsewhere.queue.suspects = here.queue.suspects  # no node gets what ends servers
        self.last: Choice | None = None
        """The last choice, for ``why``."""

    @property
    def queue(self) -> RequestQueue:
        """The queue of the side where a request would wait now."""
        return self._of(self._choice()).queue

    @property
    def repairs(self) -> Repairs:
        """The repairs, which also apply to requests that another node gets first: they may come back."""
        return self.here.repairs

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        choice = self.last = self._choice()
        elsewhere = self.elsewhere
        if choice.where is Where.HERE:
            matching = elsewhere.free(elsewhere.warm) if infers else ()
            if not matching or isinstance(state := self.here.serving(), Unavailable):
                return self.here.lease(infers=infers, body=body)
            near = elsewhere.free(state)
            if near:  # another node gets it only if its cache has the beginning of the prompt
                picked = elsewhere.balancer.pick(near, infers=infers, body=body, others=matching)
                if picked.node is not None:
                    self.last = Choice(Where.ELSEWHERE, "another node has the beginning in its cache")
                return picked.lease(infers=infers)
        return self._of(choice).lease(infers=infers, body=body)

    def reconsider(self) -> None:
        """The other nodes have changed: requests that wait for them wait here if none of them serves."""
        elsewhere = self.elsewhere
        if len(elsewhere.queue) and self._choice().where is Where.HERE and not elsewhere.is_warm:
            elsewhere.queue.move_to(self.here.queue)

    def _of(self, choice: Choice) -> ReplicaSet | RemoteModel:
        return self.here if choice.where is Where.HERE else self.elsewhere

    def load(self) -> ServedLoad:
        """The load of the side where a request would be sent now."""
        here, elsewhere = self.here.load(), self.elsewhere.load()
        return here if choose_side(here, elsewhere).where is Where.HERE else elsewhere

    def _choice(self) -> Choice:
        return choose_side(self.here.load(), self.elsewhere.load())
