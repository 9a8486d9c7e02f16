"""What can be executed, and what to say about what cannot."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import BrokenRuntime

__all__ = ["broken", "find_executable"]


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """The absolute path of what ``name`` means, or BrokenRuntime."""
    if os.sep in name or (os.altsep is not None and os.altsep in name):
        path = Path(name).absolute()
        if not path.exists():
            raise broken(str(path), os.strerror(errno.ENOENT))
        if path.is_dir():
            raise broken(str(path), os.strerror(errno.EISDIR))
        if not os.access(path, os.X_OK):
            raise broken(str(path), os.strerror(errno.EACCES), remedy=f"Make it executable: chmod +x {path}")
        return str(path)
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise broken(name, "not found on PATH")
    return str(Path(found).absolute())


def broken(path: str, reason: str, *, remedy: str = "") -> BrokenRuntime:
    return BrokenRuntime(
        f"Cannot execute {path!r}: {reason}.",
        remedy=remedy or "Name a llama-server that runs on this machine with --runtime.",
    )
