"""Reads the fields and the options of a request in Ollama's API, and reports invalid ones (pure).

``null`` counts as a missing field, as in Ollama. A field that Ollama's API does not have is
ignored, as Ollama does; a field that it has is honoured or refused (docs/ollama.md has the table).

A field stays JSON until it is read, and the items of a list are read only if they have the expected type. So
a body with millions of numbers, which would take 30 times its memory, makes no objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.body_scan import MAX_DEPTH, MAX_STEPS, is_too_complex
from llamasup.core.http.heads import HttpError
from llamasup.core.system.text import INVALID_JSON, not_json

Fields = Mapping[str, msgspec.Raw]
"""An object of JSON whose values are not decoded."""

MAX_NUMBER: Final = (1 << 31) - 1
"""The largest whole number of an option: llama-server reads 32 bits."""

FOREVER: Final = float("inf")
_MAX_KEEP_S: Final = 100 * 365 * 86_400.0  # a longer time is for ever: no calendar has its end
_MAX_SHOWN: Final = 60  # letters of a value in a message
_SPACE: Final = b" \t\r\n"

_T = TypeVar("_T")
_read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_read_text = msgspec.json.Decoder(str).decode
_read_texts = msgspec.json.Decoder(list[str]).decode
_read_number: Final[Callable[[bytes], int | float]] = msgspec.json.Decoder(int | float).decode
_place_in = re.compile(r"\$\[(\d+)\]").search


class Refused(Exception):
    """The request cannot be served."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error

    def within(self, place: str) -> Refused:
        """Return the same refusal, of a field of an item."""
        return Refused(replace(self.error, message=f"{place}: {self.error.message}"))


def refusal(message: str, remedy: str = "", *, status: int = 400) -> Refused:
    return Refused(HttpError(status, message, cause="ollama_field", remedy=remedy))


def decoded(body: bytes) -> Fields:
    """Read the JSON object of a body. Raises Refused."""
    if is_too_complex(body):
        raise Refused(
            HttpError(
                400,
                "the body is too complex",
                cause="body_too_complex",
                remedy=f"send at most {MAX_STEPS:,} strings and brackets, with fewer than {MAX_DEPTH} levels "
                "of nesting",
            )
        )
    try:
        return _read_object(body)
    except msgspec.ValidationError:
        raise refusal(f"the body is {_kind(body)}", "send a JSON object") from None
    except INVALID_JSON as error:
        raise refusal(not_json(error, _MAX_SHOWN), "send a JSON object") from None


def is_given(fields: Fields, name: str) -> bool:
    """Whether the field is there, and not null."""
    return _given(fields, name) is not None


def is_text(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]).startswith(b'"')


def is_object(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]).startswith(b"{")


def source(fields: Fields, name: str) -> str:
    """Return the JSON of a field that is there."""
    try:
        return bytes(fields[name]).decode()
    except UnicodeDecodeError:
        raise refusal(f"{name} is not UTF-8", "send UTF-8") from None


def _given(fields: Fields, name: str) -> bytes | None:
    raw = fields.get(name)
    given = None if raw is None else bytes(raw)
    return None if given == b"null" else given


def text(fields: Fields, name: str, default: str = "") -> str:
    given = _given(fields, name)
    if given is None:
        return default
    if not given.startswith(b'"'):
        raise _wrong(name, given, "a string")
    return _text(given, name)


def _text(given: bytes, name: str) -> str:
    try:
        return _read_text(given)
    except INVALID_JSON:
        raise refusal(f"{name} is not a valid string", "send UTF-8") from None


def boolean(fields: Fields, name: str, *, default: bool = False) -> bool:
    given = _given(fields, name)
    if given is None:
        return default
    if given not in (b"true", b"false"):
        raise _wrong(name, given, "true or false")
    return given == b"true"


def integer(fields: Fields, name: str, least: int = -MAX_NUMBER, most: int = MAX_NUMBER) -> int | None:
    """Read a whole number; some clients write 5 as 5.0."""
    value = number(fields, name)
    if value is None:
        return None
    if value != int(value):
        raise _wrong(name, bytes(fields[name]), "a whole number")
    if not least <= value <= most:
        raise refusal(f"{name} is {_shown(bytes(fields[name]))}", f"use {least} to {most}")
    return int(value)


def number(fields: Fields, name: str) -> float | int | None:
    given = _given(fields, name)
    if given is None:
        return None
    if given[:1] not in _NUMBERS:
        raise _wrong(name, given, "a number")
    try:
        value = _read_number(given)
    except INVALID_JSON:
        value = math.inf
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63):
        raise refusal(f"{name} is {_shown(given)}", "use a smaller number")
    return value


def object_of(fields: Fields, name: str) -> Fields:
    given = _given(fields, name)
    if given is None:
        return {}
    if not given.startswith(b"{"):
        raise _wrong(name, given, "an object")
    try:
        return _read_object(given)
    except INVALID_JSON:
        raise refusal(f"{name} is not a valid object", "send UTF-8") from None


def objects(fields: Fields, name: str) -> Sequence[Fields]:
    """Read the items of a list of objects."""
    return _items(fields, name, _read_objects, "objects")


def texts(fields: Fields, name: str) -> Sequence[str]:
    """Read the items of a list of strings."""
    return _items(fields, name, _read_texts, "strings")


def _items(fields: Fields, name: str, read: Callable[[bytes], Sequence[_T]], expected: str) -> Sequence[_T]:
    given = _given(fields, name)
    if given is None:
        return ()
    if not given.startswith(b"["):
        raise _wrong(name, given, f"an array of {expected}")
    try:
        return read(given)
    except INVALID_JSON as error:
        at = _place_in(str(error))
        place = f"{name}[{at[1]}]" if at is not None else f"an item of {name}"
        raise refusal(f"{place} is invalid", f"use an array of {expected}") from None


