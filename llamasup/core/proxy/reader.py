"""Parses the bytes of a client connection into requests, and checks their sizes and their access.

Does no I/O and calls no listener: it only fills ``ready``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

import httptools

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.http.head_cache import KnownHead, compile_head
from llamasup.core.http.heads import Head, HttpError, RawHeaders, read_head
from llamasup.core.http.routes import CONTROL
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.request import UNREAD, Request
from llamasup.core.proxy.routing import cors_lines
from llamasup.core.proxy.settings import Limits

__all__ = ["RequestReader"]

MAX_LENGTH_DIGITS: Final = 32  # 2^64 has 20
_TOO_LONG: Final = 1 << 64
_LOGGED_BYTES: Final = 2048  # of the path of a refused head

_log = logging.getLogger("llamasup.proxy")


class RequestReader:
    """The reader of one connection.

    ``ready``: complete requests and refusals of invalid ones, in order; at most those of one read.
    ``partial``: the request whose head has been read and whose body has not.
    ``begun``: whether the connection is inside a request; ``length``: its Content-Length, if it has one.
    """

    def __init__(
        self,
        limits: Limits,
        access: AccessPolicy,
        local_host: str,
        next_id: Callable[[], bytes],
        peer: str = "",
    ) -> None:
        self.ready: deque[Request] = deque()
        self.partial: Request | None = None
        self.begun = False
        self._limits = limits
        self._small_body_bytes = min(limits.small_body_bytes, limits.body_bytes)  # accepted from every client
        self._access = access
        self._local_host = local_host
        self._next_id = next_id
        self._peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: RawHeaders = []
        self.length: int | None = None
        # The last head with access. A client usually repeats it on its connection.
        self._known_key: tuple[bytes, bytes, str, RawHeaders] | None = None
        self._known_head = UNREAD
        self._known_api_key: ApiKey | None = None
        self._known_epoch = 0  # of the keys at that time
        self._known_cors = b""
        self._known_bytes: KnownHead | None = None  # after the second time; then the parser is bypassed
        self._repeats = False  # the head being parsed is the known one, and its bytes may be recognized
        self._heads_read = 0  # in the read being parsed
        self._body_remaining = 0  # bytes of a body that bypasses the parser
        self._stalled_bytes = 0  # bytes of earlier reads since the parser last made progress
        self._progress = False
        self._resume = b""  # the framing of a body that the parser leaves unread after an offered upgrade
        self._resuming = False  # while a new parser reads that framing

    def feed(self, data: bytes) -> None:
        """Parse: complete requests go to ``ready``, and so does the refusal of invalid bytes."""
        known = self._known_bytes
        if known is not None and not self.begun and self._known_epoch == self._access.keys.epoch:
            body = known.body_of(data)
            if body is not None and len(body) <= self._small_body_bytes:
                head, size = self._known_head, len(body)
                self.ready.append(
                    Request(
                        head,
                        head.request_id or self._next_id(),
                        True,
                        False,
                        head.peer,
                        self._known_api_key,
                        body,
                        size,
                        monotonic(),
                        self._known_cors,
                    )
                )
                return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._progress = False
        if self._body_remaining:
            data = self._read_body(data)
        while data and not self.begun and (known := self._known_bytes) is not None:
            digits = known.length_in(data)
            if digits is None or self._known_epoch != self._access.keys.epoch:
                break
            data = self._read_known(digits, data[known.bytes_beside_digits + len(digits) :])
        if data:
            self._parse(data)

    def _read_known(self, digits: bytes, rest: bytes) -> bytes:
        """Begin a request with the known head, followed by ``rest``; returns the bytes after the request."""
        self.length = int(digits) if digits else None
        self._begin_request(self._known_head, self._known_api_key)
        self._body_remaining = self.length or 0
        self.begun = True
        return self._read_body(rest)

    def _read_body(self, data: bytes) -> bytes:
        """Read a body that bypasses the parser; returns the bytes after it."""
        remaining = self._body_remaining
        body, rest = (data, b"") if len(data) <= remaining else (data[:remaining], data[remaining:])
        self._body_remaining -= len(body)
        self._progress = True
        if body and self.partial is not None:
            self.partial.add(body)
        if not self._body_remaining:
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
            _log.exception("llamasup failed to read a request")
            self.refuse(HttpError(500, "llamasup failed to read the request", "server_error", close=True))
        except httptools.HttpParserError as error:
            self.refuse(HttpError(400, f"malformed request: {error}", close=True))
        if self._progress:
            self._stalled_bytes = 0
        else:
            # A head, a trailer or a chunk extension without an end.
            self._stalled_bytes += len(data)
            if self._stalled_bytes > self._limits.head_bytes:
                self.refuse(_head_too_large(self._limits.head_bytes))
        if self._repeats and from_its_start and self._heads_read == 1:
            self._known_bytes = compile_head(data)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Continue in HTTP/1.1, which RFC 9110 §7.8 allows. Java's client offers h2c with its first request.

        The parser stops after the head of such a request. A new parser gets the framing of the body, and
        continues with the body.
        """
        self._parser = httptools.HttpRequestParser(self)
        if self._resume:
            resume, self._resume = self._resume, b""
            self._resuming = True
            self._parser.feed_data(resume)
            self._resuming = False
        if rest:
            self.feed(rest)

    def refuse(self, error: HttpError, head: Head = UNREAD) -> None:
        """Queue the refusal of an incomplete or invalid request. The connection ends with it."""
        peer = self._access.proxies.client_of(self._peer, head.forwarded_for)
        request = self.partial or Request(head, self._next_id(), keep_alive=False, peer=peer)
        self.partial = None
        self._known_bytes = None
        request.refusal = error
        request.keep_alive = False
        if not self.ready or self.ready[-1].keep_alive:
            self.ready.append(request)

    def close(self) -> None:
        """Drop all requests, and the parser: it holds our methods, a cycle for the garbage collector."""
        self.ready.clear()
        self.partial = None
        del self._parser

    # --- httptools

    def on_message_begin(self) -> None:
        self.begun = True

    def on_url(self, url: bytes) -> None:
        self._target += url  # in pieces if several reads split it

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            # llhttp has checked that these are digits, and below 2^64; but there may be any number of zeros.
            self.length = int(value) if len(value) <= MAX_LENGTH_DIGITS else _TOO_LONG
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
        epoch = self._access.keys.epoch
        if key == self._known_key and epoch == self._known_epoch:
            head, api_key = self._known_head, self._known_api_key
            self._repeats = (
                parser.should_keep_alive()
                and version == "1.1"
                and not (head.chunked or head.expects_continue or head.upgrades)
            )
        else:
            read = self._judge_head_size(key) or read_head(*key, self._access.rules)
            if isinstance(read, HttpError):
                self.refuse(read, _as_logged(*key))
                return
            head = read
            head.peer = self._access.proxies.client_of(self._peer, head.forwarded_for)
            admitted = self._access.authorize(head, self._local_host)
            if isinstance(admitted, HttpError):
                refusal, api_key = admitted, None
                if head.credentials and (known := self._access.keys.ring.find(head.credentials)):
                    head.peer = known.client  # the record of the refusal names the key
            elif head.route is CONTROL or head.console_secret:
                api_key = admitted  # a session can end at any time
            else:
                api_key = admitted
                self._known_key, self._known_head = key, head
                self._known_api_key, self._known_epoch = api_key, epoch
                self._known_cors = self._cors_of(head)
                self._known_bytes = None
        self._begin_request(
            head, api_key, refusal, keep_alive=parser.should_keep_alive(), http_1_0=version == "1.0"
        )
        if head.upgrades and parser.should_upgrade():
            if head.chunked:
                self._resume = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            elif self.length:
                self._resume = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % self.length

    def _begin_request(
        self,
        head: Head,
        api_key: ApiKey | None,
        refusal: HttpError | None = None,
        *,
        keep_alive: bool = True,
        http_1_0: bool = False,
    ) -> None:
        """Begin a request with ``head``."""
        self.partial = request = Request(
            head,
            head.request_id or self._next_id(),
            keep_alive=keep_alive and not http_1_0,
            http_1_0=http_1_0,
            peer=head.peer,
            key=api_key,
            cors=self._cors_of(head),
            expects_continue=head.expects_continue,
        )
        if refusal is None and self.length is not None and self.length > self._small_body_bytes:
            refusal = self._judge_body_size(self.length, request)
        request.refusal = refusal

    def _cors_of(self, head: Head) -> bytes:
        return cors_lines(head.origin) if head.origin and self._access.allows_origin(head) else b""

    def on_body(self, body: bytes) -> None:
        self._progress = True
        request = self.partial
        if request is not None:
            size = request.body_bytes + len(body)
            if size > self._small_body_bytes and request.refusal is None:
                request.refusal = self._judge_body_size(size, request)
            request.add(body)

    def on_message_complete(self) -> None:
        if self._resume:
            return  # the parser ignores the body after an offered upgrade
        request, self.partial = self.partial, None
        self.length = None
        if self._headers:  # trailers are ignored (RFC 9112 §7.1.2)
            self._headers = []
        self.begun = False
        self._progress = True
        if request is not None:
            if request.body_sink is None:
                request.received_at = monotonic()
            request.complete()
            self.ready.append(request)

    # --- sizes

    def _judge_head_size(self, key: tuple[bytes, bytes, str, RawHeaders]) -> HttpError | None:
        limits = self._limits
        _, target, _, headers = key
        if len(headers) > limits.headers:
            return HttpError(
                431, f"the request has {len(headers)} headers; the limit is {limits.headers}", close=True
            )
        if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) <= limits.head_bytes:
            return None
        return _head_too_large(limits.head_bytes)

    def _judge_body_size(self, size: int, request: Request) -> HttpError | None:
        """The refusal of a body of ``size`` bytes, announced or received; None if it is accepted."""
        if size == _TOO_LONG:
            return HttpError(400, "the Content-Length has too many digits", close=True)
        limit = self._limits.body_bytes
        remedy = "send less, or raise the limit with --max-body (in a config: http.max_body)"
        if request.key is None and self._access.needs_key:
            # Public paths need no body. A large one would take memory from clients with a key.
            limit, remedy = self._small_body_bytes, "send an API key, or a smaller body"
        elif request.head.route.of_batches and request.head.method == b"POST":
            limit, remedy = max(limit, self._limits.file_bytes), "send less, or raise batches.max_file"
        if size <= limit:
            return None
        return HttpError(
            413, f"the body is larger than {limit} bytes", cause="body_limit", remedy=remedy, close=True
        )


def _as_logged(method: bytes, target: bytes, version: str, headers: RawHeaders) -> Head:
    """Keep the fields that the logs show of an invalid head."""
    forwarded = b",".join(value for name, value in headers if name == b"x-forwarded-for")
    path = target.partition(b"?")[0][:_LOGGED_BYTES]
    head = Head(method, path, b"", UNREAD.route, forwarded_for=forwarded)
    head.method_text, head.path_text = method.decode("ascii"), path.decode("latin-1")
    return head


def _head_too_large(limit: int) -> HttpError:
    return HttpError(431, f"the head is larger than {limit} bytes", cause="head_limit", close=True)
