"""Decides which part answers a request: llamasup itself, its control API, or the llama-server of a model.

Also decides which models a client may use and list.
"""

from __future__ import annotations

import re
from enum import Enum
from time import monotonic
from typing import Final, cast

import msgspec
from msgspec.structs import replace

from llamasup._version import __version__
from llamasup.core.http.heads import (
    Head,
    HttpError,
    error_body,
    error_lines,
    error_response,
    response,
    with_query,
)
from llamasup.core.http.requested_model import (
    FORMS_ONLY,
    autoload_of,
    named_in_path,
    plain_json,
    renamed_query,
)
from llamasup.core.http.routes import CONTROL, CONVERSATIONS, ENGINE, RESPONSES
from llamasup.core.models.access import (
    ResolvedModel,
    forbidden_model,
    may_use,
    unfit_model,
    unnamed_model,
    unserved_path,
)
from llamasup.core.proxy.access_policy import AccessPolicy
from llamasup.core.proxy.backend import Backend, ServedModel, VirtualRoute, is_virtual
from llamasup.core.proxy.context import ProxyContext
from llamasup.core.proxy.request import Request
from llamasup.core.queueing.endpoint import BUSY, Lease
from llamasup.core.queueing.suspects import Suspects, alone_s
from llamasup.core.settings.model import NO_REPAIRS
from llamasup.core.system.text import INVALID_JSON, not_json

__all__ = [
    "FORWARDED",
    "Answerer",
    "access_denied",
    "after_autoload",
    "answer_locally",
    "answer_unserved",
    "answerer_of",
    "cors_lines",
    "lease_for",
    "unknown_path",
]

CONTROL_PATHS = frozenset({b"/metrics"})  # and everything below /llamasup/
_LEADING = frozenset({b"/", b"/llamasup"})  # these may lead a browser to the console

# The names of headers that a page wants to send. OpenAI's client has a dozen (X-Stainless-…).
_are_names = re.compile(rb"[A-Za-z0-9-]+(?:[ \t]*,[ \t]*[A-Za-z0-9-]+)*").fullmatch
_USUAL_HEADERS = b"Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Llamasup-Priority"

_MAX_SHOWN: Final = 200  # letters of an error

_encode = msgspec.json.Encoder().encode
_OK = b'{"status":"ok"}'  # as llama-server (b11434)
# As llama-server with several models (b11434). Its web interface and other clients look for the role. The
# memory limits the number of models.
_ROUTER = (
    b'{"role":"router","max_instances":0,"models_autoload":true,"model_alias":"llamasup","model_path":"none",'
    b'"default_generation_settings":{"params":{},"n_ctx":0},"ui_settings":{},"build_info":"llamasup %b",'
    b'"cors_proxy_enabled":false}' % __version__.encode()
)
_READS = frozenset({b"GET", b"HEAD"})
_ALLOW = b"Allow: GET, HEAD, OPTIONS\r\n"


# Another client gets another answer to the same path. The place is relative, because a reverse proxy may have
# taken a prefix off the path.
_TO_CONSOLE = (b"Location: llamasup/\r\n", b"Cache-Control: no-store\r\nVary: Accept\r\n")


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
    """Find the part that answers a request with this head. The first rule that applies decides."""
    if head.needs_permit:
        return _MODEL  # no path of llamasup itself runs a model
    if head.origin is not None and access.is_preflight(head):
        return _PREFLIGHT
    transparent = access.rules.transparent
    if head.path in access.own_paths and not (transparent and backend.readiness() is None):
        return _HEALTH  # a transparent proxy answers these paths only while llama-server cannot
    if head.route.lists and (head.from_node or backend.lists_models):
        return _MODEL_LIST
    if not transparent and (head.route is CONTROL or head.route.of_batches or head.path in CONTROL_PATHS):
        return _CONTROL
    if head.route.of_router and access.router is not None:
        return _CONTROL
    return _REDIRECT if head.path in _LEADING and access.console.redirects(head) else _MODEL


