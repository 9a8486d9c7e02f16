"""The SQLite file, with real files, folders and processes."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.store import (
    CorruptFile,
    UsageFileUnusable,
    move_aside,
    read_rows,
    save,
    usage_file,
)
from tests.kit.patience import PATIENCE_S

TINY = Group("2026-03-01", "tiny", "")
PHONE = Group("2026-03-02", "tiny", "phone")

# Root without the capability to write everywhere.
PLAIN = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def queried(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


def test_sums_are_added_to_those_of_the_file(path: Path) -> None:
    save(path, [(TINY, Sums(2, 1, 20, 8, 10, 3, 1, 1_500_000)), (PHONE, Sums(1, energy_uj=5))])
    save(path, [(TINY, Sums(1, 0, 1, 1, 1, 1, 0, 1)), (PHONE, Sums(1)), (PHONE, Sums(1, energy_uj=6))])
    assert dict(read_rows(path)) == {
        TINY: Sums(3, 1, 21, 9, 11, 4, 1, 1_500_001),
        PHONE: Sums(3, energy_uj=11),
    }


def test_file_is_in_the_state_folder_and_only_its_user_may_read_it(path: Path, own_folders: Path) -> None:
    assert usage_file() == own_folders / "state" / "llamasup" / "usage.sqlite"
    path.touch(0o644)
    save(path, [(TINY, Sums(1))])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert queried(path, "PRAGMA journal_mode") == [("wal",)]


def test_rows_are_grouped_and_earlier_days_are_left_out(path: Path) -> None:
    later = PHONE._replace(day="2026-03-05")
    save(path, [(TINY, Sums(1)), (PHONE, Sums(2)), (later, Sums(4, energy_uj=9))])
    assert read_rows(path, ("key",)) == [
        (Group("", "", ""), Sums(1)),
        (Group("", "", "phone"), Sums(6, energy_uj=9)),
    ]
    assert read_rows(path, ("model",), date(2026, 3, 2)) == [(Group("", "tiny", ""), Sums(6, energy_uj=9))]
    assert read_rows(path, ("day", "model"), date(2026, 3, 3)) == [
        (Group("2026-03-05", "tiny", ""), Sums(4, energy_uj=9))
    ]


def test_days_before_the_limit_are_deleted(path: Path) -> None:
    save(path, [(TINY, Sums(1)), (PHONE, Sums(2))])
    save(path, [], delete_before=date(2026, 3, 2))
    assert read_rows(path) == [(PHONE, Sums(2))]


def test_no_file_and_an_empty_file_have_no_rows(path: Path) -> None:
    assert read_rows(path) == []
    assert not path.exists()
    path.touch()
    assert read_rows(path) == []
    save(path, [(TINY, Sums(1))])
    assert read_rows(path) == [(TINY, Sums(1))]


def test_name_that_is_not_unicode_is_saved(path: Path) -> None:
    save(path, [(TINY._replace(model="a\udcff"), Sums(1))])
    [(group, _)] = read_rows(path)
    assert group.model.startswith("a")


@pytest.mark.parametrize("content", [b"not a database, and long enough to have a header" * 50, b"\0" * 8192])
def test_corrupt_file_is_recognised_and_moved_aside(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.with_name("usage.sqlite-wal").write_bytes(b"x")
    with pytest.raises(CorruptFile, match="is damaged") as caught:
        save(path, [(TINY, Sums(1))])
    aside = move_aside(path, caught.value)
    assert aside is not None
    assert aside.read_bytes() == content
    save(path, [(TINY, Sums(1))])
    assert read_rows(path) == [(TINY, Sums(1))]
    assert move_aside(path, caught.value) is None  # another llamasup has moved it aside
    assert aside.exists()


def test_damaged_pages_are_recognised(path: Path) -> None:
    save(path, [(TINY._replace(model=f"m{number}"), Sums(1)) for number in range(2000)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)  # the header and the first page are sound
    path.write_bytes(content)
    with pytest.raises(CorruptFile):
        save(path, [(TINY, Sums(1))])
    with pytest.raises(CorruptFile):
        read_rows(path)


def test_file_of_a_newer_llamasup_is_not_touched(path: Path) -> None:
    queried(path, "PRAGMA user_version = 9")
    for use in (lambda: save(path, [(TINY, Sums(1))]), lambda: read_rows(path)):
        with pytest.raises(UsageFileUnusable, match="newer llamasup"):
            use()
    assert queried(path, "SELECT * FROM sqlite_master") == []


_TRY = """
import sys
from pathlib import Path
from llamasup.features.usage.ledger import Group, Sums
from llamasup.features.usage.store import UsageFileUnusable, read_rows, save
path = Path(sys.argv[1])
rows = [(Group("2026-03-01", f"model {number}", ""), Sums(1)) for number in range(5000)]
def attempt(function, *arguments):
    try:
        print(function(*arguments))
    except UsageFileUnusable as error:
        print(error.message)
"""


def tried(path: Path, script: str, *prefix: str) -> list[str]:
    """The lines that a script prints, as another process."""
    words = [*prefix, sys.executable, "-c", _TRY + script, str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("mode", "script", "messages"),
    [
        (
            0o500,  # it can be read, but not written
            'attempt(save, path, rows); attempt(save, path.with_name("new"), rows); attempt(read_rows, path)',
            ["usage.sqlite' cannot be used", "new' cannot be used", "requests=7"],
        ),
        (0o000, "attempt(read_rows, path)", ["cannot be used: Permission denied"]),
    ],
)
def test_folder_without_permissions_is_unusable(
    path: Path, mode: int, script: str, messages: list[str]
) -> None:
    save(path, [(TINY, Sums(7))])
    path.chmod(0o400)
    path.parent.chmod(mode)
    try:
        lines = tried(path, script, *PLAIN)
    finally:
        path.parent.chmod(0o700)
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


def test_symlink_and_folder_are_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path.symlink_to(target)
    with pytest.raises(UsageFileUnusable):
        save(path, [(TINY, Sums(1))])
    assert not target.exists()
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageFileUnusable, match="not a regular file"):
        save(path, [(TINY, Sums(1))])


def test_locked_file_is_unusable_until_the_lock_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamasup.features.usage.store.BUSY_S", 0.0)
    save(path, [(TINY, Sums(1))])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UsageFileUnusable, match="locked"):
        save(path, [(TINY, Sums(1))])
    other.close()
    save(path, [(TINY, Sums(1))])
    assert read_rows(path) == [(TINY, Sums(2))]


def test_full_disk_keeps_what_was_saved(path: Path) -> None:
    script = """
import resource
save(path, rows[:1])
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
attempt(save, path, rows)
"""
    [line] = tried(path, script)
    assert "cannot be used" in line
    assert read_rows(path) == [(Group("2026-03-01", "model 0", ""), Sums(1))]


def test_processes_that_save_at_the_same_time_lose_nothing(path: Path) -> None:
    script = f"{_TRY}sys.stdin.readline()\nfor _ in range(10):\n    save(path, rows[:1])"
    words = [sys.executable, "-c", script, str(path)]
    processes = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(PATIENCE_S) for process in processes] == [0] * 3
    assert read_rows(path) == [(TINY._replace(model="model 0"), Sums(30))]


def test_python_without_sqlite_is_a_problem_and_no_failure(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(UsageFileUnusable, match="no sqlite3"):
        save(path, [(TINY, Sums(1))])
