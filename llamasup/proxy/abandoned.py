"""A request whose client has left, until llama-server has let go of it.

llama-server notices that a client left a plain request when it has waited a second for a token of any request
(b11434). Every token of another request wakes it before, so beside a stream the request keeps its slot to its
last token. So its connection is half-closed, which counts as leaving, and read on: its end is the end of the
work. Until then the request keeps its place and counts for its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from llamasup.core.quota import tokens_made_in

if TYPE_CHECKING:
    from llamasup.proxy.request import Request
    from llamasup.proxy.upstream import Upstream
    from llamasup.runtime.endpoint import Lease

__all__ = ["Abandoned"]


class Abandoned:
    """Takes the exchange's part on the upstream connection: drops the answer, and waits for its end.

    It ends with the generation too. Nothing but the generation waits for it. ``streams``: the answer is a
    stream, which llama-server stops at once; for any other the key is charged by the time that it takes.
    """

    __slots__ = (
        "_clock",
        "_jobs",
        "_lease",
        "_quota",
        "_since",
        "_streams",
        "_upstream",
        "answered",
        "is_head",
    )

    may_come_back: Final = False

    def __init__(
        self, lease: Lease, request: Request, upstream: Upstream, *, streams: bool, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._since = clock()
        self._streams = streams
        self._lease = lease
        self._quota = request.quota
        self._jobs = request.counted
        self._upstream = upstream
        self.answered = False
        self.is_head = False
        if self._quota is not None:
            self._quota.hold(self._jobs)
        upstream.abandon(self)
        lease.linger(self._generation_ended)

    # --- from the upstream connection

    def begin(self, upstream: Upstream, framing: bytes | None, body: bytes) -> None:
        """There is no client to pass it on to."""

    def relay(self, data: bytes) -> None:
        pass

    def upload_pauses(self) -> None:
        """The request was sent before it was abandoned."""

    def upload_resumes(self) -> None:
        pass

    def last_bytes(self) -> bytes:
        return b""

    def finished(self) -> None:
        """The answer is whole: the slot is free."""
        self._end()

    def upstream_broke(self, what: str, *, closed: bool = False) -> None:
        """llama-server closed the connection, which is how it ends what it has cancelled."""
        self._end()

    def _generation_ended(self, _reason: str) -> None:
        self._upstream.abort()
        self._end()

    def _end(self) -> None:
        if self._quota is not None:
            now = self._clock()
            speed = self._lease.endpoint.tokens_per_s
            tokens = 0 if self._streams else tokens_made_in(now - self._since, speed)
            self._quota.let_go(self._jobs, tokens, now)
        self._lease.release()
