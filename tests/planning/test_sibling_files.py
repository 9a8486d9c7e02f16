"""What is found beside a model file."""

from __future__ import annotations

from pathlib import Path

from llamasup.planning import facts
from llamasup.planning.facts import sibling_projectors
from llamasup.testing import models, vision


def names_of(model: Path) -> tuple[list[str], list[str]]:
    candidates, neighbours = sibling_projectors(model)
    return [Path(each.path).name for each in candidates], neighbours


def test_projectors_by_name_and_the_other_models(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    for name in ("mmproj-F16.gguf", "tiny.MMPROJ-Q8_0.GGUF"):
        (tmp_path / name).write_bytes(vision.vision_projector())
    for name in ("tiny.gguf", "other.gguf", "notes.txt", "mmproj.txt"):
        (tmp_path / name).write_bytes(models.tiny_decoder())
    assert names_of(model) == (["mmproj-F16.gguf", "tiny.MMPROJ-Q8_0.GGUF"], ["other.gguf"])


def test_what_cannot_be_read_or_is_no_projector_is_none_and_no_other_model(tmp_path: Path) -> None:
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj-gone.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mmproj-folder.gguf").mkdir()
    (tmp_path / "mmproj-not.gguf").write_bytes(models.tiny_decoder())
    assert names_of(tmp_path / "tiny.gguf") == ([], [])


def test_a_folder_that_cannot_be_listed_has_nothing(tmp_path: Path) -> None:
    assert names_of(tmp_path / "gone" / "tiny.gguf") == ([], [])


def test_of_very_many_only_the_first_are_looked_into(tmp_path: Path) -> None:
    content = vision.vision_projector()
    for index in range(facts._MAX_PROJECTORS + 5):
        (tmp_path / f"mmproj-{index:03}.gguf").write_bytes(content)
    candidates, _ = sibling_projectors(tmp_path / "tiny.gguf")
    assert len(candidates) == facts._MAX_PROJECTORS
