"""Facts from GGUF headers. The oracle is the ``gguf`` package: it writes the files and reads them again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from msgspec.structs import replace

from llamasup.core.gguf.facts import (
    Experts,
    FimTokens,
    Indexer,
    ModelClass,
    ModelFacts,
    RecurrentState,
    Vocabulary,
)
from llamasup.core.gguf.facts_from_header import facts_of, read_header
from llamasup.core.gguf.header import Container, NeedMore, read_container
from llamasup.errors import ModelInvalid
from tests.kit.architectures import ARCHITECTURES, tiny_model

WIDTH = 64
Tensors = dict[str, tuple[int, ...]]  # shapes in numpy's order


@dataclass(frozen=True)
class Shape:
    """What is written: keys of the architecture without its prefix, other keys, and tensors."""

    architecture: str
    keys: dict[str, Any]
    tensors: Tensors
    expected: dict[str, Any]
    general: dict[str, Any] = field(default_factory=dict)


def write(shape: Shape, path: Path, *, big_endian: bool = False) -> Path:
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, shape.architecture, endianess=order)
    named = {f"{shape.architecture}.{key}": value for key, value in shape.keys.items()}
    for key, value in (named | shape.general).items():
        add(writer, key, value)
    for name, dimensions in shape.tensors.items():
        writer.add_tensor(name, np.ones(dimensions, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def facts_from(path: Path) -> ModelFacts:
    content = path.read_bytes()
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    return facts


def block(layers: int, name: str, dimensions: tuple[int, ...]) -> Tensors:
    return {f"blk.{layer}.{name}.weight": dimensions for layer in range(layers)}


def basics(layers: int, heads: int | Sequence[int] = 4, **more: Any) -> dict[str, Any]:
    return {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 128,
        "attention.head_count": heads,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


EMBEDDING: Tensors = {"token_embd.weight": (40, WIDTH)}
ATTENTION = block(4, "attn_q", (WIDTH, WIDTH))

SHAPES = {
    "llama with grouped heads": Shape(
        "llama",
        basics(4, 4, attention__head_count_kv=2),
        EMBEDDING | ATTENTION | {"output_norm.weight": (WIDTH,), "output.weight": (40, WIDTH)},
        {
            "model_class": ModelClass.DECODER,
            "head_counts": (4,) * 4,
            "head_counts_kv": (2,) * 4,
            "key_length": 16,
            "value_length": 16,
            "feed_forward_lengths": (128,) * 4,
            "kv_layers": (True,) * 4,
            "sliding_window": None,
            "layer_bytes": (4 * WIDTH * WIDTH,) * 4,
            "input_bytes": 4 * 40 * WIDTH,
            "output_bytes": 4 * 41 * WIDTH,
            "tied_output": False,
        },
    ),
    "gemma3 with a sliding window": Shape(
        "gemma3",
        basics(
            7,
            attention__head_count_kv=1,
            attention__key_length=32,
            attention__value_length=32,
            attention__sliding_window=512,
        ),
        EMBEDDING | block(7, "attn_q", (128, WIDTH)),
        {
            "key_length": 32,
            "sliding_window": 512,
            "sliding_layers": (True,) * 5 + (False, True),
            "tied_output": True,
        },
    ),
    "gemma4 with a pattern per layer, other heads in the window, and shared KV": Shape(
        "gemma4",
        basics(
            4,
            attention__head_count_kv=[2, 2, 2, 1],
            attention__sliding_window=512,
            attention__sliding_window_pattern=[True, True, True, False],
            attention__key_length=64,
            attention__value_length=64,
            attention__key_length_swa=32,
            attention__value_length_swa=32,
            attention__shared_kv_layers=1,
        ),
        EMBEDDING | ATTENTION,
        {
            "head_counts_kv": (2, 2, 2, 1),
            "sliding_layers": (True, True, True, False),
            "key_length_swa": 32,
            "kv_layers": (True, True, True, False),
        },
    ),
    "smallthinker, where the full layer comes first": Shape(
        "smallthinker",
        basics(5, attention__sliding_window=4096),
        EMBEDDING,
        {"sliding_layers": (False, True, True, True, False)},
    ),
    "cohere2 with a period of its own": Shape(
        "cohere2",
        basics(4, attention__sliding_window=4096, attention__sliding_window_pattern=2),
        EMBEDDING,
        {"sliding_layers": (True, False, True, False)},
    ),
    "gpt-oss with a period of nought": Shape(
        "gpt-oss",
        basics(2, attention__sliding_window=128, attention__sliding_window_pattern=0),
        EMBEDDING,
        {"sliding_layers": (True, True)},
    ),
    "gemma2 from before its window was written": Shape(
        "gemma2", basics(2), EMBEDDING, {"sliding_window": 4096, "sliding_layers": (True, False)}
    ),
    "gemma3 without a window": Shape(
        "gemma3", basics(2), EMBEDDING, {"sliding_window": None, "sliding_layers": (False, False)}
    ),
    "llama4, whose chunks have one size": Shape(
        "llama4",
        basics(4, attention__sliding_window=64, expert_count=16, expert_feed_forward_length=32),
        EMBEDDING,
        {
            "sliding_window": 8192,
            "sliding_layers": (True, True, True, False),
            "experts": Experts(16, feed_forward_length=32),
        },
    ),
    "llama4 without chunks": Shape(
        "llama4",
        basics(4, attention__sliding_window=0),
        EMBEDDING,
        {"sliding_window": None, "sliding_layers": (False,) * 4},
    ),
    "exaone4 32B, the only one with a window": Shape(
        "exaone4",
        basics(64),
        EMBEDDING,
        {"sliding_window": 4096, "sliding_layers": (True, True, True, False) * 16},
    ),
    "exaone4 of another size": Shape(
        "exaone4",
        basics(4, attention__sliding_window=4096),
        EMBEDDING,
        {"sliding_layers": (False,) * 4},
    ),
    "gemma3n, which shares the KV cache of its first layers": Shape(
        "gemma3n",
        basics(22, attention__sliding_window=512),
        EMBEDDING,
        {
            "kv_layers": (True,) * 20 + (False, False),
            "side_length": 256,
            "sliding_layers": ((True,) * 4 + (False,)) * 4 + (True, True),
        },
    ),
    "llama that carries a window llama.cpp ignores": Shape(
        "llama",
        basics(2, attention__sliding_window=4096),
        EMBEDDING,
        {"sliding_window": 4096, "sliding_layers": (False, False)},
    ),
    "deepseek2 with latent attention and experts": Shape(
        "deepseek2",
        basics(
            2,
            attention__head_count_kv=1,
            attention__key_length=576,
            attention__value_length=512,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            attention__kv_lora_rank=512,
            expert_count=64,
            expert_used_count=6,
            expert_shared_count=2,
            nextn_predict_layers=1,
        ),
        EMBEDDING
        | block(2, "ffn_gate_exps", (2, 8, WIDTH))
        | block(2, "ffn_gate_shexp", (8, WIDTH))
        | {"blk.7.unknown.weight": (WIDTH,)},
        {
            "mla": True,
            "key_length": 576,
            "value_length": 512,
            "experts": Experts(64, 6, 2, 128),
            "mtp_layers": 1,
            "kv_layers": (True, False),
            "layer_bytes": (4 * 24 * WIDTH,) * 2,
            "expert_bytes": (4 * 16 * WIDTH,) * 2,
            "input_bytes": 4 * 41 * WIDTH,
        },
    ),
    "glm-dsa with an indexer": Shape(
        "glm-dsa",
        basics(
            2,
            attention__key_length_mla=192,
            attention__value_length_mla=128,
            attention__indexer__key_length=128,
            attention__indexer__top_k=2048,
        ),
        EMBEDDING,
        {"mla": True, "indexer": Indexer(128, 2048)},
    ),
    "mamba": Shape(
        "mamba",
        basics(2, 0, ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16, ssm__time_step_rank=4),
        EMBEDDING | block(2, "ssm_in", (WIDTH, WIDTH)),
        {
            "key_length": 0,
            "recurrent": RecurrentState(3 * 128, 16 * 128, 7 * 128),
            "recurrent_layers": (True, True),
            "kv_layers": (False, False),
        },
    ),
    "rwkv7": Shape(
        "rwkv7",
        basics(2, 0, wkv__head_size=32),
        EMBEDDING,
        {"recurrent": RecurrentState(2 * WIDTH, WIDTH * 32, 16 * WIDTH), "kv_layers": (False, False)},
    ),
    "granitehybrid, recurrent where there are no KV heads": Shape(
        "granitehybrid",
        basics(
            3,
            attention__head_count_kv=[0, 2, 0],
            ssm__conv_kernel=4,
            ssm__inner_size=128,
            ssm__state_size=16,
            ssm__group_count=1,
        ),
        EMBEDDING,
        {
            "recurrent": RecurrentState(3 * (128 + 32), 16 * 128, 7 * (128 + 32)),
            "recurrent_layers": (True, False, True),
            "kv_layers": (False, True, False),
        },
    ),
    "nemotron_h with layers of feed-forward alone": Shape(
        "nemotron_h",
        basics(3, attention__head_count_kv=[0, 2, 0], ssm__conv_kernel=4, ssm__inner_size=128)
        | {"feed_forward_length": [0, 0, 128]},
        EMBEDDING,
        {"recurrent_layers": (True, False, False), "kv_layers": (False, True, False)},
    ),
    "lfm2 with short convolutions": Shape(
        "lfm2",
        basics(2, attention__head_count_kv=[0, 2], shortconv__l_cache=3),
        EMBEDDING,
        {"recurrent": RecurrentState(2 * WIDTH, 0, 6 * WIDTH), "recurrent_layers": (True, False)},
    ),
    "kimi-linear with delta attention": Shape(
        "kimi-linear",
        basics(2, attention__head_count_kv=[0, 2], ssm__conv_kernel=4, kda__head_dim=16),
        EMBEDDING,
        {
            "recurrent": RecurrentState(3 * 3 * 4 * 16, 4 * 16 * 16, 4 * 3 * 4 * 16),
            "recurrent_layers": (True, False),
        },
    ),
    "qwen3next, full attention in every fourth layer, and a layer for prediction": Shape(
        "qwen3next",
        basics(
            9,
            attention__head_count_kv=2,
            nextn_predict_layers=1,
            ssm__conv_kernel=4,
            ssm__inner_size=128,
            ssm__state_size=16,
        ),
        EMBEDDING,
        {
            "recurrent_layers": (True, True, True, False) * 2 + (False,),
            "kv_layers": (False, False, False, True) * 2 + (False,),
        },
    ),
    "qwen35 with its recurrent layers listed, those for prediction left out": Shape(
        "qwen35",
        basics(
            3,
            nextn_predict_layers=1,
            attention__recurrent_layers=[True, True],
            ssm__conv_kernel=4,
            ssm__inner_size=128,
        ),
        EMBEDDING,
        {"recurrent_layers": (True, True, False), "kv_layers": (False, False, False)},
    ),
    "falcon-h1, recurrence beside attention": Shape(
        "falcon-h1",
        basics(2, ssm__conv_kernel=4, ssm__inner_size=128),
        EMBEDDING,
        {"recurrent_layers": (True, True), "kv_layers": (True, True)},
    ),
    "bert": Shape(
        "bert",
        basics(2, attention__causal=False, pooling_type=1),
        EMBEDDING | block(2, "attn_q", (WIDTH, WIDTH)),
        {
            "model_class": ModelClass.ENCODER,
            "pooling": "mean",
            "causal": False,
            "kv_layers": (False, False),
        },
    ),
    "qwen3 that embeds": Shape(
        "qwen3",
        basics(2, pooling_type=3),
        EMBEDDING,
        {"model_class": ModelClass.ENCODER, "pooling": "last", "causal": True, "kv_layers": (True, True)},
    ),
    "bert that ranks": Shape(
        "bert",
        basics(2, pooling_type=4),
        EMBEDDING | {"cls.weight": (WIDTH, WIDTH)},
        {"model_class": ModelClass.RERANKER, "pooling": "rank", "output_bytes": 4 * WIDTH * WIDTH},
    ),
    "t5": Shape(
        "t5",
        basics(2, attention__key_length=16, attention__value_length=16),
        EMBEDDING | {"enc.blk.0.attn_q.weight": (WIDTH, WIDTH), "dec.blk.0.attn_q.weight": (WIDTH, WIDTH)},
        {"model_class": ModelClass.ENCODER_DECODER, "layer_bytes": (8 * WIDTH * WIDTH, 0)},
    ),
    "clip projector for images": Shape(
        "clip",
        {
            "has_vision_encoder": True,
            "vision.block_count": 3,
            "vision.embedding_length": 128,
            "vision.attention.head_count": 8,
        },
        {"v.blk.0.attn_q.weight": (WIDTH, WIDTH)},
        {
            "model_class": ModelClass.PROJECTOR,
            "layers": 3,
            "embedding_length": 128,
            "head_counts": (8,) * 3,
            "context_length": 0,
        },
        {"general.type": "mmproj"},
    ),
    "clip projector for sound": Shape(
        "clip",
        {"has_audio_encoder": True, "audio.block_count": 2, "audio.embedding_length": 128},
        {"a.blk.0.attn_q.weight": (WIDTH, WIDTH)},
        {"model_class": ModelClass.PROJECTOR, "layers": 2},
    ),
    "lora adapter": Shape(
        "llama",
        {},
        {"blk.0.attn_q.weight.lora_a": (4, WIDTH), "blk.0.attn_q.weight.lora_b": (WIDTH, 4)},
        {"model_class": ModelClass.LORA, "layers": 0, "parameters": 8 * WIDTH},
        {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0},
    ),
    "eagle3 draft head": Shape(
        "eagle3", basics(1), EMBEDDING, {"model_class": ModelClass.DRAFT, "layers": 1}
    ),
    "vocabulary alone": Shape(
        "llama",
        basics(2),
        {},
        {"model_class": ModelClass.VOCAB, "vocab_size": 3, "quantization": "", "weights_bytes": 0},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "c"]},
    ),
}


@pytest.mark.parametrize("big_endian", [False, True], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_header_written_by_the_gguf_package_gives_its_facts(
    name: str, big_endian: bool, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    path = write(shape, tmp_path / "model.gguf", big_endian=big_endian)
    facts = facts_from(path)

    assert facts.architecture == shape.architecture
    assert facts.big_endian is big_endian
    assert facts.version == 3
    assert {key: getattr(facts, key) for key in shape.expected} == shape.expected
    for per_layer in ("head_counts", "head_counts_kv", "kv_layers", "layer_bytes", "recurrent_layers"):
        assert len(getattr(facts, per_layer)) == facts.layers

    oracle = gguf.GGUFReader(path)
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in oracle.tensors)
    assert facts.weights_bytes == sum(int(tensor.n_bytes) for tensor in oracle.tensors)
    assert facts.weights_bytes == sum(facts.layer_bytes) + facts.input_bytes + facts.output_bytes
    if oracle.tensors:
        last = oracle.tensors[-1]
        assert facts.expected_bytes == int(last.data_offset + last.n_bytes)
    assert facts.expected_bytes <= facts.file_bytes == path.stat().st_size


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reader_agrees_with_the_oracle_on_the_fuzzed_models(name: str, tmp_path: Path) -> None:
    """tests/extended/real/test_memory.py loads them. Each number is the key's own, or one for each layer."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model(name))
    facts = facts_from(path)
    oracle = gguf.GGUFReader(path)

    def stated(key: str, *, layers: int = 0) -> Any:
        found = oracle.get_field(f"{facts.architecture}.{key}")
        value = None if found is None else found.contents()
        return (value,) * layers if layers and isinstance(value, int) else value

    assert facts.layers == stated("block_count")
    assert facts.context_length == stated("context_length")
    assert facts.embedding_length == stated("embedding_length")
    assert facts.key_length == stated("attention.key_length")
    assert facts.value_length == stated("attention.value_length")
    assert facts.head_counts == stated("attention.head_count", layers=facts.layers)
    heads_kv = stated("attention.head_count_kv", layers=facts.layers) or facts.head_counts
    assert facts.head_counts_kv == tuple(heads_kv)
    assert facts.feed_forward_lengths == tuple(stated("feed_forward_length", layers=facts.layers))
    assert facts.sliding_window == stated("attention.sliding_window")
    assert facts.experts.count == (stated("expert_count") or 0)
    assert facts.mtp_layers == (stated("nextn_predict_layers") or 0)
    assert facts.weights_bytes == sum(int(tensor.n_bytes) for tensor in oracle.tensors)
    for layer in range(facts.layers):
        blocks = (f"blk.{layer}.", f"enc.blk.{layer}.", f"dec.blk.{layer}.")
        of_layer = (tensor.n_bytes for tensor in oracle.tensors if tensor.name.startswith(blocks))
        assert facts.layer_bytes[layer] == sum(map(int, of_layer))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in gguf.GGMLQuantizationType if kind.name != "Q8_1"],
    ids=lambda kind: kind.name,
)
def test_every_tensor_type_has_the_size_that_the_gguf_package_gives_it(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Q8_1 is left out: the package says 40 bytes a block, ggml 36, and no file holds it."""
    elements, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in basics(1).items():
        add(writer, f"llama.{key}", value)
    writer.add_tensor_info("token_embd.weight", [3, size_bytes], np.dtype(np.uint8), 3 * size_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = (tmp_path / "model.gguf").read_bytes()

    facts = read_header(header, len(header) + 3 * size_bytes + 64)

    assert isinstance(facts, ModelFacts)
    assert facts.weights_bytes == 3 * size_bytes
    assert facts.parameters == 3 * elements
    assert facts.quantization == kind.name


@pytest.mark.parametrize("kind", list(gguf.LlamaFileType), ids=lambda kind: kind.name)
def test_the_file_type_names_the_quantisation_as_file_names_do(
    kind: gguf.LlamaFileType, tmp_path: Path
) -> None:
    shape = Shape("llama", basics(1), EMBEDDING, {}, {"general.file_type": int(kind)})
    facts = facts_from(write(shape, tmp_path / "model.gguf"))
    word = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").removesuffix("_MOE")
    assert facts.quantization == ("F32" if kind is gguf.LlamaFileType.GUESSED else word)


def test_unknown_file_type_gives_the_type_of_most_bytes(tmp_path: Path) -> None:
    shape = Shape("llama", basics(1), EMBEDDING, {}, {"general.file_type": 999})
    assert facts_from(write(shape, tmp_path / "model.gguf")).quantization == "F32"


def test_vocabulary_has_the_facts_that_a_draft_must_share(tmp_path: Path) -> None:
    general = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(5000)],
        "tokenizer.ggml.token_type": [1] * 5000,
        "tokenizer.ggml.scores": [0.5] * 5000,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "general.name": "Tiny",
    }
    facts = facts_from(write(Shape("qwen2", basics(1), EMBEDDING, {}, general), tmp_path / "model.gguf"))
    assert replace(facts.vocabulary, digests=()) == Vocabulary(
        "gpt2", "qwen2", 5000, bos=1, eos=2, add_bos=False
    )
    assert [count for count, _ in facts.vocabulary.digests] == [4800, 4864, 4928, 4992, 5000]
    assert facts.vocab_size == 5000
    assert facts.name == "Tiny"


@pytest.mark.parametrize(
    "names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")], ids=["new", "old"]
)
def test_fill_in_the_middle_tokens_are_found_in_both_spellings(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    general = {f"tokenizer.ggml.{name}_token_id": 10 + index for index, name in enumerate(names)}
    facts = facts_from(write(Shape("llama", basics(1), EMBEDDING, {}, general), tmp_path / "model.gguf"))
    assert facts.fim == FimTokens(10, 11, 12)
    assert facts.fim.usable
    assert not FimTokens(prefix=1).usable


def test_a_recurrent_state_is_held_in_f32() -> None:
    assert RecurrentState(conv_elements=10, state_elements=20).bytes_per_layer == 120


@pytest.mark.parametrize(("key_length", "fits"), [(64, True), (80, False), (0, False)])
def test_a_quantised_kv_cache_needs_heads_that_divide_by_its_block(
    key_length: int, fits: bool, tmp_path: Path
) -> None:
    keys = basics(1, attention__key_length=key_length, attention__value_length=64)
    facts = facts_from(write(Shape("llama", keys, EMBEDDING, {}), tmp_path / "model.gguf"))
    assert facts.quantized_kv_fits is fits


# --- parts and pieces ----------------------------------------------------------------------------


def split_containers(tmp_path: Path) -> list[Container]:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for key, value in basics(2).items():
        add(writer, f"llama.{key}", value)
    for name, dimensions in (EMBEDDING | ATTENTION).items():
        writer.add_tensor(name, np.ones(dimensions, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    containers = []
    for path in sorted(tmp_path.glob("m-*.gguf")):
        container = read_container(path.read_bytes(), path.stat().st_size)
        assert isinstance(container, Container)
        containers.append(container)
    return containers


def test_the_parts_of_a_split_model_are_added_up(tmp_path: Path) -> None:
    containers = split_containers(tmp_path)
    assert len(containers) == 3
    facts = facts_of(containers)
    assert facts.split.count == 3
    assert facts.parameters == 40 * WIDTH + 4 * WIDTH * WIDTH
    assert facts.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("m-*.gguf"))
    assert facts.weights_bytes == 4 * facts.parameters


def test_a_later_part_of_a_split_model_asks_for_the_first(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="part 2 of a model in 3 files") as caught:
        facts_of(split_containers(tmp_path)[1:2])
    assert "00001-of-" in caught.value.remedy


def test_first_part_without_tensors_is_not_a_vocabulary(tmp_path: Path) -> None:
    shape = Shape("llama", basics(1), {}, {}, {"split.count": 2, "split.no": 0})
    assert facts_from(write(shape, tmp_path / "model.gguf")).model_class is ModelClass.DECODER


def test_version_2_is_read_as_version_3_is(tmp_path: Path) -> None:
    path = write(SHAPES["llama with grouped heads"], tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    content[4] = 2
    facts = read_header(content, len(content))
    assert isinstance(facts, ModelFacts)
    assert facts.version == 2
    assert facts.head_counts_kv == (2,) * 4


def test_a_header_is_asked_for_in_a_few_pieces_and_the_weights_are_not_read(tmp_path: Path) -> None:
    general = {"tokenizer.ggml.tokens": [f"token number {index}" for index in range(50_000)]}
    shape = Shape("llama", basics(1), {"token_embd.weight": (50_000, WIDTH)}, {}, general)
    content = write(shape, tmp_path / "model.gguf").read_bytes()
    given, sizes = 0, []
    outcome: ModelFacts | NeedMore = NeedMore(0)
    while isinstance(outcome, NeedMore):
        outcome = read_header(memoryview(content)[:given], len(content))
        if isinstance(outcome, NeedMore):
            assert given < outcome.bytes_needed <= len(content)
            given = outcome.bytes_needed
            sizes.append(given)
    assert len(sizes) <= 3
    assert given < len(content) / 2
    assert outcome.vocab_size == 50_000


@pytest.mark.extended
def test_a_large_vocabulary_is_read_at_least_ten_times_faster_than_by_the_gguf_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P8. The times themselves depend on the machine; they are printed."""
    count = 30_000
    general = {
        "tokenizer.ggml.tokens": [f"tok{index:x}" for index in range(count)],
        "tokenizer.ggml.token_type": [1] * count,
        "tokenizer.ggml.merges": [f"a{index:x} b{index:x}" for index in range(count)],
    }
    path = write(Shape("llama", basics(1), EMBEDDING, {}, general), tmp_path / "model.gguf")
    content = path.read_bytes()

    begin = time.thread_time()
    facts = read_header(content, len(content))
    ours_s = time.thread_time() - begin
    begin = time.thread_time()
    gguf.GGUFReader(path)
    oracle_s = time.thread_time() - begin

    assert isinstance(facts, ModelFacts)
    assert facts.vocab_size == count
    with capsys.disabled():
        print(f"\n{count} tokens and merges: {1000 * ours_s:.1f} ms, the gguf package {oracle_s:.1f} s")
    assert ours_s < oracle_s / 10
