"""The tiny decoder of the tests: a llama of two layers with random weights.

It generates random common English words until the limit, the same each time at temperature 0. In every other
way it is a real model: it chats, streams, can be its own draft model, and its heads of 32 allow a q8_0 KV
cache. 0.7 MB, from a fixed seed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf

__all__ = [
    "CHAT_TEMPLATE",
    "FIXED",
    "PRINTABLE",
    "WORDS",
    "random_weights",
    "tiny_decoder",
    "tiny_keys",
    "tiny_tensors",
    "tokenizer_keys",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PRINTABLE = "▁\n" + "".join(map(chr, range(33, 127)))
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two more write "
    "go see number no way could people my than first water been call who oil its now find long down day did "
    "get come made may part over new sound take only little work know place year live me back give most very "
    "after thing our just name good sentence man think say great where help through much before line right "
    "too mean old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land different home "
    "us move try kind hand picture again change off play spell air away animal house point page letter "
    "mother answer found study still learn should world"
)
WORDS = tuple(_TEXT.split())

# Token types of llama.h.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
FIXED = (*_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *PRINTABLE)
"""The tokens at the beginning of each vocabulary."""
_TYPES = (_UNKNOWN, *[_CONTROL] * 4, *[_BYTE] * 256, *[_NORMAL] * len(PRINTABLE))

_LAYERS = 2
_WIDTH = 64
_HEADS = 2
_FEED_FORWARD = 160


def tiny_decoder() -> bytes:
    """The file, byte for byte the same each time. Takes about 6 ms."""
    return write_gguf(tiny_keys(), tiny_tensors())


def tiny_keys(words: Sequence[str] = WORDS, *, context_length: int = 32_768) -> dict[str, KeyValue]:
    """The header's keys, for a vocabulary that ends with ``words``."""
    return {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "llamasup demo",
        "general.description": "Random weights: it answers with words that mean nothing.",
        "general.file_type": 0,
        "llama.block_count": _LAYERS,
        "llama.context_length": context_length,
        "llama.embedding_length": _WIDTH,
        "llama.feed_forward_length": _FEED_FORWARD,
        "llama.attention.head_count": _HEADS,
        "llama.attention.head_count_kv": _HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": _WIDTH // _HEADS,
        "llama.vocab_size": len(FIXED) + len(words),
        **tokenizer_keys([f"▁{word}" for word in words]),
    }


def tokenizer_keys(pieces: Sequence[str]) -> dict[str, KeyValue]:
    """Of a vocabulary that ends with ``pieces``, of which the first is merged first."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*FIXED, *pieces],
        # SentencePiece merges the piece with the highest score first.
        "tokenizer.ggml.scores": [*[0.0] * len(FIXED), *(-1.0 - rank for rank in range(len(pieces)))],
        "tokenizer.ggml.token_type": [*_TYPES, *[_NORMAL] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        # A space after a control token fits no grammar, so answers with a JSON schema would fail.
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_tensors(
    words: Sequence[str] = WORDS, *, seed: str = "llamasup demo"
) -> list[tuple[TensorPlan, bytes]]:
    """The weights, for a vocabulary that ends with ``words``.

    All tokens except the words have output weights of zero, so their logit is 0, far below the best word's.
    The model never generates a control token, an end of text, or half a UTF-8 character, and goes on until
    max_tokens.
    """
    silent = len(FIXED)

    def matrix(name: str, row: int, rows: int, largest: float = 0.3) -> tuple[TensorPlan, bytes]:
        plan = TensorPlan(f"{name}.weight", (row, rows))
        return plan, random_weights(row * rows, largest, f"{seed} {name}")

    def norm(name: str) -> tuple[TensorPlan, bytes]:
        return TensorPlan(f"{name}.weight", (_WIDTH,)), struct.pack("<f", 1.0) * _WIDTH

    tensors = [matrix("token_embd", _WIDTH, silent + len(words), largest=1.0)]
    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        tensors += (norm(block + "attn_norm"), norm(block + "ffn_norm"))
        tensors += (matrix(f"{block}attn_{part}", _WIDTH, _WIDTH) for part in ("q", "k", "v", "output"))
        tensors += (matrix(f"{block}ffn_{part}", _WIDTH, _FEED_FORWARD) for part in ("gate", "up"))
        tensors.append(matrix(block + "ffn_down", _FEED_FORWARD, _WIDTH))
    spoken = random_weights(_WIDTH * len(words), 0.3, f"{seed} output")
    tensors.append(norm("output_norm"))
    output = TensorPlan("output.weight", (_WIDTH, silent + len(words)))
    tensors.append((output, bytes(4 * _WIDTH * silent) + spoken))
    return tensors


def random_weights(count: int, largest: float, seed: str) -> bytes:
    """``count`` little-endian f32 of 256 even steps from ``-largest`` to ``largest``, the same for a seed."""
    levels = [struct.pack("<f", largest * (2 * level / 255 - 1)) for level in range(256)]
    noise = hashlib.shake_256(seed.encode()).digest(count)
    return b"".join(map(levels.__getitem__, noise))
