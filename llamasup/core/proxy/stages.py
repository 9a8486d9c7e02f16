"""Protocols: what receives an answer, the stages through which some pass, and what they see of an exchange.

A request that needs no stage has none of these objects. ``AnswerStages`` (``interfaces.py``) makes the stages
of features, which the core does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

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

    def pause(self) -> None: ...

    def disable_keepalive(self) -> None: ...

    def abort(self) -> None: ...


class ResponseReceiver(Protocol):
    """Receives the response to the request that an upstream connection carries."""

    answered: bool
    """Whether a byte of the response has come; set by the connection."""

    @property
    def is_head(self) -> bool:
        """Whether the request is a HEAD request, so that its response has no body."""
        ...

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


class BegunStream(Protocol):
    """A stream that llamasup has begun before llama-server has answered (``KeepaliveStream``)."""

    def comment(self, text: str) -> None:
        """Send an SSE comment."""
        ...

    def join(self, *, is_stream: bool, framing: bytes | None) -> Callable[[bytes], None]:
        """Continue with llama-server's answer; returns the function that takes its body."""
        ...

    @property
    def is_relayed(self) -> bool:
        """Whether that answer is also a stream, so that the client gets it unchanged."""
        ...

    def finish(self, status: int) -> bytes | None:
        """The answer is complete. Returns the error body for ``fail`` if it was not a stream, else None."""
        ...

    def fail(self, error: bytes) -> None:
        """End with the event of this error body."""
        ...


class KeptStream(BegunStream, Protocol):
    """A stream that is kept so that a later llama-server can continue it.

    ``sent_at`` and ``first_byte_at`` are those of the first exchange, and ``opening`` its first bytes.
    ``is_continued``: a second one has been asked for the rest. ``is_complete``: only the end of the body is
    missing. ``tail``: what was sent last. ``refusal``: why the rest is not requested; empty if it may be.
    """

    sent_at: float
    first_byte_at: float
    opening: bytes
    refusal: str

    @property
    def is_continued(self) -> bool: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def tail(self) -> deque[bytes]: ...

    def first(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """The function that takes the first part of the answer; ``write`` sends it to the client."""
        ...

    @property
    def pieces(self) -> int:
        """The tokens of the first part, once its rest has been asked for."""
        ...

    @property
    def sent_bytes(self) -> int: ...

    def expect(self, *, repeats: bool | None, fail: Callable[[HttpError], None]) -> None:
        """A next part begins. ``fail`` is called if it does not continue the answer.

        ``repeats``: as in ``Endpoint.repeats_begun_message``.
        """
        ...

    @property
    def is_uncounted(self) -> bool:
        """Whether only the model knows how many tokens the client has, once the rest has been asked for."""
        ...

    async def count(self, endpoint: Endpoint) -> int | None:
        """The number of these tokens, by the model; None if it cannot be asked."""
        ...

    def counted(self, tokens: int) -> None:
        """Change the request for the rest: the client has this number of tokens."""
        ...

    def ask_for_rest(self, model: str) -> bool:
        """Make the request one for the rest. False: that is refused. ``model``: for the metrics."""
        ...

    def refuse(self, reason: str, model: str) -> None:
        """Refuse to continue the stream, and count that for this model."""
        ...

    def end(self) -> None:
        """End the body of a complete answer in place of llama-server. ``finish`` ends a continued one."""
        ...


class Answered(Struct, frozen=True):
    """The end of a response. ``complete``: the answer of llama-server could be translated to its end.
    ``framed``: the response has its last byte; otherwise the connection closes, so that it looks incomplete.
    """

    status: int
    complete: bool = True
    framed: bool = True


class ResponseForm(Struct, frozen=True):
    """The framing of the response to a client. ``lines``: the header lines of llamasup. ``load_s``: how long
    the request waited for a load.
    """

    lines: bytes
    http_1_0: bool = False
    close: bool = False
    load_s: float = 0.0


class Translation(Protocol):
    """One request of another API, and its answer."""

    def admit(self, endpoint: Endpoint) -> HttpError | None:
        """Called before each attempt to send the request to ``endpoint``. Returns the refusal if that server
        cannot serve it so.
        """
        ...

    @property
    def has_begun(self) -> bool:
        """Whether a byte of the response has been sent."""
        ...

    def begin(
        self,
        write: Callable[[bytes], None],
        status: int,
        form: ResponseForm,
        *,
        is_chunked: bool,
        streams_events: bool,
        end: Callable[[], None],
    ) -> Callable[[bytes], None]:
        """llama-server's answer begins. Returns the function that takes its body, as framed by llama-server.

        ``write`` sends to the client. ``end`` is called once the response has ended with an error before the
        answer is complete: the server shall not go on.
        """
        ...

    def finish(self) -> Answered:
        """The answer is complete: send what is left."""
        ...

    def fail(self, error: bytes) -> None:
        """End a response that has begun with this error body: the connection closes after it."""
        ...


class HeldExchange(Protocol):
    """An exchange, for the stage that holds its answers."""

    bytes_out: int

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
        """The reads of the held answer."""
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

    def fail_soon(self, error: HttpError) -> None:
        """End the request with this error in the next round of the loop: bytes are being relayed."""
        ...


class SecondTry(Protocol):
    """Holds the answers of a request that may have to be requested a second time."""

    @property
    def runs(self) -> bool:
        """Whether the request was sent again, and no byte of its second answer has gone to the client."""
        ...

    @property
    def holds(self) -> bool:
        """Whether an answer is held now."""
        ...

    def takes(self, exchange: HeldExchange, head: AnswerHead, framing: bytes | None, body: bytes) -> bool:
        """Called when an answer begins. Returns whether the answer is held until its end."""
        ...

    def completed(self, exchange: HeldExchange, *, draining: bool) -> bool:
        """The held answer is complete. Returns whether the request was sent again or refused. Otherwise, an
        answer for the client has begun.
        """
        ...

    def begin_first(self, exchange: HeldExchange) -> None:
        """The second attempt has ended before its answer: give the client the first one."""
        ...

    def total(self, counts: TokenCounts | None) -> TokenCounts | None:
        """The token counts of all attempts; ``counts``: those of the client's answer."""
        ...
