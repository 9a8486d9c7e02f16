"""Train the demo model and its draft on the stories of stories.py, and write them as GGUF files.

    pip install --group train
    python -m scripts.demo train [--steps 500] [--seed 1] [--out llamasup/core/gguf/trained]

The target is trained on the text, and the draft on the same text and on the probabilities of the target. Both
are stored as Q8_0, and share a vocabulary of 1,024 pieces. Takes about 25 minutes on 2 idle cores.
"""

from __future__ import annotations

import argparse
import io
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece

from scripts.demo.stories import Turn, conversations
from scripts.pages import ROOT
from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import FIXED, PRINTABLE, tokenizer_keys

VOCABULARY = 1024
CONTEXT = 1024
BATCH = 3
HEAD = 32  # the length of a head: a whole block of q8_0
EPSILON = 1e-5
ROPE_BASE = 10_000.0
BOS, EOS, START, END = 1, 2, 3, 4
# How much a token counts in training. The first words of an answer depend on the question, the others hardly.
QUESTION, OPENING, ANSWER = 0.05, 4.0, 1.0
OPENING_TOKENS = 24

Weights = dict[str, Any]


class Shape(NamedTuple):
    layers: int
    width: int
    feed_forward: int


TARGET = Shape(layers=6, width=192, feed_forward=512)
DRAFT = Shape(layers=1, width=96, feed_forward=256)


# --- the text


def train_tokenizer(seed: int) -> list[str]:
    """The pieces of more than one character, those that are merged first at the beginning."""
    source = conversations(seed)
    lines = [text for _ in range(4000) for turn in next(source) for text in turn if text]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCABULARY - len(FIXED) + len(PRINTABLE) + 3,
        hard_vocab_limit=True,
        character_coverage=1.0,
        required_chars=PRINTABLE.removeprefix("▁\n"),
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_number=True,
        max_sentencepiece_length=16,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    learned = [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]
    return [piece for piece in learned if len(piece) > 1][: VOCABULARY - len(FIXED)]


class Tokenizer:
    """Split a text as llama.cpp does it: the neighbours with the best score are merged first."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self._ids = {token: number for number, token in enumerate((*FIXED, *pieces))}
        self._rank = {piece: rank for rank, piece in enumerate(pieces)}
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        words = text.replace("▁", "\0▁").split("\0")  # no piece of the stories has a space within
        return [token for word in words if word for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            symbols = list(word)
            while pairs := [
                (self._rank[one + two], at)
                for at, (one, two) in enumerate(pairwise(symbols))
                if one + two in self._rank
            ]:
                at = min(pairs)[1]
                symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
            self._known[word] = [self._ids[symbol] for symbol in symbols]
        return self._known[word]

    def conversation(self, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """Its tokens, and how much each of them counts."""
        tokens, counts = [BOS], [QUESTION]

        def add(more: Sequence[int], *, learned: bool) -> None:
            tokens.extend(more)
            opening = min(len(more), OPENING_TOKENS) if learned else 0
            counts.extend([OPENING] * opening + [ANSWER if learned else QUESTION] * (len(more) - opening))

        for turn in turns:
            if not turn.question:
                add([*self.encode(turn.answer), EOS], learned=True)
                continue
            add([START, *self.encode(f"user\n{turn.question}"), END, *self.encode("\n")], learned=False)
            add([START, *self.encode("assistant\n")], learned=False)
            add([*self.encode(turn.answer), END], learned=True)
            add(self.encode("\n"), learned=False)
        return tokens, counts


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, counts), each of BATCH x (CONTEXT + 1), without end."""
    source = conversations(seed)
    while True:
        tokens = np.full((BATCH, CONTEXT + 1), EOS, np.int32)
        counts = np.zeros((BATCH, CONTEXT + 1), np.float32)
        for row in range(BATCH):
            at = 0
            while at <= CONTEXT:
                some, each = tokenizer.conversation(next(source))
                end = min(at + len(some), CONTEXT + 1)
                tokens[row, at:end], counts[row, at:end] = some[: end - at], each[: end - at]
                at = end
        yield tokens, counts


# --- the model


def new_weights(shape: Shape, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    width, wide = shape.width, shape.feed_forward

    def matrix(rows: int, row: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, row)) * scale / np.sqrt(row)).astype(np.float32)

    weights: Weights = {"token_embd": matrix(VOCABULARY, width), "output_norm": np.ones(width, np.float32)}
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        weights |= {f"{block}{part}_norm": np.ones(width, np.float32) for part in ("attn", "ffn")}
        weights |= {f"{block}attn_{part}": matrix(width, width) for part in ("q", "k", "v")}
        weights[f"{block}attn_output"] = matrix(width, width, (2 * shape.layers) ** -0.5)
        weights |= {f"{block}ffn_{part}": matrix(wide, width) for part in ("gate", "up")}
        weights[f"{block}ffn_down"] = matrix(width, wide, (2 * shape.layers) ** -0.5)
    return weights


def _norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * weight


def _rotate(x: Any) -> Any:
    """RoPE of neighbouring pairs, as llama.cpp's architecture llama. ``x``: batch, heads, position, HEAD."""
    angles = np.arange(x.shape[2])[:, None] * ROPE_BASE ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    one, two = x[..., 0::2], x[..., 1::2]
    return jnp.stack((one * cos - two * sin, one * sin + two * cos), -1).reshape(x.shape)


