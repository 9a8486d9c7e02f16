"""The requests of a measurement, and its score."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from llamasup.core.observability.access_record import access_line
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.planning.measured.prose import prose
from llamasup.features.tuning.workload import (
    STATED_MIX,
    Answered,
    Lengths,
    Measurement,
    as_json,
    as_measured,
    block_for,
    clients_for,
    lengths_in_log,
    log_ratio,
    middle_of,
    prompt_tokens,
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
