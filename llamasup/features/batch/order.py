"""The order of the lines of a batch (pure): by model, so that each is loaded once; then by shared beginning.

Lines whose prompts begin alike are next to each other, so that llama-server computes a common system prompt
once in each slot, and finds it in the slot for the next line.
"""

from __future__ import annotations

from typing import Final

from llamasup.core.pool.replicas.conversation import read_conversation

MAX_MARKS: Final = 16
"""Marks of a prompt that are compared: its first messages, or its first 16 KiB."""
_MARK_BYTES: Final = 4
_MASK: Final = (1 << (8 * _MARK_BYTES)) - 1


def prefix_key(body: bytes) -> bytes:
    """Lines with the same beginning have keys with the same beginning. For one process: hashes are keyed."""
    conversation = read_conversation(body)
    if conversation is None:
        return b""
    return b"".join((mark & _MASK).to_bytes(_MARK_BYTES, "big") for mark in conversation.marks[:MAX_MARKS])
