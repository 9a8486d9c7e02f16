"""Text from files and paths as a terminal may have it: a model's name must not move the cursor."""

from __future__ import annotations

__all__ = ["printable"]


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
