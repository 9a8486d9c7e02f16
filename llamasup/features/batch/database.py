"""The SQLite files of batches: their transactions, and the errors that a user sees."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llamasup.errors import LlamasupError


class Database:
    """A SQLite file. A subclass opens ``_db`` without implicit transactions. All methods block."""

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


def is_full(error: sqlite3.Error | OSError) -> bool:
    """Whether SQLite found no space left on the disk."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_FULL
