"""Text from files and paths as a terminal may have it: a model's name must not move the cursor."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """``text`` with control characters, direction marks and bytes outside UTF-8 written out as escapes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    # str.isprintable: neither "Other" (controls, formats, surrogates, private use) nor "Separator" but space.
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
