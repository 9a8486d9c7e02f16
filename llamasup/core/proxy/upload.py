"""A body that is forwarded while it arrives, because llamasup does not need to decode it.

The first ``Limits.replay_bytes`` of it are kept, so that a smaller body can be sent again (S10). llama-server
starts no work before it has the last byte of a body (b11434). The piece with that byte is held back until the
complete body has been checked.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Final, Protocol

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import CHATS, CONVERSATIONS
from llamasup.core.proxy.body_rules import judge_scan, scan_for
from llamasup.core.proxy.context import ClientConnection, ProxyContext
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.upstream.connection import Upstream

__all__ = ["Upload", "UploadExchange", "may_upload", "refused_file"]

RETRY_S: Final = 5.0  # the time until another upload ends is unknown


def may_upload(request: Request, proxy: ProxyContext) -> bool:
    """Whether its body is large, and need not be decoded."""
    limits = proxy.limits
    if request.body_bytes <= limits.stream_above_bytes or request.buffered:
        return False
    if request.head.route.of_batches:
        return True
    config = proxy.config
    # Its tools, or its system messages. Agents that use another API send their system messages first.
    may_change = request.head.route.label in CONVERSATIONS - CHATS and not config.rules.transparent
    return (
        not (may_change or config.route_by_model or config.holds_bodies or request.is_batch)
        and proxy.uploads < limits.uploads
    )


def refused_file(request: Request, proxy: ProxyContext) -> HttpError | None:
    """The refusal of an upload to the API for batches while the maximum is being uploaded."""
    limits = proxy.limits
    if not request.head.route.of_batches:
        return None
    if proxy.file_uploads[request.client] >= limits.file_uploads_per_client:
        return HttpError(
            429,
            f"This client uploads {limits.file_uploads_per_client} files, as many as one client may",
            "rate_limit_error",
            "client_uploads_limit",
            "upload fewer files at one time",
            RETRY_S,
            close=True,
        )
    if proxy.file_uploads.total() < limits.file_uploads:
        return None
    return HttpError(
        503,
        f"{limits.file_uploads} files are being uploaded, which is the maximum",
        "unavailable_error",
        "uploads_limit",
        "try again shortly",
        RETRY_S,
        close=True,
    )


class UploadExchange(Protocol):
    """The exchange whose request has an upload."""

    upload: Upload | None
    """None once the upload has ended."""

    def body_sent(self) -> None:
        """The body is complete, and sent."""
        ...

    def fail(self, error: HttpError, outcome: str) -> None:
        """The rest of the body is invalid, too large, or does not arrive."""
        ...


class Upload:
    """The upload of the current request, until its body is complete or its exchange ends.

    The client is read only while an upstream connection takes the bytes.
    """

    def __init__(
        self, downstream: ClientConnection, exchange: UploadExchange, request: Request, length: int | None
    ) -> None:
        """``length``: the client's Content-Length; None: its body is chunked, and stays so."""
        self._downstream = downstream
        self._exchange = exchange
        self._request = request
        self._length = length
        self._unsent = request.take_body()
        self._scan = scan_for(request, downstream.proxy.config.rules)
        if self._scan is not None:
            self._scan.feed(bytes(self._unsent))
        self._sent_copy: bytearray | None = bytearray()  # None: the body is too large to keep
        self._upstream: Upstream | None = None
        self._reading = False  # whether the client is read
        self._paused_at = monotonic()  # when reading last stopped
        request.body_sink = self.add
        self._count(1)

    # --- from the client

    def add(self, piece: bytes) -> None:
        """Take parsed bytes of the body. All bytes of one read go out with one write."""
        self._unsent += piece
        if self._scan is not None:
            self._scan.feed(piece)

    def received(self, ready: deque[Request]) -> None:
        """A read has been parsed: send its bytes, finish the body, or refuse it.

        ``ready``: the complete requests of the reader. The first is this request if its body is complete.
        """
        request = self._request
        complete = bool(ready) and ready[0] is request
        if complete:
            ready.popleft()
            if request.refusal is None and self._scan is not None:
                proxy = self._downstream.proxy
                request.refusal = judge_scan(
                    request, self._scan, proxy.config, proxy.keys, self._buffered_body
                )
        if request.refusal is not None:
            request.keep_alive = False
            self._exchange.fail(request.refusal, "refused")
        elif complete:
            self._end()
            self._exchange.body_sent()
        else:
            self._flush()
            if self._reading:
                self._downstream.resume_body(request)

    def _flush(self) -> None:
        """Send the received bytes, if there is a connection."""
        unsent = self._unsent
        if self._upstream is None or not unsent:
            return
        self._unsent = bytearray()
        if self._sent_copy is not None:
            if len(self._sent_copy) + len(unsent) <= self._downstream.proxy.limits.replay_bytes:
                self._sent_copy += unsent
            else:
                self._sent_copy = None
                self._request.body_discarded = True
        if self._length is None:
            self._upstream.transport.writelines((b"%x\r\n" % len(unsent), unsent, b"\r\n"))
        else:
            self._upstream.transport.write(unsent)

    def _end(self) -> None:
        """The body is complete: send the rest, and give the kept copy back to the request."""
        self.close()
        if self._upstream is None:  # nothing has been sent: a buffered request from now on
            self._request.body = bytes(self._received())
            return
        self._flush()
        if self._length is None:
            self._upstream.transport.write(b"0\r\n\r\n")
        if self._sent_copy is None:
            return
        if self._downstream.proxy.bodies.hold(self._request, None) is None:
            self._request.body = bytes(self._sent_copy)
        else:  # the limit of ``Bodies`` leaves no memory for a copy
            self._request.body_discarded = True

    def return_body(self) -> None:
        """Have the body buffered instead, because the child that was receiving it has ended."""
        self.close()
        self._request.buffer(self._received())

    def close(self) -> None:
        """End the upload, whatever happens to the request."""
        self._request.body_sink = None
        self._exchange.upload = None
        self._count(-1)
        self._downstream.upload_over()

    def _count(self, change: int) -> None:
        """Files go to the disk of llamasup: they take no thread of llama-server."""
        proxy = self._downstream.proxy
        if self._request.head.route.of_batches:
            client = self._request.client
            proxy.file_uploads[client] += change
            if not proxy.file_uploads[client]:
                del proxy.file_uploads[client]
        else:
            proxy.uploads += change

    # --- from the child

    @property
    def framing(self) -> bytes:
        """The last lines of the head before the body."""
        if self._length is None:
            return b"Transfer-Encoding: chunked\r\n\r\n"
        return b"Content-Length: %d\r\n\r\n" % self._length

    def connect(self, upstream: Upstream) -> None:
        """Send the body to ``upstream``, from its first byte."""
        self._upstream = upstream
        self._unsent = self._received()
        self._sent_copy = bytearray()
        self.resume()
        self._flush()  # which may pause at once

    def disconnect(self) -> None:
        """The connection has closed; another one is being made."""
        self._upstream = None
        self.pause()

    def pause(self) -> None:
        """The child does not read, or is not connected."""
        if self._reading:
            self._reading = False
            self._paused_at = monotonic()
        self._downstream.pause_upload()

    def resume(self) -> None:
        """The child reads again. The pause does not count towards the client's deadline."""
        paused_s = 0.0 if self._reading else monotonic() - self._paused_at
        self._reading = True
        self._downstream.resume_body(self._request, paused_s)

    def drop_copy(self) -> None:
        """The answer has begun: the body will not be sent again."""
        self._sent_copy = None

    def _buffered_body(self) -> bytes | None:
        """The body; None if a part of it has been dropped."""
        return None if self._sent_copy is None else bytes(self._received())

    def _received(self) -> bytearray:
        """The received part of the body. Only if no part of it has been dropped."""
        return (self._sent_copy or bytearray()) + self._unsent
