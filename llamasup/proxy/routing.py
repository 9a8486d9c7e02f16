"""Decides which part answers a request: llamasup itself, its control API, or the llama-server of a model.

Also decides which models a client may use and list.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, cast

from llamasup.http.heads import Head, HttpError, error_response, response, with_query
from llamasup.http.requested_model import named_in_path, renamed_query
from llamasup.http.routes import CHATS, CONTROL, RESPONSES
from llamasup.models.access import ResolvedModel, forbidden_model, may_use, unfit_model, unnamed_model
from llamasup.proxy.access_policy import AccessPolicy
from llamasup.proxy.backend import Backend, ModelList, VirtualRoute, is_virtual
from llamasup.proxy.interfaces import ProxyContext
from llamasup.proxy.request import Request
from llamasup.queueing.endpoint import Lease
from llamasup.queueing.unavailable import Unavailable
from llamasup.repair.kinds import NO_REPAIRS, Repairs

__all__ = [
    "FORWARDED",
    "Answerer",
    "access_denied",
    "answer_locally",
    "answerer_of",
    "cors_lines",
    "lease_for",
]

CONTROL_PATHS = frozenset({b"/metrics"})  # and everything below /llamasup/
_LEADING = frozenset({b"/", b"/llamasup"})  # these may lead a browser to the console

# The names of headers that a page wants to send. OpenAI's client has a dozen (X-Stainless-…).
_ASKED_HEADERS = re.compile(
    rb"\r\naccess-control-request-headers:[ \t]*([A-Za-z0-9-]+(?:[ \t]*,[ \t]*[A-Za-z0-9-]+)*)[ \t]*\r\n"
)
_USUAL_HEADERS = b"Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Llamasup-Priority"

_CONVERSATIONS: Final = CHATS | RESPONSES  # their bodies may have earlier tool calls

_OK = b'{"status":"ok"}'  # as llama-server (b11434)


# Another client gets another answer to the same path.
_TO_CONSOLE = (b"Location: /llamasup/\r\n", b"Cache-Control: no-store\r\nVary: Accept\r\n")


class Answerer(Enum):
    """The part that answers a request. All but ``FORWARDED`` are llamasup itself."""

    PREFLIGHT = "CORS preflight"
    HEALTH = "health"
    MODEL_LIST = "list of models"
    CONTROL = "control API"
    REDIRECT = "redirect to the console"
    MODEL = "llama-server of a model"


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
_PREFLIGHT: Final = Answerer.PREFLIGHT
_HEALTH: Final = Answerer.HEALTH
_MODEL_LIST: Final = Answerer.MODEL_LIST
_CONTROL: Final = Answerer.CONTROL
_REDIRECT: Final = Answerer.REDIRECT
_MODEL: Final = Answerer.MODEL
FORWARDED: Final = (_MODEL, _CONTROL)  # these need a lease


def answerer_of(head: Head, access: AccessPolicy, backend: Backend) -> Answerer:
    """Which part answers a request with this head. The first rule that applies decides."""
    if head.needs_permit:
        return _MODEL  # no path of llamasup itself runs a model
    if head.origin is not None and access.is_preflight(head):
        return _PREFLIGHT
    transparent = access.rules.transparent
    if head.path in access.own_paths and not (transparent and backend.readiness() is None):
        return _HEALTH  # a transparent proxy answers these paths only while llama-server cannot
    if head.route.lists and (head.from_node or backend.listing() is not None):
        return _MODEL_LIST
    if not transparent and (head.route is CONTROL or head.route.of_batches or head.path in CONTROL_PATHS):
        return _CONTROL
    return _REDIRECT if head.path in _LEADING and access.console.redirects(head) else _MODEL


def lease_for(request: Request, answerer: Answerer, proxy: ProxyContext) -> Lease | Unavailable:
    """A lease on the control API or on a generation of the requested model, or why there is none.

    Resolves the name of the model, and keeps the result in ``request.model_route``.
    """
    if answerer is _CONTROL:
        control = proxy.control
        if control is None or control.closed:
            return Unavailable(404, "this server has no control API", type="not_found_error")
        return control.lease()
    key, infers = request.key, request.needs_permit
    limited = key is not None and bool(key.models)
    # Only work for a model downloads it, and only for a key that may use all models.
    route = proxy.backend.resolve(
        request.requested_model, create=infers and not limited, local=request.head.from_node
    )
    if type(route) is Unavailable:  # without a call, as this is on the path of every request
        refusal = access_denied(request, None) if limited else None
        return route if refusal is None else Unavailable.because(refusal)
    if limited or (proxy.config.route_by_model and request.head.route.work not in route.model.works):
        if is_virtual(route):
            route = route.for_work(request.head.route.work)
        refusal = access_denied(request, route.model)
        if refusal is not None:
            return Unavailable.because(refusal)
    request.model_route = route
    if route.model.is_virtual and (refusal := _rewrite(request, cast("VirtualRoute", route))) is not None:
        return Unavailable.because(refusal)
    if (repairs := route.served.repairs) is not NO_REPAIRS and request.body:
        _repair(request, repairs, proxy)
    return route.served.lease(infers=infers, body=request.body)


def _rewrite(request: Request, route: VirtualRoute) -> HttpError | None:
    """Change a request for a virtual model, which other nodes do not know; returns the refusal, if any."""
    request.counted_as = route.model.id
    head = request.head
    if b"model=" in head.query:
        request.head = with_query(head, renamed_query(head.query, route.target))
    if request.body:
        body = route.rewrite(request.body, head.route)
        if isinstance(body, HttpError):
            return body
        request.body = body
    return None


def _repair(request: Request, repairs: Repairs, proxy: ProxyContext) -> None:
    """Make the tool calls of a conversation valid, which llama-server would refuse, and decide which checks
    its answer has to pass.
    """
    # Here, because few models ask for it.
    from llamasup.proxy.second_try import SecondTry
    from llamasup.repair.answers import checks_for
    from llamasup.repair.history import with_valid_arguments

    label = request.head.route.label
    if repairs.tool_calls and label in _CONVERSATIONS:
        body = with_valid_arguments(request.body)
        if body is not None:
            request.body = body
            request.mark_repaired("arguments")
            assert request.model_route is not None
            proxy.metrics.count_repaired(request.counted_as or request.model_route.model.id, "arguments")
    # A batch decides itself what it requests a second time. Of several answers, most may be good.
    if request.needs_permit and request.jobs == 1 and not request.is_batch:
        checks = checks_for(repairs, label, request.body)
        request.second_try = None if checks is None else SecondTry(checks)


def access_denied(request: Request, resolved: ResolvedModel | None) -> HttpError | None:
    """Why the request may not use its model; None if it may.

    The backend refuses unknown models, unless the key must not learn which models exist.
    """
    key = request.key
    if key is not None and key.models and (resolved is None or not may_use(key, resolved)):
        if resolved is None and request.requested_model is None:
            return unnamed_model(key.models)
        return forbidden_model(key, request.requested_model)
    work = request.head.route.work
    if resolved is not None and work is not None and work not in resolved.works and request.needs_permit:
        return unfit_model(resolved, work)
    return None


def answer_locally(
    answerer: Answerer, request: Request, access: AccessPolicy, backend: Backend, *, close: bool
) -> tuple[int, bytes]:
    """Status and complete response of llamasup itself. ``close``: the connection ends with it."""
    head, lines = request.head, request.response_lines
    if answerer is _PREFLIGHT:
        return 204, preflight(head, lines, close=close)
    if answerer is _REDIRECT:
        return 302, response(302, b"", *_TO_CONSOLE, lines, method=head.method, close=close, json=False)
    if answerer is _HEALTH:
        return answer(head, backend, lines, close=close, shows_diagnosis=access.shows_diagnosis)
    return answer_listing(request, backend.listing(), backend, close=close)


def answer_listing(
    request: Request, listing: ModelList | None, backend: Backend, *, close: bool
) -> tuple[int, bytes]:
    """Status and complete response for ``/v1/models`` and ``/v1/models/{id}``.

    ``listing`` None: only another node gets an answer here.
    """
    head, lines, key = request.head, request.response_lines, request.key
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, "use GET for the list of models")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", lines, close=close)
    name = named_in_path(head.path)
    if name is None or listing is None:
        allowed = (lambda resolved: may_use(key, resolved)) if key is not None and key.models else None
        if head.from_node or listing is None:
            return 200, response(200, backend.node_listing(allowed), lines, method=head.method, close=close)
        return 200, response(200, listing.all(allowed), lines, method=head.method, close=close)
    request.requested_model = name
    route = backend.resolve(name)
    if isinstance(route, Unavailable):
        refusal = access_denied(request, None) or route.as_error()
    elif (denied := access_denied(request, route.model)) is not None:
        refusal = denied
    else:
        return 200, response(200, listing.one(route.model.id), lines, method=head.method, close=close)
    return refusal.status, error_response(refusal, lines, method=head.method, close=close)


def answer(
    head: Head, backend: Backend, *lines: bytes, close: bool, shows_diagnosis: bool = True
) -> tuple[int, bytes]:
    """Status and complete response for one of ``AccessPolicy.own_paths``."""
    if head.method not in (b"GET", b"HEAD"):
        error = HttpError(405, f"use GET for {head.path.decode()}")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", *lines, close=close)
    if head.path != b"/livez" and (unavailable := backend.readiness()) is not None:
        error = unavailable.as_health() if shows_diagnosis else unavailable.as_state()
        return error.status, error_response(error, *lines, method=head.method, close=close)
    return 200, response(200, _OK, *lines, method=head.method, close=close)


def preflight(head: Head, *lines: bytes, close: bool) -> bytes:
    """The answer to a CORS preflight of a configured origin. Names the origin, never ``*`` (X3)."""
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
    """The headers that let a page of a configured origin read an answer and some of its headers."""
    return (
        b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
        b"Access-Control-Expose-Headers: X-Request-Id, Server-Timing, Retry-After, X-Llamasup-Repaired\r\n"
    )
