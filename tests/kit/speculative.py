"""Tiny model files for speculative decoding: drafts that fit and do not, and a model that drafts for itself.

What a real llama-server (b11434) does with each is shown by tests/extended/real/test_drafting.py.
"""

from __future__ import annotations

import struct

from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import WORDS, random_weights, tiny_keys, tiny_tensors

__all__ = ["changed_decoder", "draft_head", "mtp_head", "self_drafting_decoder"]

_A = "qwen35"
_WIDTH = 64
_HEADS = 2
_HEAD_LENGTH = 32
_FEED_FORWARD = 128
_STATE = 16  # of one head of linear attention
_TRUNK_LAYERS = 2  # one of linear attention, one of full
_CONV_KERNEL = 4

_Tensors = list[tuple[TensorPlan, bytes]]


def changed_decoder(
    *,
    more_words: int = 0,
    first_word: str | None = None,
    without: tuple[str, ...] = (),
    **changes: KeyValue,
) -> bytes:
    """The tiny decoder with other ``tokenizer.ggml.*`` keys (``bos_token_id=3``), or with other words.

    ``more_words`` below zero leaves the last ones out.
    """
    own = WORDS if first_word is None else (first_word, *WORDS[1:])
    words = [*own[: len(own) + min(more_words, 0)], *(f"more{index}" for index in range(more_words))]
    keys = tiny_keys(words)
    for name in without:
        del keys[f"tokenizer.ggml.{name}"]
    keys |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return write_gguf(keys, tiny_tensors(words))


def self_drafting_decoder() -> bytes:
    """A Qwen3.5 of two layers, and a third that predicts the token after the next (MTP)."""
    keys = _qwen_keys()
    trunk = [*_linear_attention(0), *_full_attention(1)]
    return write_gguf(keys, [*_outside(), *trunk, *_mtp_layer(_TRUNK_LAYERS)])


def mtp_head() -> bytes:
    """The MTP layer of the self-drafting decoder alone, as some publish it: a draft for that one model."""
    return write_gguf(_qwen_keys(), [*_outside(), *_mtp_layer(_TRUNK_LAYERS)])


def draft_head(architecture: str = "eagle3") -> bytes:
    """The header of a draft head with one tensor: enough to be recognised, not to be loaded."""
    keys: dict[str, KeyValue] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"llamasup {architecture}",
        "general.file_type": 0,
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": _WIDTH,
        f"{architecture}.feed_forward_length": _FEED_FORWARD,
        f"{architecture}.attention.head_count": _HEADS,
        f"{architecture}.attention.head_count_kv": _HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return write_gguf(keys, [_matrix("fc.weight", 3 * _WIDTH, _WIDTH)])


def _qwen_keys() -> dict[str, KeyValue]:
    """The demo model's tokenizer under another architecture."""
    demo = tiny_keys()
    keys = {key: value for key, value in demo.items() if not key.startswith("llama.")}
    return keys | {
        "general.architecture": _A,
        "general.name": "llamasup self-drafting",
        f"{_A}.block_count": _TRUNK_LAYERS + 1,
        f"{_A}.nextn_predict_layers": 1,
        f"{_A}.full_attention_interval": 2,
        f"{_A}.context_length": 32_768,
        f"{_A}.embedding_length": _WIDTH,
        f"{_A}.feed_forward_length": _FEED_FORWARD,
        f"{_A}.attention.head_count": _HEADS,
        f"{_A}.attention.head_count_kv": _HEADS,
        f"{_A}.attention.key_length": _HEAD_LENGTH,
        f"{_A}.attention.value_length": _HEAD_LENGTH,
        f"{_A}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{_A}.rope.dimension_count": _HEAD_LENGTH,
        f"{_A}.rope.dimension_sections": [8, 4, 4, 0],
        f"{_A}.ssm.conv_kernel": _CONV_KERNEL,
        f"{_A}.ssm.state_size": _STATE,
        f"{_A}.ssm.inner_size": _STATE * _HEADS,
        f"{_A}.ssm.time_step_rank": _HEADS,
        f"{_A}.ssm.group_count": _HEADS,
        f"{_A}.vocab_size": demo["llama.vocab_size"],
    }


def _outside() -> _Tensors:
    """Embeddings and output of the demo model: it speaks in words only."""
    names = {"token_embd.weight", "output_norm.weight", "output.weight"}
    return [(plan, weights) for plan, weights in tiny_tensors() if plan.name in names]


def _linear_attention(index: int) -> _Tensors:
    block = f"blk.{index}."
    inner = _STATE * _HEADS
    return [
        *_norms_and_feed_forward(block),
        _matrix(f"{block}attn_qkv.weight", _WIDTH, 3 * inner),
        _matrix(f"{block}attn_gate.weight", _WIDTH, inner),
        _matrix(f"{block}ssm_conv1d.weight", _CONV_KERNEL, 3 * inner),
        _vector(f"{block}ssm_dt.bias", _HEADS, 0.0),
        _vector(f"{block}ssm_a", _HEADS, -1.0),
        _matrix(f"{block}ssm_beta.weight", _WIDTH, _HEADS),
        _matrix(f"{block}ssm_alpha.weight", _WIDTH, _HEADS),
        _vector(f"{block}ssm_norm.weight", _STATE, 1.0),
        _matrix(f"{block}ssm_out.weight", inner, _WIDTH),
    ]


def _full_attention(index: int) -> _Tensors:
    block = f"blk.{index}."
    heads = _HEADS * _HEAD_LENGTH
    return [
        *_norms_and_feed_forward(block),
        _matrix(f"{block}attn_q.weight", _WIDTH, 2 * heads),  # queries, and a gate for each
        _matrix(f"{block}attn_k.weight", _WIDTH, heads),
        _matrix(f"{block}attn_v.weight", _WIDTH, heads),
        _matrix(f"{block}attn_output.weight", heads, _WIDTH),
        _vector(f"{block}attn_q_norm.weight", _HEAD_LENGTH, 1.0),
        _vector(f"{block}attn_k_norm.weight", _HEAD_LENGTH, 1.0),
    ]


def _mtp_layer(index: int) -> _Tensors:
    block = f"blk.{index}.nextn."
    return [
        *_full_attention(index),
        _matrix(f"{block}eh_proj.weight", 2 * _WIDTH, _WIDTH),
        _vector(f"{block}enorm.weight", _WIDTH, 1.0),
        _vector(f"{block}hnorm.weight", _WIDTH, 1.0),
        _vector(f"{block}shared_head_norm.weight", _WIDTH, 1.0),
    ]


def _norms_and_feed_forward(block: str) -> _Tensors:
    return [
        _vector(f"{block}attn_norm.weight", _WIDTH, 1.0),
        _vector(f"{block}post_attention_norm.weight", _WIDTH, 1.0),
        _matrix(f"{block}ffn_gate.weight", _WIDTH, _FEED_FORWARD),
        _matrix(f"{block}ffn_up.weight", _WIDTH, _FEED_FORWARD),
        _matrix(f"{block}ffn_down.weight", _FEED_FORWARD, _WIDTH),
    ]


def _matrix(name: str, row: int, rows: int) -> tuple[TensorPlan, bytes]:
    return TensorPlan(name, (row, rows)), random_weights(row * rows, 0.3, name)


def _vector(name: str, length: int, value: float) -> tuple[TensorPlan, bytes]:
    return TensorPlan(name, (length,)), struct.pack("<f", value) * length
