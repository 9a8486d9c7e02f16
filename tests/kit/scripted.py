"""A model that plays a script: with tools it answers with one tool call after the other, then with a text.

It is a real model for a real llama-server, which therefore renders the prompt, parses the calls, and writes
the answers of each API. Attention and the feed-forward layer add nothing, so a token depends only on the one
before it. The chat template counts the results of tools in the conversation, and ends the prompt with the
token that begins this step of the script. The answer to a request without tools is a text of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from tests.kit.gguf_writer import KeyValue, TensorPlan, write_gguf
from tests.kit.tiny import FIXED, WORDS, random_weights, tokenizer_keys

__all__ = ["TOOL_MESSAGES", "Call", "scripted"]


class Call(Struct, frozen=True):
    """A call of a tool. The grammar of llama-server wants the arguments in the order of the tool's schema."""

    name: str
    arguments: dict[str, object]

    @property
    def text(self) -> str:
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.h
_END = 4  # <|im_end|>
_WIDTH = 128  # more than enough for random directions of some hundred tokens to be told apart
_PIECE = 8  # characters of a token of the script, or more if this makes it another token
_CONTEXT = 262_144
_HEAD = 32  # the width of its one head
# The prompts of agents have 80,000 characters: these make a token of two to twelve of them.
_LETTERS = "etaoinshrdlucmfwypvbgk"
_PAIRS = tuple(first + second for first in f"▁{_LETTERS}" for second in _LETTERS)
_COMMON = (
    *('{"type": "', '", "type": "', '"description": "', '"properties": {', '"required": [', '"string"'),
    *('": "', '": {"', '": ', '", "', " to ", " of ", " in ", "the ", "tion", "ing ", "ment", "ing", "ent"),
    *("ed ", "    "),
)

TOOL_MESSAGES = r"""
{%- if tools %}
{{- '<|im_start|>system\nYou may call functions. Their signatures are within <tools></tools>:\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nFor each call return:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- set play = namespace(results=0) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- set play.results = play.results + 1 %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""
"""The template of the messages, as Qwen2.5 and Hermes have it; it also counts the results of tools."""
_EACH = "{%- for message in messages %}\n"
_REFUSAL = r"""{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
"""
_TEMPLATE = (
    TOOL_MESSAGES
    + r"""{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if not tools %}{{ '<|without tools|>' }}
{%- elif play.results < LAST %}{{ '<|step ' ~ play.results ~ '|>' }}
{%- else %}{{ '<|step LAST|>' }}{% endif %}
{%- endif %}"""
)


def scripted(calls: Sequence[Call], text: str, *, endless: bool = False, is_strict: bool = False) -> bytes:
    """Return the GGUF file of a model that makes ``calls``, and then says ``text``, again and again if
    ``endless``. It answers requests without tools with ``text``. If it ``is_strict``, its template refuses a
    system message that is not the first message, as that of Qwen3.5 does.
    """
    starts = [*(f"<|step {number}|>" for number in range(len(calls) + 1)), "<|without tools|>"]
    answers = [*(call.text for call in calls), text, text]
    pieces = _distinct_pieces(answers)
    first = len(FIXED) + len(_PAIRS) + len(_words())
    vocabulary = [*starts, *(piece for answer in pieces for piece in answer)]
    keys = _keys(vocabulary, len(starts))
    template = _TEMPLATE.replace("LAST", str(len(calls)))
    if is_strict:
        template = template.replace(_EACH, _EACH + _REFUSAL)
    keys["tokenizer.chat_template"] = template
    follows: dict[int, int] = {}
    token = first + len(starts)
    for number, answer in enumerate(pieces):
        before = first + number
        for _ in answer:
            follows[before] = before = token
            token += 1
        follows[before] = before - len(answer) + 1 if endless else _END
    return write_gguf(keys, list(_tensors(token, follows)))


def _distinct_pieces(answers: Sequence[str]) -> list[list[str]]:
    """Cut the texts into pieces of which no two are equal, because each is a token of its own."""
    taken: set[str] = {*FIXED, *_PAIRS, *_words()}
    result = []
    for answer in answers:
        pieces, piece = [], ""
        for character in answer:
            piece += character
            if len(piece) >= _PIECE and piece not in taken:
                pieces.append(piece)
                taken.add(piece)
                piece = ""
        while piece and piece in taken:  # the end repeats an earlier piece
            piece = pieces.pop() + piece
        result.append([*pieces, piece] if piece else pieces)
        taken.add(piece)
    return result


def _words() -> list[str]:
    return [*(f" {word}" for word in WORDS if len(word) > 2), *_COMMON]


def _keys(vocabulary: Sequence[str], starts: int) -> dict[str, KeyValue]:
    keys: dict[str, KeyValue] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "llamasup script",
        "general.file_type": 0,
        "llama.block_count": 1,
        "llama.context_length": _CONTEXT,
        "llama.embedding_length": _WIDTH,
        "llama.feed_forward_length": _WIDTH,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": _HEAD,
        "llama.attention.value_length": _HEAD,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": _HEAD,
        "llama.vocab_size": len(FIXED) + len(_PAIRS) + len(_words()) + len(vocabulary),
        **tokenizer_keys(_PAIRS),
    }
    vocabulary = [*_words(), *vocabulary]
    types = [_USER_DEFINED] * len(vocabulary)
    types[len(_words()) : len(_words()) + starts] = [_CONTROL] * starts
    names: dict[str, list[Any]] = {
        "tokens": vocabulary,
        "scores": [0.0] * len(vocabulary),
        "token_type": types,
    }
    for name, more in names.items():
        before = keys[f"tokenizer.ggml.{name}"]
        assert isinstance(before, list)
        keys[f"tokenizer.ggml.{name}"] = [*before, *more]
    return keys


def _tensors(tokens: int, follows: dict[int, int]) -> Iterator[tuple[TensorPlan, bytes]]:
    """The output weights of a token are the sum of the directions of the tokens that it follows."""

    def matrix(name: str, row: int, rows: int, weights: bytes | None = None) -> tuple[TensorPlan, bytes]:
        return TensorPlan(f"{name}.weight", (row, rows)), weights or bytes(4 * row * rows)

    def norm(name: str) -> tuple[TensorPlan, bytes]:
        return TensorPlan(f"{name}.weight", (_WIDTH,)), struct.pack("<f", 1.0) * _WIDTH

    directions = random_weights(_WIDTH * tokens, 1.0, "llamasup script")
    row = 4 * _WIDTH
    output = bytearray(row * tokens)
    for token in set(follows.values()):
        befores = [before for before, after in follows.items() if after == token]
        found = (struct.unpack_from(f"<{_WIDTH}f", directions, before * row) for before in befores)
        sums = (sum(column) for column in zip(*found, strict=True))
        struct.pack_into(f"<{_WIDTH}f", output, token * row, *sums)
    yield matrix("token_embd", _WIDTH, tokens, directions)
    for name in ("attn_norm", "ffn_norm"):
        yield norm(f"blk.0.{name}")
    for name in ("q", "k", "v"):
        yield matrix(f"blk.0.attn_{name}", _WIDTH, _HEAD)
    yield matrix("blk.0.attn_output", _HEAD, _WIDTH)
    for name in ("gate", "up", "down"):
        yield matrix(f"blk.0.ffn_{name}", _WIDTH, _WIDTH)
    yield norm("output_norm")
    yield matrix("output", _WIDTH, tokens, bytes(output))
