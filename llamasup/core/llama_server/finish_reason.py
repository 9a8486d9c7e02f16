"""Detects answers that ended because of the context size: refused, cut short, or shifted.

llama-server reports only refusals clearly (b11434, both runtimes). Only ``/completion`` has
``"truncated":true``; answers of the other APIs end as if they had reached ``max_tokens``. Such an answer was
cut if prompt and answer together fill the slot. With a draft, it ends up to a draft's length before that.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from llamasup.core.llama_server.answers import ContextWindow, Failed
from llamasup.core.llama_server.token_counts import TokenCounts


class ContextEnd(msgspec.Struct, frozen=True):
    """The end of an answer by its context.

    ``kind``: ``exceeded`` (refused: the prompt alone is too long), ``cut`` (the answer ends where the
    context ends), ``shifted`` (with ``--context-shift`` it went on, and the beginning was dropped).
    """

    kind: str
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


# The message if all requests together have filled a shared cache (--kv-unified).
SHARED_FULL: Final = "Context size has been exceeded."
_SHARED_FULL_KEY = b'"message":"' + SHARED_FULL.encode() + b'"'


def is_shared_full(body: bytes) -> bool:
    """Return whether this error is that of all requests which together have filled a shared context."""
    return _SHARED_FULL_KEY in body


def context_refusal(body: bytes) -> ContextEnd | None:
    """Return the refusal in the complete ``body`` of an error response.

    Returns None if it is not about the context.
    """
    if b"xceed" not in body:  # nearly every refusal is about something else
        return None
    try:
        error = msgspec.json.decode(body, type=Failed).error
    except (msgspec.DecodeError, RecursionError):
        return None
    if error.type == "exceed_context_size_error":
        return ContextEnd("exceeded", error.n_prompt_tokens, error.n_ctx)
    return ContextEnd("exceeded") if error.message == SHARED_FULL else None


# A quote inside a model's text is escaped, so these can only be the keys themselves.
_ENDED_BY_ITSELF = re.compile(
    rb'"(?:finish_reason|stop_type|stop_reason)":"(?!length|limit|max_tokens)[a-z_]+"'
)
_TRUNCATED = b'"truncated":true'


def context_end(tail: bytes, counts: TokenCounts | None, window: ContextWindow | None) -> ContextEnd | None:
    """Return how the context ended an answer with these last bytes.

    None for nearly all, after one comparison.
    """
    if counts is None:
        return ContextEnd("cut") if _SHARED_FULL_KEY in tail else None
    if window is None:
        return ContextEnd("cut") if _TRUNCATED in tail else None
    if counts.prompt is None or counts.completion is None:
        return None
    total = counts.prompt + counts.completion
    if total < window.full_from:
        return None
    if total > window.n_ctx:
        return ContextEnd("shifted", counts.prompt, window.n_ctx)
    if _ENDED_BY_ITSELF.search(tail):
        return None
    return ContextEnd("cut", counts.prompt, window.n_ctx)
