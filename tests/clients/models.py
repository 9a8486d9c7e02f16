"""A model that calls a tool whenever it may, so that what becomes of the call can be tested.

With random weights a model talks for ever, and a grammar that allows words before a call never gets to the
call. This one has the beginning of a call as a token of its own, and prefers it to all but the end. Without a
grammar it says nothing at all.
"""

from __future__ import annotations

import struct

from tests.kit.gguf_writer import KeyValue, write_gguf
from tests.kit.scripted import TOOL_MESSAGES
from tests.kit.tiny import WORDS, tiny_keys, tiny_tensors

__all__ = ["tool_caller"]

_CALL = "<tool_call>\n"
_USER_DEFINED = 4  # token type of llama.h
_END = 4  # <|im_end|>
_WIDTH = 64

_TEMPLATE = TOOL_MESSAGES + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def fill_in() -> bytes:
    """A GGUF file with tokens for filling in the middle: three of its words."""
    keys: dict[str, KeyValue] = dict(tiny_keys())
    tokens = {"fim_pre": 10, "fim_suf": 11, "fim_mid": 12}
    keys |= {f"tokenizer.ggml.{name}_token_id": token for name, token in tokens.items()}
    return write_gguf(keys, tiny_tensors())


def tool_caller() -> bytes:
    """A GGUF file."""
    words = [*WORDS, "call"]
    keys: dict[str, KeyValue] = dict(tiny_keys(words))
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    keys |= {
        "general.name": "llamasup tool caller",
        "tokenizer.ggml.tokens": [*tokens[:-1], _CALL],
        "tokenizer.ggml.token_type": [*types[:-1], _USER_DEFINED],
        "tokenizer.chat_template": _TEMPLATE,
    }
    tensors = []
    for plan, weights in tiny_tensors(words):
        numbers = list(struct.unpack(f"<{len(weights) // 4}f", weights))
        if plan.name == "token_embd.weight":
            numbers[::_WIDTH] = [8.0] * len(tokens)  # one direction that every state has in common …
        if plan.name == "output.weight":  # … and that speaks for an end wherever one may be, else for a call
            for token, strength in ((_END, 20.0), (len(tokens) - 1, 10.0)):
                numbers[token * _WIDTH : (token + 1) * _WIDTH] = [strength] + [0.0] * (_WIDTH - 1)
        tensors.append((plan, struct.pack(f"<{len(numbers)}f", *numbers)))
    return write_gguf(keys, tensors)
