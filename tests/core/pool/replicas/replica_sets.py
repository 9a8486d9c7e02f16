"""Replicas of one model whose state a test sets."""

from __future__ import annotations

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.queueing.endpoint import UNLIMITED, Endpoint, Lease, generation_ended
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy

LOADING = HttpError(503, "Loading model", cause="loading", retry_after_s=2.0, queueable=True)

__all__ = ["LOADING", "Replica", "served_model"]


class Replica(InstanceRunner):
    """A runner without a child. The test sets its state."""

    def __init__(
        self, served: ReplicaSet, path: str = "/run/1.sock", *, max_concurrent: int = UNLIMITED
    ) -> None:
        # Replaces the constructor of a real runner: there is no child and no event.
        self.model = "tiny"
        self.queue = served.queue
        self.on_idle = None
        self._generation = None
        self.why: HttpError = LOADING
        self.is_leaving = False
        self.serves: Endpoint | None = None
        self._path = path
        self._places = max_concurrent
        self._number = 0
        served.add(self)

    def becomes_ready(self) -> Endpoint:
        self._number += 1
        self.serves = Endpoint(
            self.model,
            self._number,
            UnixAddress(self._path),
            max_concurrent=self._places,
            on_permit_free=self.queue.permit_freed,
            on_idle=self.on_idle,
        )
        self.queue.changed()
        return self.serves

    def becomes(self, why: HttpError, *, leaving: bool = False) -> None:
        """Like a runner: informs the queue first, and then ends the requests in flight."""
        old, self.serves = self.serves, None
        self.why, self.is_leaving = why, leaving
        self.queue.changed()
        if old is not None:
            old.close(generation_ended("llama-server was killed"))

    # --- the interface of a runner

    @property
    def endpoint(self) -> Endpoint | None:
        return self.serves

    @property
    def is_ending(self) -> bool:
        return self.is_leaving

    def unavailable(self) -> HttpError:
        return self.why

    def lease(self, *, infers: bool = False) -> Lease | HttpError:
        return self.why if self.serves is None else self.serves.lease_if_free(infers=infers)

    @property
    def in_flight(self) -> int:
        return 0 if self.serves is None else self.serves.in_flight


def served_model(policy: Policy | None = None) -> ReplicaSet:
    return ReplicaSet(policy=policy or Policy())
