"""Paths of users and what is at them: ``~`` and relative paths are resolved; looking never raises.

Path.exists() and others raise (Python 3.11) for a dead network share, a folder without permission or a name
that is too long; none of these means that nothing is there.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterable
from enum import Enum, auto
from pathlib import Path

from llamasup.errors import LlamasupError, ModelMissing

__all__ = ["PathKind", "expanded", "path_kind", "refuse_no_folder"]


class PathKind(Enum):
    FOLDER = auto()
    FILE = auto()
    """Or a pipe, a device: what is no folder."""
    NOTHING = auto()
    UNKNOWN = auto()
    """The system says neither that something is there nor that nothing is: whoever opens it hears why."""


def path_kind(path: Path) -> PathKind:
    """Of what links lead to."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in the path
        return PathKind.NOTHING
    except OSError:
        return PathKind.UNKNOWN
    return PathKind.FOLDER if stat.S_ISDIR(mode) else PathKind.FILE


def expanded(name: str | Path, wrong: type[LlamasupError] = ModelMissing, *, of: str = "") -> Path:
    """The absolute path that a person means by ``name``, whether anything is there or not.

    Raises ``wrong`` where it cannot be told; ``of`` is what gave the name: an option, a variable.
    """
    given = f"{of}: {name}" if of else str(name)
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        user = str(name).split("/")[0]
        raise wrong(
            f"{given}: there is no user {user.removeprefix('~')!r} whose folder {user} could be",
            remedy=f"Write the path out; for a file of that very name in this folder say ./{name}",
        ) from None
    except FileNotFoundError:
        raise wrong(
            f"{given}: the current folder no longer exists", remedy="Change to another folder (cd)."
        ) from None


def refuse_no_folder(folders: Iterable[Path], *, of: str) -> None:
    """One that a config names may come; one that is given for this very start and not there was mistyped.

    Raises ModelMissing; ``of`` is what takes the folders.
    """
    for folder in folders:
        kind = path_kind(folder)
        if kind is PathKind.FILE:
            raise ModelMissing(
                f"{folder}: is a file, and {of} takes a folder",
                remedy=f"Serve it alone: {_alone(folder, of)}",
            )
        if kind is PathKind.NOTHING:
            raise ModelMissing(f"{folder}: there is no such folder", remedy="Make it, or give another one.")


def _alone(file: Path, of: str) -> str:
    if of.startswith("--"):
        return f"llamasup run {shlex.quote(str(file))}"
    return f"llamasup.serve({str(file)!r})"
