from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.core.settings.units import Size
from llamasup.errors import Conflict, FolderUnusable
from llamasup.features.batch.api.objects import StorageLimit, StoredBatch, StoredFile, ended
from llamasup.features.batch.api.store import DATABASE, Store, new_batch_id, new_file_id
from llamasup.features.batch.settings import Batches

ANNA, BEN = "key:anna", "key:ben"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "api"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with closing(Store(folder)) as opened:
        yield opened


def add(store: Store, id_: str, owner: str = ANNA, *, size: int = 3, purpose: str = "batch") -> StoredFile:
    file = StoredFile(id_, owner, purpose, "in.jsonl", size, 100, 200)
    store.part_path_of(id_).write_bytes(b"x" * size)
    store.add_file(file)
    return file


def batch_of(file: StoredFile, id_: str = "batch_1") -> StoredBatch:
    return StoredBatch(id_, file.owner, file.id, "/v1/completions", "24h", 100, 100 + 86_400)


def ids(found: object) -> list[str]:
    return [one.id for one in found]  # type: ignore[attr-defined]


def test_files_belong_to_their_owner(store: Store) -> None:
    file = add(store, "f1")
    add(store, "f2", BEN, size=5)
    assert store.file(ANNA, "f1") == file
    assert store.file(BEN, "f1") is None
    assert ids(store.files(ANNA, after=None, limit=10)) == ["f1"]
    assert store.count_files(ANNA) == 1
    assert store.held_bytes() == 8
    assert store.path_of("f1").read_bytes() == b"xxx"


def test_list_of_files_has_pages_in_both_orders(store: Store) -> None:
    for number in range(4):
        add(store, f"f{number}", purpose="batch" if number != 2 else "batch_output")
    assert ids(store.files(ANNA, after=None, limit=2)) == ["f3", "f2"]
    assert ids(store.files(ANNA, after="f2", limit=2)) == ["f1", "f0"]
    assert ids(store.files(ANNA, after="f1", limit=9, oldest_first=True)) == ["f2", "f3"]
    assert ids(store.files(ANNA, after=None, limit=9, purpose="batch_output")) == ["f2"]
    assert ids(store.files(ANNA, after="unknown", limit=9)) == []


def test_batches_are_taken_in_the_order_of_their_creation(store: Store) -> None:
    first, second = batch_of(add(store, "f1"), "b1"), batch_of(add(store, "f2", BEN), "b2")
    for batch in (first, second):
        store.save_batch(batch)
    assert list(store.unfinished()) == [first, second]
    store.save_batch(ended(first, "completed", 150))
    assert list(store.unfinished()) == [second]
    assert store.count_unfinished(ANNA) == 0
    assert store.count_unfinished(BEN) == 1
    assert store.batch(ANNA, "b1") == ended(first, "completed", 150)
    assert store.batch(ANNA, "b2") is None
    assert ids(store.batches(ANNA, after=None, limit=5)) == ["b1"]
    assert ids(store.batches(ANNA, after="b1", limit=5)) == []


def test_batch_ends_together_with_its_files(store: Store) -> None:
    batch = batch_of(add(store, "f1"))
    store.save_batch(batch)
    store.part_path_of("out").write_bytes(b"answers")
    output = StoredFile("out", ANNA, "batch_output", "out.jsonl", 7, 150, 900)
    store.save_batch(ended(batch, "completed", 150, output_file_id="out"), [output])
    assert store.file(ANNA, "out") == output
    assert store.path_of("out").read_bytes() == b"answers"


def test_expired_files_go_but_not_those_that_a_batch_reads(store: Store) -> None:
    batch = batch_of(add(store, "read"))
    store.save_batch(batch)
    add(store, "old")
    assert store.remove_expired(199, 0) == 0
    assert store.remove_expired(200, 0) == 1
    assert ids(store.files(ANNA, after=None, limit=9)) == ["read"]
    assert not store.path_of("old").exists()
    assert store.is_in_use("read")
    store.save_batch(ended(batch, "cancelled", 150))
    assert not store.is_in_use("read")
    assert store.remove_expired(200, 149) == 1
    assert ids(store.batches(ANNA, after=None, limit=9)) == [batch.id]  # its days begin with its end
    assert store.remove_expired(200, 150) == 0
    assert store.batches(ANNA, after=None, limit=9) == []


