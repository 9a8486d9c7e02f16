"""One row of the option table, its text in ``--help``, and how its values are read.

The layout is the same as in llama.cpp's ``common_arg::to_string`` (b11434), which programs parse: head up to
column 40, text wrapped at 70, ``(env: NAME)`` last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES
from llamasup.core.system.text import split_row

_COLUMN = 40
_WIDTH = 70

ON = "on"
OFF = "off"
"""The value of a switch without a value: ON for its own spelling, OFF for a negation."""

Question = Literal["help", "version", "devices"]


class InvalidValue(ValueError):
    """An invalid value of an option. The text completes ``error while handling argument "X": …``."""


class Setter(Struct, frozen=True):
    """Sets a value on xllamacpp's ``CommonParams``.

    ``needs`` are the (dotted) attributes without which the option is not supported, as wheels differ.
    ``apply`` takes the params and the text of the value; it raises InvalidValue.
    """

    needs: tuple[str, ...]
    apply: Callable[[Any, str], None]

    def is_possible(self, params: object) -> bool:
        return all(_has(params, path) for path in self.needs)


class Option(Struct, frozen=True):
    """One option of llama-server.

    ``names`` contains the spellings in the order of the help, after a ``|`` those that switch the option off.
    ``argument`` is the placeholder, empty for a switch. An option without a setter asks a question, or is a
    removed one: then ``text`` is the error.
    """

    names: str
    argument: str
    env: str
    setter: Setter | None
    text: str
    asks: Question | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(self.names.replace("|", " ").split())

    @property
    def negations(self) -> tuple[str, ...]:
        return tuple(self.names.partition("|")[2].split())

    @property
    def is_removed(self) -> bool:
        return self.setter is None and self.asks is None

    def is_possible(self, params: object) -> bool:
        return self.setter is None or self.setter.is_possible(params)

    def help(self) -> str:
        """The option's block of the help text, each line ended."""
        head = self._head()
        lines = _wrapped(self.text)
        if self.env:
            lines.append(f"(env: {self.env})")
        if len(head) > _COLUMN - 3:
            lines.insert(0, head)
        else:
            lines[0] = head.ljust(_COLUMN) + lines[0]
        indent = " " * _COLUMN
        return "".join(f"{indent if number else ''}{line}\n" for number, line in enumerate(lines))

    def _head(self) -> str:
        first, *others = self.spellings
        aligned = f"{first}, ".ljust(7) + ", ".join(others) if others else first
        return f"{aligned} {self.argument}" if self.argument else aligned


def _has(params: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(params, name):
            return False
        params = getattr(params, name)
    return True


def _wrapped(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        # textwrap would break at hyphens and cost an import; llama.cpp breaks only at blanks.
        line, *words = paragraph.split(" ")
        for word in words:
            if len(line) + 1 + len(word) > _WIDTH:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}"
        lines.append(line)
    return lines


_INTEGER = re.compile(r"\s*([+-]?\d+)")
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_TRUE = frozenset({"on", "enabled", "true", "1"})
_FALSE = frozenset({"off", "disabled", "false", "0"})
_AUTO = frozenset({"auto", "-1"})
_CPUS = 512  # GGML_MAX_N_THREADS: the length of a CPU mask

# Names of the wheel's enumerators.
KV_TYPES = {name: f"GGML_TYPE_{name.upper()}" for name in KV_CACHE_TYPES}
PRIORITIES = {
    "-1": "GGML_SCHED_PRIO_LOW",
    "0": "GGML_SCHED_PRIO_NORMAL",
    "1": "GGML_SCHED_PRIO_MEDIUM",
    "2": "GGML_SCHED_PRIO_HIGH",
    "3": "GGML_SCHED_PRIO_REALTIME",
}


def integer(text: str) -> int:
    """A 32-bit whole number."""
    match = _INTEGER.match(text)
    if match is None:
        raise InvalidValue(f"not a whole number: {text!r}")
    value = int(match[1])
    if not -(2**31) <= value < 2**31:
        raise InvalidValue(f"out of range for a 32-bit number: {text!r}")
    return value


def unsigned(text: str) -> int:
    """A 32-bit whole number without sign; negative ones wrap, so that seed -1 is 4294967295 (random)."""
    match = _INTEGER.match(text)
    if match is None:
        raise InvalidValue(f"not a whole number: {text!r}")
    return int(match[1]) % 2**32


def number(text: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise InvalidValue(f"not a number: {text!r}")
    return float(match[1])


def boolean(text: str) -> bool | None:
    """Parse a boolean; None if the text is neither true nor false."""
    return True if text in _TRUE else False if text in _FALSE else None


def three_way(text: str) -> bool | None:
    """True, False, or None for auto."""
    if text in _AUTO:
        return None
    value = boolean(text)
    if value is None:
        raise InvalidValue(f"unknown value: {text!r} (on, off or auto)")
    return value


def items(text: str) -> list[str]:
    """The non-empty parts between commas."""
    return [part for part in split_row(text) if part]


def cpu_mask(text: str) -> list[bool]:
    """Parse hexadecimal digits, the last one for the CPUs 0 to 3, with an optional ``0x``."""
    digits = text[2:] if text.startswith("0x") else text
    try:
        bits = int(digits, 16)
    except ValueError:
        raise InvalidValue(f"invalid cpumask: {text!r} (hexadecimal digits)") from None
    return [bool(bits >> cpu & 1) for cpu in range(_CPUS)]


def cpu_range(text: str) -> list[bool]:
    """Parse ``lo-hi``, both included; a missing end means the first or the last CPU."""
    match = re.fullmatch(r"(\d*)-(\d*)", text)
    low = int(match[1] or 0) if match else _CPUS
    high = int(match[2] or _CPUS - 1) if match else _CPUS
    if low >= _CPUS or high >= _CPUS:
        raise InvalidValue(f"invalid range: {text!r} (lo-hi, below {_CPUS})")
    return [low <= cpu <= high for cpu in range(_CPUS)]


def file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidValue(f"error: failed to open file '{path}' ({why})") from None


def existing_folder(path: str) -> str:
    """Return the path with a slash at its end, like llama-server."""
    if not Path(path).is_dir():
        raise InvalidValue(f"not a directory: {path}")
    return path if path.endswith("/") else path + "/"
