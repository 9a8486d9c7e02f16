"""The stages of an answer: what stands between llama-server and the client where bytes do not just pass.

``response.py`` composes the stages of a request once. A plain request has none. Features add stages
(``AnswerStages`` in ``context.py``), and the exchange knows only ``Stage``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from msgspec import Struct

from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import TokenCounts
from llamasup.core.queueing.endpoint import Endpoint


class AnswerHead(Protocol):
    """The answer that begins: of an upstream connection, or one that was held."""

    @property
    def status(self) -> int: ...

    @property
    def lines(self) -> bytes:
        """The header lines for the client."""
        ...

    @property
    def streams_events(self) -> bool: ...

    @property
    def complete(self) -> bool: ...


class ResponseReceiver(Protocol):
    """Receives the response to the request that an upstream connection carries."""

    answered: bool
    """Whether a byte of the response has come; set by the connection."""

    @property
    def is_replayable(self) -> bool:
        """Whether the request can be sent again as long as the client has received nothing."""
        ...

    def begin(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        """The head is complete; ``body`` came with it. ``framing``: the header that says where the body ends;
        None: it ends where the connection ends.
        """
        ...

    def relay(self, data: bytes) -> None:
        """More bytes of the body."""
        ...

    def last_bytes(self) -> bytes:
        """The end of the received body, for a response whose last bytes arrive in pieces."""
        ...

    def finished(self) -> None:
        """The response is complete."""
        ...

    def upstream_broke(self, reason: str, *, closed: bool = False) -> None:
        """The response cannot be completed; ``closed``: because the connection ended."""
        ...

    def upload_pauses(self) -> None:
        """The child does not read the request's body as fast as it arrives."""
        ...

    def upload_resumes(self) -> None:
        """The child reads again."""
        ...


class Position(Enum):
    """The part of the response that the client has."""

    NOTHING = "an error can be the response"
    BETWEEN = "an error event can follow the last event"
    INSIDE = "only a reset shows that the response is incomplete"


class Ended(Struct, frozen=True):
    """The end of a response. ``outcome`` and ``status``: for the record; empty and 0: as llama-server's.
    ``is_whole``: otherwise the client shall see that something is missing, and the connection closes.
    """

    outcome: str = ""
    status: int = 0
    is_whole: bool = True


AS_ANSWERED: Final = Ended()


