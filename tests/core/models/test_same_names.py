"""Files of one name in several folders, as programs for models have them: each has another name, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from llamasup.core.models.registry import Unknown, build
from llamasup.core.models.rules import ModelRule
from llamasup.core.models.search import search_models
from tests.kit import models

DECODER = models.tiny_decoder()
SMOL = "SmolLM2-Q4_K_M.gguf"


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DECODER)


@pytest.mark.parametrize(
    ("files", "served", "shared"),
    [
        pytest.param(
            ["unsloth/Qwen3-GGUF/Qwen3-Q4_K_M.gguf", "bartowski/Qwen3-GGUF/Qwen3-Q4_K_M.gguf"],
            ["bartowski/Qwen3-GGUF:Q4_K_M", "unsloth/Qwen3-GGUF:Q4_K_M"],
            {"Qwen3-Q4_K_M": ["bartowski/Qwen3-GGUF:Q4_K_M", "unsloth/Qwen3-GGUF:Q4_K_M"]},
            id="two publishers",
        ),
        # arduino/app-bricks-py#415
        pytest.param(
            [f"{org}/SmolLM2-GGUF/{SMOL}" for org in ("a", "b", "c")] + ["a/SmolLM2-GGUF/x-Q8_0.gguf"],
            ["a/SmolLM2-GGUF:Q4_K_M", "b/SmolLM2-GGUF:Q4_K_M", "c/SmolLM2-GGUF:Q4_K_M", "x-Q8_0"],
            {"SmolLM2-Q4_K_M": [f"{org}/SmolLM2-GGUF:Q4_K_M" for org in ("a", "b", "c")]},
            id="three publishers",
        ),
        # gpustack/gpustack#5108: a folder for each quantization
        pytest.param(
            ["org/repo/Q4_K_M/model.gguf", "org/repo/UD-Q6_K_XL/model.gguf"],
            ["org/repo:Q4_K_M", "org/repo:UD-Q6_K_XL"],
            {"model": ["org/repo:Q4_K_M", "org/repo:UD-Q6_K_XL"]},
            id="one file name for each quantization",
        ),
        # lmstudio-ai/lmstudio-bug-tracker#1623: a folder for each model
        pytest.param(
            ["gemma/model.gguf", "qwen/model.gguf", "llama.gguf"],
            ["gemma/model", "llama", "qwen/model"],
            {"model": ["gemma/model", "qwen/model"]},
            id="a folder for each model",
        ),
        # lmstudio-ai/lmstudio-js#387: one of them in the top folder
        pytest.param(
            [SMOL, f"a/b/{SMOL}"], ["a/b:Q4_K_M"], {"SmolLM2-Q4_K_M": ["a/b:Q4_K_M"]}, id="at the top"
        ),
        pytest.param(
            ["a/b/one.gguf", "c/d/one.gguf", "a/b/two.gguf"],
            ["a/b:one.gguf", "c/d:one.gguf", "two"],
            {"one": ["a/b:one.gguf", "c/d:one.gguf"]},
            id="no quantization in the name",
        ),
        pytest.param(
            ["ö/x.gguf", "x.gguf", "y/x.gguf"], ["y/x"], {"x": ["y/x"]}, id="a folder that is no valid name"
        ),
    ],
)
def test_files_of_one_name_are_served_under_their_folders(
    tmp_path: Path, files: Sequence[str], served: Sequence[str], shared: Mapping[str, Sequence[str]]
) -> None:
    put(tmp_path, *files)
    registry = build((), search_models([tmp_path]).found)
    assert sorted(registry.specs) == served
    for name, others in shared.items():
        unknown = registry.find(name)
        assert isinstance(unknown, Unknown)
        assert (list(unknown.near), unknown.refused is not None) == (others, True)
    # Only a file without another name is a problem.
    unserved = {
        problem.message.partition(" is not served")[0].split(", so ")[-1] for problem in registry.problems
    }
    paths = {spec.source for spec in registry.specs.values()}
    missing = sorted(str(tmp_path / file) for file in files if str(tmp_path / file) not in paths)
    assert unserved == ({", ".join(missing)} if missing else set())


def test_a_name_stays_with_its_file_until_another_file_has_it(tmp_path: Path) -> None:
    put(tmp_path, f"a/b/{SMOL}")
    (alone,) = build((), search_models([tmp_path]).found).specs.values()
    assert alone.names == ("SmolLM2-Q4_K_M", "a/b:Q4_K_M")
    put(tmp_path, f"c/d/{SMOL}")
    registry = build((), search_models([tmp_path]).found)
    assert registry.specs["a/b:Q4_K_M"].source == alone.source
    assert registry.problems == ()


def test_an_entry_for_a_shared_name_is_a_problem_that_names_the_others(tmp_path: Path) -> None:
    put(tmp_path, f"a/b/{SMOL}", f"c/d/{SMOL}")
    found = search_models([tmp_path]).found
    registry = build([ModelRule("SmolLM2-Q4_K_M")], found)
    (problem,) = registry.problems
    assert problem.remedy.startswith("Use a/b:Q4_K_M or c/d:Q4_K_M")
    assert registry.specs["SmolLM2-Q4_K_M"].problem == problem.message
    # A name that the config gives to another model is not proposed.
    taken = build([ModelRule("a/b:Q4_K_M", "/m/other.gguf")], found).find("SmolLM2-Q4_K_M")
    assert isinstance(taken, Unknown)
    assert taken.near == ("c/d:Q4_K_M",)
