"""Answers requests of clients at the address of Ray Serve: checks access, and finds the model.

This is the ASGI part, which needs no Ray: the replicas are behind ``Forward``. docs/ray.md (The address of
Ray Serve) lists what only a front does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request as AsgiRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.auth.keys import Keys
from llamasup.core.http.heads import Head, HttpError, Priority, error_body, error_lines, pairs_of, read_head
from llamasup.core.http.requested_model import named_in_path
from llamasup.core.http.routes import CONTROL
from llamasup.core.http.sse import error_event
from llamasup.core.models.access import ResolvedModel, forbidden_model, may_use, unknown_model, unnamed_model
from llamasup.core.models.names import NameIndex
from llamasup.core.pool.shown_state import ListedStatus
from llamasup.core.proxy.access_policy import PUBLIC_PATHS, AccessPolicy
from llamasup.core.proxy.body_rules import judge_body
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import Limits, ProxyConfig
from llamasup.core.queueing.outcomes import load_queue_full, wait_timed_out
from llamasup.features.peers.groups import ModelGroup, why_not_served
from llamasup.features.peers.nodes import ExpectedModel
from llamasup.fleet.membership import FleetMembership
from llamasup.fleet.messages import ListedModel
from llamasup.fleet.node_requests import AnswerBegin

_log = logging.getLogger("ray.serve")

_encode: Final = msgspec.json.Encoder().encode
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_ERROR_EVENTS: Final = (b'data: {"error":', b"event: error\n")
_KNOWN_S: Final = 5.0
_FEWEST_ASSIGNED: Final = 256
"""How many requests may wait for Serve's choice of a replica, also with a smaller ``max_queued``: each
request does so for a moment."""
_TAIL_BYTES: Final = 16_384  # an error event of a node quotes some lines of a log
_NOT_HERE = HttpError(
    404,
    "At the address of Ray Serve, this fleet answers only requests for models, and /v1/models",
    "not_found_error",
    remedy="send other requests to a front of the fleet",
)
_FOR_SERVE: Final = ("x-request-disconnect-disabled", "x-request-timeout-seconds")
"""Serve's proxy (2.60) obeys these headers of a client: with the first, a generation continues when its
client has left."""
_MANY_BODIES = HttpError(
    503,
    "the bodies of the requests that wait for a replica take all the memory that they may use",
    "unavailable_error",
    "bodies_limit",
    "try again shortly",
    1.0,
)
_SLOW_BODY = HttpError(408, "the request's body took too long", cause="slow_request")


class IngressSettings(Struct, frozen=True):
    """The settings of a config about clients. ``keys`` are digests; if there are any, each request needs a
    key. ``hosts``: names that the Host header may have. ``insecure_no_auth``: other machines need no key.
    """

    keys: tuple[ApiKey, ...] = ()
    hosts: tuple[str, ...] = ()
    remote_media: tuple[str, ...] = ()
    insecure_no_auth: bool = False
    wait_timeout_s: float = 120.0
    max_queued: int = 256


class ReplicaAnswer(Protocol):
    """The answer of a replica to one request: ``AnswerBegin``, then pieces of the body."""

    async def assigned(self) -> None:
        """Wait until a replica has the request."""
        ...

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> None:
        """End the request at the replica. May be repeated."""
        ...


Forward = Callable[[bytes, bytes, bytes], ReplicaAnswer]
"""Sends a request to a replica: its target, its header lines, its body."""


class AnswerCut(Exception):
    """The answer is incomplete. Raised so that Serve closes the connection: its client must not take the
    answer for a complete one.
    """


class Ingress:
    """Answers the requests of clients. ``forward`` has a function for each model, by its id. Of a front's
    ``limits``, the limits of bodies apply, not the limits for each client: Serve's proxy has the connections.
    """

    def __init__(
        self,
        settings: IngressSettings,
        models: Iterable[ListedModel],
        membership: FleetMembership,
        forward: Mapping[str, Forward],
        limits: Limits | None = None,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._forward = forward
        self._limits = Limits() if limits is None else limits
        self._models = IngressModels(models, membership.serves)
        self._config = ProxyConfig(hosts=settings.hosts, remote_media=settings.remote_media)
        self._keys = Keys(None, (), monotonic)
        for key in settings.keys:
            self._keys.mint(key)
        self._keys.needed = bool(settings.keys)
        self._access = AccessPolicy(self._config, self._keys)
        self._waiting: Counter[str] = Counter()
        self._unassigned: Counter[str] = Counter()
        self._held_bytes = 0

    async def answer(self, request: AsgiRequest) -> Response:
        head = _head_of(request)
        if isinstance(head, HttpError):
            return _refusal(head)
        server = request.scope.get("server") or ("", None)
        key = self._access.authorize(head, server[0])
        if isinstance(key, HttpError):
            return _refusal(key)
        if key is not None and key.limits:
            what = f"the key {key.name!r} has limits, which only a front of the fleet enforces"
            remedy = "use a front, or a key without rpm, concurrent and tpm"
            return _refusal(HttpError(403, what, "permission_error", "key_limits", remedy))
        for name in _FOR_SERVE:
            if name in request.headers:
                what = f"the header {name!r} controls Ray Serve, which clients may not do"
                return _refusal(HttpError(400, what, cause="serve_header", remedy="leave the header out"))
        if head.method in (b"GET", b"HEAD"):
            return self._answer_read(head, key)
        if not head.may_wait or head.route is CONTROL:
            return _refusal(_NOT_HERE)
        body = await self._body_of(request)
        if isinstance(body, HttpError):
            return _refusal(body)
        asked = Request(head, head.request_id, keep_alive=True, key=key, body=body)
        refusal = judge_body(asked, self._config, self._keys)
        model = refusal or self._models.resolve(asked.requested_model, key)
        if isinstance(model, HttpError):
            return _refusal(model)
        try:
            self._held_bytes += len(body)
            return await self._from_replica(asked, model)
        finally:
            self._held_bytes -= len(body)

    def _answer_read(self, head: Head, key: ApiKey | None) -> Response:
        if head.path in PUBLIC_PATHS:
            return _json(b'{"status":"ok"}')
        if not head.route.lists:
            return _refusal(_NOT_HERE)
        name = named_in_path(head.path)
        if name is None:
            return _json(self._models.all(key))
        model = self._models.resolve(name, key)
        return _refusal(model) if isinstance(model, HttpError) else _json(self._models.one(model))

    async def _body_of(self, request: AsgiRequest) -> bytes | HttpError:
        limit = self._limits.body_bytes
        too_large = HttpError(413, f"the body is larger than {limit} bytes", cause="body_limit")
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            return too_large
        body, pieces = bytearray(), aiter(request.stream())
        now, idle_s = asyncio.get_running_loop().time, self._limits.body_idle_s
        began_s = now()
        try:
            while True:
                average_s = began_s + idle_s + len(body) / self._limits.body_rate_bytes
                async with asyncio.timeout_at(min(now() + idle_s, average_s)):
                    piece = await anext(pieces, None)
                if piece is None:
                    break
                body += piece
                self._held_bytes += len(piece)
                if len(body) > limit:
                    return too_large
                is_large = len(body) > self._limits.small_body_bytes
                if is_large and self._held_bytes > self._limits.bodies_bytes:
                    return _MANY_BODIES
        except TimeoutError:
            return _SLOW_BODY
        finally:
            self._held_bytes -= len(body)
        return bytes(body)

    # --- the model ---------------------------------------------------------------------------------------

    async def _from_replica(self, asked: Request, model: ResolvedModel) -> Response:
        """A request for a model without a replica waits until one serves."""
        until_s = asyncio.get_running_loop().time() + self._settings.wait_timeout_s
        refusal = await self._until_served(model, until_s)
        if refusal is not None:
            return _refusal(refusal)
        unassigned = self._unassigned[model.id]
        if unassigned >= max(self._settings.max_queued, _FEWEST_ASSIGNED):
            return _refusal(self._queue_full(model, unassigned))
        head = asked.head
        _, target, _ = head.opening.split(b" ", 2)
        answer = self._forward[model.id](target, _lines_for_node(asked), asked.body)
        try:
            # The directory may know a replica a moment before Serve does.
            self._unassigned[model.id] += 1
            try:
                async with asyncio.timeout_at(max(until_s, asyncio.get_running_loop().time() + _KNOWN_S)):
                    await answer.assigned()
            finally:
                self._unassigned[model.id] -= 1
            begin = await anext(aiter(answer))
        except TimeoutError:
            answer.cancel()
            return _refusal(self._timed_out(model))
        except Exception as error:  # Ray raises many errors: the replica has died, or is unavailable
            _log.warning("A replica of %s did not answer: %r", model.id, error)
            answer.cancel()
            return _refusal(replica_ended(model))
        except BaseException:
            answer.cancel()
            raise
        return _Relayed(begin, answer, head.path, replica_ended(model))

    async def _until_served(self, model: ResolvedModel, until_s: float) -> HttpError | None:
        if self._membership.serves(model.id):
            return None
        if self._waiting[model.id] >= self._settings.max_queued:
            return self._queue_full(model, self._waiting[model.id])
        self._count_waiting(model, 1)
        try:
            async with asyncio.timeout_at(until_s):
                while not self._membership.serves(model.id):
                    await self._membership.changed()
        except TimeoutError:
            return self._timed_out(model)
        finally:
            self._count_waiting(model, -1)
        return None

    def _count_waiting(self, model: ResolvedModel, change: int) -> None:
        self._waiting[model.id] += change
        self._membership.wanted(model.id, self._waiting[model.id])

    def _queue_full(self, model: ResolvedModel, waiting: int) -> HttpError:
        return load_queue_full(no_node(model, self._membership.expected()), waiting)

    def _timed_out(self, model: ResolvedModel) -> HttpError:
        why = no_node(model, self._membership.expected())
        return wait_timed_out(why, 0, self._settings.wait_timeout_s, reachable=True)


class _Relayed(Response):
    """The answer of a replica. ``broken``: the error for the client if it ends early."""

    def __init__(self, begin: AnswerBegin, answer: ReplicaAnswer, path: bytes, broken: HttpError) -> None:
        super().__init__(status_code=begin.status)
        self.raw_headers = pairs_of(begin.lines)
        self._begin = begin
        self._answer = answer
        self._path = path
        self._broken = broken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, tail = self._answer, self._begin.piece
        streams_events = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.raw_headers
        )
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": tail, "more_body": True})
            async for piece in answer:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if streams_events:
                    tail = piece if len(piece) >= _TAIL_BYTES else (tail + piece)[-_TAIL_BYTES:]
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # Ray raises many errors
            if streams_events and _may_follow(tail):
                event = error_event(self._path, error_body(self._broken))
                await send({"type": "http.response.body", "body": event, "more_body": True})
            raise AnswerCut(self._broken.message) from error
        finally:
            answer.cancel()


def _may_follow(tail: bytes) -> bool:
    """Tell whether an error event can follow: the stream is after an event, which is not an error itself."""
    if not tail.endswith(_EVENT_ENDS):
        return False
    last = tail.rstrip().replace(b"\r\n", b"\n").rpartition(b"\n\n")[2]
    return not last.startswith(_ERROR_EVENTS)


def _head_of(request: AsgiRequest) -> Head | HttpError:
    """Read the head, without the path of the application (``root_path``), which nodes do not know."""
    scope = request.scope
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.removeprefix(scope.get("root_path", "").encode()) or b"/"
    query: bytes = scope.get("query_string", b"")
    target = path + b"?" + query if query else path
    return read_head(scope["method"].encode(), target, scope["http_version"], list(scope["headers"]))


def _lines_for_node(asked: Request) -> bytes:
    """Return the header lines of the request that are for a node."""
    _, _, lines = asked.head.opening.partition(b"\r\nHost: localhost\r\n")
    lines += b"X-Llamasup-Node: ingress\r\n"
    if asked.id:
        lines += b"X-Request-Id: " + asked.id + b"\r\n"
    if asked.priority is not Priority.NORMAL:
        lines += b"X-Llamasup-Priority: " + asked.priority.name.lower().encode() + b"\r\n"
    return lines


def _refusal(error: HttpError) -> Response:
    response = _json(error_body(error), error.status)
    response.raw_headers += pairs_of(b"".join(error_lines(error)))
    return response


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json; charset=utf-8")


class IngressModels:
    """The models by name. ``is_served`` tells whether a replica of the model with this id takes requests."""

    def __init__(self, listed: Iterable[ListedModel], is_served: Callable[[str], bool]) -> None:
        self._models = {model.id: ResolvedModel((model.id, *model.aliases)) for model in listed}
        self._index = NameIndex({name: model.id for model in self._models.values() for name in model.names})
        self._is_served = is_served

    def resolve(self, name: str | None, key: ApiKey | None) -> ResolvedModel | HttpError:
        """The model that a request names. A key learns nothing about models that it may not use."""
        limited = key if key is not None and key.models else None
        if name is None:
            return unnamed_model(tuple(self._models) if limited is None else limited.models)
        found = self._index.find(name)
        model = self._models[found] if isinstance(found, str) else None
        if limited is not None and (model is None or not may_use(limited, model)):
            return forbidden_model(limited, name)
        return unknown_model(name, tuple(found)) if model is None else model

    def all(self, key: ApiKey | None) -> bytes:
        """Answer ``/v1/models`` with the models that the key may use."""
        entries = [self._entry(model) for model in self._models.values() if may_use(key, model)]
        return _encode({"object": "list", "data": entries})

    def one(self, model: ResolvedModel) -> bytes:
        """Answer ``/v1/models/{id}``."""
        return _encode(self._entry(model))

    def _entry(self, model: ResolvedModel) -> dict[str, Any]:
        return {
            "id": model.id,
            "object": "model",
            "created": 0,
            "owned_by": "llamasup",
            "aliases": model.names[1:],
            "tags": (),
            "status": {"value": ListedStatus.of(serves=self._is_served(model.id)).value},
        }


def no_node(model: ResolvedModel, expected: Iterable[ExpectedModel]) -> HttpError:
    """Say why no replica serves the model now. ``expected``: what the directory says of the models."""
    known = next((each for each in expected if each.id == model.id), ExpectedModel(model.id))
    return why_not_served(ModelGroup(model, {}, known), {})


def replica_ended(model: ResolvedModel) -> HttpError:
    """Make the error for an answer, or the rest of an answer, that does not come."""
    message = f"The replica of the model {model.id!r} has ended before its answer"
    return HttpError(503, message, cause="node_absent", remedy="try again", retry_after_s=1.0)
