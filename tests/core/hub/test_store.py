"""``rm`` removes only the files of the model, in folders of every layout."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.gguf.files import read_model, split_name
from llamasup.core.hub.part_file import PartFile
from llamasup.core.models.removal import Removal, remove, to_remove
from llamasup.core.planning.facts import sibling_projector
from llamasup.errors import LlamasupError
from tests.kit import models, vision
from tests.kit.extent import examples

_HUB = "https://huggingface.co"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_models(folder: Path, *names: str) -> None:
    for name in names:
        kind = models.tiny_projector if "mmproj" in name else models.tiny_decoder
        put(folder / name, kind())


def rm(folder: Path, *names: str) -> tuple[Removal, ...]:
    removals = to_remove(names, folder, _HUB)
    for removal in removals:
        remove(removal, folder)
    return removals


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.check("X10")
def test_removing_a_projector_removes_only_this_projector(tmp_path: Path) -> None:
    put_models(tmp_path, "mmproj-a-F16.gguf", "mmproj-b-F16.gguf")
    rm(tmp_path, "mmproj-a-F16.gguf")
    assert names_in(tmp_path) == ["mmproj-b-F16.gguf"]


@pytest.mark.check("X10")
def test_removing_a_model_removes_only_its_own_projector(tmp_path: Path) -> None:
    put_models(tmp_path, "a-Q8_0.gguf", "mmproj-a-F16.gguf", "mmproj-b-F16.gguf", "mmproj-c-F16.gguf")
    rm(tmp_path, "a-Q8_0.gguf")
    assert names_in(tmp_path) == ["mmproj-b-F16.gguf", "mmproj-c-F16.gguf"]


def test_projector_that_another_model_may_need_stays(tmp_path: Path) -> None:
    put_models(tmp_path, "a.gguf", "b.gguf", "mmproj-F16.gguf")
    rm(tmp_path, "a.gguf")
    assert names_in(tmp_path) == ["b.gguf", "mmproj-F16.gguf"]
    rm(tmp_path, "b.gguf")  # now a plan of b would load it
    assert names_in(tmp_path) == []


@pytest.mark.check("X10")
@pytest.mark.parametrize("is_hard_link", [False, True])
def test_projector_named_like_the_model_stays_if_plans_are_undecided(
    tmp_path: Path, is_hard_link: bool
) -> None:
    put_models(tmp_path, "a.gguf", "mmproj-a.gguf")
    other = tmp_path / "b.gguf"
    if is_hard_link:
        other.hardlink_to(tmp_path / "a.gguf")
    else:
        put_models(tmp_path, "b.gguf")
    pairing = sibling_projector(other, read_model(other))
    assert pairing is not None
    assert "may belong to this model or to a.gguf" in pairing.reason
    rm(tmp_path, "a.gguf")
    assert names_in(tmp_path) == ["b.gguf", "mmproj-a.gguf"]


def test_projector_stays_with_an_unreadable_quantization_of_its_model(tmp_path: Path) -> None:
    put_models(tmp_path, "a-Q8_0.gguf", "mmproj-a-F16.gguf")
    put(tmp_path / "a-Q4_K_M.gguf", models.truncated_decoder())
    rm(tmp_path, "a-Q8_0.gguf")
    assert names_in(tmp_path) == ["a-Q4_K_M.gguf", "mmproj-a-F16.gguf"]


def begin_download(path: Path) -> None:
    """Leave the files of an interrupted pull."""
    part = PartFile(path)
    part.write(0, b"some")
    part.keep()


@pytest.mark.check("X10")
def test_projector_stays_with_an_unfinished_download_of_a_quantization(tmp_path: Path) -> None:
    put_models(tmp_path, "a-Q8_0.gguf", "mmproj-a-F16.gguf")
    begin_download(tmp_path / "a-Q4_K_M.gguf")
    rm(tmp_path, "a-Q8_0.gguf")
    left = ["a-Q4_K_M.gguf.part", "a-Q4_K_M.gguf.part.json", "mmproj-a-F16.gguf"]
    assert names_in(tmp_path) == left


def test_unfinished_download_of_removed_model_or_other_program_keeps_no_projector(
    tmp_path: Path,
) -> None:
    put_models(tmp_path, "a-Q8_0.gguf", "mmproj-a-F16.gguf", "a-Q4_0.gguf")
    begin_download(tmp_path / "a-Q8_0.gguf")
    begin_download(tmp_path / "a-Q4_0.gguf")
    put(tmp_path / "b.gguf.part", b"another program's")
    rm(tmp_path, "a-Q4_0.gguf", "a-Q8_0.gguf")
    assert names_in(tmp_path) == ["b.gguf.part"]


def test_projector_stays_while_another_folder_links_to_it(tmp_path: Path) -> None:
    put_models(tmp_path, "x/a.gguf", "x/mmproj-F16.gguf", "y/b.gguf")
    (tmp_path / "y/mmproj-F16.gguf").symlink_to(tmp_path / "x/mmproj-F16.gguf")
    rm(tmp_path, "x/a.gguf")
    assert names_in(tmp_path) == ["x/mmproj-F16.gguf", "y/b.gguf", "y/mmproj-F16.gguf"]


def test_removal_from_a_hub_cache_keeps_the_blobs(tmp_path: Path) -> None:
    put_models(tmp_path, "blobs/model", "blobs/mmproj")
    for commit in ("one", "two"):
        folder = tmp_path / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "a.gguf").symlink_to(tmp_path / "blobs/model")
        (folder / "mmproj-F16.gguf").symlink_to(tmp_path / "blobs/mmproj")
    rm(tmp_path, "snapshots/one/a.gguf")
    left = ["blobs/mmproj", "blobs/model", "snapshots/two/a.gguf", "snapshots/two/mmproj-F16.gguf"]
    assert names_in(tmp_path) == left


def test_folder_with_two_names_is_one_folder(tmp_path: Path) -> None:
    put_models(tmp_path, "real/a.gguf", "real/mmproj-F16.gguf", "real/b.gguf")
    put(tmp_path / "real/notes.txt", b"")
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    rm(tmp_path, "alias/b.gguf", "alias/a.gguf")
    assert names_in(tmp_path / "real") == ["notes.txt"]


def test_part_number_beyond_the_count_is_a_separate_file(tmp_path: Path) -> None:
    put_models(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00003-of-00002.gguf")
    rm(tmp_path, "m-00003-of-00002.gguf")
    assert names_in(tmp_path) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_models_whose_names_differ_in_case_are_separate(tmp_path: Path) -> None:
    put_models(tmp_path / "o/r", "m-Q8_0-00001-of-00002.GGUF", "M-Q8_0-00001-of-00002.gguf")
    models.write_split_decoder(tmp_path / "o/r", "m-Q8_0", 2)
    rm(tmp_path, "o/r:m-Q8_0-00001-of-00002.gguf")
    assert names_in(tmp_path) == ["o/r/M-Q8_0-00001-of-00002.gguf", "o/r/m-Q8_0-00001-of-00002.GGUF"]


# --- any layout ----------------------------------------------------------------------------------

_DECODER, _PROJECTOR, _LORA = models.tiny_decoder(), models.tiny_projector(), models.tiny_lora()
_CONTENTS = {
    "decoder": _DECODER,
    "broken": _DECODER[: len(_DECODER) // 2],
    "projector": _PROJECTOR,
    "wide projector": vision.vision_projector(128),
    "lora": _LORA,
}
_STEMS = ("m", "m-vl", "qwen", "Qwen")
_MODEL_NAMES = tuple(f"{stem}{end}.gguf" for stem in _STEMS for end in ("", "-Q4_K_M", "-Q8_0"))
_PROJECTOR_NAMES = (
    *("mmproj.gguf", "mmproj-F16.gguf", "mmproj-m-F16.gguf", "m.mmproj-Q8_0.gguf"),
    *("mmproj-m-vl-F16.gguf", "MMPROJ-qwen.GGUF"),
)
_FOLDERS = ("", "o/r", "o/s")
_files = st.one_of(
    st.tuples(st.sampled_from(("decoder", "decoder", "broken", "split")), st.sampled_from(_MODEL_NAMES)),
    st.tuples(st.sampled_from(("projector", "wide projector")), st.sampled_from(_PROJECTOR_NAMES)),
    st.tuples(st.just("lora"), st.sampled_from(("m-lora.gguf", "lora.gguf"))),
    st.tuples(st.sampled_from(("unfinished", "foreign part")), st.sampled_from(_MODEL_NAMES)),
    st.tuples(st.just("link"), st.sampled_from((*_MODEL_NAMES, *_PROJECTOR_NAMES))),
)
_layouts = st.lists(st.tuples(st.sampled_from(_FOLDERS), _files), min_size=1, max_size=10)


def make(folder: Path, layout: list[tuple[str, tuple[str, str]]]) -> None:
    """Write the ``layout``. A link leads to a file of the same name in another folder, or nowhere."""
    for place, (kind, name) in layout:
        path = folder / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            continue
        match kind:
            case "split":
                models.write_split_decoder(path.parent, path.stem, 2)
            case "unfinished":
                begin_download(path)
            case "foreign part":
                path.with_name(f"{name}.part").write_bytes(b"a browser's")
            case "link":
                others = (folder / other / name for other in _FOLDERS if other != place)
                path.symlink_to(next((other for other in others if other.is_file()), folder / "nowhere"))
            case _:
                path.write_bytes(_CONTENTS[kind])


def contents(folder: Path) -> dict[Path, bytes | str]:
    """The bytes of every file, and the target of every link."""
    return {
        path: str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def ours(path: Path) -> Iterator[Path]:
    """llamasup's records of the file at ``path``, as ``make`` writes them."""
    record = path.with_name(f"{path.name}.part.json")
    if record.exists():
        yield record
        yield path.with_name(f"{path.name}.part")


