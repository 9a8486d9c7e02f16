"""Where the output of llama-servers is kept."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamasup.system.process.log_tail import MAX_LLAMASUPS, LogFiles


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
