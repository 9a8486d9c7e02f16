"""Endpoints and leases: where one generation of a child listens, and which requests use it.

The runner makes an ``Endpoint`` when it spawns the child, and closes it when the child ends. The proxy takes
a ``Lease`` for each request. Neither knows more of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from llamasup.core.http.address import Address
from llamasup.core.http.heads import HttpError, Priority
from llamasup.core.queueing.suspects import place_for
from llamasup.core.queueing.wait_estimate import HELD_WEIGHT, smoothed

if TYPE_CHECKING:
    import ssl

    from llamasup.core.llama_server.answers import ContextWindow

UNLIMITED: Final = 1 << 30  # permits; more than there can be connections
_EXCLUSIVE: Final = UNLIMITED  # permits that are taken besides, so that none is free
_DEFAULT_SLOTS: Final = 4  # of a server that did not report its slots (llama-server's default)


class NodeLink(Struct, frozen=True):
    """The connection of the proxy to another llamasup node (docs/peers.md).

    ``authority``: the value of Host. ``sender``: the id of this node, which marks a request as forwarded, so
    that the other node does not forward it again. ``tls``: None for http. ``suspect`` is called when a
    connection to the node fails or breaks, or it takes no requests. ``replaced``: another node starts if this
    one ends, so that requests can wait for it.
    """

    name: str
    authority: bytes
    sender: bytes
    suspect: Callable[[], None]
    tls: ssl.SSLContext | None = None
    replaced: bool = False

    def opening(self, opening: bytes, request_id: bytes, priority: Priority) -> bytes:
        """Make the request line and headers for the node from a llama-server's."""
        lines = b"X-Request-Id: " + request_id + b"\r\nX-Llamasup-Node: " + self.sender + b"\r\n"
        if priority is not Priority.NORMAL:
            lines += b"X-Llamasup-Priority: " + priority.name.lower().encode() + b"\r\n"
        return opening.replace(b"Host: localhost\r\n", b"Host: " + self.authority + b"\r\n", 1) + lines


