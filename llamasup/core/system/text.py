"""Text that is safe in terminals and JSON: sizes, names and paths.

A path with bytes outside UTF-8 has lone surrogates in Python (PEP 383), which ``json`` writes as
``\\udcff``; many parsers reject that (RFC 8259, section 8.2). A control character in a model's name must
not move the cursor.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))
"""The separators of the names in a path: a slash, and on Windows a backslash as well."""

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters, direction marks and bytes outside UTF-8 as escapes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    # str.isprintable: neither "Other" (controls, formats, surrogates, private use) nor "Separator" but space.
    if letter.isprintable():
        return letter
    if "\udc80" <= letter <= "\udcff":  # PEP 383: a byte of a path, which JSON shows as \xff as well
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def path_text(path: str) -> str:
    """Return a path as text that every JSON parser accepts: bytes outside UTF-8 are escapes (PEP 383)."""
    return _HALF_PAIR.sub(lambda half: _escaped(half[0]), path)


def is_path(text: str, separators: Sequence[str] = SEPARATORS) -> bool:
    """Return whether ``text`` is written as a path, and not as a name."""
    return text.startswith("~") or any(separator in text for separator in separators)


def display_width(text: str) -> int:
    """Return the width of ``text`` in terminal columns: two for wide characters such as Chinese ones."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):  # combined with the letter before
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


INVALID_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


def not_json(error: Exception, letters: int) -> str:
    """Return the message for a body that is not JSON. The text of the error names the place, and no value."""
    return f"the body is not JSON: {str(error)[:letters]}"


"""The exceptions of decoding untrusted JSON; RecursionError for a few thousand nested arrays."""


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON in ASCII, which every encoding can carry.

    Values of other types become text.
    """
    text = json.dumps(value, default=str)
    if "\\ud" in text:  # rare; checking every value would be slower
        text = json.dumps(_well_formed(value))
    # The json module indents five times as slowly: 65 ms for a folder of 1,000 models.
    return text if indent is None else msgspec.json.format(text, indent=indent)


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return path_text(value)
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_well_formed(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else path_text(str(value))


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``did you mean X?`` with the most similar of the ``known`` names, or "" if none is similar."""
    import difflib  # 1 ms; only errors need it

    similar = difflib.get_close_matches(name[:64], list(known), n=1, cutoff=cutoff)
    return f"did you mean {similar[0]}?" if similar else ""


def one_of_these(near: Iterable[str]) -> str:
    """Return the remedy ``Did you mean a or b?``; empty if there is no similar name."""
    names = " or ".join(near)
    return f"Did you mean {names}?" if names else ""


def memory_text(count_bytes: int) -> str:
    """Return a size such as ``1.4 GiB`` or ``730 MiB``, with at most three digits."""
    size = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def sentence(text: str) -> str:
    """Return ``text``, which is not empty, with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


_ROW_PART = re.compile(r'(?:\A|,)(?:"((?:[^"]|"")*)"(?=,|\Z)|([^,]*))')


def split_row(text: str) -> list[str]:
    """Split at commas as llama-server does: values that contain commas are quoted, as in a CSV file."""
    return [part[2] if part[1] is None else part[1].replace('""', '"') for part in _ROW_PART.finditer(text)]


def joined_row(parts: Iterable[str]) -> str:
    """Return the text that ``split_row`` splits into these values."""
    return ",".join(
        f'"{quoted}"' if "," in part or part.startswith('"') else part
        for part in parts
        for quoted in [part.replace('"', '""')]
    )


def eta_text(eta_s: float) -> str:
    """Write ``12 s`` or ``2 min 5 s``: an estimate has no tenths."""
    seconds = max(1, round(eta_s))
    minutes, rest = divmod(seconds, 60)
    if not minutes:
        return f"{seconds} s"
    return f"{minutes} min" + (f" {rest} s" if rest else "")
