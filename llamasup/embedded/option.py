"""One option of the embedded runtime, read from llama-server's help, and how its values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from llamasup.core.llama_server.help_text import Option as Entry
from llamasup.core.llama_server.help_text import parse_help
from llamasup.core.system.text import split_row

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

    ``entry`` is what its part of the help says, and ``usage`` are the lines of this part. An option without a
    setter asks a question, or is a removed one: then the description is the error.
    """

    entry: Entry
    usage: str
    setter: Setter | None

    @property
    def asks(self) -> Question | None:
        return _QUESTIONS.get(self.entry.spellings[-1])

    @property
    def negations(self) -> tuple[str, ...]:
        """The spellings that switch it off. ``--no-host`` alone is a switch with this name."""
        negations = self.entry.negations
        return () if negations == self.entry.spellings else negations

    def is_possible(self, params: object) -> bool:
        return self.setter is None or self.setter.is_possible(params)


def options_by_section(
    help_text: str, setters: Mapping[str, Setter]
) -> tuple[tuple[str, tuple[Option, ...]], ...]:
    """Return the options that the help of llama-server lists, by the title of their section.

    ``setters`` has one of the spellings of each option that sets something.
    """
    _, *parts = _TITLE.split(help_text)
    return tuple(
        (title, tuple(_option(usage, setters) for usage in _USAGE.findall(lines)))
        for title, lines in zip(parts[::2], parts[1::2], strict=True)
    )


def _option(usage: str, setters: Mapping[str, Setter]) -> Option:
    (entry,) = parse_help(usage)
    setter = next((setters[spelling] for spelling in entry.spellings if spelling in setters), None)
    return Option(entry, usage, setter)


def _has(params: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(params, name):
            return False
        params = getattr(params, name)
    return True


_TITLE = re.compile(r"----- (.+) -----\n\n")
_USAGE = re.compile(r"^-.+\n(?: .+\n)*", re.MULTILINE)
_QUESTIONS: Mapping[str, Question] = {
    "--usage": "help",
    "--version": "version",
    "--list-devices": "devices",
}
_INTEGER = re.compile(r"\s*([+-]?\d+)")
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_TRUE = frozenset({"on", "enabled", "true", "1"})
_FALSE = frozenset({"off", "disabled", "false", "0"})
_AUTO = frozenset({"auto", "-1"})
_CPUS = 512  # GGML_MAX_N_THREADS: the length of a CPU mask


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
