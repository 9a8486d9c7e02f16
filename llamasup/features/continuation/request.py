"""Whether the answer to a request can be continued, and the parts of the request that continues it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from llamasup.features.continuation.answer import NotContinued

Body = dict[str, msgspec.Raw]
"""The members of a request, undecoded: what is not changed stays as the client wrote it."""

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_GRAMMARS: Final = ("grammar", "json_schema", "output_config")
_PARTIAL: Final = ("t_max_predict_ms", "response_fields")
_STATEFUL_SAMPLERS: Final = ("mirostat", "adaptive_target")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "thinking", "tool_use", "tool_result"})
_body = msgspec.json.Decoder(Body).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def of_request(body: bytes) -> Body:
    """The members of the request. Raises NotContinued if it is not a JSON object."""
    try:
        return _body(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NotContinued("the request is not a JSON object") from None


def encoded(body: Body) -> bytes:
    return _encode(body)


def value(body: Mapping[str, msgspec.Raw], name: str) -> Any:
    """The decoded member; None if it is absent."""
    member = body.get(name)
    return None if member is None else _decode(member)


def raw(member: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(member))


def refuse_state(body: Body) -> None:
    """Raises NotContinued if llama-server keeps more than the text for this answer: that ended with it."""
    for name in ("response_format", "text"):
        form = value(body, name)
        form = form.get("format", form) if isinstance(form, dict) else None
        if isinstance(form, dict) and form.get("type", "text") != "text":
            raise NotContinued(f"the state of the grammar of {name} is lost")
    for name in _GRAMMARS:
        if value(body, name):
            raise NotContinued(f"the state of the grammar of {name} is lost")
    choice = value(body, "tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    if choice not in (None, "auto", "none"):
        raise NotContinued("the state of the grammar of tool_choice is lost")
    for name in ("n", "n_cmpl"):
        if value(body, name) not in (None, 1):
            raise NotContinued(f"of the several answers of {name}, only one could be continued")
    for name in _PARTIAL:
        if value(body, name):
            raise NotContinued(f"{name} does not count what the client has")
    for name in _STATEFUL_SAMPLERS:
        number = value(body, name)
        if isinstance(number, int | float) and number > 0:
            raise NotContinued(f"the state of the sampler {name} is lost")


def holds_back(body: Body) -> bool:
    """Whether llama-server may hold text back that begins a stop string: an event has several tokens."""
    return any(value(body, name) for name in ("stop", "stop_sequences"))


def limited(body: Body, pieces: int) -> bool:
    """Reduce the limits of new tokens by the tokens that the client has. True: the client has all of them.

    Then one more token is asked for, because a limit of 0 is none.
    """
    is_full = False
    for name in _LIMITS:
        limit = value(body, name)
        if isinstance(limit, int | float) and limit > 0 and limit == int(limit):  # 90.0 is also a limit
            is_full = is_full or limit <= pieces
            body[name] = raw(max(int(limit) - pieces, 1))
    return is_full


def messages_of(body: Body, name: str) -> tuple[list[msgspec.Raw], str]:
    """The messages of the conversation, and the role of the last one.

    Raises NotContinued if one of them has an image or a sound, or if they are not messages.
    """
    role = ""
    try:
        messages = _items(body[name])
        for message in map(_decode, messages):
            role = message.get("role", "")
            if _has_media(message.get("content")):
                raise NotContinued("the conversation has images or sounds")
    except (msgspec.DecodeError, KeyError, AttributeError):
        raise NotContinued(f"{name} is not a list of messages") from None
    return messages, role


def _has_media(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") not in _TEXT_PARTS:
            return True
        if _has_media(part.get("content")):  # of the result of a tool
            return True
    return False
