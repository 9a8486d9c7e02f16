from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from llamasup.core.system.storage import fact_cache as cache_module
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity, default_cache_folder


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    sizes: tuple[int, ...] = ()
    note: str | None = None


FACT = Fact("tiny", (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "facts"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def cache_in(folder: Path, revision: str = "1") -> FactCache[Fact]:
    return FactCache("fact", Fact, revision=revision, folder=folder)


def only_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_a_fact_is_found_again_by_another_process_of_the_same_user(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    assert cache_in(folder).get(FileIdentity.of(model)) == FACT


def test_nothing_is_found_before_anything_was_kept(folder: Path, model: Path) -> None:
    assert cache_in(folder).get(FileIdentity.of(model)) is None
    assert not folder.exists()


def test_fact_of_a_grown_file_is_stale(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    before = model.stat()
    model.write_bytes(b"GGUF and more")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache_in(folder).get(FileIdentity.of(model)) is None


def test_fact_of_a_touched_file_is_stale_and_replaced(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    os.utime(model, ns=(0, 1_700_000_000_000_000_001))
    assert cache_in(folder).get(FileIdentity.of(model)) is None
    cache_in(folder).put(FileIdentity.of(model), Fact("other"))
    assert cache_in(folder).get(FileIdentity.of(model)) == Fact("other")
    only_entry(folder)


def test_a_symbolic_link_shares_the_entry_of_the_file_it_names(folder: Path, model: Path) -> None:
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    cache_in(folder).put(FileIdentity.of(link), FACT)
    assert cache_in(folder).get(FileIdentity.of(model)) == FACT


def test_two_kinds_of_fact_have_separate_entries(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    other = FactCache("other", Fact, revision="1", folder=folder)
    assert other.get(FileIdentity.of(model)) is None


def test_facts_read_by_older_code_are_stale(folder: Path, model: Path) -> None:
    cache_in(folder, revision="1").put(FileIdentity.of(model), FACT)
    assert cache_in(folder, revision="2").get(FileIdentity.of(model)) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"revision": "1"}', b"x" * (9 * 1024 * 1024)],
    ids=["empty", "cut", "null", "not text", "deep", "incomplete", "huge"],
)
def test_corrupt_entry_is_ignored_and_rewritten(folder: Path, model: Path, content: bytes) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    only_entry(folder).write_bytes(content)
    assert cache_in(folder).get(FileIdentity.of(model)) is None
    cache_in(folder).put(FileIdentity.of(model), FACT)
    assert cache_in(folder).get(FileIdentity.of(model)) == FACT


def test_an_entry_whose_value_has_another_shape_reads_as_nothing(folder: Path, model: Path) -> None:
    FactCache("fact", int, revision="1", folder=folder).put(FileIdentity.of(model), 7)
    assert cache_in(folder).get(FileIdentity.of(model)) is None


def test_an_entry_of_another_file_is_not_taken_for_this_one(folder: Path, model: Path) -> None:
    twin = model.with_name("twin.gguf")
    twin.write_bytes(b"GGUF")
    os.utime(twin, ns=(0, model.stat().st_mtime_ns))
    cache_in(folder).put(FileIdentity.of(model), FACT)
    entry_of_model = only_entry(folder)
    cache_in(folder).put(FileIdentity.of(twin), Fact("twin"))
    (entry_of_twin,) = set(folder.iterdir()) - {entry_of_model}
    entry_of_twin.write_bytes(entry_of_model.read_bytes())
    assert cache_in(folder).get(FileIdentity.of(twin)) is None


def test_entries_are_for_their_owner_alone(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_entry(folder).stat().st_mode) == 0o600


def test_a_symbolic_link_in_place_of_an_entry_is_not_followed(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    entry = only_entry(folder)
    elsewhere = folder.parent / "elsewhere.json"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    assert cache_in(folder).get(FileIdentity.of(model)) is None
    untouched = elsewhere.read_bytes()
    cache_in(folder).put(FileIdentity.of(model), Fact("new"))
    assert not entry.is_symlink()
    assert elsewhere.read_bytes() == untouched


def test_a_pipe_in_place_of_an_entry_does_not_block(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    entry = only_entry(folder)
    entry.unlink()
    os.mkfifo(entry)
    assert cache_in(folder).get(FileIdentity.of(model)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_entry_of_another_user_is_ignored(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    os.chown(only_entry(folder), 65534, -1)
    assert cache_in(folder).get(FileIdentity.of(model)) is None


def test_a_cache_folder_that_cannot_be_made_is_no_error(tmp_path: Path, model: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    cache = cache_in(in_the_way / "facts")
    cache.put(FileIdentity.of(model), FACT)
    assert cache.get(FileIdentity.of(model)) is None


def test_a_write_that_fails_leaves_no_temporary_file(folder: Path, model: Path) -> None:
    cache_in(folder).put(FileIdentity.of(model), FACT)
    entry = only_entry(folder)
    entry.unlink()
    entry.mkdir()
    (entry / "occupied").write_text("")
    cache_in(folder).put(FileIdentity.of(model), FACT)
    assert list(folder.iterdir()) == [entry]


def test_a_file_name_outside_utf_8_can_be_cached(folder: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel.gguf"))
    odd.write_bytes(b"GGUF")
    cache_in(folder).put(FileIdentity.of(odd), FACT)
    assert cache_in(folder).get(FileIdentity.of(odd)) == FACT


def test_a_full_cache_drops_its_oldest_entries_and_keeps_the_new_one(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MAX_ENTRIES", 4)
    identities = [FileIdentity(f"/models/{n}.gguf", 4, n) for n in range(6)]
    for age, identity in enumerate(identities):
        before = set(folder.iterdir()) if folder.exists() else set()
        cache_in(folder).put(identity, Fact(str(age)))
        for entry in set(folder.iterdir()) - before:
            os.utime(entry, ns=(0, 1_000_000_000 * age))
    kept = [n for n, identity in enumerate(identities) if cache_in(folder).get(identity) is not None]
    assert len(kept) <= 5
    assert 5 in kept
    assert 0 not in kept


def test_full_cache_drops_old_unfinished_entries(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MAX_ENTRIES", 1)
    cache_in(folder).put(FileIdentity.of(model), Fact("new"))
    (entry,) = folder.iterdir()
    unfinished = [folder / f".{entry.name}.{number}-0a1b2c3d.part" for number in range(2)]
    for path in unfinished:
        path.write_bytes(b"{")
        os.utime(path, ns=(0, 0))
    cache_in(folder).put(FileIdentity.of(model), Fact("newer"))
    assert [path.exists() for path in (*unfinished, entry)].count(True) == 2
    assert entry.exists()


def test_a_missing_file_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileIdentity.of(tmp_path / "absent.gguf")


def test_the_default_folder_is_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "llamasup" / "facts"


def test_without_a_users_cache_folder_nothing_is_kept_and_nothing_fails(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert default_cache_folder() is None
    cache = FactCache("fact", Fact, revision="1")
    cache.put(FileIdentity.of(model), FACT)
    assert cache.get(FileIdentity.of(model)) is None
