"""SQLite files: how they are opened, their versions, their transactions, and what their errors mean."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from llamasup.errors import LlamasupError

_BUSY_S: Final = 5.0  # of another process
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class Database:
    """A SQLite file. A subclass opens ``_db`` with ``open_database``. All methods block."""

    _db: sqlite3.Connection

    def _failed(self, error: sqlite3.Error | OSError) -> LlamasupError:
        """The error for users."""
        raise NotImplementedError

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._mapped_errors():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Make all changes of the block, or none if it raises."""
        with self._mapped_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from None


def create_private(path: Path) -> bool:
    """Create the file if it does not exist, and return whether it did not. SQLite would create it with the
    mode of the umask. This never opens a file that SQLite may have open: closing it would drop SQLite's locks
    (POSIX). Raises OSError.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        return True
    return False


def require_private(path: Path) -> None:
    """Create the file if it does not exist, and check that it can be written. Raises OSError with the
    system's reason, where SQLite has none. Only for a file that this process does not have open.
    """
    if not create_private(path):
        os.close(os.open(path, os.O_RDWR))


def open_database(path: Path, mode: str = "rw", *, busy_s: float = _BUSY_S) -> sqlite3.Connection:
    """Open the file without implicit transactions, for one thread at a time. ``mode``: that of a URI of
    SQLite.
    """
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=busy_s,
        isolation_level=None,
        uri=True,
        check_same_thread=False,
    )


def version_of(
    connection: sqlite3.Connection,
    known: int,
    what: str,
    newer: Callable[[str], LlamasupError],
    *,
    of: str = "",
) -> int:
    """Return the version of the tables, 0 for a new file. Raises ``newer`` if it is above ``known``."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > known:
        raise newer(f"{what} is from a newer llamasup (version {version}{of}; this one knows {known}).")
    return int(version)


def is_full(error: sqlite3.Error | OSError) -> bool:
    """Whether SQLite found no space left on the disk."""
    return _code_of(error) == sqlite3.SQLITE_FULL


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether the file is damaged, or not one of SQLite."""
    return _code_of(error) in _CORRUPT


def _code_of(error: Exception) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
