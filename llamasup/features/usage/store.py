"""The file with the saved sums: ``usage.sqlite`` in the state folder, shared by all llamasups of this user.

Each access opens the file and closes it again, so that a file that was moved or removed is noticed.
sqlite3 is imported at the first access. All functions block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import device_and_inode, state_folder
from llamasup.core.system.text import path_text
from llamasup.errors import FolderUnusable
from llamasup.features.usage.ledger import COUNTS, Group, Sums

if TYPE_CHECKING:
    import sqlite3


FILE_NAME: Final = "usage.sqlite"
VERSION: Final = 1
# Of another llamasup, whose transactions take milliseconds.
BUSY_S: Final = 2.0

_CREATE = """
CREATE TABLE usage (
    day TEXT NOT NULL,
    model TEXT NOT NULL,
    key TEXT NOT NULL,
    requests INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    tokens_prompt INTEGER NOT NULL,
    tokens_cached INTEGER NOT NULL,
    tokens_completion INTEGER NOT NULL,
    tokens_estimated INTEGER NOT NULL,
    unreported INTEGER NOT NULL,
    slot_us INTEGER NOT NULL,
    energy_uj INTEGER,
    PRIMARY KEY (day, model, key)
) WITHOUT ROWID
"""
_SUMS: Final = Sums.__struct_fields__
_ADD = ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
_INSERT = f"""
INSERT INTO usage VALUES (?, ?, ?, {", ".join("?" * len(_SUMS))})
ON CONFLICT DO UPDATE SET {_ADD}, energy_uj = CASE WHEN excluded.energy_uj IS NULL THEN energy_uj
    ELSE coalesce(energy_uj, 0) + excluded.energy_uj END
"""  # noqa: S608 - fixed names
_TOTALS = ", ".join(f"sum({name})" for name in _SUMS)


class UsageFileUnusable(FolderUnusable):
    """The file cannot be read or written."""


class CorruptFile(UsageFileUnusable):
    """The file is not a SQLite database, or a damaged one. ``identity`` is that of ``device_and_inode``."""

    identity: tuple[int, int] | None = None


def usage_file() -> Path:
    """Return the path of the file. Raises FolderUnusable."""
    return state_folder() / FILE_NAME


def today() -> date:
    """Return the local day, to which the requests that end now belong."""
    return datetime.now(UTC).astimezone().date()


def save(path: Path, rows: Sequence[tuple[Group, Sums]], *, delete_before: date | None = None) -> None:
    """Add the rows to the file, in one transaction. ``delete_before``: remove earlier days.

    Raises UsageFileUnusable and CorruptFile.
    """
    values = [
        (group.day, path_text(group.model), path_text(group.key), *(getattr(one, name) for name in _SUMS))
        for group, one in rows
    ]
    with _mapped_errors(path):
        _create(path)
        with _opened(path, "rw") as connection:
            connection.execute("PRAGMA synchronous = FULL")  # a power cut loses no more than a crash
            if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            if _version_of(connection, path) == 0:
                connection.execute(_CREATE)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.executemany(_INSERT, values)
            if delete_before is not None:
                connection.execute("DELETE FROM usage WHERE day < ?", (delete_before.isoformat(),))
            connection.execute("COMMIT")


def read_rows(
    path: Path, by: Sequence[str] = Group._fields, since: date | None = None
) -> list[tuple[Group, Sums]]:
    """Return the sums of the file for each value of ``by``; the other fields of a group are empty. No rows if
    the file does not exist. Raises as ``save``.
    """
    fields = ", ".join(name if name in by else "''" for name in Group._fields)
    # The names are fixed.
    select = f"SELECT {fields}, {_TOTALS} FROM usage WHERE day >= ? GROUP BY {', '.join(by)}"  # noqa: S608
    first = "" if since is None else since.isoformat()
    with _mapped_errors(path):
        if not path.exists():
            return []
        # Reading needs a file of shared memory next to it, which cannot be created in a read-only folder.
        mode = "rw" if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK) else "ro&immutable=1"
        with _opened(path, mode) as connection:
            if _version_of(connection, path) == 0:
                return []
            rows = connection.execute(select, (first,)).fetchall()
    return [(Group(*row[:3]), Sums(*row[3:])) for row in rows]


def move_aside(path: Path, error: CorruptFile) -> Path | None:
    """Rename the corrupt file; returns its new path. None if another llamasup did so. Raises OSError."""
    if error.identity is None or device_and_inode(path) != error.identity:
        return None
    aside = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    return aside


def _create(path: Path) -> None:
    """Create the file, or check that it is one that only this user can read. Raises OSError."""
    from llamasup.core.system.storage.database import create_private

    if not create_private(path):
        status = path.lstat()
        if not (stat.S_ISREG(status.st_mode) and native.is_own(status)):
            raise OSError("it is not a regular file of this user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)


def _opened(path: Path, mode: str) -> closing[sqlite3.Connection]:
    from llamasup.core.system.storage.database import open_database

    return closing(open_database(path, mode, busy_s=BUSY_S))  # which rolls back what was not committed


def _version_of(connection: sqlite3.Connection, path: Path) -> int:
    from llamasup.core.system.storage.database import version_of

    newer = partial(UsageFileUnusable, remedy="Upgrade llamasup, or move the file away.")
    return version_of(connection, VERSION, f"The usage file {str(path)!r}", newer, of=" of its tables")


@contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    identity = device_and_inode(path)
    try:
        import sqlite3

        from llamasup.core.system.storage.database import is_corrupt
    except ImportError as error:
        raise UsageFileUnusable(
            f"This Python has no sqlite3 ({error}).", remedy="Use a Python that was built with SQLite."
        ) from None
    try:
        yield
    except sqlite3.Error as error:
        if is_corrupt(error):
            corrupt = CorruptFile(
                f"The usage file {str(path)!r} is damaged: {error}.", remedy="Move it away."
            )
            corrupt.identity = identity
            raise corrupt from None
        raise _unusable(path, error) from None
    except OSError as error:
        raise _unusable(path, error.strerror or error) from None


def _unusable(path: Path, reason: object) -> UsageFileUnusable:
    return UsageFileUnusable(
        f"The usage file {str(path)!r} cannot be used: {reason}.",
        remedy="Make its folder writable, with free space on the disk.",
    )
