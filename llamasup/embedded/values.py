"""Words of a command line read as llama.cpp reads them (b11434, measured).

llama.cpp reads numbers with the C++ library: leading blanks and anything behind the number are ignored, so
that ``8192x`` is 8192. The same here: a command line that works with the binary works with this runtime.
"""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.embedded.option import BadValue

__all__ = [
    "boolean",
    "cpu_mask",
    "cpu_range",
    "existing_folder",
    "file_text",
    "integer",
    "items",
    "number",
    "three_way",
    "unsigned",
]

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
        raise BadValue(f"not a whole number: {text!r}")
    value = int(match[1])
    if not -(2**31) <= value < 2**31:
        raise BadValue(f"out of range for a 32-bit number: {text!r}")
    return value


def unsigned(text: str) -> int:
    """A 32-bit whole number without sign; negative ones wrap, so that seed -1 is 4294967295 (random)."""
    match = _INTEGER.match(text)
    if match is None:
        raise BadValue(f"not a whole number: {text!r}")
    return int(match[1]) % 2**32


def number(text: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise BadValue(f"not a number: {text!r}")
    return float(match[1])


def boolean(text: str) -> bool | None:
    """What the word says, None if it says neither."""
    return True if text in _TRUE else False if text in _FALSE else None


def three_way(text: str) -> bool | None:
    """True, False, or None for auto."""
    if text in _AUTO:
        return None
    value = boolean(text)
    if value is None:
        raise BadValue(f"unknown value: {text!r} (on, off or auto)")
    return value


def items(text: str) -> list[str]:
    """The parts between commas, without the empty ones."""
    return [part for part in text.split(",") if part]


def cpu_mask(text: str) -> list[bool]:
    """Hexadecimal digits, the last one for the CPUs 0 to 3; ``0x`` may stand before them."""
    digits = text[2:] if text.startswith("0x") else text
    try:
        bits = int(digits, 16)
    except ValueError:
        raise BadValue(f"invalid cpumask: {text!r} (hexadecimal digits)") from None
    return [bool(bits >> cpu & 1) for cpu in range(_CPUS)]


def cpu_range(text: str) -> list[bool]:
    """``lo-hi``, both included; an end that is left out is the first or the last CPU."""
    match = re.fullmatch(r"(\d*)-(\d*)", text)
    low = int(match[1] or 0) if match else _CPUS
    high = int(match[2] or _CPUS - 1) if match else _CPUS
    if low >= _CPUS or high >= _CPUS:
        raise BadValue(f"invalid range: {text!r} (lo-hi, below {_CPUS})")
    return [low <= cpu <= high for cpu in range(_CPUS)]


def file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"error: failed to open file '{path}' ({error})") from None


def existing_folder(path: str) -> str:
    """The path with a slash at its end, as llama-server keeps it."""
    if not Path(path).is_dir():
        raise BadValue(f"not a directory: {path}")
    return path if path.endswith("/") else path + "/"