# --- durations -------------------------------------------------------------------------------------

_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(ns|us|µs|ms|s|m|h)"
_parts_in = re.compile(_PART).finditer
_is_duration = re.compile(rf"([+-]?)(0|(?:{_PART})+)").fullmatch


def keep_alive(fields: Fields) -> float | None:
    """Return the seconds; None if the field is not set. A negative time means forever, as in Ollama."""
    given = _given(fields, "keep_alive")
    if given is None:
        return None
    if not given.startswith(b'"'):
        return _kept_s(number(fields, "keep_alive") or 0.0)
    found = _is_duration(_text(given, "keep_alive").strip())
    if found is None:
        raise refusal(f"keep_alive is {_shown(given)}", "use seconds, or a text such as 5m, 1h30m, 0 or -1m")
    seconds = sum(float(part[1]) * _UNITS_S[part[2]] for part in _parts_in(found[2]))
    return _kept_s(-seconds if found[1] == "-" else seconds)


def _kept_s(seconds: float) -> float:
    """A time below one second counts as 0: it would end between two requests of one client."""
    if seconds < 0 or seconds > _MAX_KEEP_S:
        return FOREVER
    return 0.0 if seconds < 1 else float(seconds)


# --- messages --------------------------------------------------------------------------------------

_NUMBERS: Final = tuple(bytes((letter,)) for letter in b"-0123456789")
_KINDS: Final[Mapping[bytes, str]] = {
    b"n": "null",
    b"t": "true",
    b"f": "false",
    b"[": "an array",
    b"{": "an object",
}


def _wrong(name: str, given: bytes, expected: str) -> Refused:
    return refusal(f"{name} is {_kind(given)}", f"use {expected}")


def _kind(given: bytes) -> str:
    """The type of a JSON value, with the value of a string or a number."""
    start = given.lstrip(_SPACE)[:1]
    if start in _NUMBERS:
        return f"the number {_shown(given)}"
    return f"the string {_shown(given)}" if start == b'"' else _KINDS[start]


def _shown(given: bytes) -> str:
    shown = given[: 4 * _MAX_SHOWN].decode(errors="replace")
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


class Whole(Struct, frozen=True):
    """A whole number. ``own`` is llama-server's name (b11434)."""

    own: str
    least: int
    most: int = MAX_NUMBER


class Number(Struct, frozen=True):
    """A number that has the same name in llama-server."""


class Stops(Struct, frozen=True):
    """The texts that end an answer. Ollama takes an array; some clients send one string."""


class Fixed(Struct, frozen=True):
    """An option that changes no text: ``setting`` of llamasup fixes it when the model is loaded, if any."""

    setting: str = ""


class Removed(Struct, frozen=True):
    """An option of older versions of Ollama that changes the text, and that llama-server does not have."""


OPTIONS: Final[Mapping[str, Whole | Number | Stops | Fixed | Removed]] = {
    "num_keep": Whole("n_keep", -1),
    "seed": Whole("seed", -1, (1 << 32) - 1),
    "num_predict": Whole("n_predict", -1),
    "top_k": Whole("top_k", 0),
    "repeat_last_n": Whole("repeat_last_n", -1),
    "mirostat": Whole("mirostat", 0, 2),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "temperature", "repeat_penalty"), Number()),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta"), Number()),
    "stop": Stops(),
    "num_ctx": Fixed("ctx_size"),
    "num_batch": Fixed("extra"),
    "num_gpu": Fixed("gpu_layers"),
    "main_gpu": Fixed("devices"),
    "num_thread": Fixed("threads"),
    "draft_num_predict": Fixed("draft_model"),
    **dict.fromkeys(("numa", "use_mmap", "use_mlock"), Fixed("extra")),
    "low_vram": Fixed("gpu_layers"),
    "f16_kv": Fixed("kv_type"),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), Fixed()),
    **dict.fromkeys(("penalize_newline", "tfs_z"), Removed()),
}


def without_effect(fields: Fields, *, samples: bool = True) -> tuple[str, ...]:
    """Return the options that are accepted, although they change nothing. ``samples``: as for
    ``parameters``.
    """
    options = object_of(fields, "options")
    return tuple(name for name in options if is_given(options, name) and _is_idle(name, samples=samples))


def setting_of(name: str) -> str:
    """Return the setting of llamasup that fixes an option; empty if there is none."""
    option = OPTIONS.get(name)
    return option.setting if isinstance(option, Fixed) else ""


def _is_idle(name: str, *, samples: bool) -> bool:
    option = OPTIONS.get(name)
    return isinstance(option, Fixed) or (not samples and isinstance(option, Whole | Number | Stops))


def parameters(fields: Fields, *, samples: bool = True) -> dict[str, Any]:
    """Return the parameters of llama-server. ``samples``: False for embeddings, which take none. Raises
    Refused.
    """
    options = object_of(fields, "options")
    found: dict[str, Any] = {}
    for name in options:
        if not is_given(options, name) or _is_idle(name, samples=samples):
            continue
        match OPTIONS.get(name):
            case Whole(own, least, most):
                found[own] = integer(options, name, least, most)
            case Number():
                found[name] = number(options, name)
            case Stops():
                found[name] = [text(options, name)] if is_text(options, name) else texts(options, name)
            case Removed():
                raise refusal(f"the option {name} does not exist in llama-server", "leave it out")
            case _:
                raise refusal(f"there is no option {name[:40]!r}", "docs/ollama.md lists the options")
    return found
