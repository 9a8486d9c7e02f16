"""Ollama's API on a listener of its own: which paths it has, and who answers each (a ``Dialect``).

Requests that run a model are translated and then take the way of every request to /v1/chat/completions,
/completion or /v1/embeddings: keys, limits, queue, retries, metrics and virtual models are those of that way.
Other paths of the listener, such as /v1/…, are llama-server's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from llamasup._version import __version__
from llamasup.http.heads import Head, HttpError
from llamasup.http.routes import route_of
from llamasup.models.access import ResolvedModel, may_use
from llamasup.ollama.answer import Answer, Served, created_at, error_response
from llamasup.ollama.answers import loaded
from llamasup.ollama.fields import Refused, boolean, decoded
from llamasup.ollama.listing import features_of, read_list, read_one, running, shown, tags
from llamasup.ollama.names import spellings
from llamasup.ollama.requests import PATHS, Asked, Features, asked_of, model_of
from llamasup.proxy.backend import Backend, ModelList, ModelRoute
from llamasup.proxy.dialect import LocalAnswer
from llamasup.proxy.request import Request
from llamasup.proxy.routing import access_denied
from llamasup.queueing.unavailable import Unavailable

__all__ = ["OllamaDoor"]

VERSION: Final = "0.30.0"
"""The version of Ollama whose API this is. Clients compare it with the smallest that they need."""

_RUNNING: Final = LocalAnswer(b"Ollama is running", lines=b"Content-Type: text/plain; charset=utf-8\r\n")
_READS: Final = (b"GET", b"HEAD")
_POST: Final = (b"POST",)

_NOT_HERE: Final[Mapping[bytes, str]] = {
    b"/api/create": "llamasup makes no models: name a file, a repository or an alias in its config",
    b"/api/copy": "llamasup copies no models: give the model an alias in its config",
    b"/api/push": "llamasup uploads no models",
    b"/api/pull": "llamasup downloads no models over Ollama's API: run `llamasup pull NAME` on its machine",
    b"/api/delete": "llamasup deletes no models over Ollama's API: run `llamasup rm NAME` on its machine",
}
_BLOBS: Final = b"/api/blobs/"

_CONTENT_TYPE: Final = re.compile(rb"content-type:[^\r\n]*\r\n")


class OllamaDoor:
    """``list_models``: the models as /v1/models lists them. ``keep``: see ``Served``."""

    def __init__(
        self,
        list_models: Callable[[], ModelList],
        keep: Callable[[str, float | None, int], bool],
    ) -> None:
        self._list_models = list_models
        self._served = Served(self._context_of, keep)

    # --- Dialect

    def speaks(self, head: Head) -> bool:
        return head.path == b"/" or head.path.startswith(b"/api/")

    def error_response(self, error: HttpError, lines: bytes, *, method: bytes, close: bool) -> bytes:
        return error_response(error, lines, method=method, close=close)

    def translate(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
        path = request.head.path
        try:
            if path in PATHS:
                _require(request.head, _POST)
                return self._run(request, backend)
            return self._answer(request, backend)
        except Refused as refused:
            return refused.error

    # --- requests that run a model

    def _run(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
        if request.head.compressed:
            raise Refused(_COMPRESSED)
        asked = asked_of(request.head.path, request.body, lambda name: self._features(request, backend, name))
        if asked.loads and asked.keep_s == 0:
            return self._unload(request, asked, backend)
        name = _served_name(asked.name, backend)
        request.translation = Answer(asked, request.received_at, self._served)
        request.body = msgspec.json.encode({"model": name, **asked.body})
        request.head = _head_for(request.head, asked.path)
        return None

    def _unload(self, request: Request, asked: Asked, backend: Backend) -> HttpError | LocalAnswer:
        """A request without a prompt, with ``keep_alive`` 0."""
        route = self._route(request, backend, asked.name)
        if not self._served.keep(route.model.id, 0.0, 0):
            return HttpError(
                400,
                f"the model {route.model.id!r} stays loaded: it is pinned, virtual, elsewhere or alone",
                cause="stays_loaded",
                remedy="unload it with `llamasup unload`",
            )
        return LocalAnswer(loaded(asked, created_at(), reason="unload"))

    def _features(self, request: Request, backend: Backend, name: str) -> Features:
        try:
            route = self._route(request, backend, name)
        except Refused:
            return Features()  # the refusal comes later, with the status of every other path
        return features_of(read_one(self._list_models().one(route.model.id)))

    def _context_of(self, id_: str) -> int | None:
        try:
            found = read_one(self._list_models().one(id_))
        except KeyError:  # it was removed meanwhile, or is only on another node
            return None
        return found.meta.n_ctx or found.llamasup.context

    # --- requests that llamasup answers

    def _answer(self, request: Request, backend: Backend) -> HttpError | LocalAnswer:
        head = request.head
        match head.path:
            case b"/":
                _require(head, _READS)
                return _RUNNING
            case b"/api/version":
                _require(head, _READS)
                return LocalAnswer(msgspec.json.encode({"version": VERSION, "llamasup": __version__}))
            case b"/api/tags":
                _require(head, _READS)
                return LocalAnswer(tags(read_list(self._list_models().all(_allowed(request)))))
            case b"/api/ps":
                _require(head, _READS)
                models = read_list(self._list_models().all(_allowed(request)))
                return LocalAnswer(running(models, datetime.now(UTC)))
            case b"/api/show":
                _require(head, _POST)
                return self._show(request, backend)
            case path:
                sentence = _NOT_HERE.get(path)
                if path.startswith(_BLOBS):
                    sentence = _NOT_HERE[b"/api/create"]
                if sentence is None:
                    shown_path = path[:80].decode("latin-1")
                    return HttpError(
                        404, f"there is no {shown_path!r}", remedy="docs/ollama.md lists the paths"
                    )
                return HttpError(501, sentence, type="not_supported_error", cause="not_supported")

    def _show(self, request: Request, backend: Backend) -> LocalAnswer:
        fields = decoded(request.body)
        boolean(fields, "verbose")  # the tokens of a vocabulary are never shown
        route = self._route(request, backend, model_of(fields))
        return LocalAnswer(shown(read_one(self._list_models().one(route.model.id))))

    def _route(self, request: Request, backend: Backend, name: str) -> ModelRoute:
        """The route to a model that the request may use. Raises Refused."""
        request.requested_model = _served_name(name, backend)
        route = backend.resolve(request.requested_model)
        if isinstance(route, Unavailable):
            raise Refused(access_denied(request, None) or route.as_error())
        if (denied := access_denied(request, route.model)) is not None:
            raise Refused(denied)
        return route


def _allowed(request: Request) -> Callable[[ResolvedModel], bool] | None:
    key = request.key
    return (lambda model: may_use(key, model)) if key is not None and key.models else None


def _served_name(name: str, backend: Backend) -> str:
    """The first spelling that names a model; if none does, the name without ``:latest``."""
    names = spellings(name)
    for spelling in names:
        if not isinstance(backend.resolve(spelling), Unavailable):
            return spelling
    return name.removesuffix(":latest")


def _head_for(head: Head, path: bytes) -> Head:
    """The head of the same client's request to llama-server's ``path``. Logs have the path of the client."""
    _, _, lines = head.opening.partition(b"\r\n")
    route = route_of(path)
    return replace(
        head,
        path=path,
        query=b"",
        route=route,
        opening=b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\n"
        % (path, _CONTENT_TYPE.sub(b"", lines)),
        needs_permit=route.infers,
        may_wait=route.waits,
    )


def _require(head: Head, methods: tuple[bytes, ...]) -> None:
    if head.method not in methods:
        raise Refused(HttpError(405, f"use {methods[0].decode()} for {head.path.decode('latin-1')}"))


_COMPRESSED: Final = HttpError(
    415, "the body is compressed (Content-Encoding)", cause="content_encoding", remedy="send it uncompressed"
)
