"""A path that leads to nobody's home is said to, by whatever gave it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamasup.cli.commands.pull import PullOptions
from llamasup.cli.commands.rm import rm
from llamasup.downloads.hub_settings import hub_token
from llamasup.errors import ConfigInvalid, ModelMissing, UsageInvalid
from llamasup.models.search import cache_folders
from llamasup.system.storage.paths import expanded

NOBODY = "~nobody-has-this-name/models"


def test_home_and_relative_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.chdir(tmp_path)
    assert expanded("~/m") == Path("/home/ann/m")
    assert expanded("m") == tmp_path / "m"


def test_home_of_an_unknown_user_is_an_error() -> None:
    with pytest.raises(ModelMissing, match="there is no user 'nobody-has-this-name'") as raised:
        expanded(NOBODY)
    assert raised.value.remedy.endswith(f"write ./{NOBODY}")
    with pytest.raises(UsageInvalid, match=r"^--folder: ~nobody"):
        expanded(NOBODY, UsageInvalid, of="--folder")


def test_missing_current_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")  # noqa: PTH106 - the current one
    with pytest.raises(ModelMissing, match="the current folder no longer exists"):
        expanded("m")


@pytest.mark.parametrize(
    ("variable", "cache"),
    [
        ("LLAMA_CACHE", "llama.cpp"),
        ("HF_HUB_CACHE", "huggingface"),
        ("HF_HOME", "huggingface"),
    ],
)
def test_a_cache_in_nobodys_home_names_its_variable(variable: str, cache: str) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        cache_folders((cache,), {variable: NOBODY})
    assert raised.value.message.startswith(f"${variable}: ~nobody")


def test_a_cache_is_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cache_folders(("llama.cpp",), {"LLAMA_CACHE": "c"}) == (tmp_path / "c",)


@pytest.mark.parametrize("variable", ["HF_TOKEN_PATH", "HF_HOME"])
def test_a_token_in_nobodys_home_names_its_variable(variable: str) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        hub_token({variable: NOBODY})
    assert raised.value.message.startswith(f"${variable}: ~nobody")


def test_downloads_and_removals_refuse_such_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageInvalid, match=r"^--folder: ~nobody"):
        PullOptions(folder=Path(NOBODY)).for_downloads()
    assert rm(["x"], folder=Path(NOBODY), yes=True, json=False) == 2
    assert "--folder: ~nobody" in capfd.readouterr().err
