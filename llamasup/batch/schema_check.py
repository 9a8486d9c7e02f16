"""Whether an answer has the JSON that its request asked for (pure).

llama-server keeps an answer within its schema with a grammar, but an answer that reaches ``max_tokens`` is
cut, and a grammar does not know all of JSON Schema.

The schema is a client's, so its check is bounded: no regular expression is evaluated, and a check that takes
too many steps says nothing of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, Final

import msgspec

__all__ = ["asks_for_json", "violation"]

_CHAT: Final = "/v1/chat/completions"
_MOST_SHOWN: Final = 200
MAX_STEPS: Final = 1_000_000
"""Of one check, about the keywords and values that it visits. An object with twenty fields takes some
hundreds."""
_MOST_ERRORS: Final = 20  # the best of them is shown
# Where a pattern that counts as matched could make a right answer wrong.
_NOT_WITH_PATTERN: Final = (b'"not"', b'"oneOf"', b'"if"', b'"contains"', b'"disallow"')


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
            return f"the answer is not JSON: {error}"
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
        of_schema = _bounded(jsonschema.validators.validator_for(schema))
        schema = {name: value for name, value in schema.items() if name != "$schema"}
        text = msgspec.json.encode(schema)
        # A schema inside with another $schema would get a validator without bounds.
        if b'"$schema"' in text or b'"patternProperties"' in text:
            return None
        if b'"pattern"' in text and any(name in text for name in _NOT_WITH_PATTERN):
            return None
        _steps_left.set(_Steps(MAX_STEPS, len(text)))
        validator = of_schema(schema, registry=EMPTY_REGISTRY)
        error = jsonschema.exceptions.best_match(islice(validator.iter_errors(given), _MOST_ERRORS))
    except Exception:
        # An invalid schema, which llama-server has accepted, or too many steps: nothing can be said.
        return None
    return None if error is None else f"at {error.json_path}: {error.message[:_MOST_SHOWN]}"


class _Steps:
    def __init__(self, left: int, schema_bytes: int) -> None:
        self._left = left
        self._of_reference = schema_bytes // 100  # it may be searched for

    def take(self, keyword: str, value: Any, instance: Any) -> None:
        steps = 1 + (len(value) if isinstance(value, list | dict) else 0)
        if isinstance(instance, list | dict | str):
            count = len(instance)
            steps += count * count if keyword == "uniqueItems" else count // 10
        self.spend(steps + (self._of_reference if keyword.startswith("$") else 0))

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TimeoutError


_steps_left: ContextVar[_Steps] = ContextVar("steps_left")


@cache
def _bounded(validator_class: Any) -> Any:
    """The class of validators without regular expressions that takes ``_steps_left``."""
    from jsonschema.validators import extend

    keywords = {name: _counted(name, check) for name, check in validator_class.VALIDATORS.items()}
    return extend(validator_class, {**keywords, "pattern": None, "format": None})


def _counted(keyword: str, check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        steps = _steps_left.get()
        steps.take(keyword, value, instance)
        for error in check(validator, value, instance, schema) or ():
            steps.spend(len(error.message) // 100)
            yield error

    return counted