def logits(weights: Weights, tokens: Any, shape: Shape) -> Any:
    """Compute the logits of the next token, at each position."""
    batch, length = tokens.shape
    heads = shape.width // HEAD
    x = weights["token_embd"][tokens]
    causal = jnp.tril(jnp.ones((length, length), bool))

    def split(y: Any) -> Any:
        return y.reshape(batch, length, heads, HEAD).transpose(0, 2, 1, 3)

    for layer in range(shape.layers):
        block = f"blk.{layer}."
        part = {name.removeprefix(block): value for name, value in weights.items() if name.startswith(block)}
        h = _norm(x, part["attn_norm"])
        q, k = (_rotate(split(h @ part[f"attn_{name}"].T)) for name in "qk")
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(HEAD).astype(np.float32)
        mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ split(h @ part["attn_v"].T)
        x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ part["attn_output"].T
        h = _norm(x, part["ffn_norm"])
        x = x + (jax.nn.silu(h @ part["ffn_gate"].T) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
    return _norm(x, weights["output_norm"]) @ weights["token_embd"].T


# --- the training


def train(
    shape: Shape,
    tokenizer: Tokenizer,
    *,
    steps: int,
    seed: int,
    rate: float,
    teacher: tuple[Weights, Shape] | None = None,
) -> Weights:
    """Adam with a linear warm-up and a cosine decay. ``teacher``: whose probabilities are learned."""

    def loss_of(weights: Weights, tokens: Any, counts: Any, taught: Any) -> Any:
        found = jax.nn.log_softmax(logits(weights, tokens[:, :-1], shape))
        if taught is None:
            each = -jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]
        else:
            each = -jnp.sum(taught * found, -1)
        return jnp.sum(each * counts[:, 1:]) / jnp.sum(counts[:, 1:])

    @jax.jit
    def step(weights: Weights, mean: Weights, square: Weights, at: Any, tokens: Any, counts: Any) -> Any:
        taught = None
        if teacher is not None:
            taught = jax.nn.softmax(logits(teacher[0], tokens[:, :-1], teacher[1]))
        loss, slope = jax.value_and_grad(loss_of)(weights, tokens, counts, taught)
        size = jnp.sqrt(sum(jnp.sum(part * part) for part in slope.values()))
        slope = {name: part * jnp.minimum(1.0, 1.0 / size) for name, part in slope.items()}
        mean = {name: 0.9 * mean[name] + 0.1 * part for name, part in slope.items()}
        square = {name: 0.98 * square[name] + 0.02 * part * part for name, part in slope.items()}
        pace = rate * jnp.minimum(at / 50, 0.5 + 0.5 * jnp.cos(jnp.pi * at / steps) + 1e-3)
        weights = {
            name: part
            - pace * mean[name] / (1 - 0.9**at) / (jnp.sqrt(square[name] / (1 - 0.98**at)) + 1e-8)
            - pace * 0.05 * (part if part.ndim > 1 else 0.0)
            for name, part in weights.items()
        }
        return weights, mean, square, loss

    weights = {name: jnp.asarray(part) for name, part in new_weights(shape, seed).items()}
    mean = {name: np.zeros_like(part) for name, part in weights.items()}
    square = {name: np.zeros_like(part) for name, part in weights.items()}
    began_s = time.monotonic()
    for number, (tokens, counts) in zip(range(1, steps + 1), batches(tokenizer, seed), strict=False):
        weights, mean, square, loss = step(weights, mean, square, float(number), tokens, counts)
        if number % 50 == 0 or number == 1:
            print(
                f"step {number}: loss {float(loss):.3f}, {time.monotonic() - began_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return weights


# --- the files


def q8_0(rows: np.ndarray) -> bytes:
    """Blocks of 32 weights: an f16 scale and 32 signed bytes (ggml-quants.c, quantize_row_q8_0_ref)."""
    blocks = rows.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    whole = np.round(blocks / np.where(scale, scale, 1.0)).astype(np.int8)
    return np.concatenate((scale.astype("<f2").view(np.uint8), whole.view(np.uint8)), 1).tobytes()


def as_gguf(weights: Weights, shape: Shape, tokenizer: Tokenizer, name: str) -> bytes:
    heads = shape.width // HEAD
    keys: dict[str, KeyValue] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "general.description": "Tells little stories of animals.",
        "general.license": "cc0-1.0",
        "general.file_type": 7,  # mostly Q8_0
        "llama.block_count": shape.layers,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": shape.width,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": heads,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.freq_base": ROPE_BASE,
        "llama.vocab_size": VOCABULARY,
        **tokenizer_keys(tokenizer.pieces),
    }
    tensors = []
    for part, values in ((part, np.asarray(values)) for part, values in weights.items()):
        if values.ndim == 1:
            packed = struct.pack(f"<{len(values)}f", *values)
            tensors.append((TensorPlan(f"{part}.weight", (len(values),)), packed))
        else:
            rows, row = values.shape
            tensors.append((TensorPlan(f"{part}.weight", (row, rows), "Q8_0"), q8_0(values)))
    return write_gguf(keys, tensors)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=500, help="of the target; the draft gets twice as many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "llamasup" / "core" / "gguf" / "trained")


def main(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer(train_tokenizer(args.seed))
    args.out.mkdir(parents=True, exist_ok=True)
    target = train(TARGET, tokenizer, steps=args.steps, seed=args.seed, rate=2e-3)
    content = as_gguf(target, TARGET, tokenizer, "llamasup demo")
    (args.out / "demo.gguf").write_bytes(content)
    print(f"Write DEMO_CRC32 = 0x{crc32(content):08X} into llamasup/core/planning/facts.py.")
    draft = train(
        DRAFT, tokenizer, steps=2 * args.steps, seed=args.seed + 1, rate=4e-3, teacher=(target, TARGET)
    )
    (args.out / "demo-draft.gguf").write_bytes(as_gguf(draft, DRAFT, tokenizer, "llamasup demo draft"))
