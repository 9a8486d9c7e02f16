"""Modelfiles, and models of Ollama's store, become models and virtual models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamasup.features.config_import.modelfile import from_modelfile, instructions_in_store, instructions_of
from tests.features.config_import.accounts import NOW, config_from, plain

MODELFILE = '''
# a comment
FROM ./base.gguf
from ./base-2.gguf
FROM ./mmproj.gguf
ADAPTER ./a.gguf
ADAPTER ./b.gguf
DRAFT ./d.gguf
PARAMETER num_ctx 4096
PARAMETER num_gpu 0
PARAMETER num_thread 8
PARAMETER temperature 0.7
PARAMETER num_predict 42
PARAMETER stop "<|end|>"
PARAMETER stop User:
PARAMETER top_k many
PARAMETER made_up 1
SYSTEM """
You are Mario.
Use ${braces}.
"""
TEMPLATE "{{ .Prompt }}"
LICENSE MIT
MESSAGE user hello
MADEUP x
'''


def test_modelfile_becomes_a_model_and_a_virtual_model() -> None:
    draft = from_modelfile("mario", list(instructions_of(MODELFILE)), NOW)
    config = config_from(draft)
    base, mario = config.models["mario:plain"], config.features["virtual_models"]["mario"]
    files = (base.path, base.mmproj, base.draft_model, *(base.loras or ()))
    names = ["base-2.gguf", "mmproj.gguf", "d.gguf", "a.gguf", "b.gguf"]  # any part of a split model
    assert [Path(path or "").name for path in files] == names
    assert (base.ctx_size, base.gpu_layers) == (4096, 0)
    assert base.extra == ("--temperature", "0.7", "--n-predict", "42", "--top-k", "many")
    assert mario.default == {"stop": ["<|end|>", "User:"]}
    assert (mario.model, mario.system) == ("mario:plain", "You are Mario.\nUse ${braces}.")
    text = plain(draft.text())
    for commented in (
        "num_thread 8 →",
        "--made-up 1 → left out",
        "{{ .Prompt }}",
        "MIT",
        "user hello",
        "MADEUP x →",
    ):
        assert commented in text, text


@pytest.mark.parametrize(
    ("source", "model"),
    [
        ("/m/x.gguf", {"path": "/m/x.gguf"}),
        ("hf.co/org/m:Q4_K_M", {"repo": "org/m:Q4_K_M"}),
        ("https://huggingface.co/org/m", {"repo": "org/m"}),
        ("llama3.2", {}),
    ],
)
def test_sources_of_a_model(source: str, model: dict[str, Any]) -> None:
    draft = from_modelfile("My Model", [("FROM", source)], NOW)
    assert draft.config == {"models": {"My-Model": {**model, "aliases": ["My Model"]}}}
    assert source in draft.text()


def layer(kind: str, digest: str) -> dict[str, str]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"}


def test_store_has_the_instructions_in_layers() -> None:
    texts = {"c": '{"stop": ["a", "b"], "top_k": 5}', "d": "Be kind.", "e": "{{ }}"}
    kinds = {"model": "a", "projector": "b", "params": "c", "system": "d", "template": "e"}
    manifest = json.dumps({"layers": [layer(kind, digest) for kind, digest in kinds.items()], "config": {}})
    found = instructions_in_store(
        manifest, Path("/blobs"), lambda path: texts[path.name.removeprefix("sha256-")]
    )
    assert list(found) == [
        ("FROM", "/blobs/sha256-a"),
        ("PROJECTOR", "/blobs/sha256-b"),
        *(("PARAMETER", "stop a"), ("PARAMETER", "stop b"), ("PARAMETER", "top_k 5")),
        ("SYSTEM", "Be kind."),
        ("TEMPLATE", "{{ }}"),
    ]
    with pytest.raises(msgspec.DecodeError):
        list(instructions_in_store("{}", Path("/blobs"), str))
