"""The quality guard: how far a change moves the probabilities of the tokens (pure).

The server of the reference and that of the candidate answer the same prompts greedily, at several depths of
the context, and list the probabilities of the most likely tokens. The reference is the default with an f16 KV
cache and without drafts. Up to the first token in which the two differ, their answers are compared:

- Where both list probabilities: the Kullback-Leibler divergence over the tokens that the reference lists. A
  token that the candidate does not list counts with the least probability that it lists.
- llama-server (b11434) lists no probabilities for tokens that were drafted. If such a token differs, or is
  missing, it counts with what is lost by it: how much less likely it is than the best token, according to the
  reference. So a near-tie that verification in a batch decides in another way costs almost nothing, and a
  draft that is accepted wrongly costs much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.core.llama_server.answers import Probabilities

BOUND = 0.01
"""The mean divergence in nats that a change may have without ``--allow-lossy``: a choice of llamasup."""

_LENGTHS = (8, 16, 24, 48, 64, 96, 128, 192, 256, 320, 384, 512)
"""The tokens of the prompts, cut to the context of a request."""

_ANSWER = 4
# Drafts from the context begin after 12 tokens that came before (ngram-simple), and are 48 tokens long.
_DRAFTED_ANSWER = 32
_LISTED = 40
_SPECIAL = 12  # left for special tokens of llama-server
# Below it, probabilities are rounding errors. Also what a missing token counts with.
_LEAST = math.log(1e-6)


class Probe(Struct, frozen=True):
    """A prompt of ``length`` tokens, ``repeats`` times, and the tokens of its answer."""

    length: int
    answer: int
    repeats: int = 1


def probes(ctx_size: int, *, drafts: bool) -> tuple[Probe, ...]:
    """Return the prompts for a context. For drafts the answers are longer, and each prompt says everything
    twice, so that something can be drafted from it.
    """
    answer, repeats = (_DRAFTED_ANSWER, 2) if drafts else (_ANSWER, 1)
    most = max(repeats, ctx_size - answer - _SPECIAL)
    return tuple(Probe(min(length, most) // repeats, answer, repeats) for length in _LENGTHS)


class TokenOdds(Struct, frozen=True):
    """One generated token, and the log-probabilities of the most likely ones there."""

    token: int
    logprobs: Mapping[int, float]


Distribution = tuple[TokenOdds, ...]
"""A distribution of the tokens after one prompt."""


def probe_body(prompt: Sequence[int], answer: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": answer,
        "n_probs": _LISTED,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }


def read_distributions(answer: Any) -> Distribution:
    """Read the answer to ``probe_body``. Empty if the build lists no log-probabilities (before 2025)."""
    try:
        tokens = msgspec.convert(answer, Probabilities).completion_probabilities
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
    """Return nats: the mean divergence of a token, or the mean loss of an answer if that is larger.

    None if the reference lists no probabilities.
    """
    if not any(odds.logprobs for answer in reference for odds in answer):
        return None
    each, losses = [], []
    for answers in zip(reference, candidate, strict=True):
        of_tokens, loss = _compared(*answers)
        each += of_tokens
        losses.append(loss)
    return max(sum(each) / max(1, len(each)), sum(losses) / len(losses))


def _compared(one: Distribution, other: Distribution) -> tuple[list[float], float]:
    """The divergences up to the first token that differs, and what is lost by it if it was drafted."""
    each: list[float] = []
    for number, expected in enumerate(one):
        if number == len(other):
            return each, _loss(expected, None)
        seen = other[number]
        is_listed = bool(expected.logprobs and seen.logprobs)
        if is_listed:
            each.append(_of_token(expected, seen))
        if expected.token != seen.token:
            return each, 0.0 if is_listed else _loss(expected, seen.token)
    return each, 0.0


def _of_token(one: TokenOdds, other: TokenOdds) -> float:
    least = min(other.logprobs.values())
    total = sum(
        math.exp(logprob) * (logprob - other.logprobs.get(token, least))
        for token, logprob in one.logprobs.items()
    )
    return max(0.0, total)


def _loss(expected: TokenOdds, token: int | None) -> float:
    """Return how much less likely ``token`` (None: a missing one) is than the best one, according to the
    reference.

    A token that is not listed is at most as likely as all unlisted ones together.
    """
    listed = expected.logprobs.values()
    if not listed or token is None:
        return -_LEAST
    rest = 1 - sum(map(math.exp, listed))
    unlisted = min(*listed, 0.0, max(_LEAST, math.log(rest) if rest > 0 else _LEAST))
    return max(listed) - expected.logprobs.get(token, unlisted)
