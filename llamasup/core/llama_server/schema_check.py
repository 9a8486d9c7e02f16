"""Checks whether an answer has the JSON that its request asked for (pure).

llama-server keeps an answer within its schema with a grammar, but an answer that reaches ``max_tokens`` is
cut, a grammar does not know all of JSON Schema, and the embedded runtime ignores a ``json_schema`` of
``/completion`` that it cannot read. ``/v1/responses`` is not checked: llama-server (b11434) ignores the
schema of ``text.format``.

The schema is a client's, so its check is bounded: no regular expression is evaluated, and a check that takes
too many steps says nothing of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, Final

import msgspec

from llamasup.core.llama_server.answers import TextAnswer

_CHATS: Final = ("/v1/chat/completions", "/chat/completions")
COMPLETIONS: Final = ("/completion", "/completions", "/v1/completions")
_MOST_SHOWN: Final = 200
MAX_STEPS: Final = 1_000_000
"""The limit of one check, counted in visited keywords and values.

An object with twenty fields takes some hundreds.
"""
MAX_SCHEMA: Final = 256 * 1024
"""Bytes. A larger one would hold the event loop; of its answer, only the JSON is checked."""
_MOST_ERRORS: Final = 20  # the best of them is shown
# Where a pattern that counts as matched could make a right answer wrong.
_NOT_WITH_PATTERN: Final = (b'"not"', b'"oneOf"', b'"if"', b'"contains"', b'"disallow"')


_ABSENT: Final = msgspec.Raw(b"null")


class _Schema(msgspec.Struct):
    schema: msgspec.Raw = _ABSENT


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: _Schema | None = None
    schema: msgspec.Raw = _ABSENT


class _Chat(msgspec.Struct):
    response_format: _Format | None = None


class _Completion(msgspec.Struct):
    json_schema: msgspec.Raw = _ABSENT
    grammar: Any = msgspec.UNSET  # it wins over the schema
    grammar_lazy: Any = False  # if true, the answer may begin with text


class AskedJson(msgspec.Struct, frozen=True):
    """The JSON that a request requires. ``schema`` None: any JSON."""

    schema: dict[str, Any] | None


_JSON_BEGINS: Final = re.compile(r"[\[{\"0-9-]|true|false|null|(?:t|tr|tru|f|fa|fal|fals|n|nu|nul)?\Z")
"""Matches a literal, even if it was cut off."""
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_read_schema: Final = msgspec.json.Decoder(dict[str, Any] | None).decode
_read_answer: Final = msgspec.json.Decoder(TextAnswer).decode


def import_package() -> None:
    """Import jsonschema, if it is installed: that takes 0.2 s, for which requests would wait later."""
    with suppress(ImportError):
        import jsonschema  # noqa: F401
        import referencing.jsonschema  # noqa: F401


def asked_json(route: str, body: bytes) -> AskedJson | None:
    """Return the JSON that the answer has to be; None if any text is right. Cheap for most requests without
    JSON.

    ``route``: the path that the body is for.
    """
    if b"response_format" not in body and b"json_schema" not in body:
        return None
    try:
        if route in _CHATS:
            wanted = msgspec.json.decode(body, type=_Chat).response_format
            if wanted is None or wanted.type not in ("json_object", "json_schema"):
                return None
            return AskedJson(
                _read(wanted.schema if wanted.json_schema is None else wanted.json_schema.schema)
            )
        if route in COMPLETIONS:
            completion = msgspec.json.decode(body, type=_Completion)
            is_free = completion.grammar is not msgspec.UNSET or completion.grammar_lazy is True
            if bytes(completion.json_schema) != b"null" and not is_free:
                return AskedJson(_read(completion.json_schema))
    except _UNREADABLE:
        pass
    return None


def _read(schema: msgspec.Raw) -> dict[str, Any] | None:
    """Read the schema; None if there is no schema, or it is too large to check it."""
    text = bytes(schema)
    return None if len(text) > MAX_SCHEMA else _read_schema(text)


def violation(asked: AskedJson, answer: bytes) -> str | None:
    """Describe what is wrong with the answer.

    Returns None if nothing is, or if the check takes more than ``MAX_STEPS``.
    """
    try:
        return mismatch(asked, _read_answer(answer), MAX_STEPS)
    except _UNREADABLE as error:
        return f"the answer cannot be read: {error}"
    except TimeoutError:
        return None


def read_answer(answer: bytes) -> TextAnswer | None:
    """Read the answer; None if that is not possible."""
    try:
        return _read_answer(answer)
    except _UNREADABLE:
        return None


def ignores_schema(answer: TextAnswer, route: str) -> bool:
    """Return whether llama-server has ignored the schema of a completion: it does not begin as JSON.

    The embedded runtime (xllamacpp 2026.10) does so with a schema that it cannot use, such as one with
    ``not``, ``oneOf`` or ``uniqueItems``. It says so only in its log, in a line that names no request.
    """
    # Only a short part: white space of any length would take the expression quadratic time.
    return route in COMPLETIONS and any(
        _JSON_BEGINS.match(text.strip()[:6]) is None for text in answer.texts()
    )


def mismatch(asked: AskedJson, answer: TextAnswer, most_steps: int) -> str | None:
    """Describe what is wrong with the answer; None if nothing is. Raises TimeoutError if it takes more than
    ``most_steps`` to know.
    """
    for text in answer.texts():
        try:
            given = msgspec.json.decode(text)
        except _UNREADABLE as error:
            return f"the answer is not JSON: {error}"
        wrong = None if asked.schema is None else _mismatch(given, asked.schema, most_steps)
        if wrong is not None:
            return wrong
    return None


def _mismatch(given: Any, schema: dict[str, Any], most_steps: int) -> str | None:
    """Return what is wrong with the answer; None without the package jsonschema (the extra ``batch``)."""
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
        # A schema inside with another $schema would get a validator without bounds, and so would a reference
        # to the schemas of JSON Schema itself, which the package knows by their addresses.
        if any(name in text for name in (b'"$schema"', b"json-schema.org", b'"patternProperties"')):
            return None
        if b'"pattern"' in text and any(name in text for name in _NOT_WITH_PATTERN):
            return None
        _steps_left.set(_Steps(most_steps, len(text)))
        validator = of_schema(schema, registry=EMPTY_REGISTRY)
        error = jsonschema.exceptions.best_match(islice(validator.iter_errors(given), _MOST_ERRORS))
    except TimeoutError:
        raise
    except Exception:  # an invalid schema, which llama-server has accepted: nothing can be said
        return None
    return None if error is None else f"at {error.json_path}: {error.message[:_MOST_SHOWN]}"


_COMPARED: Final = ("enum", "const")
_OF_EACH: Final = (
    "items",
    "prefixItems",
    "additionalItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
)


class _Steps:
    def __init__(self, left: int, schema_bytes: int) -> None:
        self._left = left
        self._of_reference = schema_bytes // 100  # it may be searched for

    def take(self, keyword: str, value: Any, instance: Any) -> None:
        steps = 1 + (len(value) if isinstance(value, list | dict) else 0)
        if keyword in _COMPARED:
            steps += len(msgspec.json.encode(value)) // 10
        if isinstance(instance, list | dict | str):
            count = len(instance)
            steps += count if keyword in _OF_EACH else count // 10
            if keyword == "uniqueItems":  # each item is compared with each other
                steps += count * len(msgspec.json.encode(instance)) // 20
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
            steps.spend(5 + len(error.message) // 100)
            yield error

    return counted
