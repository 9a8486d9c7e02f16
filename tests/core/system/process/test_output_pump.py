"""The pump reads from real pipes with everything that a child may do to its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llamasup.core.system.native import native
from llamasup.core.system.process import output_pump
from llamasup.core.system.process.output_pump import LogPump, RotatedFile

Open = Callable[..., tuple[LogPump, int]]


@pytest.fixture
def open_pump() -> Iterator[Open]:
    """Make a pump and the write end that its child would have; both are closed at the end."""
    made: list[tuple[LogPump, int]] = []

    def open_it(**options: object) -> tuple[LogPump, int]:
        read_fd, write_fd = os.pipe()
        made.append((LogPump(read_fd, **options), write_fd))  # type: ignore[arg-type]
        return made[-1]

    yield open_it
    for pump, write_fd in made:
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(write_fd)
        pump.close(10)


def write_all(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def tail_after(pump: LogPump, write_fd: int, content: bytes) -> tuple[str, ...]:
    write_all(write_fd, content)
    os.close(write_fd)
    pump.close(10)
    return pump.tail()


def test_tee_gets_whole_lines_and_the_unfinished_last_one(open_pump: Open) -> None:
    received: list[bytes] = []
    pump, write_fd = open_pump(tee=received.extend)
    write_all(write_fd, b"one\ntw")
    tail_after(pump, write_fd, b"o\n\xff\n" + b"x" * 100_000 + b"\nwithout end")
    assert [line[:20] for line in received] == [b"one", b"two", b"\xff", b"x" * 20, b"without end"]
    assert max(map(len, received)) == 4096


# --- the tail --------------------------------------------------------------------------------------


def test_the_last_200_lines_are_kept_in_order(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    lines = [f"line {n}" for n in range(1000)]
    assert tail_after(pump, write_fd, "\n".join(lines).encode() + b"\n") == tuple(lines[-200:])
    assert pump.bytes_seen == sum(len(line) + 1 for line in lines)


def test_a_last_line_without_its_line_feed_is_part_of_the_tail(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    assert tail_after(pump, write_fd, b"one\r\n\ntwo") == ("one", "", "two")


def test_a_full_tail_and_an_unfinished_line_are_still_200(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    tail = tail_after(pump, write_fd, b"x\n" * 200 + b"last words")
    assert (len(tail), tail[-1]) == (200, "last words")


def test_a_line_that_comes_in_pieces_is_one_line(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    for piece in (b"a", b"b", b"c\nd", b"e\n"):
        seen = pump.bytes_seen + len(piece)
        write_all(write_fd, piece)
        while pump.bytes_seen < seen:
            time.sleep(0.001)
    assert pump.tail() == ("abc", "de")


def test_invalid_utf8_is_replaced(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    assert tail_after(pump, write_fd, b"a\xff\xfeb\n\xc3\xbc\n") == ("a��b", "ü")


def test_line_of_10_mb_is_truncated_and_the_next_one_complete(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    tail = tail_after(pump, write_fd, b"before\n" + b"x" * 10_000_000 + b"\nafter\n")
    assert tail == ("before", "x" * 4096, "after")


def test_many_long_lines_keep_the_tail_within_its_bound(open_pump: Open) -> None:
    pump, write_fd = open_pump()
    tail = tail_after(pump, write_fd, (b"y" * 100_000 + b"\n") * 300)
    assert tail == ("y" * 4096,) * 200


# --- the file --------------------------------------------------------------------------------------


def test_every_byte_reaches_the_file_as_it_was(open_pump: Open, tmp_path: Path) -> None:
    pump, write_fd = open_pump(path=tmp_path / "child.log")
    content = os.urandom(300_000)
    tail_after(pump, write_fd, content)
    assert (tmp_path / "child.log").read_bytes() == content
    assert stat.S_IMODE((tmp_path / "child.log").stat().st_mode) == 0o600


def test_a_log_is_continued_and_made_private(open_pump: Open, tmp_path: Path) -> None:
    (tmp_path / "child.log").write_bytes(b"earlier\n")
    (tmp_path / "child.log").chmod(0o644)
    pump, write_fd = open_pump(path=tmp_path / "child.log")
    tail_after(pump, write_fd, b"now\n")
    assert (tmp_path / "child.log").read_bytes() == b"earlier\nnow\n"
    assert stat.S_IMODE((tmp_path / "child.log").stat().st_mode) == 0o600


def test_flood_stays_within_the_bound_and_keeps_its_end(
    open_pump: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pump, "_MAX_BYTES", 200_000)
    pump, write_fd = open_pump(path=tmp_path / "child.log")
    content = b"".join(b"line %07d\n" % n for n in range(200_000))
    tail_after(pump, write_fd, content)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["child.log", "child.log.1", "child.log.2"]
    assert all((tmp_path / name).stat().st_size <= 200_000 for name in kept)
    joined = b"".join((tmp_path / name).read_bytes() for name in reversed(kept))
    assert len(joined) > 400_000
    assert content.endswith(joined)


def test_log_that_another_program_has_open_goes_on_and_is_rotated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows such a file cannot be renamed. The pump must not wait."""
    in_use = True
    replace = native.replace
    monkeypatch.setattr(native, "replace", lambda *paths, waits: not in_use and replace(*paths, waits=waits))
    monkeypatch.setattr(output_pump, "_ROTATE_RETRY_S", 0.0)
    log = RotatedFile(tmp_path / "child.log", max_bytes=100, files=3)
    for number in range(15):
        log.write(b"line %04d\n" % number)
    assert log.error is None
    assert (
        (tmp_path / "child.log")
        .read_bytes()
        .endswith(b"line 0009\nline 0010\nline 0011\nline 0012\nline 0013\nline 0014\n")
    )
    for number in range(15, 40):  # it stays within a bound all the same
        log.write(b"line %04d\n" % number)
        assert (tmp_path / "child.log").stat().st_size <= 220
    in_use = False
    for number in range(40, 60):
        log.write(b"line %04d\n" % number)
    log.close()
    kept = sorted(tmp_path.iterdir(), reverse=True)
    assert [path.name for path in kept] == ["child.log.2", "child.log.1", "child.log"]
    joined = b"".join(path.read_bytes() for path in kept)
    assert joined.endswith(b"".join(b"line %04d\n" % number for number in range(40, 60)))


