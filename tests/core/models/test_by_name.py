"""The names of ``llamasup list``, as MODEL of other commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamasup.core.models.by_name import file_of
from llamasup.core.models.removal import to_remove
from llamasup.errors import ModelMissing
from tests.e2e.driver import run_to_end
from tests.kit import models


@pytest.fixture
def hub(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in llamasup's folder, one of a repository, one in the hub's cache, and one of the same name."""
    monkeypatch.setenv("XDG_DATA_HOME", str(own_folders / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(own_folders / "hub"))
    snapshot = "models--lmstudio-community--Qwen-GGUF/snapshots/" + "a" * 40
    contents = {
        "data/llamasup/models/Story-Q8_0.gguf": models.tiny_decoder(),
        "data/llamasup/models/adapter.gguf": models.tiny_lora(),
        **{f"data/llamasup/models/{folder}/mmproj-F16.gguf": models.tiny_lora() for folder in "ab"},
        **{f"data/llamasup/models/{folder}/same.gguf": models.tiny_decoder() for folder in "ab"},
        f"hub/{snapshot}/Qwen-Q4_K_M.gguf": models.tiny_decoder(),
    }
    for path, content in contents.items():
        file = own_folders / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return own_folders


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Story-Q8_0", "Story-Q8_0.gguf"),
        ("story-q8_0", "Story-Q8_0.gguf"),
        ("story-q8_0:latest", "Story-Q8_0.gguf"),
        ("lmstudio-community/Qwen-GGUF:Q4_K_M", "Qwen-Q4_K_M.gguf"),
        ("lmstudio-community/Qwen-GGUF", "Qwen-Q4_K_M.gguf"),
        ("Story-Q8_0.gguf", "Story-Q8_0.gguf"),
        ("story-q8_0.gguf", "Story-Q8_0.gguf"),
        ("Adapter", "adapter.gguf"),
    ],
)
def test_name_of_the_list_is_the_file(name: str, file: str, hub: Path) -> None:
    assert Path(file_of(name)).name == file


@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "x.gguf",
        "~/models/x",
        "https://a.example/m.gguf",
        "org/repo:Q4_K_M",
        "",
        "a b",
        "./story-q8_0",
    ],
)
def test_path_url_or_repository_stays(name: str, hub: Path) -> None:
    assert file_of(name) == name


def test_file_of_the_working_folder_goes_before_a_name(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story-q8_0").write_bytes(b"GGUF")
    assert file_of("story-q8_0") == "story-q8_0"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mmproj-F16", "Give the path of one of them."),
        ("mmproj-F16.gguf", "Give the path of one of them."),
        ("same", "Use a/same or b/same."),
    ],
)
def test_name_of_several_files_is_refused(name: str, remedy: str, hub: Path) -> None:
    with pytest.raises(ModelMissing, match=f"2 files have the name '{name}'") as caught:
        file_of(name)
    assert caught.value.remedy == remedy


def test_rm_suggests_the_nearest_name(hub: Path) -> None:
    with pytest.raises(ModelMissing) as caught:
        to_remove(["stroy-q8_0"], hub / "data/llamasup/models", "https://huggingface.co")
    assert caught.value.remedy.startswith("Did you mean Story-Q8_0? Give a name of `llamasup list`")


@pytest.mark.parametrize("name", ["llama3.2:3b", "gpt-oss:20b", "qwen2.5", "stroy-q8_0"])
def test_unknown_name_says_how_to_get_a_model(name: str, hub: Path) -> None:
    with pytest.raises(ModelMissing, match=f"There is no model '{name}'") as caught:
        file_of(name)
    assert "llamasup run org/repo:QUANT" in caught.value.remedy
    assert ("Did you mean Story-Q8_0?" in caught.value.remedy) == (name == "stroy-q8_0")
    assert file_of(name, required=False) == name


@pytest.mark.parametrize(
    "command",
    [["plan"], ["inspect"], ["tune", "--show"], ["rm", "--yes"]],
    ids=lambda words: words[0],
)
def test_commands_take_names_of_the_list(command: list[str], hub: Path) -> None:
    name, *options = command
    done = run_to_end(name, "story-q8_0", *options, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "Story-Q8_0" in done.stdout + done.stderr
