"""What is at a path, where asking Path itself would raise."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llamasup.system.storage.paths import PathKind, path_kind


def test_known_kinds_are_returned(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    told = {
        name: path_kind(tmp_path / name) for name in ("", "file", "pipe", "link", "dangling", "file/x", "\0")
    }
    assert told == {
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
