"""Paths of this machine in llama-server's answers, for clients that may only infer (pure).

``/props`` has the model's path in ``model_path``, ``/lora-adapters`` an adapter's in ``path`` (b11434).
"""

from __future__ import annotations

import re

__all__ = ["whole_and_plain", "without_folders"]

# A quote inside a string is escaped, so these are the keys themselves.
_PATH = re.compile(rb'("(?:model_)?path"\s*:\s*)"((?:[^"\\]|\\.)*)"')


def without_folders(answer: bytes) -> bytes:
    """JSON with files' names in the place of their paths, of the same length: blanks fill the difference."""
    return _PATH.sub(_name_alone, answer)


def _name_alone(found: re.Match[bytes]) -> bytes:
    name = re.split(rb"/|\\\\", found[2])[-1]
    return b'%b"%b"%b' % (found[1], name, b" " * (len(found[2]) - len(name)))


_PARTIAL_OR_CODED = re.compile(rb"\r\n(?:range|accept-encoding):[^\r\n]*", re.IGNORECASE)


def whole_and_plain(opening: bytes) -> bytes:
    """The head of a request without what asks for a part of its answer, or for a coding of it."""
    return _PARTIAL_OR_CODED.sub(b"", opening)