def lease_for(request: Request, answerer: Answerer, proxy: ProxyContext) -> Lease | HttpError:
    """A lease on the control API or on a generation of the requested model, or why there is none.

    Resolves the name of the model, and keeps the result in ``request.model_route``.
    """
    if answerer is _CONTROL:
        control = proxy.control
        if control is None or control.closed:
            return HttpError(404, "this server has no control API", type="not_found_error")
        return control.lease()
    key, infers = request.key, request.head.needs_permit
    if request.requested_model is None and request.head.route.label == "/props" and _is_router(proxy):
        return unnamed_model(())  # ``answer_unserved`` answers instead
    limited = key is not None and bool(key.models)
    # Only work for a model downloads it, and only for a key that may use all models.
    name = request.requested_model
    if name is None and len(owners := proxy.owners(request.head.path_text)) == 1:
        name = owners[0]
    route = proxy.backend.resolve(
        name,
        create=infers and not limited and request.head.route.is_known,
        local=request.head.from_node,
    )
    if type(route) is HttpError:  # without a call, as this is on the path of every request
        if proxy.owners(request.head.path_text):
            request.head = _of_engine(request.head)
        refusal = access_denied(request, None) if limited else _unreadable(request)
        return refusal or route
    if (
        limited
        or route.model.engine is not None
        or (proxy.config.route_by_model and request.head.route.work not in route.model.works)
    ):
        if is_virtual(route):
            route = route.for_work(request.head.route.work)
        refusal = access_denied(request, route.model)
        if refusal is not None:
            return refusal
    request.model_route = route
    if route.model.engine is not None:
        request.head = _of_engine(request.head)
    if route.model.is_virtual and (refusal := _rewrite(request, cast("VirtualRoute", route))) is not None:
        return refusal
    is_conversation = (label := request.head.route.label) in CONVERSATIONS and route.model.engine is None
    if is_conversation and (  # without a call for most requests
        b'"system"' in (body := request.body)
        or b'"developer"' in body
        or (label in RESPONSES and (b'"tools"' in body or b"custom_tool" in body or b'"namespace"' in body))
    ):
        _change_for_agents(request, proxy)
    repairs, repair = route.served.repairs, proxy.stages.repair
    if repairs is not NO_REPAIRS and request.body and repair is not None:
        repair(request, repairs, proxy.metrics)
    if request.body and (suspects := route.served.queue.suspects).known:
        return _lease_beside(suspects, request, route.served)
    return route.served.lease(infers=infers, body=request.body)


def _is_router(proxy: ProxyContext) -> bool:
    """Whether /props without a model is about llamasup, and not about the default model."""
    return proxy.config.router is not None and proxy.config.router.props


def _of_engine(head: Head) -> Head:
    """The head of a request to another program. All of its requests wait for a load."""
    if head.may_wait and head.route.is_known:
        return head
    own = replace(ENGINE, repeats=head.method in _READS)
    return replace(head, route=head.route if head.route.is_known else own, may_wait=True)


def _change_for_agents(request: Request, proxy: ProxyContext) -> None:
    """Have the tools changed that llama-server does not know, and system messages that a template drops."""
    if (change := proxy.stages.tools) is not None and not proxy.config.rules.transparent:
        change(request)


def _unreadable(request: Request) -> HttpError | None:
    """Why the body names no model, where it is not JSON at all: its quotes were lost in a shell."""
    if request.requested_model is not None or request.head.route.label in FORMS_ONLY or not request.body:
        return None
    try:
        msgspec.json.decode(plain_json(request.body), type=msgspec.Raw)
    except INVALID_JSON as error:
        message, remedy = not_json(error, _MAX_SHOWN), 'send a JSON object with a "model"'
        return HttpError(400, message, cause="body_not_json", remedy=remedy)
    return None


def _lease_beside(suspects: Suspects, request: Request, served: ServedModel) -> Lease | HttpError:
    """A lease while some bodies are known to have ended a server, or to have been in flight then."""
    fingerprint = suspects.fingerprint(request.head.path, request.body)
    request.suspicion = known = suspects.find(fingerprint, monotonic())
    if known is not None and known.refusal is not None:
        return known.refusal
    lease = served.lease(infers=request.needs_permit, body=request.body)
    if known is None or (type(lease) is Lease and lease.endpoint.node is not None):
        return lease
    request.fingerprint = fingerprint
    is_alone = type(lease) is Lease and lease.isolate(monotonic() + alone_s(len(known.ends), 0.0))
    if type(lease) is Lease and not is_alone and served.queue.lets_wait:
        lease.cancel_permit()
        lease.release()
        return BUSY
    return lease


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


def access_denied(request: Request, resolved: ResolvedModel | None) -> HttpError | None:
    """Why the request may not use its model; None if it may.

    The backend refuses unknown models, unless the key must not learn which models exist.
    """
    key = request.key
    if key is not None and key.models and (resolved is None or not may_use(key, resolved)):
        if resolved is None and request.requested_model is None:
            return unnamed_model(key.models)
        return forbidden_model(key, request.requested_model)
    route = request.head.route
    if resolved is not None and (engine := resolved.engine) is not None:
        # A translated request has the route of another path.
        path = route.label if route.label.startswith("/") else request.head.path_text
        return None if route.lists or engine.answers(path) else unserved_path(resolved, path)
    work = route.work
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
    return answer_listing(request, backend, close=close)


