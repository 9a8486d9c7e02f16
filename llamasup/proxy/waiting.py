"""A request between a client and no server: it came too early, or its server ended before it answered."""

from __future__ import annotations

from time import monotonic
from typing import Final, Protocol

from llamasup.http.heads import HttpError
from llamasup.proxy.interfaces import ClientConnection
from llamasup.proxy.request import Request, overdue, record_of
from llamasup.proxy.sse_keepalive import send_keepalive_if_due
from llamasup.queueing.endpoint import Endpoint, Lease, Unavailable
from llamasup.queueing.wait_queue import QueueEntry, RequestQueue

__all__ = ["CLIENT_GONE", "Waiting", "WaitingConnection"]

CLIENT_GONE: Final = 499  # nginx's number for it; only ever logged and counted


class WaitingConnection(ClientConnection, Protocol):
    """The connection of a client whose request can wait."""

    def exchange_waits(self, waiting: Waiting) -> None:
        """The exchange has ended without a byte of a response, and its request waits for another."""
        ...

    def wait_over(self, waiting: Waiting, request: Request, lease: Lease) -> None:
        """The wait has ended: ``lease`` is for a generation that serves ``request``."""
        ...


class Waiting:
    """Holds the place of an exchange on its connection while the request waits, and hands it over then.

    Made when a request first has to wait. The exchange that follows keeps it, in case that it comes back.
    """

    __slots__ = ("_downstream", "_generation", "_model", "_request", "_room", "_ticket")

    def __init__(
        self, downstream: WaitingConnection, request: Request, room: RequestQueue, model: str
    ) -> None:
        """``model``: the id of the one that it waits for."""
        self._downstream = downstream
        self._request = request
        self._room = room
        self._ticket = QueueEntry(
            self,
            request.received_at,
            len(request.body),
            client=request.client,
            priority=request.priority,
            needs_permit=request.needs_permit,
        )
        self._ticket.jobs = request.jobs
        self._model = model
        self._generation = 0  # the last that had it

    # --- going in

    def enter(self) -> Unavailable | None:
        """Wait, or learn why not."""
        return self._room.enter(self._ticket)

    def requeue(self, broken: Endpoint, *, sent: bool) -> bool:
        """Wait again, if that is allowed: ``broken`` ended without a byte of a response."""
        if not self._room.requeue(self._ticket, broken, sent=sent):
            return False
        self._generation = broken.generation
        if sent:
            self._downstream.proxy.metrics.count_replay(broken.model)
        return True

    def verdict(self) -> HttpError | None:
        """Why nobody may wait any more, where it is so."""
        why = self._room.unqueueable_reason()
        return None if why is None else why.as_error()

    # --- what comes of it

    @property
    def body(self) -> bytes:
        return self._request.body

    def served(self, lease: Lease) -> None:
        self._downstream.wait_over(self, self._request, lease)

    def refused(self, why: Unavailable) -> None:
        self._tell(why.status, "unavailable")
        self._downstream.exchange_failed(self._request, why.as_error())

    @property
    def replayed(self) -> bool:
        return self._ticket.replayed

    @property
    def waited_s(self) -> float:
        """For a generation, in all."""
        return self._ticket.waited_s

    @property
    def position(self) -> int:
        """Its place in the queue when it began to wait; 1 was the next."""
        return self._ticket.position

    # --- from the client's connection, as an exchange hears it

    def cancel(self) -> None:
        """The client left: its place is free at once (S11)."""
        self._room.leave(self._ticket)
        self._tell(CLIENT_GONE, "client_gone")

    def sweep(self, now: float) -> None:
        """The time that a request has goes on while it waits."""
        error = overdue(self._request, self._downstream.proxy.config.request_timeout_s, now)
        if error is not None:
            self._room.leave(self._ticket)
            self._tell(error.status, "timed_out")
            self._downstream.exchange_failed(self._request, error)
        else:
            send_keepalive_if_due(self._downstream, self._request, now)

    def pause(self) -> None:
        """There is nothing to hold back."""

    def resume(self) -> None:
        pass

    def _tell(self, status: int, outcome: str) -> None:
        request = self._request
        self._downstream.proxy.record_request(
            request,
            record_of(
                request,
                status,
                outcome,
                model=self._model,
                generation=self._generation,
                queue_s=monotonic() - request.received_at,
                waited_s=self.waited_s,
                replayed=self.replayed,
            ),
        )