class Received(Protocol):
    """The part of an answer that the client has received, and that a later llama-server can continue.

    ``is_continued``: a later one has begun its part. ``pieces``: the tokens of the first part, once its rest
    has been requested. ``tail``: what was sent last.
    """

    @property
    def is_continued(self) -> bool: ...

    @property
    def pieces(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def tail(self) -> Sequence[bytes]: ...


class Begun(Struct, frozen=True):
    """The first part of an answer whose rest was requested. ``opening``: its first bytes."""

    received: Received
    sent_at: float
    first_byte_at: float
    opening: bytes


class ResponseForm(Struct, frozen=True):
    """The framing of the response to a client. ``lines``: the header lines of llamasup. ``load_s``: how long
    the request waited for a load.
    """

    lines: bytes
    http_1_0: bool = False
    close: bool = False
    load_s: float = 0.0


class Attempt(Protocol):
    """The exchange of an answer, for the stages of the answer."""

    bytes_out: int

    @property
    def send(self) -> Callable[[bytes], None]:
        """Sends bytes to the client."""
        ...

    @property
    def form(self) -> ResponseForm: ...

    @property
    def is_draining(self) -> bool:
        """Whether llamasup stops, so that nothing new is begun."""
        ...

    def response_head(self, answer: AnswerHead, framing: bytes) -> bytes:
        """The head of the response with this answer of llama-server."""
        ...

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def counted_as(self) -> str:
        """The model that the request counts for."""
        ...

    @property
    def is_uploaded(self) -> bool:
        """Whether the body of the request is forwarded, and so cannot be sent a second time."""
        ...

    @property
    def tail(self) -> Iterable[bytes]:
        """The reads of a held answer."""
        ...

    def hold(self, beginning: bytes, more: Callable[[bytes], None]) -> None:
        """Keep the body of the answer that begins. ``more`` is called for each further read."""
        ...

    def send_again(self) -> None:
        """Send the request, whose body was changed, with the same lease: it has its permit until the end."""
        ...

    def begin(self, upstream: AnswerHead, framing: bytes | None, body: bytes) -> None:
        """Give the client this answer."""
        ...

    def fail(self, error: HttpError, outcome: str) -> None:
        """End the request with this error."""
        ...

    def end_soon(self, outcome: str, error: HttpError | None = None) -> None:
        """End the request in the next round of the loop, because bytes are being relayed. Without ``error``,
        the client has its last byte.
        """
        ...


class Stage:
    """One stage of the answer to one request, through all attempts to get it.

    The last stage of a chain writes to the client. ``begin``, ``write``, ``end`` and ``fail`` carry the
    answer. The other methods are for the few stages that also decide about attempts.
    """

    __slots__ = ("write",)

    write: Callable[[bytes], None]
    """Takes the body of the answer, as llama-server frames it. ``begin`` sets it. It is an attribute, so that
    a stage that changes nothing costs nothing for each chunk.
    """

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        """An answer for the client begins."""
        raise NotImplementedError

    def end(self, status: int) -> Ended:
        """The answer with this status is complete: send what is left."""
        return AS_ANSWERED

    def fail(self, error: bytes) -> None:
        """End a response that has begun with this error body. The connection closes after it."""
        raise NotImplementedError

    def position(self, plain: Position) -> Position:
        """The part of the response that the client has. ``plain``: without any stage."""
        return plain

    def comment(self, text: str) -> None:
        """Send a comment while the request waits; begins a stream if there is none."""

    # --- before an answer

    def prepare(self, endpoint: Endpoint) -> Coroutine[Any, Any, Callable[[], object]] | None:
        """The work before the request is sent to ``endpoint``. What it returns is called if the request is
        still to be sent.
        """
        return None

    def admit(self, endpoint: Endpoint) -> HttpError | None:
        """The refusal of a request that this server cannot serve. Called before each attempt."""
        return None

    def holds(self, attempt: Attempt, head: AnswerHead, framing: bytes | None, body: bytes) -> bool:
        """Whether the answer that begins is held until its end (``Attempt.hold``)."""
        return False

    def release(self, attempt: Attempt) -> bool:
        """The held answer is complete. Returns whether an answer for the client has begun; otherwise, the
        request was sent again or refused.
        """
        return True

    def rescue(self, attempt: Attempt) -> None:
        """A request that was sent again has failed: give the client the earlier answer."""

    # --- the rest of an answer, from another llama-server

    @property
    def received(self) -> Received | None:
        """The part that the client has, if another llama-server may continue it."""
        return None

    def resume(self) -> str:
        """Change the request into one for the rest. Returns the reason if that is not possible."""
        return ""

    def complete(self) -> bool:
        """End the body in place of llama-server, if nothing but its end is missing. Returns whether it is."""
        return False

    # --- the record

    def total(self, counts: TokenCounts | None) -> TokenCounts | None:
        """The token counts of all attempts; ``counts``: the counts of the client's answer."""
        return counts


class Between(Stage):
    """A stage with another one behind it, nearer to the client. Passes everything on.

    What concerns whole attempts (``admit``, ``holds``, ``release``, ``rescue``, ``total``) is not passed on:
    only the last stage and the first one have it.
    """

    __slots__ = ("next",)

    next: Stage

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        self.next.begin(attempt, head, framing)
        self.write = self.next.write

    def end(self, status: int) -> Ended:
        return self.next.end(status)

    def fail(self, error: bytes) -> None:
        self.next.fail(error)

    def position(self, plain: Position) -> Position:
        return self.next.position(plain)

    def comment(self, text: str) -> None:
        self.next.comment(text)

    def prepare(self, endpoint: Endpoint) -> Coroutine[Any, Any, Callable[[], object]] | None:
        return self.next.prepare(endpoint)

    @property
    def received(self) -> Received | None:
        return self.next.received

    def resume(self) -> str:
        return self.next.resume()

    def complete(self) -> bool:
        return self.next.complete()
