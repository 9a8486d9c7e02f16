"""Paths from users: resolves ``~`` and relative paths, and tells what is at a path, or wrong with a PEM file.

Path.exists() and others raise (Python 3.11) for a dead network share, a folder without permission or a name
that is too long; in none of these cases is the path known to be free.
"""

from __future__ import annotations

import contextlib
import shlex
import stat
from collections.abc import Iterable
from enum import Enum, auto
from pathlib import Path

from llamasup.errors import LlamasupError, ModelMissing


class PathKind(Enum):
    FOLDER = auto()
    FILE = auto()
    """A file, pipe or device."""
    NOTHING = auto()
    UNKNOWN = auto()
    """The system does not say whether something is there; opening the path gives the reason."""


def path_kind(path: Path) -> PathKind:
    """Return the kind of file at ``path``, symlinks followed."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in the path
        return PathKind.NOTHING
    except OSError:
        return PathKind.UNKNOWN
    return PathKind.FOLDER if stat.S_ISDIR(mode) else PathKind.FILE


def expanded(name: str | Path, wrong: type[LlamasupError] = ModelMissing, *, of: str = "") -> Path:
    """Return the absolute path for ``name``, whether it exists or not.

    ``of`` is the option or variable that the name comes from. Raises ``wrong`` if ``name`` has no path.
    """
    given = f"{of}: {name}" if of else str(name)
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        user = Path(name).parts[0]
        raise wrong(
            f"{given}: there is no user {user.removeprefix('~')!r}",
            remedy=f"Write the path out; for a file of this name in the current folder write ./{name}",
        ) from None
    except FileNotFoundError:
        raise wrong(
            f"{given}: the current folder no longer exists", remedy="Change to another folder with cd."
        ) from None


def require_folders(folders: Iterable[Path], *, of: str) -> None:
    """Reject missing folders of a command line, which are mistyped. Folders of a config may appear later.

    ``of`` is the option or argument that takes the folders. Raises ModelMissing.
    """
    for folder in folders:
        kind = path_kind(folder)
        if kind is PathKind.FILE:
            raise ModelMissing(
                f"{folder} is a file, but {of} takes a folder",
                remedy=f"To serve only this file: {_alone(folder, of)}",
            )
        if kind is PathKind.NOTHING:
            raise ModelMissing(f"{folder}: there is no such folder", remedy="Create it, or give another one.")


def _alone(file: Path, of: str) -> str:
    if of.startswith("--"):
        return f"llamasup run {shlex.quote(str(file))}"
    return f"llamasup.serve({str(file)!r})"


# --- PEM files ------------------------------------------------------------------------------------


def irregular_file(*files: str) -> str | None:
    """Return the first of ``files`` that exists and is neither a regular file nor a folder.

    OpenSSL would block on a pipe without a writer, and llamasup reads the files several times.
    """
    for file in files:
        with contextlib.suppress(OSError):  # reading the file reports the error
            mode = Path(file).stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return file
    return None


def why_unusable(error: OSError, key_file: str, cert_file: str) -> str:
    """Return the reason for ``error`` of ``load_cert_chain``, with the file."""
    import ssl  # only errors need it here

    for name in (cert_file, key_file):
        try:
            Path(name).open("rb").close()
        except OSError as unreadable:
            return f"{name!r}: {unreadable.strerror}"
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    except ssl.SSLError:
        return f"{cert_file!r} contains no PEM certificate"
    return f"{key_file!r} contains no PEM key, or one with a password"
