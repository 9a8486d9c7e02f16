"""Where the output of llama-servers is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.effects.log_files import log_path_of


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    return tmp_path


def name_of(model: str) -> str:
    path = log_path_of(model)
    assert path is not None
    return path.name


def test_a_log_has_the_name_of_its_model(state: Path) -> None:
    assert log_path_of("tiny-Q4_K.M") == state / "logs/tiny-Q4_K.M.log"


def test_no_two_models_write_one_log() -> None:
    names = ["a/b", "a:b", "a_b", "a@b", "tiny", "tiny~1", "tiny.1", "x" * 255, "x" * 256, "é/", "", "_"]
    assert len({name_of(each) for each in names}) == len(names)


@pytest.mark.parametrize("model", ["x" * 256, "\U00020000" * 256, "../" * 80, "..", "\udcff" * 9, "a\0b"])
def test_whatever_a_model_is_called_its_log_can_be_written(model: str, state: Path) -> None:
    path = log_path_of(model)
    assert path is not None
    assert path.parent == state / "logs"
    path.with_name(f"{path.name}.9").write_bytes(b"")