def test_file_whose_content_is_gone_can_be_removed(store: Store) -> None:
    add(store, "f1")
    store.path_of("f1").unlink()
    store.remove_file("f1")
    assert store.count_files(ANNA) == 0


def test_next_start_removes_what_a_kill_has_left_and_nothing_of_others(folder: Path) -> None:
    with closing(Store(folder)) as store:
        batch = batch_of(add(store, new_file_id()), new_batch_id())
        store.save_batch(batch)
        store.part_path_of(new_file_id()).write_bytes(b"to")
        store.path_of(new_file_id()).write_bytes(b"x")
        store.path_of("letter.txt").write_bytes(b"of the user")
        run = store.run_folder(batch.id)
        over = store.run_folder(new_batch_id())
        of_user = store.run_folder("photos")
    with closing(Store(folder)) as store:
        left = sorted(path.name for path in (folder / "files").iterdir())
        assert left == [batch.input_file_id, "letter.txt"]
        assert run.exists()
        assert of_user.exists()
        assert not over.exists()
        store.remove_run(batch.id)
        assert not run.exists()
        assert list(store.unfinished()) == [batch]


@pytest.mark.check("X13")
@pytest.mark.parametrize(
    "names",
    [("a.txt",), ("files/a.txt",), ("running/batch_1/a",), ("lock",), ("lost+found/x", "files/a")],
    ids=str,
)
def test_folder_with_files_of_the_user_is_refused_and_unchanged(tmp_path: Path, names: Sequence[str]) -> None:
    """``batches.folder`` may name any folder by mistake."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    for path in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    before = everything_in(tmp_path)
    with pytest.raises(FolderUnusable, match="it has other files") as raised:
        Store(tmp_path)
    assert "empty folder" in raised.value.remedy
    assert everything_in(tmp_path) == before


def everything_in(folder: Path) -> Mapping[Path, tuple[int, str]]:
    """The mode of each path, and the text of each file."""
    paths = (folder, *folder.rglob("*"))
    return {path: (path.stat().st_mode, path.read_text() if path.is_file() else "") for path in paths}


@pytest.mark.parametrize("name", ["", "lost+found"])
def test_empty_folder_of_the_user_is_used_with_its_mode(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    tmp_path.chmod(0o755)
    for _ in range(2):
        Store(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    for inner in ("files", "running"):
        assert stat.S_IMODE((tmp_path / inner).stat().st_mode) == 0o700


def test_files_of_the_user_in_a_used_folder_stay(folder: Path) -> None:
    Store(folder).close()
    kept = [folder / name for name in ("files/a.txt", "files/file-1", "running/mine/b", "c")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    Store(folder).close()
    assert [path.read_text() for path in kept] == ["mine"] * 4


@pytest.mark.parametrize("version", [0, 1])
def test_database_of_another_program_is_refused_and_unchanged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "batches.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"CREATE TABLE own (x); PRAGMA user_version = {version};")
    before = path.read_bytes()
    with pytest.raises(FolderUnusable, match="belongs to another program"):
        Store(tmp_path)
    assert path.read_bytes() == before
    assert not (tmp_path / "files").exists()


def test_contents_without_a_row_are_removed_while_llamasup_runs_but_not_those_that_arrive(
    store: Store,
) -> None:
    kept, lost, arrives = add(store, new_file_id()).id, new_file_id(), new_file_id()
    store.path_of(lost).write_bytes(b"x")
    store.part_path_of(arrives).write_bytes(b"x")
    store.reserve(arrives, ANNA, 1, Batches())
    store.remove_expired(100, 0)
    assert store.path_of(kept).exists()
    assert store.part_path_of(arrives).exists()
    assert not store.path_of(lost).exists()
    store.release(arrives)
    store.remove_expired(100, 0)
    assert not store.part_path_of(arrives).exists()


@pytest.mark.check("X8", "removed within ten minutes")
def test_no_content_stays_if_its_row_cannot_be_written(store: Store, folder: Path) -> None:
    too_late = replace(add(store, "f1"), id="f2", expires_at=10**40)
    store.part_path_of("f2").write_bytes(b"x")
    with pytest.raises(OverflowError):
        store.add_file(too_late)
    store._db.execute("CREATE TRIGGER full AFTER INSERT ON batches BEGIN SELECT RAISE(ABORT, ''); END")
    store.part_path_of("out").write_bytes(b"x")
    with pytest.raises(FolderUnusable):
        store.save_batch(batch_of(too_late), [replace(too_late, id="out", expires_at=1)])
    assert ids(store.files(ANNA, after=None, limit=9)) == ["f1"]
    assert [path.name for path in (folder / "files").iterdir() if path.name[0] != "."] == ["f1"]


@pytest.mark.check("X8", "400 storage_limit")
def test_files_that_arrive_at_one_time_stay_within_the_bounds_together(store: Store) -> None:
    bounds = Batches(disk=Size(bytes=10), max_files=3)
    add(store, "f1", size=4)
    store.reserve("a", ANNA, 4, bounds)
    with pytest.raises(StorageLimit, match="all clients"):
        store.reserve("b", BEN, 3, bounds)
    store.reserve("b", ANNA, 2, bounds)
    with pytest.raises(StorageLimit, match="3 files"):
        store.reserve("c", ANNA, 0, bounds)
    store.part_path_of("a").write_bytes(b"x" * 4)
    store.add_file(StoredFile("a", ANNA, "batch", "in.jsonl", 4, 100, 200))
    store.reserve("b", ANNA, 2, bounds)  # what has arrived counts once
    store.release("b")
    store.reserve("c", BEN, 2, bounds)


def test_one_llamasup_at_a_time_uses_the_folder(store: Store, folder: Path) -> None:
    with pytest.raises(Conflict, match="Another llamasup"):
        Store(folder)


def newer(folder: Path) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        database.execute("PRAGMA user_version = 99")


def in_place_of(folder: Path, make: Callable[[Path], None]) -> None:
    folder.rename(folder.with_name(f"{folder.name}-used"))
    make(folder)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (newer, "newer"),
        (lambda folder: (folder / DATABASE).write_bytes(b"no database" * 1000), "cannot be used"),
        (lambda folder: in_place_of(folder / DATABASE, Path.mkdir), "Is a directory"),
        (lambda folder: folder.chmod(0o770), "0770"),
        (lambda folder: in_place_of(folder, Path.touch), "folder"),
        (lambda folder: in_place_of(folder, lambda path: path.symlink_to("nowhere")), "folder"),
    ],
    ids=["newer", "damaged", "no file", "others can write", "a file", "a link"],
)
def test_folder_that_cannot_be_used_is_refused(
    folder: Path, spoil: Callable[[Path], object], why: str
) -> None:
    Store(folder).close()
    spoil(folder)
    with pytest.raises(FolderUnusable, match=why):
        Store(folder)


def test_id_that_is_used_changes_nothing(store: Store) -> None:
    file = add(store, "f1")
    with pytest.raises(FolderUnusable):
        add(store, "f1")
    assert store.files(ANNA, after=None, limit=9) == [file]
    assert store.path_of("f1").exists()
    assert replace(file, id="f2") not in store.files(ANNA, after=None, limit=9)


def test_batch_is_replaced_only_if_it_is_as_known(store: Store) -> None:
    batch = batch_of(add(store, "f1"))
    store.save_batch(batch)
    begun = replace(batch, status="in_progress")
    assert store.replace_batch(batch, begun)
    assert not store.replace_batch(batch, ended(batch, "cancelled", 150))
    assert store.batch(ANNA, batch.id) == begun
    assert store.replace_batch(begun, ended(begun, "cancelled", 150))
    assert not store.unfinished()
