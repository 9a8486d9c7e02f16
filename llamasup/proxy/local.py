"""The routes that llamasup answers itself: they work while no model does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamasup.core.http import Head, HttpError, error_response, response
from llamasup.runtime.endpoint import Backend, Unavailable

if TYPE_CHECKING:
    from llamasup.proxy.door import Door
    from llamasup.proxy.request import Request

__all__ = ["CONTROL_PATHS", "answer", "answer_to", "as_error", "is_local", "preflight"]

CONTROL_PATHS = frozenset({b"/metrics"})  # and everything below /llamasup/

_OK = b'{"status":"ok"}'  # llama-server's own words (b11434)


def answer_to(request: Request, door: Door, backend: Backend, *, draining: bool) -> tuple[int, bytes] | None:
    """Status and whole response, if this is a request that llamasup answers itself."""
    head = request.head
    if head.path in door.own_paths and not _is_seen_through(door, backend):
        close = draining or not request.keep_alive
        return answer(head, backend, request.response_lines, close=close)
    if head.origin is not None and door.is_preflight(head):
        close = draining or not request.keep_alive
        return 204, preflight(head, request.response_lines, close=close)
    return None


def is_local(request: Request, door: Door, backend: Backend) -> bool:
    """Whether ``answer_to`` has an answer."""
    own = request.head.path in door.own_paths and not _is_seen_through(door, backend)
    return own or door.is_preflight(request.head)


def _is_seen_through(door: Door, backend: Backend) -> bool:
    """Whether llama-server itself answers what llamasup answers elsewhere."""
    return door.rules.transparent and backend.readiness() is None


def answer(head: Head, backend: Backend, *lines: bytes, close: bool) -> tuple[int, bytes]:
    """Status and whole response for a path that is llamasup's own (``Door.own_paths``)."""
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, f"{head.path.decode()} is read with GET")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", *lines, close=close)
    if head.path != b"/livez" and (unavailable := backend.readiness()) is not None:
        error = as_error(unavailable)
        return error.status, error_response(error, *lines, method=head.method, close=close)
    return 200, response(200, _OK, *lines, method=head.method, close=close)


def preflight(head: Head, *lines: bytes, close: bool) -> bytes:
    """The answer to a configured origin's CORS preflight. Names the origin, never ``*`` (X3)."""
    return response(
        204,
        b"",
        *lines,
        b"Access-Control-Allow-Methods: GET, HEAD, POST, DELETE\r\n",
        b"Access-Control-Allow-Headers: Authorization, Content-Type, X-Api-Key, X-Request-Id\r\n",
        b"Access-Control-Max-Age: 600\r\n",
        close=close,
    )


def as_error(unavailable: Unavailable) -> HttpError:
    return HttpError(
        unavailable.status,
        unavailable.message,
        unavailable.type,
        unavailable.cause,
        unavailable.remedy,
        unavailable.retry_after_s,
    )
