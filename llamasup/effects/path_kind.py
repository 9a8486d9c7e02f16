"""What is at a path, as far as that can be told; never raises.

Path.exists() and its kin do (Python 3.11): of a network share that is dead, of a folder that may not be
entered, of a name that is too long. None of these says that nothing is there.
"""

from __future__ import annotations

import stat
from enum import Enum, auto
from pathlib import Path

__all__ = ["PathKind", "path_kind"]


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
