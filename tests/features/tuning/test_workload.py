"""The requests of a measurement, and its score."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from llamasup.core.observability.access_record import access_line
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.planning.measured.paired import prose
from llamasup.features.tuning.workload import (
    BOUND,
    STATED_MIX,
    Answered,
    Distribution,
    Lengths,
    Measurement,
    TokenOdds,
    as_json,
    as_measured,
    block_for,
    clients_for,
    divergence,
    lengths_in_log,
    log_ratio,
    middle_of,
    probe_body,
    probes,
    prompt_tokens,
    read_distributions,
)


def measured(seconds: float = 1.0, memory_bytes: int = 100) -> Measurement:
    return Measurement(seconds, 0.1, 10.0, memory_bytes)


def line(**fields: object) -> bytes:
    return str(fields).replace("'", '"').replace("None", "null").encode()


# --- lengths of an access log --------------------------------------------------------------------


def test_only_answered_requests_with_tokens_count() -> None:
    log = [
        line(status=200, tokens_prompt=100, tokens_completion=20),
        line(status=500, tokens_prompt=7, tokens_completion=7),
        line(status=200, tokens_prompt=None, tokens_completion=None),
        line(status=200, tokens_prompt=5, tokens_completion=None),
        line(status=200, tokens_prompt=50, tokens_completion=0),
        b"not JSON",
        b"",
    ]
    assert lengths_in_log(log) == (Lengths(50, 1), Lengths(100, 20))


def test_many_requests_are_represented_by_some_of_them() -> None:
    log = [line(status=200, tokens_prompt=size, tokens_completion=1) for size in range(1, 1001)]
    chosen = [one.prompt for one in lengths_in_log(log, 4)]
    assert chosen == [126, 376, 626, 876]


def test_a_line_of_the_access_log_is_understood() -> None:
    record = RequestRecord(
        request_id="id",
        method="POST",
        path="/v1/completions",
        route="/v1/completions",
        model="model",
        generation=1,
        status=200,
        tokens_prompt=48,
        tokens_cached=0,
        tokens_completion=16,
        tokens_per_s=20.0,
        queue_s=0.0,
        first_byte_s=0.1,
        duration_s=1.0,
        bytes_out=500,
        outcome="ok",
    )
    line = access_line(record, datetime(2026, 11, 26, tzinfo=UTC))
    assert lengths_in_log([line]) == (Lengths(48, 16),)


# --- blocks --------------------------------------------------------------------------------------


def test_a_fast_model_answers_the_mix_several_times() -> None:
    assert block_for(STATED_MIX, 3.7, ctx_size=8192, clients=1).requests == STATED_MIX * 3


def test_a_block_has_a_limit() -> None:
    assert len(block_for(STATED_MIX, 1e9, ctx_size=8192, clients=1).requests) == 64


def test_a_slow_model_gets_shorter_requests() -> None:
    block = block_for(STATED_MIX, 0.5, ctx_size=8192, clients=1)
    assert block.requests[2] == Lengths(512, 24)
    shortest = block_for(STATED_MIX, 0.001, ctx_size=8192, clients=1)
    assert set(shortest.requests) == {Lengths(16, 8)}


def test_requests_fit_into_the_context() -> None:
    block = block_for(STATED_MIX, 1.0, ctx_size=256, clients=1)
    assert all(one.prompt + one.answer <= 248 for one in block.requests)
    tiny = block_for(STATED_MIX, 1.0, ctx_size=2, clients=1)
    assert set(tiny.requests) == {Lengths(1, 1)}


def test_a_short_request_is_not_made_longer() -> None:
    assert block_for([Lengths(3, 2)], 0.5, ctx_size=100, clients=1).requests == (Lengths(3, 2),)


def test_each_client_has_a_request() -> None:
    assert len(block_for(STATED_MIX, 0.2, ctx_size=8192, clients=16).requests) == 16


def test_throughput_is_measured_with_more_clients_than_slots() -> None:
    assert clients_for("throughput", 8) == 16
    assert clients_for("latency", 4) == 1


LONGEST = 32_768


@pytest.mark.parametrize("seed", [0, 1, 63])
def test_nothing_in_the_text_of_the_longest_prompt_comes_twice(seed: int) -> None:
    words = prose(seed, LONGEST).lower().replace(".", "").split()
    assert len(words) >= LONGEST
    pieces = [tuple(words[at : at + 12]) for at in range(len(words) - 11)]
    assert len(set(pieces)) == len(pieces)
    sentences = prose(seed, LONGEST).split(". ")
    assert len(set(sentences)) == len(sentences) > 2000


def test_each_request_has_a_text_of_its_own_which_is_always_the_same() -> None:
    assert prose(1, 100) == prose(1, 100) != prose(2, 100)
    assert prose(1, 5000).startswith(prose(1, 100))
    assert len(prose(0, 3).split()) >= 3


def test_a_prompt_is_the_beginning_of_its_text() -> None:
    assert prompt_tokens([1, 2, 3, 4], 3) == [1, 2, 3]
    assert prompt_tokens([1, 2], 5) == [1, 2, 1, 2, 1]  # of a tokenizer that makes few tokens
    assert prompt_tokens([], 2) == [0, 0]


# --- scores --------------------------------------------------------------------------------------


def test_for_latency_and_throughput_the_time_counts() -> None:
    for purpose in ("latency", "throughput"):
        ratio = log_ratio(purpose, measured(2.0), measured(1.0, 900))
        assert ratio == pytest.approx(math.log(2))


def test_for_memory_the_memory_counts() -> None:
    assert log_ratio("memory", measured(memory_bytes=200), measured(1.1)) == pytest.approx(math.log(2))


def test_for_memory_a_much_slower_candidate_is_worse() -> None:
    assert log_ratio("memory", measured(memory_bytes=200), measured(2.0)) == pytest.approx(-math.log(2))


def test_a_measurement_sums_up_its_requests() -> None:
    seen = as_measured([Answered(0.1, 1.0, 10), Answered(0.3, 2.0, 30)], 2.0, 7)
    assert (seen.seconds, seen.first_token_s, seen.tokens_per_s, seen.memory_bytes) == (2.0, 0.2, 20.0, 7)
    assert as_json(seen) == {"first_token_s": 0.2, "tokens_per_s": 20.0, "memory_bytes": 7}


def test_the_middle_of_measurements_ignores_outliers() -> None:
    assert middle_of([measured(1.0), measured(1.1), measured(50.0)]) == measured(1.1)
    assert middle_of([]) is None


# --- the quality guard ----------------------------------------------------------------------------


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
