"""Parses values like llama.cpp (b11434, measured), and lists the values that several options share.

llama.cpp parses numbers with the C++ library, which ignores leading blanks and the text after the number, so
``8192x`` is 8192. A command line for the binary thus works with this runtime.
"""

from __future__ import annotations

import re
from pathlib import Path

from llamasup.core.gguf.tensor_types import KV_CACHE_TYPES
from llamasup.core.system.text import split_row
from llamasup.embedded.option import InvalidValue

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
