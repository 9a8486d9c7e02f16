"""A client's request as far as it has been read, and what is told about it when it is over."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from llamasup.core.http import Head, HttpError, Route
from llamasup.core.sse import TokenCounts
from llamasup.runtime.metrics import RequestRecord

if TYPE_CHECKING:
    from llamasup.proxy.waiting import Waiting

__all__ = ["UNREAD", "Request", "record_of"]

UNREAD = Head(b"", b"", b"", Route("unread"))  # stands for a head that could not be read


class _Named(msgspec.Struct):
    model: str | None = None


_read_model = msgspec.json.Decoder(_Named).decode


class Request:
    """Filled by the parser's callbacks; ``refusal`` is set as soon as it is known that it is not served."""

    __slots__ = (
        "_pieces",
        "body",
        "body_bytes",
        "expects_continue",
        "head",
        "http_1_0",
        "id",
        "keep_alive",
        "peer",
        "received_at",
        "refusal",
        "response_lines",
    )

    def __init__(
        self, head: Head, request_id: bytes, *, keep_alive: bool, http_1_0: bool = False, peer: str = ""
    ) -> None:
        """``peer``: the address that it came from; empty for a Unix socket."""
        self.head = head
        self.peer = peer
        self.id = request_id
        self.http_1_0 = http_1_0
        self.keep_alive = keep_alive and not http_1_0
        self.expects_continue = head.expects_continue
        self.refusal: HttpError | None = None
        self.response_lines = b"X-Request-Id: " + request_id + b"\r\n"
        self.received_at = 0.0  # monotonic time of its last byte; 0 until then
        self.body = b""
        self.body_bytes = 0
        self._pieces: list[bytes] | None = None

    def add(self, piece: bytes) -> None:
        """Keep bytes of the body; those of a refused request are only counted."""
        self.body_bytes += len(piece)
        if self.refusal is not None:
            self._pieces = None
        elif self._pieces is not None:
            self._pieces.append(piece)
        elif not self.body:
            self.body = piece  # most bodies come whole
        else:
            self._pieces = [self.body, piece]

    def complete(self) -> None:
        if self._pieces is not None:
            self.body = b"".join(self._pieces)
            self._pieces = None

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for a generation, and be sent again if nothing of an answer has come."""
        return self.head.route.waits and self.head.method == b"POST"

    @property
    def needs_place(self) -> bool:
        """Whether it is work for the model itself, of which there may be only so much at a time."""
        return self.head.route.infers and self.head.method == b"POST"

    def model(self) -> str | None:
        """The ``model`` that a JSON body names. A body that is no JSON is for llama-server to refuse."""
        if not self.body:
            return None
        try:
            return _read_model(self.body).model
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None


def record_of(
    request: Request,
    status: int,
    outcome: str,
    *,
    model: str = "",
    generation: int = 0,
    queue_s: float = 0.0,
    first_byte_s: float | None = None,
    bytes_out: int = 0,
    counts: TokenCounts | None = None,
    waiting: Waiting | None = None,
) -> RequestRecord:
    """The record of a request that is over now. ``waiting``: it had to wait for a generation."""
    head = request.head
    record = RequestRecord(
        request.id.decode("ascii"),
        head.method.decode("ascii"),
        head.path.decode("latin-1"),
        head.route.label,
        model,
        generation,
        status,
        counts.prompt if counts else None,
        counts.cached if counts else None,
        counts.completion if counts else None,
        counts.tokens_per_s if counts else None,
        queue_s,
        first_byte_s,
        monotonic() - request.received_at if request.received_at else 0.0,
        bytes_out,
        outcome,
    )
    if waiting is None:
        return record
    return msgspec.structs.replace(record, waited_s=waiting.waited_s, replayed=waiting.replayed)
