"""A request's body that is sent on while it comes, because nobody here has to read it.

What has gone out is kept for a while, so that the request can be sent again (S10); a body larger than that is
nowhere held whole. llama-server starts no work before it has the last byte of a body (b11434). The piece
with that byte is held back until the whole body is checked.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Protocol

from llamasup.http.heads import HttpError
from llamasup.proxy.body_rules import judge_scan, scan_for
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.interfaces import ClientConnection, ProxyContext
from llamasup.proxy.local import is_local
from llamasup.proxy.request import Request
from llamasup.proxy.upstream import Upstream

__all__ = ["Upload", "UploadExchange", "may_upload"]


def may_upload(request: Request, door: AccessPolicy, proxy: ProxyContext) -> bool:
    """Whether its body is large, and nobody here has to read it."""
    return (
        request.body_bytes > proxy.limits.stream_above_bytes
        and not (request.buffered or proxy.config.route_by_model)
        and proxy.uploads < proxy.limits.uploads
        and not is_local(request, door, proxy.backend)
    )


class UploadExchange(Protocol):
    """The exchange whose request has an upload."""

    upload: Upload | None
    """None once the upload has ended."""

    def upload_ended(self) -> None:
        """The body is complete, and sent."""
        ...

    def refused(self, error: HttpError) -> None:
        """The rest of the body is invalid, too large, or does not come."""
        ...


class Upload:
    """Of the one request that a client's connection is reading, until its body is whole or its exchange over.

    The client is read only while its bytes can be passed on: there is a connection, and it takes them.
    """

    __slots__ = (
        "_downstream",
        "_exchange",
        "_flows",
        "_fresh",
        "_kept",
        "_length",
        "_paused_at",
        "_request",
        "_scan",
        "_upstream",
    )

    def __init__(
        self, downstream: ClientConnection, exchange: UploadExchange, request: Request, length: int | None
    ) -> None:
        """``length``: the client's Content-Length; None: its body is chunked, and is sent on so."""
        self._downstream = downstream
        self._exchange = exchange
        self._request = request
        self._length = length
        self._fresh = request.take_body()  # not sent yet
        self._scan = scan_for(request, downstream.proxy.config.rules)
        if self._scan is not None:
            self._scan.feed(bytes(self._fresh))
        self._kept: bytearray | None = bytearray()  # sent; None: it was too much to be kept
        self._upstream: Upstream | None = None
        self._flows = False  # the client is read
        self._paused_at = monotonic()  # when the client was last stopped
        request.body_sink = self.add
        downstream.proxy.uploads += 1

    # --- from the client

    def add(self, piece: bytes) -> None:
        """Bytes of the body, as they were parsed. They go out when all of a read is: with one write."""
        self._fresh += piece
        if self._scan is not None:
            self._scan.feed(piece)

    def received(self, ready: deque[Request]) -> None:
        """What came has been parsed: the body goes on, is whole, or is none that will be served.

        ``ready``: what the reader has found; this request is the first of it if its end was found too.
        """
        request = self._request
        buffered = bool(ready) and ready[0] is request
        if buffered:
            ready.popleft()
            if request.refusal is None and self._scan is not None:
                proxy = self._downstream.proxy
                request.refusal = judge_scan(request, self._scan, proxy.config, proxy.keys, self._whole)
        if request.refusal is not None:
            request.keep_alive = False
            self._exchange.refused(request.refusal)
        elif buffered:
            self._end()
            self._exchange.upload_ended()
        else:
            self._flush()
            if self._flows:
                self._downstream.read_on(request)

    def _flush(self) -> None:
        """Send what has come, if there is a connection."""
        fresh = self._fresh
        if self._upstream is None or not fresh:
            return
        self._fresh = bytearray()
        if self._kept is not None:
            if len(self._kept) + len(fresh) <= self._downstream.proxy.limits.replay_bytes:
                self._kept += fresh
            else:
                self._kept = None
                self._request.body_discarded = True
        if self._length is None:
            self._upstream.transport.writelines((b"%x\r\n" % len(fresh), fresh, b"\r\n"))
        else:
            self._upstream.transport.write(fresh)

    def _end(self) -> None:
        """The body is whole: what is kept of it is the request's own again."""
        self.close()
        if self._upstream is None:  # nothing has been sent: it is a request like any other now
            self._request.body = bytes(self._received())
            return
        self._flush()
        if self._length is None:
            self._upstream.transport.write(b"0\r\n\r\n")
        if self._kept is None:
            return
        if self._downstream.proxy.bodies.hold(self._request, None) is None:
            self._request.body = bytes(self._kept)
        else:  # there is no memory for a copy
            self._request.body_discarded = True

    def give_back(self) -> None:
        """Have the body read whole: the child that had begun to get it is gone."""
        self.close()
        self._request.read_whole(self._received())

    def close(self) -> None:
        """This is over, whatever becomes of the request."""
        self._request.body_sink = None
        self._exchange.upload = None
        self._downstream.proxy.uploads -= 1
        self._downstream.upload_over()

    # --- from the child

    @property
    def framing(self) -> bytes:
        """The last lines of the head that goes before it."""
        if self._length is None:
            return b"Transfer-Encoding: chunked\r\n\r\n"
        return b"Content-Length: %d\r\n\r\n" % self._length

    def connect(self, upstream: Upstream) -> None:
        """Send it there, from its first byte."""
        self._upstream = upstream
        self._fresh = self._received()
        self._kept = bytearray()
        self.resume()
        self._flush()  # which may call for a pause at once

    def disconnect(self) -> None:
        """That connection is gone; another is being made."""
        self._upstream = None
        self.pause()

    def pause(self) -> None:
        """The child takes no more for now, or there is none yet."""
        if self._flows:
            self._flows = False
            self._paused_at = monotonic()
        self._downstream.hold_upload()

    def resume(self) -> None:
        """It takes more. The pause does not count towards the client's time."""
        paused_s = 0.0 if self._flows else monotonic() - self._paused_at
        self._flows = True
        self._downstream.read_on(self._request, paused_s)

    def forget(self) -> None:
        """The answer has begun: nothing of this will be sent again."""
        self._kept = None

    def _whole(self) -> bytes | None:
        """The body, as long as no part of it has been dropped."""
        return None if self._kept is None else bytes(self._received())

    def _received(self) -> bytearray:
        """Everything received. Only while nothing of it has been dropped."""
        return (self._kept or bytearray()) + self._fresh
