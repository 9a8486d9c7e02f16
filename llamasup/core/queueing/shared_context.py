"""Computes the permits of a request on a server whose slots share one context (pure).

If the running requests fill the context together, llama-server aborts all of them (b11434). So a long request
takes the permits of several slots, as far as its length can be told from bytes.
"""

from __future__ import annotations

from typing import Final

_BODY_BYTES: Final = 4
"""For each token of a prompt: English text has 4 to 5, and JSON around it."""
_EVENT_BYTES: Final = 200
"""For each token of a streamed answer: an event of a chat has 200 to 250."""
_ANSWER_SHARE: Final = 4
"""A request that has begun keeps this part of a slot's share for its answer."""
_MEDIA: Final = b";base64,"
"""Images and sounds take few tokens for their bytes."""


def prompt_tokens(body: bytes) -> int:
    """Estimate the tokens of the prompt in this ``body``."""
    return 0 if _MEDIA in body else len(body) // _BODY_BYTES


def permits_for(prompt: int, answer_bytes: int, share: int) -> int:
    """Compute the permits of a request whose prompt has ``prompt`` tokens.

    ``answer_bytes``: the size of its streamed answer so far. ``share``: the tokens of the context for each
    slot.
    """
    needed = prompt + max(share // _ANSWER_SHARE, answer_bytes // _EVENT_BYTES)
    return max(1, -(-needed // share))
