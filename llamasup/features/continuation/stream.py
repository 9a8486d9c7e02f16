"""Keeps a streamed answer so that it can be continued, and joins its parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk
from llamasup.core.http.sse import FRAMING
from llamasup.features.continuation.answer import NotContinued, event_of, events_in
from llamasup.features.continuation.apis import API_BY_ROUTE, Joint
from llamasup.features.continuation.request import encoded, holds_back, of_request, refuse_state

__all__ = ["MAX_KEPT", "TAIL_PIECES", "Recording"]

TAIL_PIECES: Final = 8

MAX_KEPT: Final = 1024 * 1024  # of the request, and of the answer: about 4,000 tokens of a chat
MAX_HELD: Final = 64 * 1024  # of an event; the last one of /completion has 3 KiB and the prompt
_EVENT_END: Final = b"\n\n\r\n"  # of a chunk that ends with an event
_OTHER_EVENT_END: Final = b"\r\n\r\n\r\n"  # which no llama-server sends
_LAST_CHUNK_END: Final = b"0\r\n\r\n"


# A llama-server can send strange values. Their errors must not stop the task that relays the answer.
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Recording:
    """Only whole events are sent to the client, so that the answer never ends within one.

    The bytes have the framing of chunks in both directions. ``route``: the label. ``body``: of the request.
    """

    def __init__(self, route: str, body: bytes) -> None:
        self._api = API_BY_ROUTE[route]
        self._body = body
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._held = b""
        self._joint: Joint | None = None
        self._dechunker: Dechunker | None = None
        self._payloads: list[bytes] = []
        self._write: Callable[[bytes], None] | None = None
        self.tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        """The last bytes that were sent."""
        self.sent_bytes = 0
        self.pieces = 0
        """The pieces of the first part, once its rest has been requested."""
        self.uncounted = ""
        """Its text, if that may have more tokens than ``pieces``."""

    @property
    def is_continued(self) -> bool:
        """Whether a later generation has begun its part."""
        return self._dechunker is not None

    @property
    def is_complete(self) -> bool:
        """Whether the client has the last event of the answer: only the end of the body is missing."""
        sent = b"".join(self.tail)
        if not self.is_continued and not sent.endswith((_EVENT_END, _OTHER_EVENT_END)):
            return False  # within a chunk
        last = FRAMING.sub(b"", b"\r\n" + sent).rstrip().rpartition(b"\n\n")[2]
        try:
            event = event_of(last)
            return event is not None and self._api.is_last(event)
        except NotContinued:
            return False

    def begin(self, write: Callable[[bytes], None], *, repeats: bool | None = None) -> None:
        """A generation begins its part of the answer. ``write`` sends to the client.

        ``repeats`` is true if this llama-server sends the text of a message that it continues again, and None
        if it cannot continue messages.
        Raises NotContinued if a later part needs that.
        """
        self._write = write
        self._held = b""
        if self._joint is None:
            return
        self._payloads = []
        self._dechunker = Dechunker(self._payloads.append)
        if self._joint.prefixes and self.pieces:
            if repeats is None:
                raise NotContinued("this llama-server was not seen to continue a begun message")
            for prefix in self._joint.prefixes:
                prefix.is_repeated = repeats

    def relay(self, data: bytes) -> None:
        """Bytes of the answer: of the first part unchanged, of the next ones joined to it.

        Raises NotContinued if a next part does not continue the answer.
        """
        if self._dechunker is not None:
            self._dechunker.write(data)
            self._join()
            return
        if self._held or not data.endswith((_EVENT_END, _LAST_CHUNK_END)):
            data = self._whole_events(self._held + data)
        if data:
            self._send(data)

    def _whole_events(self, data: bytes) -> bytes:
        """The part of ``data`` that ends with an event; the rest is held back."""
        self._held = b""
        if data.endswith(_LAST_CHUNK_END) or self._kept_bytes > MAX_KEPT:
            return data
        end = data.rfind(_EVENT_END)
        end = 0 if end < 0 else end + len(_EVENT_END)
        if len(data) - end > MAX_HELD or data.endswith(_OTHER_EVENT_END):
            self._drop()
            return data
        data, self._held = data[:end], data[end:]
        return data

    def finish(self) -> None:
        """The last part is complete."""
        if self._dechunker is not None:
            self._send(chunk(b": llama-server ended within this answer, and the next one continued it\n\n"))
            self._send(LAST_CHUNK)

    def end(self) -> None:
        """End the body of the first part in place of llama-server, because the answer is complete."""
        if self._dechunker is None:
            self._send(LAST_CHUNK)

    def continued_body(self, tokens: int = 0) -> bytes:
        """The body of the request that continues the answer. Raises NotContinued with the reason.

        The next part that begins is joined to what was sent until now. ``tokens``: those of ``uncounted``, if
        they are known.
        """
        if self._kept_bytes > MAX_KEPT:
            raise NotContinued("the answer is longer than 1 MiB, or its events are too long")
        try:
            body = of_request(self._body)
            sent = self._api.sent(events_in(b"".join(self._kept)))
            is_uncounted = not sent.is_counted and (holds_back(body) or not sent.text.isascii())
            self.uncounted = sent.text if is_uncounted else ""
            sent.pieces = max(sent.pieces, tokens)
            refuse_state(body)
            self._joint = self._api.continued(body, sent)
            self.pieces = sent.pieces
            return encoded(body)
        except _UNREADABLE:
            raise NotContinued("the request or its answer cannot be read") from None

    def _join(self) -> None:
        assert self._joint is not None
        *blocks, self._held = (self._held + b"".join(self._payloads)).split(b"\n\n")
        self._payloads.clear()
        joined = b""
        try:
            for block in blocks:
                event = event_of(block)
                if event is None:
                    joined += block + b"\n\n" if block else b""  # a ping
                elif (news := self._joint.joined(event)) is not None:
                    joined += news.encoded()
        except _UNREADABLE:
            raise NotContinued("the rest of the answer cannot be read") from None
        if joined:
            self._send(chunk(joined))

    def _send(self, data: bytes) -> None:
        assert self._write is not None
        self.tail.append(data)
        size = len(data)
        self.sent_bytes += size
        self._kept_bytes += size
        if self._kept_bytes <= MAX_KEPT:
            self._kept.append(data)
        else:
            self._drop()
        self._write(data)

    def _drop(self) -> None:
        """The answer will not be continued."""
        self._kept_bytes = MAX_KEPT + 1
        self._kept.clear()
        self._body = b""
