"""The requests of a measurement, its score (what "better" means for each purpose), and the quality guard.

The lengths come from an access log, or from a stated mix. Only lengths are read from a log, which has no
prompts. Each prompt is a text of its own, so none is found in a cache, and no text repeats itself. Sampling
is llama-server's default with a fixed seed: greedy answers repeat themselves. Both would flatter drafts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.llama_server.answers import Probabilities
from llamasup.features.tuning.candidates import Purpose


class Lengths(Struct, frozen=True):
    """The tokens of one request."""

    prompt: int
    answer: int


# A chat with a system prompt, a short question, a text to summarize, and a completion of code.
STATED_MIX: tuple[Lengths, ...] = (Lengths(384, 96), Lengths(48, 128), Lengths(1024, 48), Lengths(192, 32))

_SHORTEST = Lengths(16, 8)
_MOST_REQUESTS = 64
# The newest lines of a log; a busy server writes as many in a day.
_MOST_LINES = 200_000
# A memory candidate may be this much slower, and no more.
_SLOWEST_OF_MEMORY = math.log(0.8)


class Block(Struct, frozen=True):
    """The requests of one measurement: ``clients`` at a time."""

    requests: tuple[Lengths, ...]
    clients: int = 1


class Answered(Struct, frozen=True):
    """A request as a client saw it."""

    first_token_s: float
    total_s: float
    tokens: int


class Measurement(Struct, frozen=True):
    """The measurement of one block. ``tokens_per_s`` are those of the answers of all clients together."""

    seconds: float
    first_token_s: float
    tokens_per_s: float
    memory_bytes: int


def as_measured(answers: Sequence[Answered], seconds: float, memory_bytes: int) -> Measurement:
    return Measurement(
        seconds,
        fmean(one.first_token_s for one in answers),
        sum(one.tokens for one in answers) / max(seconds, 1e-9),
        memory_bytes,
    )


def middle_of(measured: Sequence[Measurement]) -> Measurement | None:
    """Return the median of each figure."""
    if not measured:
        return None
    return Measurement(
        median(one.seconds for one in measured),
        median(one.first_token_s for one in measured),
        median(one.tokens_per_s for one in measured),
        round(median(one.memory_bytes for one in measured)),
    )


def log_ratio(purpose: Purpose, default: Measurement, candidate: Measurement) -> float:
    """Return the log of the gain, positive if the candidate is better.

    For latency and throughput: the time of the same requests. For memory: the resident memory after them,
    unless the candidate is slower than four fifths of the default's speed.
    """
    time = math.log(max(default.seconds, 1e-9) / max(candidate.seconds, 1e-9))
    if purpose != "memory":
        return time
    if time < _SLOWEST_OF_MEMORY:
        return time
    return math.log(max(default.memory_bytes, 1) / max(candidate.memory_bytes, 1))


# --- which requests ------------------------------------------------------------------------------


class _Line(msgspec.Struct):
    status: int = 0
    tokens_prompt: int | None = None
    tokens_completion: int | None = None


def lengths_in_log(lines: Iterable[bytes], count: int = 8) -> tuple[Lengths, ...]:
    """Return the lengths of ``count`` requests that represent the requests of an access log, by their sums of
    tokens.

    Lines that are no answered requests with tokens are skipped.
    """
    decode = msgspec.json.Decoder(_Line).decode
    found: deque[Lengths] = deque(maxlen=_MOST_LINES)
    for line in lines:
        try:
            request = decode(line)
        except msgspec.DecodeError:
            continue
        prompt, answer = request.tokens_prompt, request.tokens_completion
        if request.status == 200 and prompt and answer is not None and answer >= 0:
            found.append(Lengths(prompt, max(1, answer)))
    ordered = sorted(found, key=lambda one: (one.prompt + one.answer, one.prompt))
    if len(ordered) <= count:
        return tuple(ordered)
    # The middle of each of ``count`` equal parts.
    return tuple(ordered[(2 * part + 1) * len(ordered) // (2 * count)] for part in range(count))


def clients_for(purpose: Purpose, slots: int) -> int:
    """Return how many requests run at a time."""
    return 2 * slots if purpose == "throughput" else 1


def block_for(mix: Sequence[Lengths], scale: float, *, ctx_size: int, clients: int) -> Block:
    """Make the requests of one block: the mix ``scale`` times, or with all lengths shortened by that factor.

    Each client has a request at least.
    """
    times = max(1, min(int(scale), _MOST_REQUESTS // len(mix)), -(-clients // len(mix)))
    shortened = (_shortened(one, min(scale, 1.0)) for one in mix)
    return Block(tuple(_within(one, ctx_size) for one in shortened) * times, clients)


def _shortened(one: Lengths, share: float) -> Lengths:
    return Lengths(
        min(one.prompt, max(_SHORTEST.prompt, round(one.prompt * share))),
        min(one.answer, max(_SHORTEST.answer, round(one.answer * share))),
    )


def _within(one: Lengths, ctx_size: int) -> Lengths:
    """The request cut to a context; a few tokens are left for special ones of llama-server."""
    room = max(2, ctx_size - 8)
    answer = min(one.answer, room // 2)
    return replace(one, prompt=min(one.prompt, room - answer), answer=answer)


# --- prompts -------------------------------------------------------------------------------------


def prompt_tokens(text: Sequence[int], length: int) -> list[int]:
    """Return the first tokens of a tokenized ``text``, which is repeated if a tokenizer makes too few
    of it.
    """
    tokens = list(text) or [0]
    return (tokens * -(-length // len(tokens)))[:length]


def as_json(measured: Measurement) -> Mapping[str, float]:
    return {
        "first_token_s": round(measured.first_token_s, 4),
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "memory_bytes": measured.memory_bytes,
    }


# --- the quality guard ----------------------------------------------------------------------------

# The quality guard measures how far a change moves the probabilities of the tokens. The server of the
# reference and that of the candidate answer the same prompts greedily, at several depths of the context, and
# list the probabilities of the most likely tokens. The reference is the default with an f16 KV cache and
# without drafts. Up to the first token in which the two differ, their answers are compared:
#
# - Where both list probabilities: the Kullback-Leibler divergence over the tokens that the reference lists. A
#   token that the candidate does not list counts with the least probability that it lists.
# - llama-server (b11434) lists no probabilities for tokens that were drafted. If such a token differs, or is
#   missing, it counts with what is lost by it: how much less likely it is than the best token, according to
#   the reference. So a near-tie that verification in a batch decides in another way costs almost nothing, and
#   a draft that is accepted wrongly costs much.


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
    """One generated token, and the log-probabilities of the most likely tokens at its position."""

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
