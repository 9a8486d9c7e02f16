"""Hides folders from clients without the right ``control``, in messages and in llama-server's answers (pure).

``/props`` has the path of the model in ``model_path``, ``/lora-adapters`` has the path of an adapter in
``path`` (b11434).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

# Not the slashes of https:// and org/repo, and not the endpoint /health of our own messages.
_ROOT = r"(?:~\w*|\.{1,2})?/(?![/\s]|health(?:,|\.?(?:\s|$)))"
# Of Windows: a drive, or the name of another machine. In a quoted path the backslashes are doubled.
_DRIVE = r"(?:[A-Za-z]:[\\/](?![/\s])|\\{2,4}[\w.$?-]+\\)"
_BEFORE = r"(?:^|(?<=[\s('\"`\[<=:,;]))"
# Other names may be folders.
_FILE = r"(?:\.\w+|llama-server)"


class _Paths(NamedTuple):
    """The paths of POSIX or of Windows in texts. ``separator`` is the pattern between two names."""

    separator: str
    root: str
    """The text that ``place`` recognises."""
    after: str
    """The text that may follow a known path: `/srv/my models/x` is not in `/srv/my`."""
    place: re.Pattern[str]
    quoted: re.Pattern[str]
    bare: re.Pattern[str]
    flags: re.RegexFlag

    def split(self, path: str) -> tuple[str, str]:
        """The folder and the name."""
        name = re.split(self.separator, path)[-1]
        return re.sub(rf"{self.separator}$", "", path.removesuffix(name)), name

    def known(self, path: str) -> str:
        """The pattern of a known path."""
        return _BEFORE + self.separator.join(map(re.escape, re.split(self.separator, path)))


def _paths(separator: str, sign: str, begin: str, root: str, flags: re.RegexFlag) -> _Paths:
    """Make the patterns. ``sign``: the separators, for a set; ``begin``: the pattern of a path's begin."""
    return _Paths(
        separator,
        root,
        rf"(?![\w-]|\.\w|\S*[{sign}]|\s[^:;,'\"`]*[{sign}])",
        re.compile(rf"(?<![\w{sign}]){begin}"),
        re.compile(
            rf"(?<!\w)(['\"`]){begin}(?:[^'\"`\n{sign}]*{separator})*([^'\"`\n{sign}]*{_FILE})\1(?!\w)"
        ),
        re.compile(rf"{_BEFORE}{begin}(?:[^\s{sign}]+{separator})*(?=[^\s{sign}]*{_FILE})"),
        flags,
    )


# Each takes 2 ms to make, and few runs need them.
@cache
def _of_posix() -> _Paths:
    return _paths("/", "/", _ROOT, "/", re.NOFLAG)


@cache
def _of_windows() -> _Paths:
    return _paths(r"[\\/]+", r"\\/", _DRIVE, "C:\\", re.IGNORECASE)


def _paths_like(path: str) -> _Paths:
    return _of_windows() if re.match(r"[A-Za-z]:(?:[\\/]|$)|\\\\", path) else _of_posix()


def redact_paths(text: str, paths: Iterable[str]) -> str:
    """Replace the known ``paths`` in ``text`` by file names, and other absolute paths that have a clear end.

    A path has a clear end if it is quoted or contains no blank. Returns an empty text if a folder could
    remain. Assumes that no folder's name begins or ends with a blank.
    """
    folders: dict[str, None] = {}
    for path in sorted(set(paths), key=len, reverse=True):
        kind = _paths_like(path)
        folder, name = kind.split(path)
        text = re.sub(f"{kind.known(path)}{kind.after}", _literally(name), text, flags=kind.flags)
        folders[folder] = None
    for folder in filter(None, folders):
        kind = _paths_like(folder)
        inside = rf"{kind.known(folder)}{kind.separator}(?!{kind.separator})"
        text = re.sub(inside, _literally(kind.root), text, flags=kind.flags)
        text = re.sub(f"{kind.known(folder)}{kind.after}", "its folder", text, flags=kind.flags)
    posix, windows = _of_posix(), _of_windows()
    named = windows.bare.sub("", windows.quoted.sub(r"\1\2\1", text))
    if windows.place.search(named) or (named != text and re.search(r"[\\/]", named)):
        return ""
    text, named = named, posix.bare.sub("", posix.quoted.sub(r"\1\2\1", named))
    return "" if posix.place.search(named) or (named != text and "/" in named) else named


def _literally(name: str) -> str:
    return name.replace("\\", r"\\")


# A quote inside a string is escaped, so this matches only keys.
_PATH = re.compile(rb'("(?:model_)?path"\s*:\s*)"((?:[^"\\]|\\.)*)"')


def without_folders(answer: bytes) -> bytes:
    """Replace paths in the JSON by file names, padded with blanks to the same length."""
    return _PATH.sub(_name_alone, answer)


def _name_alone(found: re.Match[bytes]) -> bytes:
    name = re.split(rb"/|\\\\", found[2])[-1]
    return b'%b"%b"%b' % (found[1], name, b" " * (len(found[2]) - len(name)))


_PARTIAL_OR_CODED = re.compile(rb"\r\n(?:range|accept-encoding):[^\r\n]*", re.IGNORECASE)


def whole_and_plain(opening: bytes) -> bytes:
    """Remove Range and Accept-Encoding from the head of a request."""
    return _PARTIAL_OR_CODED.sub(b"", opening)
