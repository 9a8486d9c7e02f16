"""Model files for tests, made on the spot: tiny ones of several kinds, broken ones, and one of any size.

All with random weights from fixed seeds. What a real llama-server (b11434) loads and serves of them is shown
by tests/real/test_demo_model.py.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.kit.gguf_writer import (
    I32,
    U16,
    KeyValue,
    TensorPlan,
    tensor_bytes,
    write_gguf,
    write_gguf_header,
)
from tests.kit.tiny import FIXED, WORDS, random_weights, tiny_decoder, tiny_keys, tiny_tensors

__all__ = [
    "big_endian_decoder",
    "other_vocabulary",
    "tiny_decider",
    "tiny_decoder",
    "tiny_encoder",
    "tiny_lora",
    "tiny_projector",
    "tiny_reranker",
    "truncated_decoder",
    "vocabulary_only",
    "write_large_decoder",
    "write_split_decoder",
]

_WIDTH = 64
_HEADS = 2
_LAYERS = 2
_FEED_FORWARD = 128
_CONTEXT = 512


def other_vocabulary() -> bytes:
    """A decoder like the tiny one with other and fewer words: no draft for it."""
    words = [f"other{index}" for index in range(100)]
    keys = tiny_keys(words) | {"general.name": "other vocabulary"}
    return write_gguf(keys, tiny_tensors(words, seed="other vocabulary"))


def truncated_decoder(share: float = 0.5) -> bytes:
    """The first part of the tiny decoder, as an interrupted download leaves it."""
    whole = tiny_decoder()
    return whole[: int(len(whole) * share)]


def big_endian_decoder() -> bytes:
    """The tiny decoder for a big-endian host; a little-endian llama-server refuses it."""
    turned = [(plan, _swapped(weights)) for plan, weights in tiny_tensors()]
    return write_gguf(tiny_keys(), turned, big_endian=True)


def vocabulary_only() -> bytes:
    """The tiny decoder's keys and tokenizer, no tensors."""
    return write_gguf(tiny_keys(), [])


def tiny_decider(kind: str) -> bytes:
    """The tiny decoder as a decision model of a type that reads the output of a decoder (b11549)."""
    end = "<|im_end|>" if kind != "kev" else "<|box_end|>"
    template = (
        "{{ state }} {{ instructions }} {% for option in options %}{{ option.key }}" + end + "{% endfor %}"
    )
    keys = tiny_keys() | {"llama.decision.type": kind, "tokenizer.chat_template.systemone": template}
    tokens = [token.replace("<|im_end|>", end) for token in (*FIXED, *(f"▁{word}" for word in WORDS))]
    return write_gguf(keys | {"tokenizer.ggml.tokens": tokens}, tiny_tensors())


def tiny_encoder(pooling_type: int = 1, architecture: str = "bert") -> bytes:
    """A BERT for ``/v1/embeddings``. ``pooling_type``: 1 mean, 2 cls (enum llama_pooling_type)."""
    return write_gguf(_bert_keys(architecture, pooling_type), _bert_tensors())


def tiny_reranker() -> bytes:
    """A BERT with a classification head for ``/v1/rerank``."""
    head = [
        _matrix("cls.weight", _WIDTH, _WIDTH),
        _vector("cls.bias", _WIDTH, 0.0),
        _matrix("cls.output.weight", _WIDTH, 1),
        _vector("cls.output.bias", 1, 0.0),
    ]
    return write_gguf(_bert_keys("bert", 4), [*_bert_tensors(), *head])


def tiny_lora(rank: int = 4, *, base: str | None = None, width: int = _WIDTH) -> bytes:
    """A LoRA adapter for the tiny decoder; of another ``width`` for no model that there is."""
    keys: dict[str, KeyValue] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "general.name": "llamasup lora",
        "general.file_type": 0,
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    if base is not None:
        keys |= {"general.base_model.count": 1, "general.base_model.0.name": base}
    tensors = [
        _matrix("blk.0.attn_q.weight.lora_a", width, rank),
        _matrix("blk.0.attn_q.weight.lora_b", rank, width),
    ]
    return write_gguf(keys, tensors)


