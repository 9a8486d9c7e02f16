"""Log files that fill up, hang, are moved, or were never writable."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest

from llamasup.core.observability import access_log
from llamasup.core.observability.access_log import AccessLog, check_log_file
from llamasup.errors import ConfigInvalid
from tests.kit.patience import PATIENCE_S, eventually

Open = Callable[..., "AccessLog[int]"]


def line(number: int, ended: datetime) -> bytes:
    return b"%d\n" % number


@pytest.fixture
def open_log() -> Iterator[Open]:
    made: list[AccessLog[int]] = []

    def open_it(path: Path | None, line: Callable[[int, datetime], bytes] = line, **options: int) -> object:
        made.append(AccessLog(path, line, **options))
        return made[-1]

    yield open_it  # type: ignore[misc]
    for log in made:
        log.close(PATIENCE_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A full disk: no file of this process can be longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- what is written ---------------------------------------------------------------------------------


def test_every_record_is_a_line_in_order_and_the_last_are_written_at_the_end(
    open_log: Open, path: Path
) -> None:
    log = open_log(path)
    for number in range(1234):
        log.write(number)
    log.close(PATIENCE_S)
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(1234))
    assert log.dropped() == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_line_is_written_before_close_after_those_of_before(open_log: Open, path: Path) -> None:
    path.write_bytes(b"before\n")
    log = open_log(path)
    log.write(1)
    eventually(lambda: path.read_bytes() == b"before\n1\n")
    log.write(2)  # after the thread has gone back to sleep
    eventually(lambda: path.read_bytes() == b"before\n1\n2\n")


def test_a_line_has_the_time_at_which_its_request_ended(
    open_log: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer writes it 7.5 s later; the test sets both clocks."""
    now, clock_s = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), [100.0]
    at_work, go_on = threading.Event(), threading.Event()
    times: list[datetime] = []

    class Wall(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(now.timestamp(), tz)

    def keep(number: int, ended: datetime) -> bytes:
        times.append(ended)
        at_work.set()
        go_on.wait(PATIENCE_S)
        return b"\n"

    monkeypatch.setattr(access_log, "datetime", Wall)
    monkeypatch.setattr(access_log, "monotonic", lambda: clock_s[0])
    log = open_log(tmp_path / "access.log", keep)
    log.write(1)
    assert at_work.wait(PATIENCE_S)
    log.write(2)
    clock_s[0] += 7.5
    go_on.set()
    log.close(PATIENCE_S)
    assert times == [now, now - timedelta(seconds=7.5)]


def test_standard_error_gets_whole_lines(open_log: Open, capfd: pytest.CaptureFixture[str]) -> None:
    log = open_log(None, lambda number, ended: json.dumps({"n": number, "x": "y" * 300}).encode() + b"\n")
    for number in range(50):
        log.write(number)
    log.close(PATIENCE_S)
    assert [json.loads(text)["n"] for text in capfd.readouterr().err.splitlines()] == list(range(50))


# --- rotation ----------------------------------------------------------------------------------------


def test_file_is_rotated_and_the_oldest_removed(open_log: Open, tmp_path: Path) -> None:
    log = open_log(tmp_path / "access.log", max_bytes=2000)
    for number in range(10_000, 20_000):
        log.write(number)
    log.close(PATIENCE_S)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["access.log", *(f"access.log.{n}" for n in range(1, 5))]
    assert all(file.stat().st_size <= 2000 for file in files)
    newest_first = [*(tmp_path / "access.log").read_text().split()[::-1]]
    for number in range(1, 5):
        newest_first += (tmp_path / f"access.log.{number}").read_text().split()[::-1]
    assert newest_first == [str(number) for number in range(19_999, 19_999 - len(newest_first), -1)]


def test_moved_file_is_created_again(open_log: Open, path: Path) -> None:
    moved = path.with_name("yesterday.log")
    log = open_log(path)
    log.write(1)
    eventually(lambda: path.read_bytes() == b"1\n")
    path.rename(moved)
    log.write(2)
    eventually(path.exists)
    log.close(PATIENCE_S)
    assert (moved.read_bytes(), path.read_bytes()) == (b"1\n", b"2\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_comes_while_others_are_written_goes_to_the_new_file(open_log: Open, path: Path) -> None:
    """The file is moved while the writer formats the first record, with a second one pending."""
    moved = path.with_name("yesterday.log")
    at_work, go_on = threading.Event(), threading.Event()

    def held(number: int, ended: datetime) -> bytes:
        at_work.set()
        go_on.wait(PATIENCE_S)
        return line(number, ended)

    log = open_log(path, held)
    log.write(1)
    assert at_work.wait(PATIENCE_S)
    path.rename(moved)
    log.write(2)
    go_on.set()
    eventually(path.exists)
    log.close(PATIENCE_S)
    assert (moved.read_bytes(), path.read_bytes()) == (b"1\n", b"2\n")


# --- full and hanging disks --------------------------------------------------------------------------


def test_full_disk_loses_whole_lines_and_is_logged_once(
    open_log: Open, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "RETRY_S", 1000.0)
    with files_of_at_most(450):
        log = open_log(path)
        for number in range(1000, 1100):
            log.write(number)  # 500 bytes: more than there is room for
        eventually(lambda: log.dropped() == 100)
        for number in range(10):
            log.write(number)
        eventually(lambda: log.dropped() == 110)
        log.close(PATIENCE_S)
    assert path.read_bytes() == b""  # no half line, which would corrupt the next
    assert len(caplog.messages) == 1
    assert "the access log is no longer written" in caplog.messages[0]


def test_a_disk_with_room_again_is_written_to_again(
    open_log: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "RETRY_S", 0.0)
    with files_of_at_most(3):
        log = open_log(path)
        log.write(1000)
        eventually(lambda: log.dropped() == 1)
    log.write(2000)
    log.close(PATIENCE_S)
    assert path.read_bytes() == b"2000\n"
    assert log.dropped() == 1


def test_hanging_disk_blocks_no_request_and_lost_lines_are_counted(
    open_log: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "MAX_PENDING", 50)
    hangs, on = threading.Event(), threading.Event()

    def hanging(number: int, ended: datetime) -> bytes:
        hangs.set()
        on.wait(PATIENCE_S)
        return line(number, ended)

    log = open_log(path, hanging)
    log.write(0)
    assert hangs.wait(PATIENCE_S)
    for number in range(1, 61):
        log.write(number)  # never waits
    assert log.dropped() == 10
    log.close(timeout_s=0.01)  # neither does the end
    on.set()
    log.close(PATIENCE_S)
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(51))


def test_lines_to_a_closed_standard_error_are_counted(open_log: Open) -> None:
    read_fd, write_fd = os.pipe()
    saved = os.dup(2)
    os.dup2(write_fd, 2)
    try:
        os.close(read_fd)
        log = open_log(None)
        log.write(1)
        log.write(2)
        log.close(PATIENCE_S)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(write_fd)
    assert log.dropped() == 2


# --- invalid paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none/access.log", "No such file"),
        ("", "Is a directory"),
        ("file/access.log", "Not a directory"),
        ("link", "it is a symlink"),
        ("pipe", "it is a pipe"),
        ("/dev/full", "not a regular file"),
    ],
)
def test_invalid_path_is_refused_and_a_symlink_not_followed(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid) as caught:
        check_log_file(tmp_path / path)
    assert caught.value.exit_code == 78
    for word in (str(tmp_path / path), why):
        assert word in caught.value.message
    assert "standard error" in caught.value.remedy
    assert (tmp_path / "file").read_text() == "precious"


def test_valid_path_gets_an_empty_private_file(tmp_path: Path) -> None:
    check_log_file(tmp_path / "access.log")
    assert (tmp_path / "access.log").read_bytes() == b""
