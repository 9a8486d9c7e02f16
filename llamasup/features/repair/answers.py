"""Whether an answer is requested a second time, with another seed (pure).

Two answers are: an error of llama-server because the model's output does not match the format of its tool
calls, and a whole answer that does not match the JSON schema of its request.
"""

from __future__ import annotations

import re
import zlib
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct

from llamasup.core.http.requested_model import plain_json
from llamasup.core.http.routes import CHATS, RESPONSES
from llamasup.core.llama_server.answers import TextAnswer
from llamasup.core.llama_server.schema_check import (
    COMPLETIONS,
    AskedJson,
    asked_json,
    ignores_schema,
    mismatch,
    read_answer,
)
from llamasup.core.settings.model import Repairs

__all__ = ["MAX_HELD", "Checks", "Fault", "checks_for", "with_another_seed"]

MAX_HELD: Final = 1 << 20
"""Bytes of an answer that is held until it is checked; a larger one is forwarded as it comes. 200,000 tokens
of JSON have fewer."""

MAX_STEPS: Final = 10_000
"""The most steps of a check against a schema: an object with twenty fields takes 74 (12 ms for 100), and
the check of a hostile schema ends after 0.05 s, for which other requests wait."""

_MISMATCH: Final = b"The model produced output that does not match the expected "
"""common/chat.cpp of b11434, ``common_chat_peg_parse``; the name of the format follows."""

_ERROR_EVENT: Final = re.compile(rb'(?:[0-9A-Fa-f]+\r\n)?(?:event: error\n|data: \{"error":)')
"""A stream of b11434 begins with it, after a head with the status 200, if no token could be parsed."""

_PARSED: Final = CHATS | RESPONSES | {"/v1/messages"}
"""The routes in whose answers llama-server parses tool calls. It ignores the ``seed`` of ``/v1/messages``,
and takes another one each time.
"""
_GREEDY: Final = 0.0


class Fault(StrEnum):
    """A fault of an answer. The names in the header and in the metric."""

    TOOL_CALL = "tool_call"
    JSON = "json"
    SCHEMA_IGNORED = "schema_ignored"

    @property
    def may_change(self) -> bool:
        """Whether a second answer may be without it."""
        return self is not Fault.SCHEMA_IGNORED


class Checks(Struct, frozen=True):
    """The checks of the answers to one request. ``route``: its label. ``json``: what an answer has to be.
    ``varies``: whether another seed may give another answer.
    """

    route: str
    tool_calls: bool
    json: AskedJson | None
    varies: bool = True

    def holds(self, status: int, beginning: bytes, *, is_stream: bool) -> bool:
        """Whether an answer that begins so is held until its end, because a second one may be requested."""
        if is_stream:
            return self.tool_calls and _ERROR_EVENT.match(beginning) is not None
        return (self.json is not None and status == 200) or (self.tool_calls and status == 500)

    def fault(self, status: int, answer: bytes, *, is_stream: bool) -> Fault | None:
        """Find what is wrong with the whole answer. None: nothing, or nothing that another seed changes.

        An answer that was cut off by ``max_tokens`` would most likely be cut off again.
        """
        if status == 500 or is_stream:
            return Fault.TOOL_CALL if self.tool_calls and _MISMATCH in answer else None
        if status != 200 or self.json is None:
            return None
        found = read_answer(answer)
        if found is None:
            return None
        if ignores_schema(found, self.route):
            return Fault.SCHEMA_IGNORED
        if found.is_cut or not self.varies:
            return None
        return Fault.JSON if self._matches(found) is False else None

    def is_right(self, answer: bytes) -> bool:
        """Whether this answer (200, no stream) is whole and known to match."""
        found = read_answer(answer)
        return found is not None and not found.is_cut and self._matches(found) is True

    def _matches(self, answer: TextAnswer) -> bool | None:
        """Returns None if it takes too long to know."""
        assert self.json is not None
        try:
            return mismatch(self.json, answer, MAX_STEPS) is None
        except TimeoutError:
            return None


class _Sampling(Struct):
    temperature: Any = None
    stream: Any = None


_read_sampling: Final = msgspec.json.Decoder(_Sampling).decode
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def checks_for(repairs: Repairs, route: str, body: bytes) -> Checks | None:
    """Returns None if the answer is not checked. A ``temperature`` of 0 gives the same answer with each seed:
    then only an ignored schema is a fault.
    """
    tool_calls = repairs.tool_calls and route in _PARSED
    json = asked_json(route, body) if repairs.json else None
    if not tool_calls and json is None:
        return None
    try:
        asked = _read_sampling(plain_json(body))
    except _UNREADABLE:
        return None  # llama-server refuses it
    if asked.stream is True:
        json = None
    if isinstance(asked.temperature, int | float) and asked.temperature <= _GREEDY:
        only = json is not None and route in COMPLETIONS
        return Checks(route, tool_calls=False, json=json, varies=False) if only else None
    return Checks(route, tool_calls, json) if tool_calls or json is not None else None


def with_another_seed(body: bytes, request_id: bytes) -> bytes | None:
    """The same request with another seed, which the id decides. All other values stay byte for byte.

    None: the body cannot be read. How deep a body may be nested depends on the depth of the Python stack.
    """
    try:
        fields = _fields(plain_json(body))
    except _UNREADABLE:
        return None
    seed = zlib.crc32(request_id) >> 1
    if bytes(fields.get("seed", b"")) == b"%d" % seed:
        seed += 1
    fields["seed"] = msgspec.Raw(b"%d" % seed)
    return msgspec.json.encode(fields)
