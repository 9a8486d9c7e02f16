"""Files with a GGUF header that are no language models, and language models of unknown architectures."""

from __future__ import annotations

from typing import Any

import pytest

from llamasup.core.gguf.facts import ModelClass, ModelFacts, is_served
from llamasup.core.gguf.facts_from_header import read_header
from llamasup.core.planning.memory.kv_cache import ContextShape, kv_bytes
from tests.kit.architectures import ARCHITECTURES, write_model
from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf
from tests.kit.layers import Widths
from tests.kit.tiny import tiny_keys, tiny_tensors

Keys = dict[str, KeyValue]


def facts_of(keys: Keys, *tensors: str) -> ModelFacts:
    plans = [(TensorPlan(name, (64, 64)), bytes(4 * 64 * 64)) for name in tensors]
    content = write_gguf(keys, plans)
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    return facts


def of_images(architecture: str) -> Keys:
    """All that ComfyUI-GGUF writes."""
    return {"general.architecture": architecture, "general.quantization_version": 2, "general.file_type": 7}


@pytest.mark.parametrize(
    ("keys", "tensor", "contents"),
    [
        # ggml-org/llama.cpp#15143, lmstudio-ai/lmstudio-bug-tracker#1267 and #2280, city96/ComfyUI-GGUF#253
        *(
            pytest.param(
                of_images(name),
                "double_blocks.0.img_attn.qkv.weight",
                f"an image or video model ({name})",
                id=name,
            )
            for name in ("qwen_image", "lumina2", "flux", "hidream", "wan", "sd3", "sdxl", "pig")
        ),
        pytest.param(
            of_images("next-image"),
            "model.diffusion_model.input_blocks.0.weight",
            "a file of the architecture 'next-image' without a tokenizer",
            id="a newer image model",
        ),
        pytest.param(
            {},
            "first_stage_model.decoder.conv_in.weight",
            "a file without an architecture",
            id="no keys at all",
        ),
        # unslothai/unsloth#9411
        pytest.param(
            {"general.type": "imatrix", "imatrix.chunk_count": 1, "imatrix.datasets": ["calibration.txt"]},
            "blk.0.attn_k.weight.in_sum2",
            "an importance matrix, which llama-quantize reads",
            id="imatrix",
        ),
        pytest.param(
            {"general.architecture": "controlvector", "controlvector.model_hint": "llama"},
            "direction.1",
            "a control vector, which llama-server loads with a model (--control-vector)",
            id="control vector",
        ),
        pytest.param(
            {"general.architecture": "new-voice", "new-voice.block_count": 2},
            "decoder.0.weight",
            "a file of the architecture 'new-voice' without a tokenizer",
            id="speech",
        ),
        pytest.param(
            {"general.architecture": "new-codec", "tokenizer.ggml.tokens": ["a"]},
            "decoder.0.weight",
            "a file of the architecture 'new-codec' without layers",
            id="tokens without layers",
        ),
    ],
)
def test_a_file_that_is_no_language_model_says_what_it_is(keys: Keys, tensor: str, contents: str) -> None:
    facts = facts_of(keys, tensor)
    assert (facts.model_class, facts.contents, is_served(facts)) == (ModelClass.OTHER, contents, False)


def test_an_adapter_of_an_image_model_is_an_adapter() -> None:
    keys: Keys = {"general.architecture": "flux", "general.type": "adapter", "adapter.type": "lora"}
    assert facts_of(keys, "blk.0.attn_q.weight.lora_a").model_class is ModelClass.LORA


def renamed(architecture: str, **changes: Any) -> ModelFacts:
    """A tiny llama with this architecture in its place."""
    keys = {name.replace("llama.", f"{architecture}."): value for name, value in tiny_keys().items()}
    keys |= {"general.architecture": architecture}
    for name, value in changes.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        keys = (
            keys | {key: value} if value is not None else {each: keys[each] for each in keys if each != key}
        )
    content = write_gguf(keys, tiny_tensors())
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    return facts


@pytest.mark.parametrize(
    ("architecture", "value", "kind"),
    [
        # The types of ggml-org/llama.cpp#29818 and of b11549, on the architectures of their files.
        *(("qwen3", kind, kind) for kind in ("openjev", "lev", "kev", "nimble", "pplx-decider")),
        ("modern-bert", "laya", "laya"),  # ggml-org/Laya-GGUF, NandhaKishorM/laya#37
        ("clef", "clef", "clef"),
        ("llama", "lfm2-d1", "lfm2-d1"),
        ("llama", "lfm2-d1-omni", "lfm2-d1-omni"),
        # Of later builds, or damaged: b11549 refuses them, and the list still says what they are.
        ("llama", "vllm-d3", "vllm-d3"),  # Quartermaster-Labs/Quartermaster 1.7.0
        ("llama", "", "unknown"),
        ("llama", 7, "unknown"),
        ("qwen7-next", "tev1", "tev1"),  # ollama/ollama#18594
    ],
)
def test_a_decision_model_is_found_by_its_type(architecture: str, value: str | int, kind: str) -> None:
    facts = renamed(architecture, decision__type=value)
    assert (facts.model_class, facts.decision, is_served(facts)) == (ModelClass.DECISION, kind, True)


def test_no_other_model_has_a_decision_type() -> None:
    keys = tiny_keys() | {"qwen3.decision.type": "lev", "llama.decision.temperature.noul": 1.0}
    content = write_gguf(keys, tiny_tensors())
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert (facts.model_class, facts.decision) == (ModelClass.DECODER, "")


def test_a_model_of_an_unknown_architecture_has_the_facts_of_its_header() -> None:
    ours, theirs = renamed("llama"), renamed("llama5")
    assert (ours.known, theirs.known) == (True, False)
    for name in ("layers", "context_length", "embedding_length", "key_length", "vocab_size", "layer_bytes"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.model_class is ModelClass.DECODER
    assert theirs.chat_template == ours.chat_template
    assert not theirs.quantized_kv_fits


@pytest.mark.parametrize(
    "changes",
    [
        {"attention__head_count": None},
        {"attention__head_count": [1, 2, 3, 4, 5]},
        {"attention__head_count": "many", "attention__head_count_kv": None},
        {"attention__head_count": 0, "attention__key_length": None},
        {"context_length": "long"},
        {"pooling_type": "newest"},
        {"block_count": -1},
    ],
    ids=str,
)
def test_keys_of_an_unknown_architecture_may_mean_anything(changes: dict[str, Any]) -> None:
    facts = renamed("llama5", **changes)
    assert facts.model_class is ModelClass.DECODER
    assert len(facts.head_counts) == len(facts.head_counts_kv) == facts.layers


@pytest.mark.parametrize("name", ["gemma3", "qwen35", "mamba2", "deepseek2", "lfm2"])
def test_the_cache_of_an_unknown_architecture_is_not_estimated_too_small(name: str) -> None:
    """The models have windows, states or latent attention; llamasup does not know their architecture."""
    content = write_model(name, ARCHITECTURES[name](Widths()))
    architecture, keys, tensors = ARCHITECTURES[name](Widths())
    other = write_model(name, (f"{architecture}x", keys, tensors))
    known, unknown = (read_header(each, len(each)) for each in (content, other))
    assert isinstance(known, ModelFacts)
    assert isinstance(unknown, ModelFacts)
    assert unknown.model_class is known.model_class
    shape = ContextShape(8192, 4, 512)
    assert kv_bytes(unknown, shape) >= 0.5 * kv_bytes(known, shape)
