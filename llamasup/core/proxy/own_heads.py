"""Writes the request of an exchange to llama-server, and the head of its response."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from llamasup.core.http.heads import status_line
from llamasup.core.http.routes import CONTROL
from llamasup.core.models.redaction import whole_and_plain
from llamasup.core.proxy.outbox import Outbox
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import ResponseReceiver
from llamasup.core.proxy.upload import Upload
from llamasup.core.proxy.upstream.connection import Upstream
from llamasup.core.proxy.waiting import Waiting
from llamasup.core.queueing.endpoint import Endpoint

_BODILESS: Final = (b"GET", b"HEAD", b"DELETE", b"OPTIONS")


def send_request(
    exchange: ResponseReceiver,
    upstream: Upstream,
    request: Request,
    endpoint: Endpoint,
    upload: Upload | None,
    outbox: Outbox,
) -> None:
    """Send the request with a new head: our framing, and the child's own key (X5, X9)."""
    head, api_key = request.head, endpoint.api_key
    opening = head.opening
    if head.route.has_paths and request.hides_paths:
        opening = whole_and_plain(opening)
    if api_key is not None:
        if endpoint.node is not None:
            opening = endpoint.node.opening(opening, request.id, request.priority)
        if api_key:
            opening += b"Authorization: Bearer " + api_key.encode("ascii") + b"\r\n"
    if mark := endpoint.mark:
        opening += mark
    if request.key is not None and (head.route is CONTROL or head.route.of_batches):
        opening += b"X-Llamasup-Client: " + quote(request.key.client).encode("ascii") + b"\r\n"
    body = request.body
    if upload is not None:
        upstream.send(exchange, opening + upload.framing, b"")
        outbox.flush()  # the upload writes past it
        upload.connect(upstream)
    elif body or head.method not in _BODILESS:
        upstream.send(exchange, b"%bContent-Length: %d\r\n\r\n" % (opening, len(body)), body)
    else:
        upstream.send(exchange, opening + b"\r\n", b"")


def response_head(
    request: Request,
    status: int,
    lines: bytes,
    framing: bytes,
    waiting: Waiting | None,
    sent_at: float,
    *,
    draining: bool,
) -> bytes:
    """The head of the response. ``lines``: the header lines of llama-server. ``waiting``: the wait of the
    request, if any. ``sent_at``: when the request was sent.
    """
    end = b"\r\n" if request.keep_alive and not draining else b"Connection: close\r\n\r\n"
    if request.head.from_node:  # it knows the id, and recognizes a head that it has seen before
        timing = b"" if waiting is None else _timing(request, waiting, sent_at)
        return status_line(status) + b"".join((lines, framing, timing, request.repaired, end))
    return b"%b%b%bX-Request-Id: %b\r\n%b%b%b%b" % (
        status_line(status),
        lines,
        framing,
        request.id,
        request.repaired,
        request.cors,
        b"Server-Timing: queue;dur=%.1f\r\n" % ((sent_at - request.received_at) * 1000.0)
        if waiting is None
        else _timing(request, waiting, sent_at),
        end,
    )


def _timing(request: Request, waiting: Waiting, sent_at: float) -> bytes:
    """The Server-Timing of a request that waited: for a load (``load``), and otherwise (``queue``)."""
    load_s = waiting.entry.waited_s
    queue_s = sent_at - request.received_at - load_s
    return b'Server-Timing: queue;dur=%.1f;desc="position %d", load;dur=%.1f\r\n' % (
        queue_s * 1000.0,
        waiting.entry.position,
        load_s * 1000.0,
    )
