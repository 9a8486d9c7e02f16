"""A request in the queue: no generation serves, no permit is free, or its server ended before an answer."""

from __future__ import annotations

from time import monotonic
from typing import Final, Protocol

from msgspec.structs import replace

from llamasup.core.auth.quota import prompt_tokens_of
from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.context import ClientConnection
from llamasup.core.proxy.live.state import InFlight, LivePhase, described
from llamasup.core.proxy.request import Request, overdue, record_of
from llamasup.core.proxy.response import send_comment_if_due
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import QueueEntry, RequestQueue
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.system.text import eta_text

CLIENT_GONE: Final = 499  # as nginx; only for logs and metrics


class WaitingConnection(ClientConnection, Protocol):
    """The connection of a client whose request can wait."""

    def exchange_waits(self, waiting: Waiting) -> None:
        """The exchange has ended, and its request is queued again."""
        ...

    def wait_ended(self, waiting: Waiting, request: Request, lease: Lease) -> None:
        """The wait has ended: ``lease`` is for a generation that serves ``request``."""
        ...


class Waiting:
    """Stands for the exchange on its connection while the request waits.

    Made when a request first has to wait. The exchange keeps it, in case the request returns to the queue.
    ``entry`` tells how long it waited, and at which position.
    """

    def __init__(
        self, downstream: WaitingConnection, request: Request, queue: RequestQueue, model: str
    ) -> None:
        """``model``: the id of the model for which the request waits."""
        self._downstream = downstream
        self._request = request
        self.queue = queue
        self.entry = QueueEntry(
            self,
            request.received_at,
            len(request.body),
            client=request.client,
            priority=request.priority,
            needs_permit=request.needs_permit,
        )
        self.entry.jobs = request.jobs
        self.entry.ends = () if request.suspicion is None else request.suspicion.ends
        self._model = model
        self._generation = 0  # the last one that had the request

    def __repr__(self) -> str:
        return f"<Waiting for {self._model!r}: {self.entry!r}>"

    # --- entering the queue

    def requeue(self, lease: Lease, queue: RequestQueue, *, sent: bool) -> bool:
        """Queue the request again, if allowed, after the server of ``lease`` ended."""
        self.queue, broken = queue, lease.endpoint
        ran_s = monotonic() - lease.since_s if lease.since_s else 0.0
        if not queue.requeue(self.entry, broken, sent=sent, alone=lease.alone, ran_s=ran_s):
            return False
        self._left(broken, sent=sent)
        return True

    def isolate(self, lease: Lease, queue: RequestQueue) -> bool:
        """Queue the request again, alone, if allowed: with others it has filled a shared context."""
        self.queue = queue
        if not queue.isolate(self.entry):
            return False
        self._left(lease.endpoint, sent=True)
        return True

    def _left(self, endpoint: Endpoint, *, sent: bool) -> None:
        """Note the generation that had the request. ``sent``: it is sent a second time."""
        self._generation = endpoint.generation
        if sent:
            self._downstream.proxy.metrics.count_replay(self._request.counted_as or endpoint.model)

    # --- from the queue

    @property
    def body(self) -> bytes:
        return self._request.body

    def served(self, lease: Lease) -> None:
        self._downstream.wait_ended(self, self._request, lease)

    def refused(self, why: HttpError) -> None:
        self.interrupt(why, "unavailable")

    # --- from the client's connection, as for an exchange

    def cancel(self) -> None:
        """The client disconnected: free its position in the queue at once (S11)."""
        self.queue.leave(self.entry)
        self._record(CLIENT_GONE, "client_gone")

    def sweep(self, now: float) -> None:
        """Check the request timeout, which also counts the wait."""
        error = overdue(self._request, self._downstream.proxy.config, now)
        if error is not None:
            self.interrupt(error, "timed_out")
        else:
            send_comment_if_due(self._downstream, self._request, now, self._outlook_text)

    def interrupt(self, error: HttpError, outcome: str) -> None:
        """End the request, and its wait if that has not ended."""
        self.queue.leave(self.entry)
        self._record(error.status, outcome, error.cause)
        self._downstream.exchange_failed(self._request, error)

    def held_slots(self) -> None:
        """It holds none while it waits."""

    def waits_since(self) -> float:
        return self._request.received_at

    def live(self, now: float) -> InFlight:
        entry = self.entry
        outlook = self.queue.outlook(entry)
        phase = LivePhase.LOADING if outlook.loads else LivePhase.QUEUED
        return InFlight(
            replace(
                described(self._request, phase, now, model=self._model, since_s=entry.since_s),
                generation=self._generation,
                position=outlook.position,
                expected_wait_s=outlook.wait_s,
                percent=outlook.percent,
                eta_s=outlook.wait_s,
                replayed=entry.replayed,
            )
        )

    def _outlook_text(self) -> str:
        """``loading 43 %, 12 s left``, ``loading, 12 s left``, ``position 3, about 8 s``."""
        outlook = self.queue.outlook(self.entry)
        if not outlook.loads:
            wait = "" if outlook.wait_s is None else f", about {eta_text(outlook.wait_s)}"
            return f"position {outlook.position}{wait}"
        if progress := progress_text(outlook.percent, outlook.eta_s):
            return f"loading{',' if outlook.percent is None else ''} {progress}"
        return "waiting"

    def pause(self) -> None:
        """Nothing to pause: no response has begun."""

    def resume(self) -> None:
        pass

    def _record(self, status: int, outcome: str, cause: str = "") -> None:
        request, now = self._request, monotonic()
        request.cause = cause
        begun = request.begun  # the client has a part of the answer, which counts
        if begun is not None:
            request.unreported_tokens = prompt_tokens_of(request.body_bytes) + begun.received.pieces
        self._downstream.proxy.record_request(
            request,
            record_of(
                request,
                status,
                outcome,
                now,
                model=self._model,
                generation=self._generation,
                queue_s=(now if begun is None else begun.sent_at) - request.received_at,
                first_byte_s=None if begun is None else begun.first_byte_at - request.received_at,
                bytes_out=0 if begun is None else begun.received.sent_bytes,
                waited_s=self.entry.waited_s,
                replayed=self.entry.replayed,
            ),
        )