def answer_listing(request: Request, backend: Backend, *, close: bool) -> tuple[int, bytes]:
    """Status and complete response for ``/v1/models`` and ``/v1/models/{id}``."""
    head, lines, key = request.head, request.response_lines, request.key
    if head.method not in _READS:
        error = HttpError(405, "use GET for the list of models")
        return 405, error_response(error, b"Allow: GET, HEAD\r\n", lines, close=close)
    name = named_in_path(head.path)
    if name is not None and backend.lists_models:
        request.requested_model = name
        route = backend.resolve(name)
        if isinstance(route, HttpError):
            refusal = access_denied(request, None) or route
        elif (denied := access_denied(request, route.model)) is not None:
            refusal = denied
        else:
            body = _encode(route.listed().entry())
            return 200, response(200, body, lines, method=head.method, close=close)
        return refusal.status, error_response(refusal, lines, method=head.method, close=close)
    models = backend.models(for_node=head.from_node)
    shown = [listed.entry() for listed in models if may_use(key, listed.model)]
    if head.from_node:
        body = _encode({"node": backend.node, "models": shown, "version": __version__})
    else:
        body = _encode({"object": "list", "data": shown})
    return 200, response(200, body, lines, method=head.method, close=close)


def unknown_path(request: Request, why: HttpError) -> HttpError:
    """Why a request to a path of no known llama-server is not served: it loads and downloads no model.

    A model that is loaded, or is about to be, gets such a request, because a newer build may have the path.
    ``why``: the reason if the path were known.
    """
    is_served = request.head.route.is_known or why.cause == "unserved_path"
    if is_served or not (request.model_route is None or why.absent):
        return why
    path = request.head.path_text[:200]
    if "/v1/v1/" in path:
        remedy = "the base URL of the client ends in /v1, and the client adds another one: leave one out"
    elif path.startswith("/api/"):
        remedy = "for Ollama's API, set `ollama.listen` in the config, and use its address"
    else:
        remedy = (
            "check the base URL of the client; a path of your own build is served while its model is loaded"
        )
    return HttpError(
        404, f"no known llama-server has the path {path!r}", "not_found_error", "unknown_path", remedy
    )


def after_autoload(request: Request, why: HttpError) -> HttpError:
    """Return why the request is not served, after its ``?autoload=`` (llama.cpp's router).

    With false, it loads no model. With true, a GET with a key also waits for the load. Without a key it does
    not, because every web page can send a GET without an Origin.
    """
    head = request.head
    if why.status != 503 or (loads := autoload_of(head.query)) is None:
        return why
    if loads and head.method in _READS and head.route.label == "/props" and request.key is not None:
        request.head = replace(head, may_wait=True)
    if loads or (why.queueable and not why.absent):
        return why
    remedy = "load it, or leave out autoload=false" if why.absent else why.message
    return HttpError(400, "model is not loaded", cause="not_loaded", remedy=remedy)


def answer_unserved(request: Request, *, close: bool) -> tuple[int, bytes] | None:
    """Status and response of llamasup itself to a request about the server that no loaded model answers.

    None: the request is for a model.
    """
    head, lines = request.head, request.response_lines
    if request.requested_model is not None:
        return None
    if head.path in (b"/", b"*") and head.method == b"OPTIONS":
        return 204, response(204, b"", _ALLOW, lines, close=close)
    if head.method not in _READS or not (
        head.path == b"/" or (head.path == b"/props" and request.model_route is None)
    ):
        return None
    body = _OK if head.path == b"/" else _ROUTER
    return 200, response(200, body, lines, method=head.method, close=close)


def answer(
    head: Head, backend: Backend, *lines: bytes, close: bool, shows_diagnosis: bool = True
) -> tuple[int, bytes]:
    """Status and complete response for one of ``AccessPolicy.own_paths``."""
    if head.method == b"OPTIONS":  # HAProxy's check of a server
        return 204, response(204, b"", _ALLOW, *lines, close=close)
    if head.method not in _READS:
        error = HttpError(405, f"use GET for {head.path.decode()}")
        return 405, error_response(error, _ALLOW, *lines, close=close)
    if head.path != b"/livez" and (why := backend.readiness()) is not None:
        error = why if shows_diagnosis else why.without_reason()
        body = error_body(error, error.message)  # that of llama-server itself, also during a load
        lines += error_lines(error)
        return error.status, response(error.status, body, *lines, method=head.method, close=close)
    return 200, response(200, _OK, *lines, method=head.method, close=close)


def preflight(head: Head, *lines: bytes, close: bool) -> bytes:
    """The answer to a CORS preflight of a configured origin. Names the origin, never ``*`` (X3)."""
    asked = head.asked_headers if _are_names(head.asked_headers) else _USUAL_HEADERS
    return response(
        204,
        b"",
        *lines,
        b"Access-Control-Allow-Methods: GET, HEAD, POST, PUT, DELETE\r\n",
        b"Access-Control-Allow-Headers: " + asked + b"\r\n",
        b"Access-Control-Max-Age: 600\r\n",
        close=close,
    )


def cors_lines(origin: bytes) -> bytes:
    """The headers that let a page of a configured origin read an answer and some of its headers."""
    return (
        b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
        b"Access-Control-Expose-Headers: X-Request-Id, Server-Timing, Retry-After, X-Llamasup-Repaired, "
        b"X-Llamasup-Ignored-Tools, X-Llamasup-Moved-System\r\n"
    )
