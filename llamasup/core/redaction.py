"""Removes paths of this machine from llama-server's answers, for clients without the right ``control``.

``/props`` has the path of the model in ``model_path``, ``/lora-adapters`` that of an adapter in ``path``
(b11434).
"""

from __future__ import annotations

import re

__all__ = ["whole_and_plain", "without_folders"]

# A quote inside a string is escaped, so this matches only keys.
_PATH = re.compile(rb'("(?:model_)?path"\s*:\s*)"((?:[^"\\]|\\.)*)"')


def without_folders(answer: bytes) -> bytes:
    """The JSON with file names instead of paths. Blanks keep its length the same."""
    return _PATH.sub(_name_alone, answer)


def _name_alone(found: re.Match[bytes]) -> bytes:
    name = re.split(rb"/|\\\\", found[2])[-1]
    return b'%b"%b"%b' % (found[1], name, b" " * (len(found[2]) - len(name)))


_PARTIAL_OR_CODED = re.compile(rb"\r\n(?:range|accept-encoding):[^\r\n]*", re.IGNORECASE)


def whole_and_plain(opening: bytes) -> bytes:
    """The head of a request without Range and Accept-Encoding."""
    return _PARTIAL_OR_CODED.sub(b"", opening)
