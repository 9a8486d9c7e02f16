"""What lies in the folders, each time that it is looked at."""

from __future__ import annotations

from pathlib import Path

from llamasup.config.values import Config
from llamasup.runtime.library import read_library
from llamasup.testing.models import tiny_decoder, tiny_encoder


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
