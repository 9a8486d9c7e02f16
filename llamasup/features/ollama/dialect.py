"""Serves Ollama's API on a listener of its own: its paths, and what answers each (a ``Dialect``).

Requests that run a model are translated and then take the way of every request to /v1/chat/completions,
/completion or /v1/embeddings: keys, limits, queue, retries, metrics and virtual models work as for these
requests. Other paths of the listener, such as /v1/…, are llama-server's own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from llamasup._version import __version__
from llamasup.core.http.heads import Head, HttpError
from llamasup.core.http.routes import Work, route_of
from llamasup.core.models.access import may_use, unfit_model
from llamasup.core.proxy.backend import Backend, ModelRoute
from llamasup.core.proxy.context import LocalAnswer
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.routing import access_denied
from llamasup.features.ollama.answer_format import error_line, loaded
from llamasup.features.ollama.fields import Refused, boolean, decoded, refusal, setting_of
from llamasup.features.ollama.files_answer import FilesAnswer
from llamasup.features.ollama.model_answer import JSON, Keep, ModelAnswer, Served, created_at, error_response
from llamasup.features.ollama.model_lists import (
    Entry,
    features_of,
    read_listed,
    running,
    shown,
    spellings,
    tags,
)
from llamasup.features.ollama.requests import PATHS, Features, OllamaRequest, model_of, read_request

__all__ = ["OllamaDialect"]

VERSION: Final = "0.30.0"
"""The version of Ollama whose API this is. Clients compare it with the smallest that they need."""

_log = logging.getLogger("llamasup.ollama")
_RUNNING: Final = LocalAnswer(b"Ollama is running", lines=b"Content-Type: text/plain; charset=utf-8\r\n")
_READS: Final = (b"GET", b"HEAD")
_POST: Final = (b"POST",)
_DELETE: Final = (b"DELETE",)
_CONTROL: Final = b"/llamasup/v1/"

_NOT_HERE: Final[Mapping[bytes, str]] = {
    b"/api/create": "llamasup makes no models: name a file, a repository or an alias in its config",
    b"/api/copy": "llamasup copies no models: give the model an alias in its config",
    b"/api/push": "llamasup uploads no models",
}
_BLOBS: Final = b"/api/blobs/"

_OF_THE_BODIES: Final = re.compile(rb"^(?:content-type|accept|accept-encoding):[^\r\n]*\r\n", re.MULTILINE)
"""Header lines of the client about the bodies, which are not those of llama-server."""


class _WrongMethod(Exception):
    """The path does not have the method of the request, but ``methods``."""

    def __init__(self, methods: tuple[bytes, ...]) -> None:
        super().__init__()
        self.methods = methods


class OllamaDialect:
    """A ``Dialect``. ``keep``: see ``Served``."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._named: set[str] = set()  # options without effect, of which there are few

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
        except _WrongMethod as wrong:
            sentence = f"use {wrong.methods[0].decode()} for {path.decode('latin-1')}"
            lines = b"%bAllow: %b\r\n" % (JSON, b", ".join(wrong.methods))
            return LocalAnswer(error_line(sentence), 405, lines)

    # --- requests that run a model

    def _run(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
        _require_plain(request.head)
        wanted = read_request(
            request.head.path, request.body, lambda name: self._features(request, backend, name)
        )
        if wanted.loads:
            route = self._route(request, backend, wanted.name)
            if wanted.keep_s == 0:
                return self._unload(wanted, route)
            work = Work.EMBEDDINGS if wanted.embeds else Work.TEXT
            if work not in route.model.works:
                return unfit_model(route.model, work)
        self._name_once(wanted.idle)
        name = _served_name(wanted.name, backend)
        request.body = msgspec.json.encode({"model": name, **wanted.body})
        served = Served(partial(_features_of, backend), self._keep)
        # Without the body, which would stay in memory until the end of the answer.
        request.translation = ModelAnswer(replace(wanted, body={}), request.received_at, served)
        request.head = _head_for(request.head, wanted.path)
        return None

    def _name_once(self, idle: tuple[str, ...]) -> None:
        """Name options without effect in the log. Many clients send the same ones with each request."""
        for name in idle:
            if name not in self._named:
                self._named.add(name)
                setting = setting_of(name)
                remedy = f"; set {setting} of the model in llamasup's config" if setting else ""
                _log.warning("The option %s of requests to Ollama's API has no effect%s.", name, remedy)

    def _unload(self, wanted: OllamaRequest, route: ModelRoute) -> HttpError | LocalAnswer:
        """A request without a prompt, with ``keep_alive`` 0."""
        kept = self._keep(route.model.id, 0.0, 0)
        if kept == "fixed":
            return HttpError(
                400,
                f"the model {route.model.id!r} stays loaded: it is pinned, a virtual model, on another node, "
                "or the only model",
                cause="stays_loaded",
                remedy="unload it with `llamasup unload`",
            )
        # Clients take any answer but ``unload`` for a model that is still loaded.
        return LocalAnswer(loaded(wanted, created_at(), reason="unload" if kept == "kept" else "stop"))

    def _features(self, request: Request, backend: Backend, name: str) -> Features:
        """Return none if the request may not use the model: it is refused later, as on every other path."""
        try:
            return features_of(read_listed(self._route(request, backend, name).listed()))
        except Refused:
            return Features()

    # --- requests that llamasup answers

    def _answer(self, request: Request, backend: Backend) -> HttpError | LocalAnswer | None:
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
                return LocalAnswer(tags(_models(request, backend)))
            case b"/api/ps":
                _require(head, _READS)
                return LocalAnswer(running(_models(request, backend), datetime.now(UTC)))
            case b"/api/show":
                _require(head, _POST)
                return self._show(request, backend)
            case b"/api/pull":
                _require(head, _POST)
                self._pull(request, backend)
                return None
            case b"/api/delete":
                _require(head, _DELETE)
                return self._delete(request, backend)
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
        _require_plain(request.head)
        fields = decoded(request.body)
        boolean(fields, "verbose")  # the tokens of a vocabulary are never shown
        route = self._route(request, backend, model_of(fields))
        return LocalAnswer(shown(read_listed(route.listed())))

    # --- requests that the control API carries out

    def _pull(self, request: Request, backend: Backend) -> None:
        """Download what a request for the model would also download, so a key that may use the model is
        enough.
        """
        _require_plain(request.head)
        fields = decoded(request.body)
        if boolean(fields, "insecure"):
            raise refusal(
                "insecure is not supported",
                "leave it out: downloads.private_addresses in llamasup's config allows http",
            )
        streams = boolean(fields, "stream", default=True)
        name = model_of(fields)
        if request.key is not None and request.key.models:
            self._route(request, backend, name)
        request.requested_model = _plain_name(name, backend)
        request.translation = FilesAnswer(name, pulls=True, streams=streams, hides_paths=request.hides_paths)
        client = {} if request.key is None else {"client": request.key.name}
        request.body = msgspec.json.encode({"model": request.requested_model, **client})
        request.head = _head_for(request.head, _CONTROL + b"pull")

    def _delete(self, request: Request, backend: Backend) -> HttpError | None:
        _require_plain(request.head)
        name = model_of(decoded(request.body))
        if request.key is None or not request.key.controls:
            return HttpError(
                403,
                "only a key with the right `control` may delete models",
                type="permission_error",
                cause="key_rights",
                remedy="use a key with rights=inference,control, or `llamasup rm` on llamasup's machine",
            )
        request.requested_model = _plain_name(name, backend)
        request.translation = FilesAnswer(name, pulls=False, streams=False, hides_paths=False)
        request.body = b"{}"
        name = quote(request.requested_model, safe="")
        request.head = _head_for(request.head, b"%bmodels/%b/remove" % (_CONTROL, name.encode()))
        return None

    def _route(self, request: Request, backend: Backend, name: str) -> ModelRoute:
        """The route to a model that the request may use. Raises Refused."""
        request.requested_model = _served_name(name, backend)
        route = backend.resolve(request.requested_model)
        if isinstance(route, HttpError):
            raise Refused(access_denied(request, None) or route)
        if (denied := access_denied(request, route.model)) is not None:
            raise Refused(denied)
        return route


def _features_of(backend: Backend, id_: str) -> Features:
    """Return none if the model was removed meanwhile."""
    route = backend.resolve(id_)
    return Features() if isinstance(route, HttpError) else features_of(read_listed(route.listed()))


def _models(request: Request, backend: Backend) -> list[Entry]:
    """The models that the request may use."""
    return [read_listed(listed) for listed in backend.models() if may_use(request.key, listed.model)]


def _served_name(name: str, backend: Backend) -> str:
    """The first spelling that names a model; if none does, the name without ``:latest``."""
    names = spellings(name)
    for spelling in names:
        if not isinstance(backend.resolve(spelling), HttpError):
            return spelling
    return name.removesuffix(":latest")


def _plain_name(name: str, backend: Backend) -> str:
    """The served name, without ``:latest`` unless that names another model."""
    served = _served_name(name, backend)
    plain = served.removesuffix(":latest")
    found, other = backend.resolve(served), backend.resolve(plain)
    if isinstance(found, HttpError) or isinstance(other, HttpError) or found.model.id != other.model.id:
        return served
    return plain


def _head_for(head: Head, path: bytes) -> Head:
    """The head of the same client's POST to ``path``. Logs have the path of the client."""
    _, _, lines = head.opening.partition(b"\r\n")
    route = route_of(path)
    return replace(
        head,
        path=path,
        query=b"",
        route=route,
        opening=b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\n"
        % (path, _OF_THE_BODIES.sub(b"", lines)),
        needs_permit=route.infers,
        may_wait=route.waits,
    )


def _require(head: Head, methods: tuple[bytes, ...]) -> None:
    if head.method not in methods:
        raise _WrongMethod(methods)


def _require_plain(head: Head) -> None:
    if head.compressed:
        raise Refused(_COMPRESSED)


_COMPRESSED: Final = HttpError(
    415, "the body is compressed (Content-Encoding)", cause="content_encoding", remedy="send it uncompressed"
)