class Endpoint:
    """The address of one generation, and its requests.

    ``api_key`` is the child's own key (loopback children only); the client's key never reaches the child.
    ``mark``: header lines that each request from the proxy gets, so that the endpoint knows it from others.
    ``node``: it is another llamasup node, and ``api_key`` is its key for us; empty if it needs none.
    ``max_concurrent``: its permits. ``busy``: the permits that are taken; a request of several jobs is sent
    when one permit is free, so ``busy`` may exceed ``max_concurrent``. ``held_s``: how long requests held
    permits lately, times the number of permits (a weighted mean; None: not known). ``on_permit_free`` is
    called for the first permit that becomes free, before another request can take it. ``on_idle`` is called
    each time the last lease ends; ``idle_since_s`` (monotonic) is that time, if ``on_idle`` is set.
    ``crashed``: the generation has ended, and a request may be the reason. ``trial``: the lease during which
    no other request gets a permit. ``on_explained`` is called if one request has caused the end. ``share``:
    the tokens for each slot of a context that all slots share; 0: each has its own. ``program``: its name in
    messages.
    """

    __slots__ = (
        "_explained",
        "_leases",
        "_lingering",
        "_on_close",
        "_on_idle",
        "address",
        "answered",
        "api_key",
        "busy",
        "bytes_relayed",
        "closed",
        "crashed",
        "ejected_until_s",
        "failures",
        "generation",
        "held_s",
        "idle_since_s",
        "keeps_system_messages",
        "mark",
        "max_concurrent",
        "model",
        "node",
        "on_explained",
        "on_idle",
        "on_permit_free",
        "produced",
        "program",
        "repeats_begun_message",
        "reserved",
        "share",
        "tokens_per_s",
        "trial",
        "window",
    )

    def __init__(
        self,
        model: str,
        generation: int,
        address: Address,
        api_key: str | None = None,
        *,
        max_concurrent: int = UNLIMITED,
        held_s: float | None = None,
        on_permit_free: Callable[[], None] | None = None,
        on_idle: Callable[[Endpoint], None] | None = None,
        on_explained: Callable[[], None] | None = None,
        node: NodeLink | None = None,
        mark: bytes = b"",
        share: int = 0,
        program: str = "llama-server",
    ) -> None:
        self.model = model
        self.generation = generation
        self.address = address
        self.api_key = "" if api_key is None and node is not None else api_key
        self.node = node
        self.mark = mark
        self.share = share
        self.program = program
        self.max_concurrent = max_concurrent
        self.busy = 0
        self.held_s = held_s
        self.on_permit_free = on_permit_free
        self.on_idle = on_idle
        self.on_explained = on_explained
        self.idle_since_s = 0.0
        self.ejected_until_s = 0.0  # it broke a request: no waiting request goes to it until then
        self.closed = self.crashed = self._explained = False
        self.trial: Lease | None = None
        self.reserved = False
        # Progress as the proxy sees it; plain counters, since they are on the path of every token.
        self.bytes_relayed = 0
        self.answered = 0  # completed responses
        self.produced = 0  # completed responses with output of the model
        self.failures = 0  # consecutive 5xx responses to inference requests
        self.tokens_per_s: float | None = None  # measured in the last long response
        # Whether a stream that continues a begun message repeats it; None: unknown, or it continues none.
        self.repeats_begun_message: bool | None = None
        # Whether the chat template keeps system messages at any place; None: unknown, no request needed it.
        self.keeps_system_messages: bool | None = None
        self.window: ContextWindow | None = None  # the context of a request, once the child has reported it
        self._leases: set[Lease] = set()
        self._lingering: set[Lease] = set()
        self._on_idle: Callable[[], None] | None = None
        self._on_close: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.in_flight} in flight, {self.taken} permits taken"
        return f"<Endpoint {self.model!r} generation {self.generation}: {state}>"

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def server(self) -> str:
        """The name of the kind of server, for messages."""
        return self.program if self.node is None else f"the node {self.node.name!r}"

    @property
    def slots(self) -> int:
        """The child's slots, for estimates."""
        return self.max_concurrent if self.max_concurrent < UNLIMITED else _DEFAULT_SLOTS

    @property
    def at_work(self) -> int:
        """The requests that the child works on: requests in flight, and abandoned ones."""
        return len(self._leases) + len(self._lingering)

    @property
    def taken(self) -> int:
        """The permits that requests hold."""
        return self.busy % _EXCLUSIVE

    @property
    def is_explained(self) -> bool:
        """Whether one request has caused the end of the generation, or would have if it ended now."""
        return self._explained or (self.trial is not None and self.trial.alone)

    @property
    def served(self) -> int:
        """The requests that hold permits."""
        return len(self.working())

    def working(self) -> list[Lease]:
        """The leases that hold permits, in the order in which they got them."""
        leases = [lease for lease in (*self._leases, *self._lingering) if lease.since_s]
        return sorted(leases, key=lambda lease: lease.since_s)

    def lease(self, *, infers: bool = False) -> Lease:
        """Lease the open endpoint for one request; if it ``infers``, with a permit, free or not."""
        if self.closed:
            raise RuntimeError(f"lease of the closed generation {self.generation} of {self.model!r}")
        if infers:
            self.busy += 1
            lease = Lease(self, monotonic())
        else:
            lease = Lease(self)
        self._leases.add(lease)
        return lease

    def lease_if_free(self, *, infers: bool) -> Lease | HttpError:
        """Return a ``lease``, or BUSY if the request needs a permit and none is free."""
        return BUSY if infers and self.busy >= self.max_concurrent else self.lease(infers=infers)

    def count_answer(self, status: int, *, infers: bool) -> None:
        """Count a completed response. ``infers``: the request was work for the model itself.

        A server whose model is stuck still answers /props and rejects invalid requests.
        """
        self.answered += 1
        if infers and status < 400:
            self.produced += 1
            self.failures = 0
        elif infers and status >= 500:
            self.failures += 1

    def begin_serving(self) -> None:
        """Reset the counters: responses during the load ("Loading model") do not count."""
        self.answered = self.failures = 0

    def reserve(self, *, reserved: bool) -> None:
        """Give out no more permits, until those that are taken have been returned (``on_permit_free``)."""
        if self.reserved is not reserved:
            self.reserved = reserved
            self.busy += _EXCLUSIVE if reserved else -_EXCLUSIVE

    def explain(self) -> None:
        """Note that one request has caused the end of the generation."""
        if self.on_explained is not None:
            self.on_explained()

    def once_idle(self, callback: Callable[[], None]) -> None:
        """Call back once, when no request is in flight (at once if none is)."""
        if not self._leases:
            callback()
        else:
            self._on_idle = callback

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call back when the generation ends; for idle keep-alive connections to it."""
        self._on_close.append(callback)

    def close(self, why: HttpError, *, crashed: bool = False) -> None:
        """End every request in flight because of ``why``, and every idle connection."""
        if self.closed:
            return
        self._explained = crashed and self.is_explained
        self.closed, self.crashed = True, crashed
        for lease in (*self._leases, *self._lingering):
            lease.revoke(why)
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    def _take_back(self, lease: Lease, now_s: float) -> None:
        """Take back the permits of ``lease``. ``now_s``: the time, to measure ``held_s``; 0: do not."""
        if now_s:
            lease.permit_s += (now_s - lease.since_s) * lease.weight
            self.held_s = smoothed(self.held_s, lease.permit_s, HELD_WEIGHT)
        lease.since_s = 0.0
        busy = self.busy
        if lease is self.trial:
            lease.share()
        self.busy = still_busy = self.busy - lease.weight
        is_first = busy >= self.max_concurrent > still_busy or (self.reserved and still_busy == _EXCLUSIVE)
        if is_first and self.on_permit_free is not None:
            self.on_permit_free()

    def _lingers(self, lease: Lease) -> None:
        self._lingering.add(lease)
        self._lease_ended(lease, 0.0)

    def _lease_ended(self, lease: Lease, now_s: float) -> None:
        """Note the end of a lease. ``now_s`` is the time, or 0 if the caller has not read the clock."""
        if lease not in self._leases:
            self._lingering.discard(lease)
            return
        self._leases.remove(lease)
        if self._leases:
            return
        if self.on_idle is not None:
            self.idle_since_s = now_s or monotonic()
            self.on_idle(self)
        if self._on_idle is not None:
            callback, self._on_idle = self._on_idle, None
            callback()


BUSY: Final = HttpError(429, "The model is busy", "rate_limit_error", cause="busy", queueable=True)
"""No permit is free. A request that may not wait gets a longer message from the queue."""


def generation_ended(message: str, cause: str = "generation_ended", remedy: str = "") -> HttpError:
    """Make the reason for requests that end together with their generation."""
    return HttpError(503, message, cause=cause, remedy=remedy, retry_after_s=1.0)


class Reservation:
    """Keeps at most one ``endpoint`` free for the next suspect, so that it runs alone.

    The endpoint gives out no more permits until all have been returned.
    """

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None

    def __repr__(self) -> str:
        return f"<Reservation of {self.endpoint!r}>"

    def place(self, eligible: tuple[Endpoint, ...]) -> Endpoint | None:
        """Find the idle endpoint for the next suspect. None: one is reserved, or another suspect runs."""
        index = place_for([None if each.trial is not None else each.taken for each in eligible])
        endpoint = None if index is None else eligible[index]
        if endpoint is None or endpoint.taken:
            self.move_to(endpoint)
            return None
        self.move_to(None)
        return endpoint

    def move_to(self, endpoint: Endpoint | None) -> None:
        """Reserve this endpoint instead; None: no suspect waits any more, or its endpoint is idle."""
        if self.endpoint is not endpoint:
            if self.endpoint is not None:
                self.endpoint.reserve(reserved=False)
            if endpoint is not None:
                endpoint.reserve(reserved=True)
            self.endpoint = endpoint


Serving = tuple[Endpoint, ...] | HttpError
"""The endpoints that serve a model (at least one; they may be closed by now), or why none does."""


class Lease(Struct, eq=False):
    """One request's right to use one generation. Released exactly once; ``release`` may be repeated.

    ``since_s``: since when it holds permits (monotonic); 0: it holds none. ``weight``: how many it holds.
    ``permit_s``: how long it held permits that it has returned, times their number. ``alone``: no other
    request has held a permit at the same time.
    """

    endpoint: Endpoint
    since_s: float = 0.0
    weight: int = 1
    permit_s: float = 0.0
    alone: bool = False
    alone_until_s: float = 0.0
    _on_revoke: Callable[[HttpError], None] | None = None

    def __repr__(self) -> str:
        return f"<Lease of {self.endpoint!r}, {self.weight if self.since_s else 0} permits>"

    def on_revoked(self, callback: Callable[[HttpError], None]) -> None:
        """Call back with the reason when the generation ends while the request is in flight."""
        self._on_revoke = callback

    def revoke(self, why: HttpError) -> None:
        callback, self._on_revoke = self._on_revoke, None
        if callback is not None:
            callback(why)

    def linger(self, when_closed: Callable[[HttpError], None]) -> None:
        """Keep only the permits, for work that the child has not ended; ``release`` returns them.

        The request is not in flight any more, so no drain waits for it. ``when_closed`` is called on close.
        """
        self._on_revoke = when_closed
        self.endpoint._lingers(self)

    def isolate(self, until_s: float) -> bool:
        """Let no other request get a permit meanwhile. Returns False if others hold permits."""
        endpoint = self.endpoint
        if not self.since_s or endpoint.busy != self.weight:
            return False
        endpoint.busy += _EXCLUSIVE
        endpoint.trial, self.alone, self.alone_until_s = self, True, until_s
        return True

    def share(self) -> None:
        """Let other requests get permits again. May be repeated."""
        if self.endpoint.trial is self:
            self.endpoint.trial, self.alone = None, False
            self.endpoint.busy -= _EXCLUSIVE

    def acquire_permit(self) -> None:
        """Take a permit, free or not."""
        if self.endpoint.trial is not None:
            self.endpoint.trial.alone = False
        self.endpoint.busy += 1
        self.weight = 1
        self.since_s = monotonic()

    def weigh(self, jobs: int) -> None:
        """Hold a permit for each job, up to all permits. llama-server queues the other jobs."""
        if self.since_s:
            weight = min(jobs, self.endpoint.max_concurrent)
            # Until now it held fewer, and ``since_s`` counts them all.
            self.permit_s -= (weight - self.weight) * (monotonic() - self.since_s)
            self.endpoint.busy += weight - self.weight
            self.weight = weight

    def release_permit(self) -> None:
        """Return the permit before the end of the request. May be repeated."""
        if self.since_s:
            self.endpoint._take_back(self, monotonic())

    def cancel_permit(self) -> None:
        """Return an unused permit, without a measurement of ``held_s``."""
        if self.since_s:
            self.endpoint._take_back(self, 0.0)

    def release(self, now_s: float = 0.0) -> None:
        """End the lease. ``now_s``: the time, if the caller has read it; else 0.

        The permit comes first, so that the next request gets its lease before the endpoint is idle.
        """
        self._on_revoke = None
        if self.since_s:
            now_s = now_s or monotonic()
            self.endpoint._take_back(self, now_s)
        self.endpoint._lease_ended(self, now_s)


def permits_of(endpoints: Sequence[Endpoint]) -> tuple[int, int]:
    """Count the permits, and the free ones."""
    slots = sum(endpoint.slots for endpoint in endpoints)
    return slots, sum(max(0, endpoint.max_concurrent - endpoint.busy) for endpoint in endpoints)


def eligible_of(state: Serving, now_s: float) -> tuple[Endpoint, ...]:
    """Return the endpoints that are neither closed nor ejected."""
    if isinstance(state, HttpError):
        return ()
    return tuple(endpoint for endpoint in state if not endpoint.closed and endpoint.ejected_until_s <= now_s)


def with_free_permit(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    return tuple(endpoint for endpoint in endpoints if endpoint.busy < endpoint.max_concurrent)


def next_readmission_s(state: Serving, now_s: float) -> float:
    """Return when the next ejection ends, or the next lease shares its endpoint again; inf if none does."""
    endpoints = () if isinstance(state, HttpError) else state
    ends = [e.ejected_until_s if e.trial is None else e.trial.alone_until_s for e in endpoints]
    return min((at_s for at_s in ends if at_s > now_s), default=float("inf"))


def share_again(state: Serving, now_s: float) -> bool:
    """Share the endpoints whose suspects were alone for long enough. Returns whether a suspect is alone."""
    trials = () if isinstance(state, HttpError) else [e.trial for e in state if e.trial is not None]
    for trial in trials:
        if trial.alone_until_s <= now_s:
            trial.share()
    return any(trial.alone_until_s > now_s for trial in trials)
