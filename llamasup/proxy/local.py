"""The routes that llamasup answers itself: they work while no model does."""

from __future__ import annotations

from llamasup.core.http import Head, HttpError, error_response, response
from llamasup.runtime.endpoint import Backend, Unavailable

__all__ = ["CONTROL_PATHS", "answer", "as_error", "preflight"]

CONTROL_PATHS = frozenset({b"/metrics"})  # and everything below /llamasup/

_OK = b'{"status":"ok"}'  # llama-server's own words (b11434)


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
