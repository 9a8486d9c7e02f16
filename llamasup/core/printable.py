"""Text from files and paths as a terminal may have it: a model's name must not move the cursor."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["display_width", "path_text", "printable"]

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with control characters, direction marks and bytes outside UTF-8 written out as escapes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    # str.isprintable: neither "Other" (controls, formats, surrogates, private use) nor "Separator" but space.
    if letter.isprintable():
        return letter
    if "\udc80" <= letter <= "\udcff":  # PEP 383: a byte of a path, which JSON shows as \xff as well
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def path_text(path: str) -> str:
    """A path with its bytes outside UTF-8 as escapes (PEP 383): text that every JSON parser takes."""
    return _HALF_PAIR.sub(lambda half: _escaped(half[0]), path)


def display_width(text: str) -> int:
    """How many columns of a terminal ``text`` takes: two for Chinese letters and the like."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):  # drawn onto the letter before
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
