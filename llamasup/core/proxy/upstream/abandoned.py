"""A request whose client has disconnected, until llama-server has freed its slot.

llama-server (b11434) checks whether the client of a plain request has disconnected only when it has generated
no token for a second. While a stream runs, that never happens, and the plain request keeps its slot to its
last token. So the proxy half-closes the connection, which llama-server treats as a disconnect, and reads
until its end, which is the end of the work. Until then the request keeps its permit and counts for its key.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from llamasup.core.auth.quota import tokens_made_in
from llamasup.core.http.heads import HttpError
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.queueing.endpoint import Lease


class Abandoned:
    """Replaces the exchange on the upstream connection: discards the answer, and waits for its end.

    It also ends when the generation ends. Nothing else waits for it. The key is charged for the time until
    then, which is short for a stream, because llama-server stops a stream at once.
    ``on_crash`` is called if the generation has crashed meanwhile.
    ``max_tokens``: the rest of the context after the tokens that are charged already; None: unknown.
    """

    is_replayable: Final = False

    def __init__(
        self,
        lease: Lease,
        request: Request,
        upstream: Upstream,
        clock: Callable[[], float],
        on_crash: Callable[[HttpError], None],
    ) -> None:
        if lease.since_s:  # it keeps its permits, but the request has finished
            request.slot_s += (monotonic() - lease.since_s) * lease.weight
        request.slot_s += lease.permit_s
        self._on_crash = on_crash
        self._clock = clock
        self._since = clock()
        self._lease = lease
        self._quota = request.quota
        self._jobs = request.counted
        self._upstream = upstream
        self.answered = False
        self.max_tokens: int | None = None
        if self._quota is not None:
            self._quota.hold(self._jobs)
        upstream.abandon(self)
        lease.linger(self._generation_ended)

    # --- from the upstream connection

    def begin(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        """Ignored: the client has disconnected."""

    def relay(self, data: bytes) -> None:
        pass

    def upload_pauses(self) -> None:
        """The request was sent before it was abandoned."""

    def upload_resumes(self) -> None:
        pass

    def last_bytes(self) -> bytes:
        return b""

    def upstream_broke(self, reason: str, *, closed: bool = False) -> None:
        """llama-server closed the connection, as it does after it has cancelled a request."""
        self.finished()

    def _generation_ended(self, why: HttpError) -> None:
        if self._lease.endpoint.crashed:
            self._on_crash(why)
        self._upstream.abort()
        self.finished()

    def finished(self) -> None:
        """The answer is complete, so the slot is free."""
        if self._quota is not None:
            now = self._clock()
            endpoint = self._lease.endpoint
            slots = min(self._lease.weight, endpoint.slots)
            made = tokens_made_in(now - self._since, endpoint.tokens_per_s, slots)
            if self.max_tokens is not None:
                made = min(made, self.max_tokens)
            self._quota.leave(made, now, self._jobs)
        self._lease.release()
