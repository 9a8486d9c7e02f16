"""The inventory of models after each search of the folders."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.config.config_keys import Config
from llamasup.core.config.inventory import read_inventory, search_paths
from llamasup.core.models.spec import ModelSpec, changes
from llamasup.core.settings.model import ModelEntry, ModelSettings
from tests.kit.models import tiny_decoder, tiny_encoder, tiny_lora, tiny_projector


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def specs(config: Config) -> dict[str, ModelSpec]:
    return dict(read_inventory(config).registry.specs)


def test_model_in_a_missing_folder_keeps_its_configured_name(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(tiny_decoder())
    rules = {"chat": ModelEntry(path=str(folder / "a.gguf"))}
    config = Config(models_dir=(folder,), models=rules)
    before = read_inventory(config)
    assert set(before.registry.specs) == {"chat"}
    folder.rename(tmp_path / "elsewhere")
    assert read_inventory(config, before.search).registry == before.registry


def test_models_of_a_missing_folder_stay(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name, content in ((here, "a", tiny_decoder()), (there, "b", tiny_encoder())):
        folder.mkdir()
        (folder / f"{name}.gguf").write_bytes(content)
    config = Config(models_dir=(here, there))
    before = read_inventory(config)
    assert set(before.registry.specs) == {"a", "b"}
    there.rename(tmp_path / "elsewhere")
    (here / "a.gguf").rename(here / "c.gguf")
    after = read_inventory(config, before.search)
    assert set(after.registry.specs) == {"c", "b"}
    assert any("there is no such folder" in note for note in after.notes)
    assert set(read_inventory(config).registry.specs) == {"c"}  # the earlier content is unknown
    there.mkdir()
    assert set(read_inventory(config, after.search).registry.specs) == {"c"}  # it is there, and empty


def test_reload_during_a_copy_waits_for_the_complete_file(
    tmp_path: Path,
) -> None:
    whole = tiny_decoder()
    config = Config(models_dir=(tmp_path,), models={"named": ModelEntry(path=str(tmp_path / "far/y.gguf"))})
    put(tmp_path / "x.gguf", whole), put(tmp_path / "far/y.gguf", whole)
    before = read_inventory(config)

    put(tmp_path / "backup/x.gguf", whole[:2000])
    put(tmp_path / "far/y.gguf", whole[:2000])
    during = read_inventory(config, before.search)
    assert during.registry == before.registry
    assert during.settles_in_s == 0.0

    put(tmp_path / "z.gguf", whole)
    put(tmp_path / "far/y.gguf", tiny_encoder())
    after = read_inventory(config, before.search)
    assert after.registry == before.registry
    assert 0.0 < after.settles_in_s <= 2.0

    written_s = time.time_ns() / 1e9 - 2.1
    for path in ("z.gguf", "far/y.gguf"):
        os.utime(tmp_path / path, (written_s, written_s))
    settled = read_inventory(config, before.search)
    assert set(settled.registry.specs) == {"x", "z", "named"}
    assert settled.registry.specs["named"] != before.registry.specs["named"]
    assert settled.settles_in_s == 0.0


def test_model_new_in_the_config_counts_at_once(tmp_path: Path) -> None:
    before = read_inventory(Config())
    path = put(tmp_path / "x.gguf", tiny_decoder())
    config = Config(models={"named": ModelEntry(path=str(path))})
    assert read_inventory(config, before.search).registry.specs["named"].problem == ""


def test_a_cache_is_a_folder_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found there stays while it is gone, and it is looked for before it is there."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    config = Config(caches=("huggingface",))
    assert search_paths(config).folders == (hub,)
    assert read_inventory(config).notes == (f"{hub}: there is no such folder",)

    put(hub / f"models--org--repo/snapshots/{'1' * 40}/x-Q4_K_M.gguf", tiny_decoder())
    before = read_inventory(config)
    assert set(before.registry.specs) == {"org/repo:Q4_K_M"}
    hub.rename(tmp_path / "away")
    after = read_inventory(config, before.search)
    assert after.registry == before.registry
    assert after.notes == (f"{hub}: there is no such folder",)


def test_one_of_llama_cpps_two_cache_folders_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = Config(caches=("llama.cpp",))
    assert len(read_inventory(config).notes) == 2
    model = put(tmp_path / "hub/x.gguf", tiny_decoder())
    before = read_inventory(config)
    assert before.notes == ()
    model.parent.rename(tmp_path / "away")
    (tmp_path / ".cache/llama.cpp").mkdir(parents=True)
    assert read_inventory(config).notes == ()
    # It was there.
    assert read_inventory(config, before.search).notes == (f"{tmp_path}/hub: there is no such folder",)


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({"mmproj": "beside.gguf"}, tiny_projector()),
        ({"draft_model": "beside.gguf"}, tiny_decoder()),
        ({"loras": ("beside.gguf",)}, tiny_lora()),
    ],
)
@pytest.mark.parametrize("where", ["models", "defaults", "rule"])
def test_attachments_in_the_config_are_watched_with_their_model(
    tmp_path: Path, said: dict[str, Any], content: bytes, where: str
) -> None:
    put(tmp_path / "models/a.gguf", tiny_decoder())
    beside = put(tmp_path / "elsewhere/beside.gguf", content)
    said = {key: str(beside) if isinstance(value, str) else (str(beside),) for key, value in said.items()}
    folders = (tmp_path / "models",)
    config = {
        "models": Config(models_dir=folders, models={"a": ModelEntry(**said)}),
        "rule": Config(models_dir=folders, models={"*": ModelEntry(**said)}),
        "defaults": Config(models_dir=folders, defaults=ModelSettings(**said)),
    }[where]
    assert search_paths(config).paths == (str(beside),)
    before = specs(config)
    assert changes(before, specs(config)).unchanged == ("a",)

    touch(beside)
    assert changes(before, specs(config)).changed == ("a",)

    beside.unlink()
    gone = specs(config)
    put(beside, content)
    assert changes(gone, specs(config)).changed == ("a",)


def test_sibling_files_belong_to_a_configured_model_in_any_folder(tmp_path: Path) -> None:
    model = put(tmp_path / "far/tiny.gguf", tiny_decoder())
    projector = put(tmp_path / "far/mmproj-tiny.gguf", tiny_projector())
    adapter = put(tmp_path / "far/adapter.gguf", tiny_lora())
    put(tmp_path / "far/below/other.gguf", tiny_decoder())
    config = Config(models={"a": ModelEntry(path=str(model), loras=("auto",))})
    before = specs(config)
    assert before.keys() == {"a"}
    assert before["a"].projector == str(projector)
    assert before["a"].settings.adapters == (str(adapter),)
    for each in (projector, adapter):
        touch(each)
        assert changes(before, specs(config)).changed == ("a",)
        before = specs(config)
    projector.unlink()
    assert changes(before, specs(config)).changed == ("a",)


def test_model_being_replaced_keeps_its_sibling_files(tmp_path: Path) -> None:
    model = put(tmp_path / "far/tiny.gguf", tiny_decoder())
    projector = put(tmp_path / "far/mmproj-tiny.gguf", tiny_projector())
    put(tmp_path / "far/below/other.gguf", tiny_decoder())
    put(model, tiny_decoder()[:100])
    config = Config(models={"a": ModelEntry(path=str(model))})
    assert set(read_inventory(config).search.sources) == {str(model), str(projector)}


def test_no_other_files_near_configured_files_are_searched(tmp_path: Path) -> None:
    put(tmp_path / "models/a.gguf", tiny_decoder())
    named = put(tmp_path / "far/p.gguf", tiny_projector())
    put(tmp_path / "far/large.gguf", tiny_decoder())
    config = Config(models_dir=(tmp_path / "models",), models={"a": ModelEntry(mmproj=str(named))})
    assert set(read_inventory(config).search.sources) == {str(named)}


def test_demo_in_a_config_is_the_demo_model_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").write_text("no model")
    monkeypatch.chdir(tmp_path)
    spec = read_inventory(Config(models={"a": ModelEntry(path="demo")})).registry.specs["a"]
    assert spec.source.endswith("/demo.gguf")
    assert not spec.problem
