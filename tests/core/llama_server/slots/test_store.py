"""Saved slots on the disk: private, checked, used once, limited, and removed with their model."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.slots.policy import STRAY_AFTER_S, KeptSlots, SavedSet, file_name, list_name
from llamasup.core.llama_server.slots.store import SlotStore, Taken, slot_home, sweep_slots
from llamasup.core.system.storage.folders import cache_folder
from tests.kit.models import write_split_decoder

KEY, OTHER_KEY = "0" * 32, "1" * 32
LONG_AGO_S = STRAY_AFTER_S + 60


class Disk:
    """A model and a slot folder, with methods that write there like llama-server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "slots"
        self.model = folder / "tiny.gguf"
        self.model.write_bytes(b"weights")
        home = slot_home(self.model, [], make=False)
        assert home is not None
        self.files = home.files

    def store(self, most_bytes: int = 1 << 20) -> SlotStore:
        return SlotStore(self.folder, most_bytes)

    def kept(self, key: str = KEY) -> KeptSlots:
        return KeptSlots(str(self.folder), key, 2, self.files)

    def writes(self, saved: SavedSet, number: int, content: bytes) -> Path:
        path = self.folder / file_name(saved.key, saved.token, number)
        path.write_bytes(content)
        path.chmod(0o644)
        return path

    def saves(self, *contents: bytes, key: str = KEY, most_bytes: int = 1 << 20) -> SavedSet:
        store = self.store(most_bytes)
        saved = store.new_set(self.kept(key))
        for number, content in enumerate(contents):
            self.writes(saved, number, content)
            more = store.add(saved, number, 100)
            assert more is not None
            saved = more
        store.commit(saved)
        return saved

    def take(self, key: str = KEY) -> Taken:
        taken = self.store().take(key)
        assert taken is not None
        return taken

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def age(self, name: str, seconds: float) -> None:
        then = time.time_ns() - int(seconds * 1e9)
        os.utime(self.folder / name, ns=(then, then))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


# --- once and only once -----------------------------------------------------------------------------


def test_saved_set_is_taken_once(disk: Disk) -> None:
    saved = disk.saves(b"one", b"two")
    taken = disk.take()
    assert (taken.saved, taken.damaged) == (saved, 0)
    assert disk.store().take(KEY) is None
    assert disk.names() == {slot.name for slot in saved.slots}  # llama-server has yet to read them
    disk.store().discard(saved)
    assert disk.names() == set()


def test_newest_set_of_the_same_plan_is_taken(disk: Disk) -> None:
    older, newer = disk.saves(b"older"), disk.saves(b"newer")
    disk.saves(b"other", key=OTHER_KEY)
    for expected in (newer, older):
        assert disk.take().saved == expected
    assert disk.store().take(KEY) is None
    assert disk.store().take(OTHER_KEY) is not None


def test_set_taken_by_another_process_is_skipped(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = disk.saves(b"one")
    store = disk.store()
    monkeypatch.setattr(store, "_sets", lambda: [saved])
    assert disk.store().take(KEY) is not None
    assert store.take(KEY) is None


def test_set_without_list_is_invalid(disk: Disk) -> None:
    saved = disk.saves(b"one")
    (disk.folder / list_name(saved.key, saved.token)).unlink()
    assert disk.store().take(KEY) is None


# --- private ----------------------------------------------------------------------------------------


def test_folder_and_files_are_private(disk: Disk) -> None:
    disk.saves(b"one", b"two")
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in disk.folder.iterdir()} == {0o600}


def test_list_with_other_file_names_is_invalid(disk: Disk, tmp_path: Path) -> None:
    saved = disk.saves(b"one")
    path = disk.folder / list_name(saved.key, saved.token)
    path.write_text(path.read_text().replace(saved.slots[0].name, "../tiny.gguf"))
    assert disk.store().take(KEY) is None
    disk.store(0).new_set(disk.kept())  # room is made
    assert disk.model.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 5000, b"\xff", b'{"key":1}'])
def test_invalid_list_is_ignored_and_removed_later(disk: Disk, content: bytes) -> None:
    saved = disk.saves(b"one")
    name = list_name(saved.key, saved.token)
    (disk.folder / name).write_bytes(content)
    assert disk.store().take(KEY) is None
    for path in disk.names():
        disk.age(path, LONG_AGO_S)
    disk.store().sweep()
    assert disk.names() == set()


# --- whole ------------------------------------------------------------------------------------------


def test_changed_slot_is_removed_from_the_set(disk: Disk) -> None:
    saved = disk.saves(b"one", b"two", b"three", b"four", b"five")
    paths = [disk.folder / slot.name for slot in saved.slots]
    paths[0].write_bytes(b"on")
    paths[1].write_bytes(b"TWO")
    paths[2].unlink()
    paths[3].rename(disk.folder / "elsewhere")
    paths[3].symlink_to(disk.folder / "elsewhere")
    taken = disk.take()
    assert (taken.damaged, [slot.number for slot in taken.saved.slots]) == (4, [4])
    assert disk.names() == {saved.slots[4].name, "elsewhere"}


def test_folder_in_place_of_a_file_is_damaged(disk: Disk) -> None:
    saved = disk.saves(b"one")
    path = disk.folder / saved.slots[0].name
    path.unlink()
    path.mkdir()
    taken = disk.take()
    assert taken.damaged == 1


