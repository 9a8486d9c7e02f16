"""Bytes in, requests out: what a client sends is parsed, bounded and judged before it is acted upon.

Does no I/O of its own: it tells nobody anything, it only fills ``ready``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

import httptools

from llamasup.auth.keys import ApiKey
from llamasup.http.head_cache import KnownHead, compile_head
from llamasup.http.heads import Head, HttpError, RawHeaders, read_head
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.local import cors_lines
from llamasup.proxy.request import UNREAD, Request
from llamasup.proxy.settings import Limits

__all__ = ["RequestReader"]

MAX_LENGTH_DIGITS: Final = 32  # 2^64 has 20
_ABSURD: Final = 1 << 64

_log = logging.getLogger("llamasup.proxy")


class RequestReader:
    """Of one connection.

    ``ready``: whole requests, and refusals of what is none, in order; no more than one read holds.
    ``partial``: the request whose head is read and whose body is not.
    ``begun``: a request's first byte was seen, its last was not.
    """

    __slots__ = (
        "_door",
        "_fed",
        "_headers",
        "_heads_read",
        "_known_api_key",
        "_known_bytes",
        "_known_epoch",
        "_known_head",
        "_known_key",
        "_length",
        "_limits",
        "_local_host",
        "_next_id",
        "_owed",
        "_parser",
        "_peer",
        "_progress",
        "_repeats",
        "_resume",
        "_resuming",
        "_small",
        "_target",
        "begun",
        "partial",
        "ready",
    )

    def __init__(
        self,
        limits: Limits,
        door: AccessPolicy,
        local_host: str,
        next_id: Callable[[], bytes],
        peer: str = "",
    ) -> None:
        self.ready: deque[Request] = deque()
        self.partial: Request | None = None
        self.begun = False
        self._limits = limits
        self._small = min(limits.small_body_bytes, limits.body_bytes)  # accepted from every client
        self._door = door
        self._local_host = local_host
        self._next_id = next_id
        self._peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: RawHeaders = []
        self._length: int | None = None
        # The last head that was admitted: a client that keeps its connection repeats itself.
        self._known_key: tuple[bytes, bytes, str, RawHeaders] | None = None
        self._known_head = UNREAD
        self._known_api_key: ApiKey | None = None
        self._known_epoch = 0  # of the keys that admitted it
        self._known_bytes: KnownHead | None = None  # once it has come twice; the parser is not shown it again
        self._repeats = False  # the head being parsed is the known one, and may be known by its bytes
        self._heads_read = 0  # in the read being parsed
        self._owed = 0  # bytes of a body that the parser is not shown
        self._fed = 0  # bytes of earlier reads since the parser last got on
        self._progress = False
        self._resume = b""  # the framing of a body that the parser leaves unread behind an offered upgrade
        self._resuming = False  # while a new parser is shown that framing

    def feed(self, data: bytes) -> None:
        """Parse; whole requests end up in the queue, and so does the refusal of bytes that are none."""
        self._progress = False
        if self._owed:
            data = self._read_owed(data)
        while data and not self.begun and (known := self._known_bytes) is not None:
            digits = known.length_in(data)
            if digits is None or self._known_epoch != self._door.keys.epoch:
                break
            data = self._read_known(digits, data[known.bytes_beside_digits + len(digits) :])
        if data:
            self._parse(data)

    def _read_known(self, digits: bytes, rest: bytes) -> bytes:
        """Read a request whose head is known, and which ``rest`` is behind; what is left then."""
        self._length = int(digits) if digits else None
        self._open(self._known_head, self._known_api_key)
        self._owed = self._length or 0
        self.begun = True
        return self._read_owed(rest)

    def _read_owed(self, data: bytes) -> bytes:
        """Read on in a body that the parser is not shown; what is left behind it."""
        body, rest = (data, b"") if len(data) <= self._owed else (data[: self._owed], data[self._owed :])
        self._owed -= len(body)
        self._progress = True
        if body and self.partial is not None:
            self.partial.add(body)
        if not self._owed:
            self.on_message_complete()
        return rest

    def _parse(self, data: bytes) -> None:
        self._repeats = False
        self._heads_read = 0
        from_its_start = not self.begun
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError:
            _log.exception("our own parser callback failed")
            self.refuse(HttpError(500, "llamasup failed to read the request", "server_error", close=True))
        except httptools.HttpParserError as error:
            self.refuse(HttpError(400, f"malformed request: {error}", close=True))
        if self._progress:
            self._fed = 0
        else:
            # A head, a trailer or a chunk's extensions that do not come to an end.
            self._fed += len(data)
            if self._fed > self._limits.head_bytes:
                self.refuse(_unbounded(self._limits.head_bytes))
        if self._repeats and from_its_start and self._heads_read == 1:
            self._known_bytes = compile_head(data)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1, as RFC 9110 §7.8 lets us: Java's client offers h2c with its first request.

        The parser leaves off behind the head of such a request, its body unread. A new one is shown the
        framing of the body and reads on from there.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._resume:
            resume, self._resume = self._resume, b""
            self._resuming = True
            self._parser.feed_data(resume)
            self._resuming = False
        if rest:
            self.feed(rest)

    @property
    def length(self) -> int | None:
        """The Content-Length of the request that is being read."""
        return self._length

    def refuse(self, error: HttpError) -> None:
        """Queue the refusal of something that is not a whole request; the connection ends with it."""
        request = self.partial or Request(UNREAD, self._next_id(), keep_alive=False, peer=self._peer)
        self.partial = None
        self._known_bytes = None
        request.refusal = error
        request.keep_alive = False
        if not self.ready or self.ready[-1].keep_alive:
            self.ready.append(request)

    def close(self) -> None:
        """Forget all. The parser holds our methods: the pair would wait for the cycle collector."""
        self.ready.clear()
        self.partial = None
        del self._parser

    # --- httptools

    def on_message_begin(self) -> None:
        self.begun = True

    def on_url(self, url: bytes) -> None:
        self._target += url  # in pieces when reads split it

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            # Digits, and below 2^64: llhttp has seen to that, but not to the zeros before them.
            self._length = int(value) if len(value) <= MAX_LENGTH_DIGITS else _ABSURD
        else:
            self._headers.append((lower, value))

    def on_headers_complete(self) -> None:
        self._progress = True
        if self._resuming:
            self._target = b""
            self._headers = []
            return
        parser = self._parser
        method: bytes = parser.get_method()
        version: str = parser.get_http_version()
        key = (method, self._target, version, self._headers)
        self._target = b""
        self._headers = []
        self._heads_read += 1
        refusal = None
        epoch = self._door.keys.epoch
        if key == self._known_key and epoch == self._known_epoch:
            head, api_key = self._known_head, self._known_api_key
            self._repeats = (
                parser.should_keep_alive()
                and version == "1.1"
                and not (head.chunked or head.expects_continue or head.upgrades)
            )
        else:
            read = self._too_large(key) or read_head(*key, self._door.rules)
            if isinstance(read, HttpError):
                self.refuse(read)
                return
            head = read
            admitted = self._door.authorize(head, self._local_host)
            if isinstance(admitted, HttpError):
                refusal, api_key = admitted, None
            else:
                api_key = admitted
                self._known_key, self._known_head = key, head
                self._known_api_key, self._known_epoch = api_key, epoch
                self._known_bytes = None
        self._open(head, api_key, refusal, keep_alive=parser.should_keep_alive(), http_1_0=version == "1.0")
        if head.upgrades and parser.should_upgrade():
            if head.chunked:
                self._resume = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            elif self._length:
                self._resume = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % self._length

    def _open(
        self,
        head: Head,
        api_key: ApiKey | None,
        refusal: HttpError | None = None,
        *,
        keep_alive: bool = True,
        http_1_0: bool = False,
    ) -> None:
        """Begin the request that ``head`` heads."""
        self.partial = request = Request(
            head,
            head.request_id or self._next_id(),
            keep_alive=keep_alive,
            http_1_0=http_1_0,
            peer=self._peer,
            key=api_key,
        )
        if refusal is None and self._length is not None and self._length > self._small:
            refusal = self._too_large_body(self._length, api_key)
        request.refusal = refusal
        if head.origin is not None and self._door.allows_origin(head.origin):
            request.response_lines += cors_lines(head.origin)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        request = self.partial
        if request is not None:
            size = request.body_bytes + len(body)
            if size > self._small and request.refusal is None:
                request.refusal = self._too_large_body(size, request.key)
            request.add(body)

    def on_message_complete(self) -> None:
        if self._resume:
            return  # only the parser believes that it has no body
        request, self.partial = self.partial, None
        self._length = None
        if self._headers:  # trailers: nobody here reads them
            self._headers = []
        self.begun = False
        self._progress = True
        if request is not None:
            if request.body_sink is None:
                request.received_at = monotonic()
            request.complete()
            self.ready.append(request)

    # --- sizes

    def _too_large(self, key: tuple[bytes, bytes, str, RawHeaders]) -> HttpError | None:
        limits = self._limits
        _, target, _, headers = key
        if len(headers) > limits.headers:
            return HttpError(431, f"{len(headers)} headers; at most {limits.headers} are read", close=True)
        if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) <= limits.head_bytes:
            return None
        return _unbounded(limits.head_bytes)

    def _too_large_body(self, size: int, key: ApiKey | None) -> HttpError | None:
        """The refusal of a body of ``size`` bytes, or of a part that has grown to it."""
        if size == _ABSURD:
            return HttpError(400, "the Content-Length has more digits than one needs", close=True)
        limit = self._limits.body_bytes
        if key is None and self._door.needs_key:
            # Public paths need no body. A large one would take memory from clients with a key.
            limit = self._small
        if size <= limit:
            return None
        remedy = "" if limit == self._limits.body_bytes else "send an API key, or a smaller body"
        return HttpError(
            413, f"the body is larger than {limit} bytes", cause="body_limit", remedy=remedy, close=True
        )


def _unbounded(limit: int) -> HttpError:
    return HttpError(431, f"the head is larger than {limit} bytes", cause="head_limit", close=True)