@pytest.mark.parametrize("obstacle", ["symlink", "folder", "fifo", "no folder"])
def test_only_regular_file_of_this_user_is_written(
    open_pump: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    path, victim = tmp_path / "child.log", tmp_path / "victim"
    victim.write_bytes(b"precious")
    match obstacle:
        case "symlink":
            path.symlink_to(victim)
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path = tmp_path / "gone" / "child.log"
    with caplog.at_level(logging.WARNING):
        pump, write_fd = open_pump(path=path)
        assert tail_after(pump, write_fd, b"still here\n") == ("still here",)
    assert str(path) in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert victim.read_bytes() == b"precious"


def test_full_disk_is_logged_once_and_reading_continues(
    open_pump: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        return real(path, flags, mode) if path.name != "child.log" else real("/dev/full", os.O_WRONLY)

    real = os.open
    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)  # /dev/full is a device that is always full
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    with caplog.at_level(logging.WARNING):
        pump, write_fd = open_pump(path=tmp_path / "child.log")
        tail_after(pump, write_fd, b"line\n" * 100_000)
    assert pump.bytes_seen == 500_000
    (record,) = caplog.records
    assert record.getMessage().endswith(f"{tmp_path / 'child.log'}: No space left on device")


# --- watching --------------------------------------------------------------------------------------


def test_watch_reports_matching_lines_with_earlier_ones(open_pump: Open) -> None:
    async def scenario() -> list[str]:
        pump, write_fd = open_pump()
        received: list[str] = []
        both = asyncio.Event()

        def on_line(line: str) -> None:
            received.append(line)
            if len(received) == 2:
                both.set()

        write_all(write_fd, b"model loaded\nnoise\n")
        while not pump.tail():  # noqa: ASYNC110 - what is waited for happens in a thread
            await asyncio.sleep(0)
        pump.watch(re.compile(rb"model loaded|listening on"), on_line)
        write_all(write_fd, b"more noise\n... listening on unix:///s\nlisten")
        await both.wait()
        await pump.aclose(0)
        return received

    assert asyncio.run(scenario()) == ["model loaded", "... listening on unix:///s"]


def test_watch_of_a_closed_loop_is_ignored(open_pump: Open) -> None:
    pump, write_fd = open_pump()

    async def watch() -> None:
        pump.watch(re.compile(rb"x"), lambda line: None)

    asyncio.run(watch())
    assert tail_after(pump, write_fd, b"x\ny\n") == ("x", "y")


# --- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "aclose"])
def test_closing_is_bounded_and_reads_the_rest_while_the_pipe_is_open(open_pump: Open, how: str) -> None:
    pump, write_fd = open_pump()
    write_all(write_fd, b"last words\n")
    if how == "close":
        pump.close(0)
    else:
        asyncio.run(pump.aclose(0))
    assert pump.tail() == ("last words",)
    with pytest.raises(BrokenPipeError):
        os.write(write_fd, b"not read")


def test_closing_ends_even_while_a_grandchild_floods_the_pipe(open_pump: Open) -> None:
    pump, write_fd = open_pump()

    def flood() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(write_fd, b"flood " * 10_000)

    thread = threading.Thread(target=flood)
    thread.start()
    pump.close(0)
    thread.join()


def test_aclose_waits_for_the_last_lines(open_pump: Open) -> None:
    async def scenario() -> tuple[str, ...]:
        pump, write_fd = open_pump()
        closing = asyncio.ensure_future(pump.aclose(60))  # noqa: TID251
        await asyncio.sleep(0)
        write_all(write_fd, b"last words\n")
        os.close(write_fd)
        await closing
        await pump.aclose(60)  # again, at once
        return pump.tail()

    assert asyncio.run(scenario()) == ("last words",)


def test_a_hundred_pumps_leave_no_descriptor_and_no_thread() -> None:
    def live() -> None:
        read_fd, write_fd = os.pipe()
        pump = LogPump(read_fd)
        write_all(write_fd, b"hello\n")
        os.close(write_fd)
        pump.close(10)

    live()
    before = psutil.Process().num_fds(), threading.active_count()
    for _ in range(100):
        live()
    assert (psutil.Process().num_fds(), threading.active_count()) == before


# --- the cost --------------------------------------------------------------------------------------


def test_a_million_lines_are_drained_and_their_cost_is_printed(
    open_pump: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measure of S19: processor time of the pump, its file included, for 1 M lines of 100 bytes."""
    pump, write_fd = open_pump(path=tmp_path / "child.log")
    block = b"0.00.011.472 I srv  log_server_r: " + b"x" * 65 + b"\n"
    feeder_s = 0.0

    def feed() -> None:
        nonlocal feeder_s
        for _ in range(1000):
            write_all(write_fd, block * 1000)
        feeder_s = time.thread_time()

    before_s = time.process_time()
    feeder = threading.Thread(target=feed)
    feeder.start()
    feeder.join()
    os.close(write_fd)
    pump.close(60)
    cost_s = time.process_time() - before_s - feeder_s
    assert pump.bytes_seen == 1_000_000 * len(block)
    with capsys.disabled():
        print(f"\n1 M lines drained and written: {cost_s:.2f} s of one core")
