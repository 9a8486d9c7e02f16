"""The quality guard: the distance between two answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llamasup.tuning.quality import BOUND, Distribution, divergence, probe_body, read_distributions


def answer(*tokens: tuple[int, dict[int, float]]) -> dict[str, Any]:
    """As llama-server lists probabilities (b11434)."""
    return {
        "content": "text",
        "completion_probabilities": [
            {
                "id": token,
                "token": "word",
                "logprob": math.log(odds[token]),
                "top_logprobs": [
                    {"id": one, "token": "word", "bytes": [], "logprob": math.log(share)}
                    for one, share in odds.items()
                ],
            }
            for token, odds in tokens
        ],
    }


def read(*tokens: tuple[int, dict[int, float]]) -> Distribution:
    return read_distributions(answer(*tokens))


EVEN = {1: 0.5, 2: 0.5}


def test_the_same_answers_have_no_divergence() -> None:
    one = read((1, EVEN), (2, EVEN))
    assert divergence([one], [one]) == 0


def test_the_divergence_is_that_of_kullback_and_leibler() -> None:
    other = read((1, {1: 0.6, 2: 0.4}))
    expected = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert divergence([read((1, EVEN))], [other]) == pytest.approx(expected)
    assert expected > BOUND


def test_a_small_shift_is_within_the_bound() -> None:
    other = read((1, {1: 0.52, 2: 0.48}))
    seen = divergence([read((1, EVEN))], [other])
    assert seen is not None
    assert 0 < seen < BOUND


def test_a_token_that_is_not_listed_counts_with_the_least_probability() -> None:
    other = read((1, {1: 0.9, 3: 0.1}))
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence([read((1, EVEN))], [other]) == pytest.approx(expected)


def test_after_different_tokens_the_texts_are_not_compared() -> None:
    one = read((1, EVEN), (1, {1: 0.9, 2: 0.1}))
    other = read((2, EVEN), (1, {1: 0.1, 2: 0.9}))
    assert divergence([one], [other]) == 0


def test_a_build_without_probabilities_cannot_be_compared() -> None:
    assert read_distributions({"content": "text"}) == ()
    assert read_distributions({"completion_probabilities": "none"}) == ()
    assert divergence([()], [()]) is None
    empty = read_distributions({"completion_probabilities": [{"id": 1}]})
    assert divergence([empty], [empty]) is None


def test_an_impossible_token_is_not_listed() -> None:
    raw = {"completion_probabilities": [{"id": 1, "top_logprobs": [{"id": 1, "logprob": None}]}]}
    assert read_distributions(raw)[0].logprobs == {}


def test_a_negative_rest_counts_as_no_divergence() -> None:
    # The listed tokens of both are a part of the vocabulary, so their sums can differ.
    assert divergence([read((1, {1: 0.5}))], [read((1, {1: 0.6}))]) == 0


def test_the_probe_is_greedy_and_uses_no_cache() -> None:
    body = probe_body([1, 2, 3])
    assert body["prompt"] == [1, 2, 3]
    assert body["temperature"] == 0
    assert body["cache_prompt"] is False
