"""The transactions of a SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from llamasup.core.system.storage.database import Database, open_database
from llamasup.errors import LlamasupError


class Names(Database):
    def __init__(self, path: Path) -> None:
        self._db = open_database(path, "rwc")
        self._db.execute("CREATE TABLE names (name TEXT UNIQUE)")

    def _failed(self, error: sqlite3.Error | OSError) -> LlamasupError:
        return LlamasupError(f"The names are lost: {error}.")

    def add(self, *statements: str) -> None:
        with self._transaction():
            for statement in statements:
                self._db.execute(statement)

    @property
    def names(self) -> list[str]:
        return [name for (name,) in self._rows("SELECT name FROM names")]


@pytest.mark.parametrize(
    "same", ["INSERT INTO names VALUES ('a')", "INSERT OR ROLLBACK INTO names VALUES ('a')"]
)
def test_failed_transaction_changes_nothing_and_the_next_one_works(tmp_path: Path, same: str) -> None:
    """With OR ROLLBACK, SQLite ends the transaction itself, as it does when the disk is full."""
    names = Names(tmp_path / "names")
    with pytest.raises(LlamasupError, match="UNIQUE"):
        names.add("INSERT INTO names VALUES ('a')", same)
    assert names.names == []
    names.add("INSERT INTO names VALUES ('b')")
    assert names.names == ["b"]
    names._db.close()
