"""Log files of llama-servers: their names, reading their end, and following them through rotations."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamasup.core.system.process.log_tail import LINES_SKIPPED, MAX_LLAMASUPS, LogFiles, LogTail
from llamasup.core.system.process.output_pump import RotatedFile


@contextmanager
def tail(path: Path, lines: int) -> Iterator[LogTail]:
    log = LogTail(path, lines)
    try:
        yield log
    finally:
        log.close()


def rest(log: LogTail) -> bytes:
    """All that there is for now."""
    return b"".join(iter(log.read, b""))


def numbered(*numbers: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in numbers)


@pytest.mark.parametrize(
    ("content", "lines", "seen"),
    [
        (numbered(*range(5)), 2, numbered(3, 4)),
        (numbered(*range(5)), 5, numbered(*range(5))),
        (numbered(*range(5)), 99, numbered(*range(5))),
        (numbered(*range(5)), 0, b""),
        (numbered(*range(5)) + b"half", 1, b"half"),
        (numbered(*range(5)) + b"half", 2, numbered(4) + b"half"),
        (numbered(*range(50_000)), 3, numbered(49_997, 49_998, 49_999)),
        (numbered(*range(50_000)), 20_000, numbered(*range(30_000, 50_000))),
        (b"\n\n\n", 2, b"\n\n"),
        (b"no end", 1, b"no end"),
        (b"", 5, b""),
    ],
)
def test_the_last_lines_are_read(tmp_path: Path, content: bytes, lines: int, seen: bytes) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(content)
    with tail(path, lines) as log:
        assert rest(log) == seen


def test_older_files_supply_missing_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(numbered(4, 5))
    path.with_name("a.log.1").write_bytes(numbered(2, 3))
    path.with_name("a.log.2").write_bytes(numbered(0, 1))
    for count in range(8):
        with tail(path, count) as log:
            assert rest(log) == numbered(*range(max(0, 6 - count), 6)), count


def test_later_lines_are_read_through_rotations(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    written = RotatedFile(path, max_bytes=40, files=3)  # five lines a file
    written.write(numbered(0))
    with tail(path, 10) as log:
        assert rest(log) == numbered(0)
        assert log.read() == b""
        seen = []
        for number in range(1, 100):
            written.write(numbered(number))
            if number % 3 == 0:
                seen.append(rest(log))
        assert b"".join(seen) == numbered(*range(1, 100))
    written.close()


def test_a_reader_two_rotations_behind_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    written = RotatedFile(path, max_bytes=40, files=3)
    written.write(numbered(0))
    with tail(path, 10) as log:
        for number in range(1, 12):
            written.write(numbered(number))
        assert rest(log) == numbered(*range(12))
    written.close()


def test_lines_lost_by_rotation_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    written = RotatedFile(path, max_bytes=40, files=3)
    written.write(numbered(0))
    with tail(path, 10) as log:
        assert rest(log) == numbered(0)
        for number in range(1, 50):
            written.write(numbered(number))
        before, reported, after = rest(log).partition(LINES_SKIPPED)
        assert reported
        assert before == numbered(1, 2, 3, 4)  # of the file that was open
        assert after.endswith(numbered(48, 49))
        assert b"line 4\n" not in after
    written.close()


def test_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(numbered(1, 2, 3))
    with tail(path, 10) as log:
        assert rest(log) == numbered(1, 2, 3)
        path.write_bytes(numbered(4))
        assert rest(log) == numbered(4)


def test_missing_log_symlink_and_folder_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogTail(tmp_path / "a.log", 5)
    (tmp_path / "b.log").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=r"symbolic|symlink"):
        LogTail(tmp_path / "b.log", 5)
    (tmp_path / "c.log").mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        LogTail(tmp_path / "c.log", 5)


def test_a_closed_one_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(numbered(1))
    log = LogTail(path, 10)
    log.close()
    log.close()
    assert log.read() == b""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def logs() -> Iterator[LogFiles]:
    logs = LogFiles()
    yield logs
    logs.close()


def test_a_log_has_the_name_of_its_model(state: Path, logs: LogFiles) -> None:
    assert logs.path_of("tiny-Q4_K.M") == state / "logs/tiny-Q4_K.M.log"


def test_no_two_models_write_one_log(logs: LogFiles) -> None:
    names = ["a/b", "a:b", "a_b", "a@b", "tiny", "tiny~1", "tiny.1", "x" * 255, "x" * 256, "é/", "", "_"]
    assert len({logs.path_of(each) for each in names}) == len(names)


@pytest.mark.parametrize("model", ["x" * 256, "\U00020000" * 256, "../" * 80, "..", "\udcff" * 9, "a\0b"])
def test_log_can_be_written_for_any_model_name(model: str, state: Path, logs: LogFiles) -> None:
    path = logs.path_of(model)
    assert path is not None
    assert path.parent == state / "logs"
    path.with_name(f"{path.name}.9").write_bytes(b"")


def test_two_llamasups_that_serve_a_model_of_one_name_have_a_log_each(state: Path, logs: LogFiles) -> None:
    other = LogFiles()
    try:
        assert logs.path_of("tiny") == state / "logs/tiny.log"
        assert other.path_of("tiny") == state / "logs/2/tiny.log"
        assert other.path_of("big") == state / "logs/big.log"
        assert logs.path_of("tiny") == state / "logs/tiny.log", "it keeps its own"
    finally:
        other.close()
    assert stat.S_IMODE((state / "logs/2").stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "logs/tiny.lock").stat().st_mode) == 0o600


def test_the_next_llamasup_takes_the_first_log_that_is_free(state: Path) -> None:
    first, second, third = LogFiles(), LogFiles(), LogFiles()
    assert first.path_of("tiny") == state / "logs/tiny.log"
    assert second.path_of("tiny") == state / "logs/2/tiny.log"
    first.close()
    first.close()
    assert third.path_of("tiny") == state / "logs/tiny.log"
    second.close()
    third.close()


def test_number_of_logs_of_one_name_is_limited(
    state: Path, logs: LogFiles, caplog: pytest.LogCaptureFixture
) -> None:
    others = [LogFiles() for _ in range(MAX_LLAMASUPS)]
    paths = [each.path_of("tiny") for each in others]
    assert len({*paths, None}) == MAX_LLAMASUPS + 1
    assert logs.path_of("tiny") is None
    assert "is not kept" in caplog.text
    for each in others:
        each.close()


def test_symlink_at_the_lock_file_is_not_followed(
    state: Path, logs: LogFiles, tmp_path_factory: pytest.TempPathFactory
) -> None:
    victim = tmp_path_factory.mktemp("victim") / "file"
    (state / "logs").mkdir(mode=0o700)
    (state / "logs/tiny.lock").symlink_to(victim)
    assert logs.path_of("tiny") == state / "logs/tiny.log"
    assert not victim.exists()
