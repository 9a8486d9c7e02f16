"""What lies in the folders, each time that it is looked at."""

from __future__ import annotations

from pathlib import Path

from llamasup.config.values import Config, ModelEntry
from llamasup.runtime.library import read_library
from llamasup.testing.models import tiny_decoder, tiny_encoder


def test_a_model_of_such_a_folder_keeps_the_name_that_the_config_gives_it(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(tiny_decoder())
    rules = {"chat": ModelEntry(path=str(folder / "a.gguf"))}
    config = Config(models_dir=(folder,), models=rules)
    before = read_library(config)
    assert set(before.registry.specs) == {"chat"}
    folder.rename(tmp_path / "elsewhere")
    assert read_library(config, before.search).registry == before.registry


def test_what_was_in_a_folder_that_is_gone_is_not_known_to_be_gone(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name, content in ((here, "a", tiny_decoder()), (there, "b", tiny_encoder())):
        folder.mkdir()
        (folder / f"{name}.gguf").write_bytes(content)
    config = Config(models_dir=(here, there))
    before = read_library(config)
    assert set(before.registry.specs) == {"a", "b"}
    there.rename(tmp_path / "elsewhere")
    (here / "a.gguf").rename(here / "c.gguf")
    after = read_library(config, before.search)
    assert set(after.registry.specs) == {"c", "b"}
    assert any("there is no such folder" in note for note in after.notes)
    assert set(read_library(config).registry.specs) == {"c"}  # nobody knows what was there
    there.mkdir()
    assert set(read_library(config, after.search).registry.specs) == {"c"}  # it is there, and empty