def planned_projector(path: Path) -> Path | None:
    """The path of the projector that a plan of the model at ``path`` passes, in any folder."""
    part = split_name(path.name)
    if "mmproj" in path.name.lower() or (part is not None and part.number != 1):
        return None
    try:
        found = sibling_projector(path, read_model(path))
    except LlamasupError:
        return None
    return None if found is None or found.projector is None else Path(found.projector.path)


@settings(max_examples=examples(150), deadline=None)
@given(layout=_layouts, choice=st.data())
@pytest.mark.check("X10", "other files are unchanged, byte for byte")
def test_rm_removes_only_the_files_of_the_model(
    layout: list[tuple[str, tuple[str, str]]], choice: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "models"
        folder.mkdir()
        make(folder, layout)
        before = contents(folder)
        targets = sorted(path for path in before if path.name.lower().endswith(".gguf"))
        if not targets:
            return
        target = choice.draw(st.sampled_from(targets))
        part = split_name(target.name)
        own = {target}
        if part is not None:
            first = target.with_name(part.first)
            own = {first, first.with_name(first.name.replace("-00001-of", "-00002-of"))}
        paired = {path: planned_projector(path) for path in targets}
        projector = next((paired[path] for path in sorted(own) if paired[path]), None)
        users = [path for path, used in paired.items() if used and path not in own]
        may_go = {*own, *itertools.chain.from_iterable(map(ours, own))}
        if projector is not None and not any(
            projector in (paired[path], (paired[path] or path).resolve()) for path in users
        ):
            may_go |= {projector, *ours(projector)}

        (removal,) = to_remove([str(target)], folder, _HUB)
        remove(removal, folder)

        after = contents(folder)
        assert own.isdisjoint(after)
        assert {path: content for path, content in before.items() if path not in may_go} == {
            path: content for path, content in after.items() if path not in may_go
        }
        assert set(before) - set(after) == {*removal.files, *removal.leftovers}  # the files that rm has shown