def test_missing_slot_file_raises_and_leaves_nothing(disk: Disk) -> None:
    store = disk.store()
    saved = store.new_set(disk.kept())
    with pytest.raises(FileNotFoundError):
        store.add(saved, 0, 100)
    path = disk.writes(saved, 1, b"one")
    path.rename(disk.folder / "elsewhere")
    path.symlink_to(disk.folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        store.add(saved, 1, 100)
    assert disk.names() == {"elsewhere"}


def test_failed_commit_leaves_no_files(disk: Disk) -> None:
    store = disk.store()
    saved = store.new_set(disk.kept())
    disk.writes(saved, 0, b"one")
    more = store.add(saved, 0, 100)
    assert more is not None
    shutil.rmtree(disk.folder)
    with pytest.raises(FileNotFoundError):
        store.commit(more)


# --- bounded ----------------------------------------------------------------------------------------


def test_oldest_set_is_removed_for_a_new_one(disk: Disk) -> None:
    first, second = disk.saves(b"x" * 400, most_bytes=1000), disk.saves(b"x" * 400, most_bytes=1000)
    third = disk.saves(b"x" * 400, most_bytes=1000)
    names = {name for saved in (second, third) for name in (saved.slots[0].name, list_name(KEY, saved.token))}
    assert disk.names() == names
    assert first.slots[0].name not in names


def test_slot_over_the_limit_is_not_saved_and_removes_nothing(disk: Disk) -> None:
    other = disk.saves(b"x" * 600, most_bytes=1000)
    store = disk.store(1000)
    saved = store.new_set(disk.kept())
    disk.writes(saved, 0, b"x" * 1001)
    assert store.add(saved, 0, 100) is None
    assert disk.names() == {other.slots[0].name, list_name(KEY, other.token)}


def test_concurrent_saves_stay_within_the_limit(disk: Disk) -> None:
    store = disk.store(1000)
    both = [store.new_set(disk.kept(key)) for key in (KEY, OTHER_KEY)]
    for saved in both:
        disk.writes(saved, 0, b"x" * 600)
    listed = [store.add(saved, 0, 100) for saved in both]
    complete = [larger for larger in listed if larger is not None]
    assert len(complete) == 2
    for larger in complete:
        store.commit(larger)
    newest = max(complete, key=lambda larger: larger.saved_ns)
    assert disk.names() == {newest.slots[0].name, list_name(newest.key, newest.token)}


def test_lower_limit_applies_at_the_next_save(disk: Disk) -> None:
    disk.saves(b"x" * 600)
    disk.store(500).new_set(disk.kept())
    assert disk.names() == set()


# --- gone with their model --------------------------------------------------------------------------


def test_set_is_removed_when_its_model_changes(disk: Disk) -> None:
    disk.saves(b"one")
    disk.store().sweep()
    assert disk.names()
    disk.model.write_bytes(b"other weights")
    disk.store().sweep()
    assert disk.names() == set()


def test_stray_slot_files_are_removed_and_other_files_kept(disk: Disk) -> None:
    saved = disk.saves(b"one")
    young, old, foreign = file_name(KEY, "a" * 16, 0), file_name(KEY, "b" * 16, 0), "notes.txt"
    for name in (young, old, foreign):
        (disk.folder / name).write_bytes(b"x")
    for name in (old, foreign, saved.slots[0].name):
        disk.age(name, LONG_AGO_S)
    disk.store().sweep()
    assert disk.names() == {young, foreign, saved.slots[0].name, list_name(KEY, saved.token)}


def test_files_of_a_taken_set_are_not_stray(disk: Disk) -> None:
    saved = disk.saves(b"one")
    disk.age(saved.slots[0].name, LONG_AGO_S)
    assert disk.store().take(KEY) is not None
    disk.store().sweep()
    assert disk.names() == {saved.slots[0].name}


def test_sweep_removes_sets_of_a_removed_model(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    sweep_slots()  # nothing there yet, and nothing is made
    home = slot_home(disk.model, [], make=True)
    assert home is not None
    disk.folder = Path(home.folder)
    assert disk.folder == cache_folder() / "slots"
    disk.saves(b"one")
    disk.model.unlink()
    sweep_slots()
    assert disk.names() == set()


# --- what a server is started from ------------------------------------------------------------------


def test_slot_home_lists_every_model_file(tmp_path: Path) -> None:
    parts = write_split_decoder(tmp_path)
    loras = [tmp_path / name for name in ("mmproj.gguf", "one.gguf", "two.gguf")]
    for number, path in enumerate(loras):
        path.write_bytes(b"x" * number)
    words = [
        str(loras[0]),
        "--lora-scaled",
        f"{loras[1]},{loras[2]}:0.5",
        str(tmp_path / "missing"),
        "-1",
        "",
    ]
    home = slot_home(parts[0], words, make=False)
    assert home is not None
    assert [path for path, _, _ in home.files] == [str(path) for path in (*parts, *loras)]
    assert [size for _, size, _ in home.files] == [path.stat().st_size for path in (*parts, *loras)]
    os.utime(parts[2], (1, 1))
    assert slot_home(parts[0], words, make=False) != home


def test_no_slot_home_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("CACHE_DIRECTORY", str(blocked))
    assert slot_home(tmp_path / "x.gguf", [], make=True) is None
    sweep_slots()


def test_clock_that_went_backwards_is_harmless(disk: Disk) -> None:
    saved = disk.saves(b"one")
    store = disk.store()
    early = replace(saved, saved_ns=-1)
    store.commit(early)
    taken = store.take(KEY)
    assert taken is not None
    assert taken.saved == early
