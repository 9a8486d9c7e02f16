"""Hides folders in messages for clients: a client learns the name of a file, not its folder (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["without_places"]

_ROOT = r"(?:~\w*|\.{1,2})?/(?![/\s])"  # the slashes of https:// and org/repo begin no path
_BEFORE = r"(?:^|(?<=[\s('\"`\[<=:,;]))"
_AFTER = r"(?![\w-]|\.\w|\S*/|\s[^:;,'\"`]*/)"  # `/srv/my models/x` is not in `/srv/my`
_PLACE = re.compile(rf"(?<![\w/]){_ROOT}")
# Other names may be those of folders.
_FILE = r"(?:\.\w+|llama-server)"
_QUOTED = re.compile(rf"(?<!\w)(['\"`]){_ROOT}(?:[^'\"`\n/]*/)*([^'\"`\n/]*{_FILE})\1(?!\w)")
_BARE = re.compile(rf"{_BEFORE}{_ROOT}(?:[^\s/]+/)*(?=[^\s/]*{_FILE})")


def without_places(text: str, paths: Iterable[str]) -> str:
    """``text`` with file names instead of absolute paths. ``paths`` are the known paths. An unknown path is
    replaced if it ends like a file, and is quoted or has no blank.

    Empty if the name of a folder could be left: an unquoted path with a blank has no clear end. Assumes that
    no folder's name begins or ends with a blank.
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
