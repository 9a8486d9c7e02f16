"""The quality guard: the distance between two answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llamasup.features.tuning.quality import (
    BOUND,
    Distribution,
    TokenOdds,
    divergence,
    probe_body,
    probes,
    read_distributions,
)


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


def drafted(*tokens: int) -> Distribution:
    """As b11434 lists tokens that were drafted: without probabilities."""
    raw = [{"id": token, "logprob": 0.0, "top_logprobs": []} for token in tokens]
    return read_distributions({"completion_probabilities": raw})


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
    assert divergence([drafted(1)], [drafted(1)]) is None


def test_an_impossible_token_is_not_listed() -> None:
    raw = {"completion_probabilities": [{"id": 1, "top_logprobs": [{"id": 1, "logprob": None}]}]}
    assert read_distributions(raw)[0].logprobs == {}


def test_a_negative_rest_counts_as_no_divergence() -> None:
    # The listed tokens of both are a part of the vocabulary, so their sums can differ.
    assert divergence([read((1, {1: 0.5}))], [read((1, {1: 0.6}))]) == 0


def test_the_probe_is_greedy_and_uses_no_cache() -> None:
    body = probe_body([1, 2, 3], 4)
    assert (body["prompt"], body["n_predict"]) == ([1, 2, 3], 4)
    assert body["temperature"] == 0
    assert body["cache_prompt"] is False


# --- drafts --------------------------------------------------------------------------------------


def test_drafted_tokens_that_are_those_of_the_reference_have_no_loss() -> None:
    one = read((1, {1: 0.4, 2: 0.3}), (2, {2: 0.5, 1: 0.4}))
    assert divergence([one], [drafted(1, 2)]) == 0


def test_a_wrong_draft_costs_how_much_less_likely_its_token_is() -> None:
    one = read((1, {1: 0.8, 2: 0.1}), (1, EVEN))
    assert divergence([one], [drafted(2, 1)]) == pytest.approx(math.log(8))


def test_a_near_tie_that_a_batch_decides_in_another_way_costs_almost_nothing() -> None:
    one = read((1, {1: 0.4000, 2: 0.3999}))
    seen = divergence([one], [drafted(2)])
    assert seen is not None
    assert 0 < seen < BOUND


def test_a_wrong_draft_in_one_of_many_answers_is_found() -> None:
    right = read(*[(1, {1: 0.8, 2: 0.1})] * 32)
    answers = [drafted(*[1] * 32)] * 11
    seen = divergence([right] * 12, [*answers, drafted(*[1] * 31, 2)])
    assert seen is not None
    assert seen > BOUND


def test_a_drafted_token_that_is_not_listed_counts_with_what_is_left() -> None:
    assert divergence([read((1, {1: 0.9, 2: 0.04}))], [drafted(3)]) == pytest.approx(math.log(0.9 / 0.04))
    assert divergence([read((1, {1: 0.9}))], [drafted(3)]) == pytest.approx(math.log(0.9 / 0.1))
    assert divergence([read((1, {1: 1.0}))], [drafted(3)]) == pytest.approx(-math.log(1e-6))


def test_an_answer_that_ends_early_or_is_empty_differs() -> None:
    one = read((1, EVEN), (2, EVEN))
    for answer in ((), read((1, EVEN)), drafted(1)):
        seen = divergence([one], [answer])
        assert seen is not None
        assert seen > BOUND


def test_a_token_without_odds_in_the_reference_is_compared_by_its_number() -> None:
    one = (*read((1, EVEN)), TokenOdds(2, {}))
    assert divergence([one], [drafted(1, 2)]) == 0
    seen = divergence([one], [drafted(1, 3)])
    assert seen is not None
    assert seen > BOUND


def test_for_drafts_the_answers_are_long_and_the_prompts_repeat_themselves() -> None:
    plain, for_drafts = probes(8192, drafts=False), probes(8192, drafts=True)
    assert {(one.answer, one.repeats) for one in plain} == {(4, 1)}
    assert {(one.answer, one.repeats) for one in for_drafts} == {(32, 2)}
    assert max(one.length for one in plain) == 512


def test_the_probes_fit_into_the_context() -> None:
    for drafts in (False, True):
        for ctx_size in (8, 64, 256, 8192):
            for one in probes(ctx_size, drafts=drafts):
                assert one.length >= 1
                assert ctx_size < 64 or one.length * one.repeats + one.answer <= ctx_size - 8
