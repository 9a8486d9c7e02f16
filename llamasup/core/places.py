"""What clients are told of files: their names, not where they lie, which is nothing to them (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["without_places"]

_ANOTHER_PLACE = re.compile(r"(?<![\w/])~?/(?![/\s])")  # the slashes of https:// and org/repo are none


def without_places(text: str, paths: Iterable[str]) -> str:
    """``text`` with a file's name where one of ``paths`` (absolute) stands, and without their folders. Empty
    where it names another place: nobody can tell where a path in a text ends.
    """
    folders: dict[str, None] = {}
    for path in sorted(set(paths), key=len, reverse=True):
        folder, _, name = path.rpartition("/")
        text = text.replace(path, name)
        folders[folder] = None
    for folder in filter(None, folders):
        text = re.sub(rf"(?<![\w/]){re.escape(folder)}/", "", text)
        text = re.sub(rf"(?<![\w/]){re.escape(folder)}(?![\w/-]|\.\w)", "its folder", text)
    return "" if _ANOTHER_PLACE.search(text) else text
