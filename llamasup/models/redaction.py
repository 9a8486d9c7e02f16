"""Hides folders from clients without the right ``control``, in messages and in llama-server's answers (pure).

``/props`` has the path of the model in ``model_path``, ``/lora-adapters`` that of an adapter in ``path``
(b11434).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["redact_paths", "whole_and_plain", "without_folders"]


# Not the slashes of https:// and org/repo, and not the endpoint /health of our own messages.
_ROOT = r"(?:~\w*|\.{1,2})?/(?![/\s]|health(?:,|\.?(?:\s|$)))"
_BEFORE = r"(?:^|(?<=[\s('\"`\[<=:,;]))"
_AFTER = r"(?![\w-]|\.\w|\S*/|\s[^:;,'\"`]*/)"  # `/srv/my models/x` is not in `/srv/my`
_PLACE = re.compile(rf"(?<![\w/]){_ROOT}")
# Other names may be folders.
_FILE = r"(?:\.\w+|llama-server)"
_QUOTED = re.compile(rf"(?<!\w)(['\"`]){_ROOT}(?:[^'\"`\n/]*/)*([^'\"`\n/]*{_FILE})\1(?!\w)")
_BARE = re.compile(rf"{_BEFORE}{_ROOT}(?:[^\s/]+/)*(?=[^\s/]*{_FILE})")


def redact_paths(text: str, paths: Iterable[str]) -> str:
    """``text`` with file names instead of the known ``paths``, and of unknown absolute paths of files that
    are quoted or contain no blank.

    Empty if a folder could remain: an unquoted path with a blank has no clear end. Assumes that no folder's
    name begins or ends with a blank.
    """
    folders: dict[str, None] = {}
    for path in sorted(set(paths), key=len, reverse=True):
        folder, _, name = path.rpartition("/")
        text = re.sub(rf"{_BEFORE}{re.escape(path)}{_AFTER}", _literally(name), text)
        folders[folder] = None
    for folder in filter(None, folders):
        text = re.sub(rf"{_BEFORE}{re.escape(folder)}/(?!/)", "/", text)
        text = re.sub(rf"{_BEFORE}{re.escape(folder)}{_AFTER}", "its folder", text)
    named = _BARE.sub("", _QUOTED.sub(r"\1\2\1", text))
    is_unclear = _PLACE.search(named) or (named != text and "/" in named)
    return "" if is_unclear else named


def _literally(name: str) -> str:
    return name.replace("\\", r"\\")


# A quote inside a string is escaped, so this matches only keys.
_PATH = re.compile(rb'("(?:model_)?path"\s*:\s*)"((?:[^"\\]|\\.)*)"')


def without_folders(answer: bytes) -> bytes:
    """The JSON with file names instead of paths, padded with blanks to the same length."""
    return _PATH.sub(_name_alone, answer)


def _name_alone(found: re.Match[bytes]) -> bytes:
    name = re.split(rb"/|\\\\", found[2])[-1]
    return b'%b"%b"%b' % (found[1], name, b" " * (len(found[2]) - len(name)))


_PARTIAL_OR_CODED = re.compile(rb"\r\n(?:range|accept-encoding):[^\r\n]*", re.IGNORECASE)


def whole_and_plain(opening: bytes) -> bytes:
    """The head of a request without Range and Accept-Encoding."""
    return _PARTIAL_OR_CODED.sub(b"", opening)
