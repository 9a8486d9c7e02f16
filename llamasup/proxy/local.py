"""The routes that llamasup answers itself, without a model, and which models a client may use and list."""

from __future__ import annotations

import re

from llamasup.http.heads import Head, HttpError, error_response, response
from llamasup.http.requested_model import named_in_path
from llamasup.models.access import ResolvedModel, forbidden_model, may_use, unfit_model, unnamed_model
from llamasup.proxy.backend import Backend, ModelList
from llamasup.proxy.gate import AccessPolicy
from llamasup.proxy.request import Request
from llamasup.queueing.endpoint import Unavailable

__all__ = [
    "CONTROL_PATHS",
    "access_denied",
    "answer",
    "answer_listing",
    "answer_to",
    "cors_lines",
    "is_local",
    "preflight",
]


def access_denied(request: Request, meant: ResolvedModel | None) -> HttpError | None:
    """Why the request may not have the model that it means. None: nothing here speaks against it.

    What means no model at all is for the backend to refuse, unless its key must not learn which there are.
    """
    key = request.key
    if key is not None and key.models and (meant is None or not may_use(key, meant)):
        if meant is None and request.named is None:
            return unnamed_model(key.models)
        return forbidden_model(key, request.named)
    work = request.head.route.work
    if meant is not None and work is not None and work not in meant.works and request.needs_permit:
        return unfit_model(meant, work)
    return None


def answer_listing(
    request: Request, listing: ModelList, backend: Backend, *, close: bool
) -> tuple[int, bytes]:
    """Status and whole response for ``/v1/models`` and ``/v1/models/{id}``."""
    head, lines, key = request.head, request.response_lines, request.key
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, "the list of models is read with GET")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", lines, close=close)
    name = named_in_path(head.path)
    if name is None:
        allowed = (lambda meant: may_use(key, meant)) if key is not None and key.models else None
        return 200, response(200, listing.all(allowed), lines, method=head.method, close=close)
    request.named = name
    meant = backend.meant(name)
    refusal = access_denied(request, meant)
    if refusal is None and meant is None:
        why = backend.lease(name)
        assert isinstance(why, Unavailable)
        refusal = why.as_error()
    if refusal is not None:
        return refusal.status, error_response(refusal, lines, method=head.method, close=close)
    assert meant is not None
    return 200, response(200, listing.one(meant.id), lines, method=head.method, close=close)


CONTROL_PATHS = frozenset({b"/metrics"})  # and everything below /llamasup/

# The names of headers that a page wants to send: openai's client has a dozen of its own (X-Stainless-…).
_ASKED_HEADERS = re.compile(
    rb"\r\naccess-control-request-headers:[ \t]*([A-Za-z0-9-]+(?:[ \t]*,[ \t]*[A-Za-z0-9-]+)*)[ \t]*\r\n"
)
_USUAL_HEADERS = b"Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Llamasup-Priority"

_OK = b'{"status":"ok"}'  # llama-server's own words (b11434)


def answer_to(
    request: Request, door: AccessPolicy, backend: Backend, *, draining: bool
) -> tuple[int, bytes] | None:
    """Status and whole response, if this is a request that llamasup answers itself."""
    head = request.head
    close = draining or not request.keep_alive
    if head.origin is not None and door.is_preflight(head):
        return 204, preflight(head, request.response_lines, close=close)
    if head.path in door.own_paths and not _is_seen_through(door, backend):
        return answer(head, backend, request.response_lines, close=close, says_why=door.says_why)
    if head.route.lists and (listing := backend.listing()) is not None:
        return answer_listing(request, listing, backend, close=close)
    return None


def is_local(request: Request, door: AccessPolicy, backend: Backend) -> bool:
    """Whether ``answer_to`` has an answer."""
    head = request.head
    own = head.path in door.own_paths and not _is_seen_through(door, backend)
    return own or (head.route.lists and backend.listing() is not None) or door.is_preflight(head)


def _is_seen_through(door: AccessPolicy, backend: Backend) -> bool:
    """Whether llama-server itself answers what llamasup answers elsewhere."""
    return door.rules.transparent and backend.readiness() is None


def answer(
    head: Head, backend: Backend, *lines: bytes, close: bool, says_why: bool = True
) -> tuple[int, bytes]:
    """Status and whole response for a path that is llamasup's own (``AccessPolicy.own_paths``)."""
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, f"{head.path.decode()} is read with GET")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", *lines, close=close)
    if head.path != b"/livez" and (unavailable := backend.readiness()) is not None:
        error = unavailable.as_error() if says_why else unavailable.as_state()
        return error.status, error_response(error, *lines, method=head.method, close=close)
    return 200, response(200, _OK, *lines, method=head.method, close=close)


def preflight(head: Head, *lines: bytes, close: bool) -> bytes:
    """The answer to a configured origin's CORS preflight. Names the origin, never ``*`` (X3)."""
    asked = _ASKED_HEADERS.search(head.opening)
    return response(
        204,
        b"",
        *lines,
        b"Access-Control-Allow-Methods: GET, HEAD, POST, DELETE\r\n",
        b"Access-Control-Allow-Headers: " + (asked.group(1) if asked else _USUAL_HEADERS) + b"\r\n",
        b"Access-Control-Max-Age: 600\r\n",
        close=close,
    )


def cors_lines(origin: bytes) -> bytes:
    """What lets a page of a configured origin read an answer, and of its head what is worth knowing."""
    return (
        b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
        b"Access-Control-Expose-Headers: X-Request-Id, Server-Timing, Retry-After\r\n"
    )
