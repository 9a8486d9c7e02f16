"""The quality guard: how far a change moves the probabilities of the tokens (pure).

The server of the default and that of the candidate get the same prompts, at several depths of the context.
Each answers the probabilities of the most likely next tokens, and those of a few greedy tokens after it, with
which drafting is checked too. The divergence of one token is the Kullback-Leibler divergence over the tokens
that the default lists; a token that the candidate does not list counts with the least probability that it
lists. Where the two choose different tokens, what follows is not compared, as the texts differ from there on.

The reference has an f16 KV cache, also if the default has another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

__all__ = [
    "BOUND",
    "LENGTHS",
    "Distribution",
    "TokenOdds",
    "divergence",
    "probe_body",
    "read_distributions",
]

BOUND = 0.01
"""The mean divergence in nats that a change may have without ``--allow-lossy``: a choice of llamasup."""

LENGTHS = (8, 16, 24, 48, 64, 96, 128, 192, 256, 320, 384, 512)
"""The tokens of the prompts, cut to the context of a request."""

_ANSWER = 4
_LISTED = 40


class TokenOdds(Struct, frozen=True):
    """One generated token, and the log-probabilities of the most likely ones there."""

    token: int
    logprobs: Mapping[int, float]


Distribution = tuple[TokenOdds, ...]
"""Of the tokens after one prompt."""


def probe_body(prompt: Sequence[int]) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": _ANSWER,
        "n_probs": _LISTED,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }


class _Listed(msgspec.Struct):
    id: int
    logprob: float | None = None


class _Token(msgspec.Struct):
    id: int
    top_logprobs: list[_Listed] = msgspec.field(default_factory=list)


class _Answer(msgspec.Struct):
    completion_probabilities: list[_Token] = msgspec.field(default_factory=list)


def read_distributions(answer: Any) -> Distribution:
    """Of the answer to ``probe_body``; empty if the build lists no log-probabilities (before 2025)."""
    try:
        tokens = msgspec.convert(answer, _Answer).completion_probabilities
    except msgspec.ValidationError:
        return ()
    return tuple(
        TokenOdds(
            token.id,
            {one.id: one.logprob for one in token.top_logprobs if one.logprob is not None},
        )
        for token in tokens
    )


def divergence(reference: Sequence[Distribution], candidate: Sequence[Distribution]) -> float | None:
    """The mean divergence in nats; None if nothing can be compared."""
    pairs = (_same_context(*both) for both in zip(reference, candidate, strict=True))
    each = [_of_token(*pair) for pair in chain.from_iterable(pairs)]
    return sum(each) / len(each) if each else None


def _same_context(one: Distribution, other: Distribution) -> list[tuple[TokenOdds, TokenOdds]]:
    """The tokens up to the first that differs, which is compared too."""
    pairs = []
    for pair in zip(one, other, strict=False):
        if pair[0].logprobs and pair[1].logprobs:
            pairs.append(pair)
        if pair[0].token != pair[1].token:
            break
    return pairs


def _of_token(one: TokenOdds, other: TokenOdds) -> float:
    least = min(other.logprobs.values())
    total = sum(
        math.exp(logprob) * (logprob - other.logprobs.get(token, least))
        for token, logprob in one.logprobs.items()
    )
    return max(0.0, total)
