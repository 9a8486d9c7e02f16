"""Folders of models on a real file system, with all files that users and tools leave there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.gguf import files
from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.models import folder as model_folder
from llamasup.core.models.folder import ModelFolder, list_models, pseudo_devices
from llamasup.errors import LlamasupError, ModelMissing
from tests.kit import models
from tests.kit.paths import FIXTURES

List = Callable[[Path], ModelFolder]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> List:
    """``list_models`` with a cache for this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return list_models


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def put(path: Path, content: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(models.tiny_decoder() if content is None else content)
    return path


def shown(folder: ModelFolder, top: Path) -> dict[str, str]:
    """Path below ``top`` → class or error."""
    return {
        os.path.relpath(found.path, top): found.outcome.message.removeprefix(f"{found.path}: ")
        if isinstance(found.outcome, LlamasupError)
        else found.outcome.model_class
        for found in folder.models
    }


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the paths of the opened model files."""
    paths: list[str] = []
    system_open = os.open

    def counted(path: str | Path, *arguments: int, **options: int) -> int:
        if str(path).endswith(".gguf"):
            paths.append(str(path))
        return system_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", counted)
    return paths


# --- the list ------------------------------------------------------------------------------------


def test_models_are_found_in_the_folders_of_downloaders(top: Path, listed: List) -> None:
    put(top / "plain.gguf")
    put(top / "LMSTUDIO/org/repo/UPPER.GGUF", models.tiny_encoder())
    blob = put(top / "hub/models--org--repo/blobs/0123abc")
    snapshot = top / "hub/models--org--repo/snapshots/4567def/Q4/hub.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    put(top / ".cache/hidden.gguf")
    put(top / "readme.md")
    put(top / "half.gguf.part")
    assert shown(listed(top), top) == {
        "hub/models--org--repo/snapshots/4567def/Q4/hub.gguf": ModelClass.DECODER,
        "LMSTUDIO/org/repo/UPPER.GGUF": ModelClass.ENCODER,
        "plain.gguf": ModelClass.DECODER,
    }


def test_split_set_is_one_model(top: Path, listed: List) -> None:
    parts = models.write_split_decoder(top)
    found = listed(top).models
    assert [model.path for model in found] == [str(parts[0])]
    assert isinstance(found[0].outcome, ModelFacts)
    assert found[0].outcome.file_bytes == sum(part.stat().st_size for part in parts)


@pytest.mark.parametrize("missing", [0, 1])
def test_split_set_with_a_missing_part_is_one_broken_model(top: Path, listed: List, missing: int) -> None:
    parts = models.write_split_decoder(top)
    parts[missing].unlink()
    (message,) = shown(listed(top), top).values()
    assert f"part {missing + 1} of" in message
    assert "is missing" in message


def test_broken_file_is_listed_with_its_error(top: Path, listed: List) -> None:
    put(top / "good.gguf")
    put(top / "cut.gguf", models.truncated_decoder(0.25))
    put(top / "empty.gguf", b"")
    put(top / "page.gguf", b"<!DOCTYPE html>" + bytes(100))
    (top / "dangling.gguf").symlink_to("gone")
    (top / "loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(top / "pipe.gguf")
    (top / "zero.gguf").symlink_to("/dev/zero")
    found = shown(listed(top), top)
    assert found.pop("good.gguf") == ModelClass.DECODER
    assert {name: message.split(",")[0][:40] for name, message in found.items()} == {
        "cut.gguf": "truncated: 169040 of 676160 bytes",
        "dangling.gguf": "is a symbolic link to gone",
        "empty.gguf": "the file is empty",
        "loop.gguf": "the symbolic links form a circle",
        "page.gguf": "not a GGUF file: it begins with '<!DOCTY",
        "pipe.gguf": "is a named pipe",
        "zero.gguf": "is a character device",
    }


def test_folder_named_like_a_model_is_a_folder(top: Path, listed: List) -> None:
    put(top / "folder.gguf/inside.gguf")
    assert list(shown(listed(top), top)) == ["folder.gguf/inside.gguf"]


def test_names_outside_utf8_are_listed_and_remembered(top: Path, listed: List, opened: list[str]) -> None:
    path = put(top / os.fsdecode(b"caf\xe9.gguf"))
    assert [model.path for model in listed(top).models] == [str(path)]
    opened.clear()
    assert [model.path for model in listed(top).models] == [str(path)]
    assert opened == []


# --- bounds --------------------------------------------------------------------------------------


def test_circular_links_end(top: Path, listed: List) -> None:
    put(top / "a/b/model.gguf")
    (top / "a/b/up").symlink_to("../..")
    (top / "a/self").symlink_to(".")
    assert list(shown(listed(top), top)) == ["a/b/model.gguf"]


def test_folder_with_two_links_to_it_is_listed_once(top: Path, tmp_path: Path, listed: List) -> None:
    put(tmp_path / "elsewhere/model.gguf")
    (top / "one").symlink_to(tmp_path / "elsewhere")
    (top / "two").symlink_to(tmp_path / "elsewhere")
    assert len(listed(top).models) == 1


def test_folders_are_listed_down_to_a_depth(top: Path, listed: List) -> None:
    put(top / "1/2/3/4/5/6/deep.gguf")
    assert listed(top).notes == ()
    put(top / "1/2/3/4/5/6/7/too-deep.gguf")
    folder = listed(top)
    assert list(shown(folder, top)) == ["1/2/3/4/5/6/deep.gguf"]
    assert folder.notes == ("folders more than 6 levels down were skipped",)


def test_too_deep_folders_are_noted(top: Path, listed: List) -> None:
    put(top / "1/2/3/4/5/6/7/too-deep.gguf")
    assert listed(top) == ModelFolder((), ("folders more than 6 levels down were skipped",))


def test_list_of_too_many_names_is_cut_with_a_note(
    top: Path, listed: List, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "_MAX_ENTRIES", 5)
    for number in range(9):
        put(top / f"{number}.gguf", b"")
    folder = listed(top)
    assert len(folder.models) == 5
    assert folder.notes == ("stopped after 5 names and 5 models",)


def test_unreadable_folder_is_skipped_with_a_note(
    top: Path, listed: List, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces the answer of the system, because root may list every folder."""
    put(top / "open.gguf")
    put(top / "closed/model.gguf")
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    folder = listed(top)
    assert list(shown(folder, top)) == ["open.gguf"]
    assert folder.notes == (f"{top / 'closed'} was skipped: Permission denied",)
    with pytest.raises(ModelMissing, match="may not be read"):
        listed(top / "closed")
    for number in range(5):
        (top / f"{number}-closed").mkdir()
        if number == 2:
            assert listed(top).notes[-1] == "1 more folder was skipped"
    assert listed(top).notes[-1] == "3 more folders were skipped"


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="Linux")
def test_folders_of_the_kernel_are_not_listed(
    top: Path, listed: List, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc and /sys have some 100,000 names and no model."""
    entered: list[str] = []
    scandir = os.scandir

    def noted(path: str) -> object:
        entered.append(str(path))
        return scandir(path)

    put(top / "model.gguf")
    (top / "proc").symlink_to("/proc")
    (top / "sys").symlink_to("/sys")
    (top / "self").symlink_to("/proc/self")
    monkeypatch.setattr(os, "scandir", noted)
    assert list(shown(listed(top), top)) == ["model.gguf"]
    assert [path for path in entered if Path(path).is_relative_to(top)] == [
        str(top)
    ] * 2  # one check, one walk


# --- empty and missing folders -------------------------------------------------------------------


def test_folder_without_models_is_an_empty_list(top: Path, listed: List) -> None:
    put(top / "sub/readme.md")
    assert listed(top) == ModelFolder(())


def test_missing_folder_is_an_error(top: Path, listed: List) -> None:
    with pytest.raises(ModelMissing, match="there is no such file"):
        listed(top / "gone")


# --- the cache -----------------------------------------------------------------------------------


def test_second_list_of_a_folder_opens_no_model_file(top: Path, listed: List, opened: list[str]) -> None:
    for number in range(20):
        put(top / f"{number % 3}/{number}.gguf")
    models.write_split_decoder(top)
    cold = listed(top)
    assert len(opened) == 20 + 3
    opened.clear()
    assert listed(top) == cold
    assert opened == []


def test_list_of_a_folder_is_one_cache_entry(top: Path, tmp_path: Path, listed: List) -> None:
    for number in range(20):
        put(top / f"{number}.gguf")
    listed(top)
    assert len(list((tmp_path / "cache" / "llamasup" / "facts").iterdir())) == 1


def test_only_changed_files_are_read_again(top: Path, listed: List, opened: list[str]) -> None:
    for name in ("stays", "changes", "goes"):
        put(top / f"{name}.gguf")
    listed(top)
    opened.clear()
    put(top / "changes.gguf", models.tiny_encoder())
    put(top / "new.gguf")
    (top / "goes.gguf").unlink()
    assert shown(listed(top), top) == {
        "changes.gguf": ModelClass.ENCODER,
        "new.gguf": ModelClass.DECODER,
        "stays.gguf": ModelClass.DECODER,
    }
    assert opened == [str(top / "changes.gguf"), str(top / "new.gguf")]


def test_changed_part_of_a_set_is_noticed(top: Path, listed: List) -> None:
    parts = models.write_split_decoder(top)
    listed(top)
    os.truncate(parts[2], parts[2].stat().st_size // 2)
    (message,) = shown(listed(top), top).values()
    assert "truncated" in message


def test_broken_file_is_read_again(top: Path, listed: List) -> None:
    put(top / "m.gguf", models.truncated_decoder())
    listed(top)
    put(top / "m.gguf")
    assert shown(listed(top), top) == {"m.gguf": ModelClass.DECODER}


def test_folders_are_listed_without_a_cache(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(top / "m.gguf")
    put(tmp_path / "file", b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert len(list_models(top).models) == 1


def test_file_that_returns_during_the_list_is_listed(
    top: Path, listed: List, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(top / "m.gguf")
    away = shutil.move(path, top / "away")
    (top / "m.gguf").symlink_to("nowhere")
    read_uncached = files.read_uncached

    def back(path: Path) -> object:
        path.unlink()
        shutil.move(away, path)
        return read_uncached(path)

    monkeypatch.setattr(model_folder, "read_uncached", back)
    assert shown(listed(top), top) == {"m.gguf": ModelClass.DECODER}


def test_folder_that_disappears_is_missing_not_empty(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "sub").mkdir()
    (top / "sub/x.gguf").write_bytes(models.tiny_decoder())
    listing = os.scandir

    def go(folder: str | Path) -> object:
        found = listing(folder)
        if folder == str(top):
            top.rename(top.with_name("away"))
        return found

    with monkeypatch.context() as patch, pytest.raises(ModelMissing):
        patch.setattr(os, "scandir", go)
        list_models(top)


# --- kernel file systems


def test_kernel_file_systems_are_skipped_but_not_tmpfs() -> None:
    mountinfo = (
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "23 27 0:22 / /sys rw,relatime shared:7 - sysfs sysfs rw\n"
        "24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12334460k\n"
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw\n"
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    )
    assert pseudo_devices(mountinfo) == {(0, 21), (0, 22), (0, 6)}


def test_every_machine_has_kernel_file_systems() -> None:
    for mountinfo in FIXTURES.glob("hardware/*/proc/self/mountinfo"):
        assert pseudo_devices(mountinfo.read_text()), mountinfo


def test_invalid_lines_of_mountinfo_are_ignored() -> None:
    assert (
        pseudo_devices("22 27\n22 27 x:y / / rw - proc\n22 27 0: / / rw - proc\n0 0 0:1 / / rw - \n") == set()
    )
    assert pseudo_devices(f"22 27 {'9' * 5000}:1 / /proc rw - proc proc rw") == set()


@given(st.text())
def test_no_mountinfo_raises(text: str) -> None:
    pseudo_devices(text)
