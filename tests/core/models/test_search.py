"""Models in the folders of users and programs on a real file system, and links out of them (X10)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.models import search as model_search
from llamasup.core.models.folder import list_models
from llamasup.core.models.search import Search, cache_folders, search_models
from llamasup.errors import LlamasupError
from tests.kit import models

OLD, NEW = "1" * 40, "2" * 40
DECODER = models.tiny_decoder()


def put(path: Path, content: bytes = DECODER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def in_hub(hub: Path, repo: str, revision: str, file: str, blob: str, content: bytes = DECODER) -> Path:
    """The layout of huggingface_hub: a link to the blobs of the repository."""
    repository = hub / f"models--{repo.replace('/', '--')}"
    target = put(repository / "blobs" / blob, content)
    snapshot = repository / "snapshots" / revision / file
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    snapshot.symlink_to(os.path.relpath(target, snapshot.parent))
    return snapshot


def names(search: Search) -> dict[str, str]:
    """Id → class or error."""
    return {
        found.ids[0]: found.outcome.message
        if isinstance(found.outcome, LlamasupError)
        else found.outcome.model_class
        for found in search.found
    }


# --- caches --------------------------------------------------------------------------------------


def test_hubs_cache_has_ids_with_quantization(tmp_path: Path) -> None:
    file = in_hub(tmp_path, "org/repo", NEW, "x-Q4_K_M.gguf", "b1")
    in_hub(tmp_path, "org/repo", NEW, "deep/x-Q8_0.gguf", "b2", models.tiny_encoder())
    search = search_models([tmp_path])
    assert names(search) == {"org/repo:Q4_K_M": "decoder", "org/repo:Q8_0": "encoder"}
    found = next(file for file in search.found if file.ids[0] == "org/repo:Q4_K_M")
    assert found.path == str(file)
    assert found.files[0][0] == os.path.realpath(tmp_path / "models--org--repo/blobs/b1")


def test_revision_of_main_counts(tmp_path: Path) -> None:
    in_hub(tmp_path, "org/repo", OLD, "x-Q4_K_M.gguf", "b1")
    in_hub(tmp_path, "org/repo", NEW, "x-Q4_K_M.gguf", "b2", models.tiny_encoder())
    refs = tmp_path / "models--org--repo/refs"
    put(refs / "pr", NEW.encode())
    put(refs / "main", f"{OLD}\n".encode())
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "decoder"}
    (refs / "main").write_text(NEW)
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "encoder"}


@pytest.mark.parametrize("reference", [b"", b"../../..", b"3" * 40, b"\xff" * 40, None])
def test_newest_revision_counts_without_a_ref(tmp_path: Path, reference: bytes | None) -> None:
    in_hub(tmp_path, "org/repo", OLD, "x-Q4_K_M.gguf", "b1")
    in_hub(tmp_path, "org/repo", NEW, "x-Q4_K_M.gguf", "b2", models.tiny_encoder())
    snapshots = tmp_path / "models--org--repo/snapshots"
    os.utime(snapshots / OLD, ns=(1, 1))
    if reference is not None:
        put(tmp_path / "models--org--repo/refs/main", reference)
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "encoder"}


def test_newer_revision_without_the_model_keeps_the_old_one(tmp_path: Path) -> None:
    """During its download, or forever if only its README.md was downloaded."""
    refs = tmp_path / "models--org--repo/refs"
    old = in_hub(tmp_path, "org/repo", OLD, "x-Q4_K_M.gguf", "b1")
    put(refs / "main", NEW.encode())
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "decoder"}
    put(tmp_path / f"models--org--repo/snapshots/{NEW}/README.md", b"x")
    in_hub(tmp_path, "org/repo", NEW, "x-Q8_0.gguf", "b2", models.tiny_encoder())
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "decoder", "org/repo:Q8_0": "encoder"}
    in_hub(tmp_path, "org/repo", NEW, "x-Q4_K_M.gguf", "b3", DECODER[:2000])
    assert str(old) in {found.path for found in search_models([tmp_path]).found}
    put(tmp_path / "models--org--repo/blobs/b3", models.tiny_encoder())
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "encoder", "org/repo:Q8_0": "encoder"}


def test_unfinished_hub_download_is_no_model(tmp_path: Path) -> None:
    in_hub(tmp_path, "org/repo", NEW, "x-Q4_K_M.gguf", "b1")
    put(tmp_path / "models--org--repo/blobs/b2.incomplete", DECODER[:100])
    put(tmp_path / f"models--org--repo/snapshots/{NEW}/y.gguf.part", DECODER[:100])
    assert list(names(search_models([tmp_path]))) == ["org/repo:Q4_K_M"]


def test_llama_cpps_older_cache_has_ids_of_manifests(tmp_path: Path) -> None:
    put(tmp_path / "org_repo_x-Q4_K_M.gguf")
    put(tmp_path / "org_repo_x-Q4_K_M.gguf.etag", b"e")
    put(tmp_path / "manifest=org=repo=latest.json", b"{}")
    put(tmp_path / "other.gguf")
    put(tmp_path / "org_repo_y.gguf.downloadInProgress", DECODER[:10])
    assert names(search_models([tmp_path])) == {"org/repo:Q4_K_M": "decoder", "other": "decoder"}


def test_known_caches_are_those_of_the_programs(tmp_path: Path) -> None:
    folders = {
        name: tmp_path / name
        for name in (
            "lc",
            "hub",
            "old",
            "home/hub",
            "xdg/huggingface/hub",
            "xdg/llama.cpp",
            "u/.cache/llama.cpp",
        )
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    of_hub, of_llama, both = ("huggingface",), ("llama.cpp",), ("huggingface", "llama.cpp")
    home = {"HOME": str(tmp_path / "u")}
    xdg = {**home, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    hub = {**xdg, "HF_HOME": str(tmp_path / "home")}
    assert cache_folders(of_hub, home) == ()
    assert cache_folders(of_llama, home) == (folders["u/.cache/llama.cpp"],)
    assert cache_folders(of_hub, xdg) == (folders["xdg/huggingface/hub"],)
    assert cache_folders(both, xdg) == (folders["xdg/huggingface/hub"], folders["xdg/llama.cpp"])
    assert cache_folders(of_hub, hub) == (folders["home/hub"],)
    assert cache_folders(of_hub, {**hub, "HUGGINGFACE_HUB_CACHE": str(folders["old"])}) == (folders["old"],)
    assert cache_folders(of_hub, {**hub, "HF_HUB_CACHE": str(folders["hub"])}) == (folders["hub"],)
    assert cache_folders(of_llama, {**hub, "LLAMA_CACHE": str(folders["lc"])}) == (folders["lc"],)
    assert cache_folders(both, {}) == ()


# --- links ---------------------------------------------------------------------------------------


def test_link_out_of_the_folders_is_refused(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside/x.gguf")
    top = tmp_path / "models"
    top.mkdir()
    (top / "x.gguf").symlink_to(outside)
    (top / "folder").symlink_to(outside.parent)
    put(top / "y.gguf")
    outcomes = {found.path: found.outcome for found in search_models([top]).found}
    assert not isinstance(outcomes[str(top / "y.gguf")], LlamasupError)
    for path in (top / "x.gguf", top / "folder/x.gguf"):
        error = outcomes[str(path)]
        assert isinstance(error, LlamasupError)
        assert str(outside) in error.message
        assert "in none of the models folders" in error.message


def test_link_from_one_folder_into_another_is_followed(tmp_path: Path) -> None:
    target = put(tmp_path / "b/x.gguf")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/y.gguf").symlink_to(target)
    assert names(search_models([tmp_path / "a", tmp_path / "b"])) == {"y": "decoder", "x": "decoder"}


def test_folder_with_a_common_prefix_is_another_one(tmp_path: Path) -> None:
    target = put(tmp_path / "models-private/x.gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/y.gguf").symlink_to(target)
    assert "in none of the models folders" in names(search_models([tmp_path / "models"]))["y"]


def test_part_that_links_out_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    parts = models.write_split_decoder(outside)
    top = tmp_path / "models"
    top.mkdir()
    parts[0].rename(top / parts[0].name)
    for part in parts[1:]:
        (top / part.name).symlink_to(part)
    assert "in none of the models folders" in names(search_models([top]))["tiny"]


def test_path_in_the_config_may_lead_anywhere(tmp_path: Path) -> None:
    target = put(tmp_path / "far/x.gguf")
    link = tmp_path / "l.gguf"
    link.symlink_to(target)
    (source,) = search_models([], [str(link)]).sources.values()
    assert source.files[0][0] == os.path.realpath(target)
    assert not isinstance(source.outcome, LlamasupError)


# --- files and folders ---------------------------------------------------------------------------


def test_any_part_of_a_set_stands_for_the_set(tmp_path: Path) -> None:
    parts = models.write_split_decoder(tmp_path)
    search = search_models([], [str(parts[2])])
    source = search.sources[str(parts[2])]
    assert source.path == str(parts[0])
    assert len(source.files) == len(parts)


def test_replaced_part_changes_the_identity(tmp_path: Path) -> None:
    parts = models.write_split_decoder(tmp_path)
    before = search_models([tmp_path]).found[0].files
    os.utime(parts[1], ns=(1, 1))
    assert search_models([tmp_path]).found[0].files != before


def test_missing_folder_is_reported_and_others_are_searched(tmp_path: Path) -> None:
    put(tmp_path / "there/x.gguf")
    search = search_models([tmp_path / "gone", tmp_path / "there"])
    assert list(search.missing) == [str(tmp_path / "gone")]
    assert names(search) == {"x": "decoder"}


def test_one_folder_in_another_has_each_model_once(tmp_path: Path) -> None:
    put(tmp_path / "in/x.gguf")
    assert len(search_models([tmp_path, tmp_path / "in"]).found) == 1


def test_folder_that_disappears_keeps_its_configured_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    path = put(folder / "a.gguf")

    def move_and_list(top: Path, **options: Any) -> Any:
        if folder.exists():
            folder.rename(tmp_path / "elsewhere")
        return list_models(top, **options)

    monkeypatch.setattr(model_search, "list_models", move_and_list)
    search = search_models([folder], [str(path)])
    assert set(search.missing) == {str(folder)}
    assert not isinstance(search.sources[str(path)].outcome, LlamasupError)
