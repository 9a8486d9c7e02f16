from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamasup.batch.api.objects import StoredBatch, StoredFile, ended
from llamasup.batch.api.store import Store
from llamasup.errors import Conflict, FolderUnusable

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


def test_next_start_removes_what_a_kill_has_left(folder: Path) -> None:
    with closing(Store(folder)) as store:
        batch = batch_of(add(store, "f1"))
        store.save_batch(batch)
        store.part_path_of("torn").write_bytes(b"to")
        store.path_of("unknown").write_bytes(b"x")
        run = store.run_folder(batch.id)
        over = store.run_folder("batch_over")
    with closing(Store(folder)) as store:
        assert sorted(path.name for path in (folder / "files").iterdir()) == ["f1"]
        assert run.exists()
        assert not over.exists()
        store.remove_run(batch.id)
        assert not run.exists()
        assert list(store.unfinished()) == [batch]


def test_one_llamasup_at_a_time_uses_the_folder(store: Store, folder: Path) -> None:
    with pytest.raises(Conflict, match="Another llamasup"):
        Store(folder)


def test_folder_of_a_newer_llamasup_is_refused(folder: Path) -> None:
    Store(folder).close()
    with closing(sqlite3.connect(folder / "batches.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(FolderUnusable, match="newer"):
        Store(folder)


def test_damaged_file_is_reported(folder: Path) -> None:
    Store(folder).close()
    (folder / "batches.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(FolderUnusable, match="cannot be used"):
        Store(folder)


def test_id_that_is_used_changes_nothing(store: Store) -> None:
    file = add(store, "f1")
    with pytest.raises(FolderUnusable):
        add(store, "f1")
    assert store.files(ANNA, after=None, limit=9) == [file]
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