def tiny_projector() -> bytes:
    """The header of a vision projector with one tensor: enough to be recognised, not to be loaded."""
    keys: dict[str, KeyValue] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": "llamasup projector",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.vision.block_count": 1,
        "clip.vision.embedding_length": _WIDTH,
        "clip.vision.feed_forward_length": _FEED_FORWARD,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_size": 28,
        "clip.vision.patch_size": 14,
        "clip.vision.projection_dim": _WIDTH,
    }
    return write_gguf(keys, [_matrix("mm.0.weight", _WIDTH, _WIDTH)])


def write_split_decoder(folder: Path, name: str = "tiny", parts: int = 3) -> list[Path]:
    """The tiny decoder in several files, as llama-gguf-split writes them; the first has the keys."""
    tensors = tiny_tensors()
    paths = []
    for index in range(parts):
        own = tensors[index * len(tensors) // parts : (index + 1) * len(tensors) // parts]
        keys: dict[str, KeyValue] = dict(tiny_keys()) if index == 0 else {}
        keys["split.no"] = U16(index)
        keys["split.count"] = U16(parts)
        keys["split.tensors.count"] = I32(len(tensors))
        path = folder / f"{name}-{index + 1:05d}-of-{parts:05d}.gguf"
        path.write_bytes(write_gguf(keys, own))
        paths.append(path)
    return paths


def write_large_decoder(
    path: Path,
    size_bytes: int,
    *,
    context_length: int = 32_768,
    width: int = 1024,
    head: int = 64,
    head_count_kv: int = 4,
    quantization: Literal["Q8_0", "Q4_0", "F16"] = "Q8_0",
) -> Path:
    """A llama of about ``size_bytes`` for measuring speed and memory; random weights are as good.

    ``head``: the width of a head. The number of layers makes the size. Written piece by piece.
    ``quantization``: F16 runs on each processor; a build may compute with the others only on a newer one.
    """
    heads, feed_forward = width // head, width * 11 // 4
    kv_width = head * head_count_kv
    keys = tiny_keys(context_length=context_length)
    vocab_size = keys["llama.vocab_size"]
    if not isinstance(vocab_size, int):
        raise TypeError(f"llama.vocab_size is {vocab_size!r}")

    def layer(index: int) -> list[TensorPlan]:
        shapes: Mapping[str, tuple[int, int]] = {
            "attn_q": (width, width),
            "attn_k": (width, kv_width),
            "attn_v": (width, kv_width),
            "attn_output": (width, width),
            "ffn_gate": (width, feed_forward),
            "ffn_up": (width, feed_forward),
            "ffn_down": (feed_forward, width),
        }
        norms = [TensorPlan(f"blk.{index}.{name}_norm.weight", (width,)) for name in ("attn", "ffn")]
        matrices = [
            TensorPlan(f"blk.{index}.{name}.weight", shape, quantization) for name, shape in shapes.items()
        ]
        return norms + matrices

    ends = [
        TensorPlan("token_embd.weight", (width, vocab_size), quantization),
        TensorPlan("output_norm.weight", (width,)),
        TensorPlan("output.weight", (width, vocab_size), quantization),
    ]
    fixed_bytes = sum(map(tensor_bytes, ends))
    layers = max(1, round((size_bytes - fixed_bytes) / sum(map(tensor_bytes, layer(0)))))
    keys |= {
        "general.name": "llamasup large",
        "general.file_type": {"Q8_0": 7, "Q4_0": 2, "F16": 1}[quantization],
        "llama.block_count": layers,
        "llama.embedding_length": width,
        "llama.feed_forward_length": feed_forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": head_count_kv,
        "llama.rope.dimension_count": head,
    }
    plans = [*ends[:1], *(plan for index in range(layers) for plan in layer(index)), *ends[1:]]
    blocks = _halves() if quantization == "F16" else _blocks({"Q8_0": 32, "Q4_0": 16}[quantization])
    with path.open("wb") as file:
        file.write(write_gguf_header(keys, plans))
        for plan in plans:
            count = tensor_bytes(plan)
            if plan.type_name == "F32":
                file.write(struct.pack("<f", 1.0) * (count // 4))
            else:
                # As of the tiny decoder: its answers are words, never half a UTF-8 character.
                silent = count // vocab_size * len(FIXED) if plan.name == "output.weight" else 0
                file.write(bytes(silent))
                for begin in range(silent, count, len(blocks)):
                    file.write(blocks[: count - begin])
            file.write(bytes(-count % 32))
    return path


def _halves(count: int = 65_536) -> bytes:
    """Numbers of f16 between -1/16 and 1/16."""
    noise = hashlib.shake_256(b"llamasup large").digest(count)
    return struct.pack(f"<{count}e", *((byte - 128) / 2048 for byte in noise))


def _blocks(size: int, count: int = 16_384) -> bytes:
    """Blocks of q8_0 or q4_0: a scale as f16, and 32 signed numbers in ``size`` bytes."""
    noise = hashlib.shake_256(b"llamasup large").digest(size * count)
    scale = struct.pack("<e", 1 / 2048 if size == 32 else 1 / 128)
    return b"".join(scale + noise[begin : begin + size] for begin in range(0, len(noise), size))


def _bert_keys(architecture: str, pooling_type: int) -> dict[str, KeyValue]:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(33, 127)]
    # WordPiece in llama.cpp's vocabulary: "▁" begins a word, pieces inside a word have no mark.
    tokens = [*specials, *(f"▁{letter}" for letter in letters), *letters, "▁cat", "▁dog", "▁hello", "▁world"]
    a = architecture
    return {
        "general.architecture": a,
        "general.type": "model",
        "general.name": "llamasup reranker" if pooling_type == 4 else "llamasup encoder",
        "general.file_type": 0,
        f"{a}.block_count": _LAYERS,
        f"{a}.context_length": _CONTEXT,
        f"{a}.embedding_length": _WIDTH,
        f"{a}.feed_forward_length": _FEED_FORWARD,
        f"{a}.attention.head_count": _HEADS,
        f"{a}.attention.layer_norm_epsilon": 1e-12,
        f"{a}.attention.causal": False,
        f"{a}.pooling_type": pooling_type,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * (len(tokens) - len(specials)),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def _bert_tensors() -> list[tuple[TensorPlan, bytes]]:
    vocab_size = 5 + 2 * 94 + 4

    def norm(name: str) -> list[tuple[TensorPlan, bytes]]:
        return [_vector(f"{name}.weight", _WIDTH, 1.0), _vector(f"{name}.bias", _WIDTH, 0.0)]

    def linear(name: str, row: int, rows: int) -> list[tuple[TensorPlan, bytes]]:
        return [_matrix(f"{name}.weight", row, rows), _vector(f"{name}.bias", rows, 0.0)]

    tensors = [
        _matrix("token_embd.weight", _WIDTH, vocab_size),
        _matrix("token_types.weight", _WIDTH, 2),
        _matrix("position_embd.weight", _WIDTH, _CONTEXT),
        *norm("token_embd_norm"),
    ]
    for index in range(_LAYERS):
        block = f"blk.{index}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors += linear(block + part, _WIDTH, _WIDTH)
        tensors += norm(block + "attn_output_norm")
        tensors += linear(block + "ffn_up", _WIDTH, _FEED_FORWARD)
        tensors += linear(block + "ffn_down", _FEED_FORWARD, _WIDTH)
        tensors += norm(block + "layer_output_norm")
    return tensors


def _matrix(name: str, row: int, rows: int) -> tuple[TensorPlan, bytes]:
    return TensorPlan(name, (row, rows)), random_weights(row * rows, 0.3, name)


def _vector(name: str, length: int, value: float) -> tuple[TensorPlan, bytes]:
    return TensorPlan(name, (length,)), struct.pack("<f", value) * length


def _swapped(weights: bytes) -> bytes:
    turned: Sequence[float] = struct.unpack(f"<{len(weights) // 4}f", weights)
    return struct.pack(f">{len(weights) // 4}f", *turned)
