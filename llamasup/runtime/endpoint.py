"""One generation of a child as its users see it: where it listens and who is using it.

The instance that owns the child makes an ``Endpoint`` when the child is spawned and closes it when the
child goes. The proxy takes a ``Lease`` for each request. Neither knows more of the other than this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llamasup.core.address import Address

if TYPE_CHECKING:
    from llamasup.runtime.waiting import WaitingRoom

__all__ = ["Backend", "Endpoint", "Lease", "Unavailable"]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a request cannot be served now, in the words of llama-server's error object.

    ``may_wait``: a generation that serves is on its way, so that a request may wait for it.
    """

    status: int
    message: str
    type: str = "unavailable_error"
    cause: str = ""
    remedy: str = ""
    retry_after_s: float | None = None
    may_wait: bool = False


class Endpoint:
    """Where one generation listens, and the requests that it is serving.

    ``api_key`` is the child's own key (loopback children only); the client's key never reaches the child.
    """

    __slots__ = (
        "_leases",
        "_on_close",
        "_on_idle",
        "address",
        "answered",
        "api_key",
        "bytes_relayed",
        "closed",
        "failures",
        "generation",
        "model",
        "produced",
    )

    def __init__(self, model: str, generation: int, address: Address, api_key: str | None = None) -> None:
        self.model = model
        self.generation = generation
        self.address = address
        self.api_key = api_key
        self.closed = False
        # What the proxy sees of its progress; plain counters, since they are on the path of every token.
        self.bytes_relayed = 0
        self.answered = 0  # responses that came to their end
        self.produced = 0  # those of them that hold what a model made
        self.failures = 0  # answers of 500 and more in a row, where such were asked for
        self._leases: set[Lease] = set()
        self._on_idle: Callable[[], None] | None = None
        self._on_close: list[Callable[[], None]] = []

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    def lease(self) -> Lease:
        """Take one request's right to use this generation. Only while it is open."""
        if self.closed:
            raise RuntimeError(f"lease of the closed generation {self.generation} of {self.model!r}")
        lease = Lease(self)
        self._leases.add(lease)
        return lease

    def count_answer(self, status: int, *, infers: bool) -> None:
        """A response came to its end. ``infers``: the request was one for the model itself.

        A server whose model is stuck goes on answering /props and refusing what is no good request.
        """
        self.answered += 1
        if infers and status < 400:
            self.produced += 1
            self.failures = 0
        elif infers and status >= 500:
            self.failures += 1

    def begin_serving(self) -> None:
        """What it answered while it loaded ("Loading model") says nothing of how it serves."""
        self.answered = self.failures = 0

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once, as soon as no request is in flight (at once if none is)."""
        if not self._leases:
            callback()
        else:
            self._on_idle = callback

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call back when the generation goes; for idle keep-alive connections to it."""
        self._on_close.append(callback)

    def close(self, reason: str) -> None:
        """End every request in flight with ``reason`` and every idle connection."""
        if self.closed:
            return
        self.closed = True
        for lease in tuple(self._leases):
            lease.revoke(reason)
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    def _released(self, lease: Lease) -> None:
        self._leases.discard(lease)
        if not self._leases and self._on_idle is not None:
            callback, self._on_idle = self._on_idle, None
            callback()


class Lease:
    """One request's right to use one generation. Released exactly once; ``release`` may be repeated."""

    __slots__ = ("_on_revoke", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._on_revoke: Callable[[str], None] | None = None

    def when_revoked(self, callback: Callable[[str], None]) -> None:
        """Called with the reason when the generation goes while the request is in flight."""
        self._on_revoke = callback

    def revoke(self, reason: str) -> None:
        callback, self._on_revoke = self._on_revoke, None
        if callback is not None:
            callback(reason)

    def release(self) -> None:
        self._on_revoke = None
        self.endpoint._released(self)


class Backend(Protocol):
    """What the proxy asks of the runtime. Synchronous: it is on the path of every request."""

    def lease(self, model: str | None) -> Lease | Unavailable:
        """A lease on a ready generation of ``model`` (None: the request named none), or why not."""
        ...

    def room(self, model: str | None) -> WaitingRoom:
        """Where the requests for ``model`` wait. Only for a model that ``lease`` knows."""
        ...

    def readiness(self) -> Unavailable | None:
        """None while requests would be served now."""
        ...
