"""Kinds of paths, and paths from users."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llamasup.cli.commands.models import rm
from llamasup.core.hub.store import hub_token
from llamasup.core.models.search import cache_folders
from llamasup.core.system.storage.paths import PathKind, expanded, path_kind
from llamasup.errors import ConfigInvalid, ModelMissing, UsageInvalid
from llamasup.features.downloads.command import download_options


def test_known_kinds_are_returned(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    kinds = {
        name: path_kind(tmp_path / name) for name in ("", "file", "pipe", "link", "dangling", "file/x", "\0")
    }
    assert kinds == {
        "": PathKind.FOLDER,
        "file": PathKind.FILE,
        "pipe": PathKind.FILE,
        "link": PathKind.FOLDER,
        "dangling": PathKind.NOTHING,
        "file/x": PathKind.NOTHING,
        "\0": PathKind.NOTHING,
    }


def test_too_long_name_and_symlink_loop_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    assert path_kind(tmp_path / ("n" * 300)) is PathKind.UNKNOWN
    assert path_kind(tmp_path / "circle") is PathKind.UNKNOWN


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE, errno.ENOTCONN, errno.EIO])
def test_dead_share_and_closed_folder_are_unknown(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **_: object) -> os.stat_result:
        raise OSError(error, os.strerror(error), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        kind = path_kind(Path("/mnt/share"))
    assert kind is PathKind.UNKNOWN


UNKNOWN_HOME = "~nobody-has-this-name/models"


def test_home_and_relative_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.chdir(tmp_path)
    assert expanded("~/m") == Path("/home/ann/m")
    assert expanded("m") == tmp_path / "m"


def test_home_of_an_unknown_user_is_an_error() -> None:
    with pytest.raises(ModelMissing, match="there is no user 'nobody-has-this-name'") as raised:
        expanded(UNKNOWN_HOME)
    assert raised.value.remedy.endswith(f"write ./{UNKNOWN_HOME}")
    with pytest.raises(UsageInvalid, match=r"^--folder: ~nobody"):
        expanded(UNKNOWN_HOME, UsageInvalid, of="--folder")


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
        cache_folders((cache,), {variable: UNKNOWN_HOME})
    assert raised.value.message.startswith(f"${variable}: ~nobody")


def test_a_cache_is_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cache_folders(("llama.cpp",), {"LLAMA_CACHE": "c"}) == (tmp_path / "c",)


@pytest.mark.parametrize("variable", ["HF_TOKEN_PATH", "HF_HOME"])
def test_a_token_in_nobodys_home_names_its_variable(variable: str) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        hub_token({variable: UNKNOWN_HOME})
    assert raised.value.message.startswith(f"${variable}: ~nobody")


def test_downloads_and_removals_refuse_such_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageInvalid, match=r"^--folder: ~nobody"):
        download_options(folder=Path(UNKNOWN_HOME))
    assert rm(["x"], folder=Path(UNKNOWN_HOME), yes=True, json=False) == 2
    assert "--folder: ~nobody" in capfd.readouterr().err
