"""The stage of a request whose tools become functions, or whose system messages move, and its attachment."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from llamasup.core.http.chunks import LAST_CHUNK, Dechunker, chunk, is_chunked
from llamasup.core.http.routes import RESPONSES
from llamasup.core.llama_server.answers import NoAnswer
from llamasup.core.proxy.failures import note_fingerprint
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.stages import AnswerHead, Attempt, Between, Ended, Position
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.features.agent_tools.answers import MAX_HELD, Events, whole
from llamasup.features.agent_tools.system_messages import PROBE, has_later_system, keeps_all, moved
from llamasup.features.agent_tools.tools import UNCHANGED, Names, rewritten

__all__ = ["NamedBack", "attach"]

_log = logging.getLogger("llamasup.proxy")
_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
_CODINGS: Final = re.compile(rb"^accept-encoding:[^\r\n]*\r\n", re.MULTILINE | re.IGNORECASE)
_logged: Final = set[str]()
_MOST_LOGGED: Final = 32  # clients choose the types


def attach(request: Request) -> None:
    """Turn the tools of this request into functions, and name those that llama-server skips. Its later system
    messages may move.
    """
    if request.translator is not None or request.head.compressed:
        return
    route = request.head.route.label
    found = rewritten(request.body) if route in RESPONSES else UNCHANGED
    if found.ignored:
        request.mark(b"X-Llamasup-Ignored-Tools", ", ".join(found.ignored))
        _log_once(found.ignored)
    request.body = found.body or request.body
    if found.names:
        # A compressed answer could not be translated.
        request.head = replace(request.head, opening=_CODINGS.sub(b"", request.head.opening))
    if (may_move := has_later_system(request.body, route)) or found.names:
        request.translator = NamedBack(request, found.names, may_move=may_move)


def _log_once(types: tuple[str, ...]) -> None:
    for type_ in types:
        if type_ not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(type_)
            _log.warning("llama-server ignores tools of the type %s in requests to /v1/responses.", type_)


class NamedBack(Between):
    """The stage that moves system messages for a template that does not keep them, and gives the client the
    calls of its own tools.
    """

    __slots__ = ("_body", "_body_bytes", "_events", "_framing", "_head", "_may_move", "_names", "_request")

    _attempt: Attempt

    def __init__(self, request: Request, names: Names, *, may_move: bool) -> None:
        self._request = request
        self._names = names
        self._may_move = may_move
        self._events: Events | None = None
        self._head: tuple[Attempt, AnswerHead] | None = None  # of a whole answer, which is held
        self._framing: bytes | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    def prepare(self, endpoint: Endpoint) -> Coroutine[Any, Any, Callable[[], object]] | None:
        """Have the template tried, once for each start of a llama-server. Another node does that itself."""
        if self._may_move and endpoint.node is None:
            if endpoint.keeps_system_messages is None:
                return self._try_template(endpoint)
            self._move(endpoint)
        return super().prepare(endpoint)

    async def _try_template(self, endpoint: Endpoint) -> Callable[[], object]:
        from llamasup.core.llama_server.client import Prober  # here, because few requests need it

        head = self._request.head
        prefix = head.path.decode("latin-1").removesuffix(head.route.label)
        with suppress(NoAnswer):
            async with Prober(endpoint.address, endpoint.api_key, prefix=prefix) as server:
                endpoint.keeps_system_messages = keeps_all(*await server.send(PROBE))
        return partial(self._move, endpoint)

    def _move(self, endpoint: Endpoint) -> None:
        request = self._request
        if endpoint.keeps_system_messages is False and self._may_move:
            self._may_move = False
            note_fingerprint(request, endpoint)  # of the body as the client sends it again
            request.body, count = moved(request.body, request.head.route.label)
            if count:
                request.mark(b"X-Llamasup-Moved-System", str(count))

    def begin(self, attempt: Attempt, head: AnswerHead, framing: bytes | None) -> None:
        self._events = self._head = None
        if not self._names or head.status != 200 or b"\r\ncontent-encoding:" in b"\r\n" + head.lines.lower():
            super().begin(attempt, head, framing)
        elif head.streams_events:
            self._events = Events(self._names)
            self.next.begin(attempt, head, _CHUNKED)
            self.write = self._payload_of(framing, self._relay)
        else:
            self._head, self._framing = (attempt, head), framing
            self._body, self._body_bytes = [], 0
            self.write = self._hold

    @staticmethod
    def _payload_of(framing: bytes | None, take: Callable[[bytes], None]) -> Callable[[bytes], None]:
        return Dechunker(take).write if is_chunked(framing) else take

    def _relay(self, data: bytes) -> None:
        assert self._events is not None
        if events := self._events.add(data):
            self.next.write(chunk(events))

    def _hold(self, data: bytes) -> None:
        """More of a whole answer, with its framing. One that is too large is forwarded as it comes."""
        if self._head is None:
            self.next.write(data)
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > MAX_HELD:
            attempt, head = self._head
            self._head = None
            self.next.begin(attempt, head, self._framing)
            self.next.write(b"".join(self._body))
            self._body = []

    def end(self, status: int) -> Ended:
        if self._events is not None:
            if rest := self._events.rest():
                self.next.write(chunk(rest))
            self.next.write(LAST_CHUNK)
        elif self._head is not None:
            attempt, head = self._head
            self._head = None
            pieces: list[bytes] = []
            self._payload_of(self._framing, pieces.append)(b"".join(self._body))
            body = whole(b"".join(pieces), self._names)
            self.next.begin(attempt, head, b"Content-Length: %d\r\n" % len(body))
            self.next.write(body)
        return super().end(status)

    def position(self, plain: Position) -> Position:
        """The part that the client has: nothing of a held answer, and only whole events of a stream."""
        if self._head is not None:
            return Position.NOTHING
        found = super().position(plain)
        return Position.BETWEEN if found is Position.INSIDE and self._events is not None else found
