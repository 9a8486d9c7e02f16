"""Whether an answer has the JSON that its request asked for (pure).

llama-server keeps an answer within its schema with a grammar, but an answer that reaches ``max_tokens`` is
cut, and a grammar does not know all of JSON Schema.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["asks_for_json", "violation"]

_CHAT: Final = "/v1/chat/completions"
_MOST_SHOWN: Final = 200


class _Schema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: _Schema | None = None
    schema: dict[str, Any] | None = None


class _Asked(msgspec.Struct):
    response_format: _Format | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


def asks_for_json(url: str, body: bytes) -> bool:
    """Whether the answer has to be JSON. Cheap for the others."""
    return url == _CHAT and b"response_format" in body and _format_of(body) is not None


def violation(body: bytes, answer: bytes) -> str | None:
    """What is wrong with the answer to this body, which asks for JSON; None: nothing."""
    asked = _format_of(body)
    assert asked is not None
    schema = asked.json_schema.schema if asked.json_schema is not None else asked.schema
    try:
        choices = msgspec.json.decode(answer, type=_Answer).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"the answer cannot be read: {error}"
    for choice in choices:
        message = choice.message
        if message is None or (message.content is None and message.tool_calls):
            continue
        try:
            given = msgspec.json.decode(message.content or "")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return f"the answer is no JSON: {error}"
        wrong = _mismatch(given, schema) if schema is not None else None
        if wrong is not None:
            return wrong
    return None


def _format_of(body: bytes) -> _Format | None:
    try:
        asked = msgspec.json.decode(body, type=_Asked).response_format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return asked if asked is not None and asked.type in ("json_object", "json_schema") else None


def _mismatch(given: Any, schema: dict[str, Any]) -> str | None:
    """Without the package jsonschema (``pip install 'llamasup[batch]'``), any JSON is right."""
    try:
        import jsonschema
        from referencing.jsonschema import EMPTY_REGISTRY
    except ImportError:
        return None
    try:
        # With this registry, a reference to an address is an error, and no request.
        validator = jsonschema.validators.validator_for(schema)(schema, registry=EMPTY_REGISTRY)
        error = jsonschema.exceptions.best_match(validator.iter_errors(given))
    except Exception:
        return None  # an invalid schema, which llama-server has accepted: nothing can be said of the answer
    return None if error is None else f"at {error.json_path}: {error.message[:_MOST_SHOWN]}"
