from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.auth.api_key import KeyLimits
from llamasup.core.auth.quota import Bucket, Quota, context_left, cost_of, tokens_made_in, unreported_tokens
from llamasup.core.http.body_scan import MANY_JOBS
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.token_counts import TokenCounts
from tests.kit.extent import examples


def refused(answer: HttpError | None) -> HttpError:
    assert answer is not None
    assert answer.status == 429
    assert answer.type == "rate_limit_error"
    assert answer.retry_after_s is not None
    return answer


def test_key_without_limits_is_never_refused() -> None:
    quota = Quota(KeyLimits(), 0.0)
    assert all(quota.enter(0.0) is None for _ in range(1000))
    quota.leave(10**9, 0.0)
    assert quota.enter(0.0) is None


def test_requests_of_a_minute_may_come_at_once_then_at_the_rate() -> None:
    quota = Quota(KeyLimits(requests_per_minute=3), 100.0)
    assert [quota.enter(100.0) for _ in range(3)] == [None] * 3
    late = refused(quota.enter(100.0))
    assert late.cause == "key_requests"
    assert "limit of 3 requests per minute" in late.message
    assert late.retry_after_s == pytest.approx(20.0)
    refused(quota.enter(119.9))
    assert quota.enter(120.0) is None
    refused(quota.enter(120.0))


def test_abandoned_request_counts_until_the_server_ends_it() -> None:
    quota = Quota(KeyLimits(concurrent=1), 0.0)
    assert quota.enter(0.0) is None
    quota.hold(2)
    quota.leave(0, 0.0)
    late = refused(quota.enter(0.0))
    assert late.cause == "key_concurrent"
    assert "limit of 1 job at the same time" in late.message
    quota.leave(0, 0.0, 2)
    assert quota.enter(0.0) is None


def test_tokens_of_an_abandoned_request_are_charged() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=60), 0.0)
    assert quota.enter(0.0) is None
    quota.hold(1)
    quota.leave(0, 0.0)
    quota.leave(tokens_made_in(2.0, 45.0), 0.0)
    assert refused(quota.enter(0.0)).retry_after_s == pytest.approx(31.0)
    assert tokens_made_in(2.0, None) == 200
    assert tokens_made_in(2.0, 45.0, 3) == 270


def test_refused_request_costs_nothing() -> None:
    quota = Quota(KeyLimits(requests_per_minute=1), 0.0)
    assert quota.enter(0.0) is None
    for at in range(59):
        refused(quota.enter(float(at)))
    assert quota.enter(60.0) is None


def test_refund_gives_back_one_request() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2), 0.0)
    for _ in range(5):
        assert quota.enter(0.0) is None
        quota.leave(0, 0.0)
        quota.refund(0.0)
    assert quota.enter(0.0) is None
    assert quota.enter(0.0) is None
    quota.refund(60.0)  # the bucket is full after a minute
    assert [quota.enter(60.0) for _ in range(2)] == [None, None]
    refused(quota.enter(60.0))
    unlimited = Quota(KeyLimits(concurrent=2), 0.0)
    assert unlimited.enter(0.0) is None
    unlimited.refund(0.0)


def test_bucket_holds_at_most_one_minute() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2), 0.0)
    assert [quota.enter(1e6) for _ in range(2)] == [None, None]
    refused(quota.enter(1e6))


def test_next_request_enters_when_a_concurrent_one_ends() -> None:
    quota = Quota(KeyLimits(concurrent=2), 0.0)
    assert quota.enter(0.0) is None
    assert quota.enter(0.0) is None
    third = refused(quota.enter(0.0))
    assert third.cause == "key_concurrent"
    assert third.retry_after_s == 1.0
    quota.leave(0, 0.0)
    assert quota.enter(0.0) is None


def test_tokens_are_charged_at_the_end_of_an_answer() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=600), 0.0)
    assert quota.enter(0.0) is None
    quota.leave(1200, 0.0)  # more than the limit of a minute
    over = refused(quota.enter(0.0))
    assert over.cause == "key_tokens"
    assert over.retry_after_s == pytest.approx(60.1)
    refused(quota.enter(60.0))
    assert quota.enter(60.1) is None


def test_tokens_are_charged_to_the_minute_in_which_the_answer_ends() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=60), 0.0)
    assert quota.enter(0.0) is None
    quota.leave(60, 300.0)  # the bucket holds one minute, not five
    assert refused(quota.enter(300.0)).retry_after_s == pytest.approx(1.0)


def test_refusal_for_tokens_costs_no_request() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2, tokens_per_minute=60), 0.0)
    assert quota.enter(0.0) is None
    quota.leave(60, 0.0)
    for _ in range(5):
        assert refused(quota.enter(0.0)).cause == "key_tokens"
    assert quota.enter(1.0) is None


def test_changed_limits_keep_the_use_so_far() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2, concurrent=5), 0.0)
    assert quota.enter(0.0) is None
    assert quota.enter(0.0) is None
    quota.change(KeyLimits(requests_per_minute=3, concurrent=3, tokens_per_minute=60), 0.0)
    assert quota.enter(0.0) is None  # the third of three
    assert refused(quota.enter(0.0)).cause == "key_concurrent"
    quota.leave(0, 0.0)
    assert refused(quota.enter(0.0)).cause == "key_requests"
    quota.change(KeyLimits(), 0.0)
    assert quota.enter(0.0) is None


def test_lower_rate_never_overdraws_the_bucket() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(59)
    bucket.resize(6, 0.0)
    assert bucket.seconds_until_one(0.0) == 0.0
    bucket.take(1)
    assert bucket.seconds_until_one(0.0) == pytest.approx(10.0)
    full = Bucket(60, 0.0)
    full.resize(1, 0.0)
    full.take(1)
    assert full.seconds_until_one(0.0) == pytest.approx(60.0)


def test_clock_that_stops_or_goes_back_fills_nothing() -> None:
    bucket = Bucket(1, 10.0)
    bucket.take(1)
    assert bucket.seconds_until_one(10.0) == pytest.approx(60.0)
    assert bucket.seconds_until_one(5.0) == pytest.approx(60.0)


def test_quota_knows_whether_tokens_are_limited() -> None:
    assert Quota(KeyLimits(tokens_per_minute=1), 0.0).counts_tokens
    assert not Quota(KeyLimits(requests_per_minute=1), 0.0).counts_tokens


# --- tokens that an answer does not report

ANSWER: Mapping[str, Any] = {
    "items": 1,
    "items_reported": 0,
    "prompts_reported": 0,
    "events": 0,
    "whole": True,
    "streams": False,
    "generates": True,
    "reports_all_prompts": True,
    "prompt_bytes": 300,
    "seconds": 2.0,
    "begun": True,
    "tokens_per_s": 50.0,
    "max_concurrent": 4,
    "n_ctx": None,
}


@pytest.mark.parametrize(
    ("reported", "answer", "tokens"),
    [
        (TokenCounts(90, 0, 40), {"items_reported": 1}, 0),
        (TokenCounts(90, 0, 40), {"items_reported": 1, "streams": True, "events": 45}, 0),
        (None, {}, 100 + 100),  # 300 bytes of body, 2 s at 50 a second
        (None, {"tokens_per_s": None}, 100 + 200),
        (None, {"items": 3}, 100 + 300),  # each in a slot of its own
        (None, {"items": 9}, 100 + 400),  # four slots, one after another
        (None, {"generates": False}, 100),
        (TokenCounts(90), {"generates": False}, 0),
        (TokenCounts(90), {}, 100),
        (TokenCounts(None, None, 40), {"items_reported": 1}, 100),
        (None, {"whole": False, "streams": True, "events": 130}, 100 + 130),
        (None, {"whole": False, "streams": True, "events": 30}, 100 + 100),  # not each token makes an event
        (None, {"whole": False, "streams": True, "events": 30, "items": 2}, 100 + 200),
        # Left before its first event: some of the time went to the prompt.
        (None, {"whole": False, "streams": True, "begun": False}, 100),
        (None, {"whole": False, "streams": True, "begun": False, "seconds": 9.0}, 100 + 350),
        (None, {"whole": False, "streams": True, "begun": False, "seconds": 9.0, "n_ctx": 256}, 256),
        (
            TokenCounts(90, 0, 20),
            {"whole": False, "streams": True, "items_reported": 1, "events": 22, "seconds": 0.1},
            2,
        ),
        (
            TokenCounts(90, 0, 20),
            {"streams": True, "items": 2, "items_reported": 1, "events": 50, "seconds": 0.1},
            30,
        ),
        (TokenCounts(90, 0, 80), {"items": 3, "items_reported": 1, "seconds": 0.5}, 160),
        (
            TokenCounts(90, 0, 1),
            {"items": 3, "items_reported": 1},
            299,
        ),  # the first was short, the others were not
        (TokenCounts(5, 0, 80), {"items": 2, "items_reported": 1, "reports_all_prompts": False}, 95 + 120),
        (
            TokenCounts(5, 0, 80),
            {"items": 2, "items_reported": 1, "prompts_reported": 2, "reports_all_prompts": False},
            120,
        ),
        (
            TokenCounts(5, 0, 160),
            {"items": 2, "items_reported": 2, "prompts_reported": 1, "reports_all_prompts": False},
            95,
        ),
        (None, {"n_ctx": 64, "prompt_bytes": 9_000_000}, 64),
        (TokenCounts(60, 0, 4), {"n_ctx": 64, "items": 2, "items_reported": 1, "seconds": 99.0}, 64),
        (TokenCounts(900, 0, 4), {"n_ctx": 64, "whole": False}, 0),  # its context has shifted
    ],
)
def test_unreported_tokens_are_estimated(
    reported: TokenCounts | None, answer: Mapping[str, Any], tokens: int
) -> None:
    assert unreported_tokens(reported, **{**ANSWER, **answer}) == tokens


def test_context_left_is_the_context_minus_reported_tokens() -> None:
    assert context_left(None, 2, 64) == 128
    assert context_left(TokenCounts(60, 10, 8), 2, 64) == 60
    assert context_left(TokenCounts(100, None, None), 1, 64) == 0  # its context has shifted
    assert context_left(TokenCounts(1, 0, 1), 1, None) is None


@settings(max_examples=examples(40))
@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60),
)
def test_retry_after_the_given_time_is_served(per_minute: int, steps: list[tuple[float, bool]]) -> None:
    quota = Quota(KeyLimits(requests_per_minute=per_minute), 0.0)
    now, entered = 0.0, 0
    for pause, patient in steps:
        now += pause
        refusal = quota.enter(now)
        if refusal is not None and patient:
            assert refusal.retry_after_s is not None
            now += refusal.retry_after_s
            refusal = quota.enter(now)
            assert refusal is None
        entered += refusal is None
        assert entered <= per_minute * (1 + now / 60) + 1e-3


@pytest.mark.parametrize(
    ("prompt", "cached", "completion", "cost"),
    [
        (100, 0, 20, 120),
        (100, 90, 20, 30),
        (100, None, None, 100),
        (None, None, 7, 7),
        (None, None, None, 0),
        (5, 9, 1, 1),
    ],
)
def test_cached_tokens_are_free(
    prompt: int | None, cached: int | None, completion: int | None, cost: int
) -> None:
    assert cost_of(prompt, cached, completion) == cost


# --- requests of several jobs


def test_each_job_of_a_request_counts_as_concurrent() -> None:
    quota = Quota(KeyLimits(concurrent=4), 0.0)
    assert quota.enter(0.0) is None
    assert quota.weigh(3) is None
    assert quota.enter(0.0) is None
    assert refused(quota.weigh(2)).cause == "key_concurrent"
    assert quota.weigh(1) is None
    assert refused(quota.enter(0.0)).cause == "key_concurrent"
    quota.leave(0, 0.0, 3)
    assert quota.in_flight == 1
    assert quota.enter(0.0) is None
    assert quota.weigh(3) is None


def test_more_jobs_than_the_limit_are_refused_with_both_numbers() -> None:
    quota = Quota(KeyLimits(concurrent=2), 0.0)
    assert quota.enter(0.0) is None
    error = quota.weigh(3000)
    assert error is not None
    assert (error.status, error.cause, error.retry_after_s) == (400, "too_many_jobs", None)
    assert "has 3000 jobs" in error.message
    assert "may have 2 at the same time" in error.message
    uncounted = quota.weigh(MANY_JOBS)
    assert uncounted is not None
    assert "has too many jobs" in uncounted.message
    assert quota.in_flight == 1


def test_jobs_without_a_limit_are_counted() -> None:
    quota = Quota(KeyLimits(requests_per_minute=5), 0.0)
    assert quota.enter(0.0) is None
    assert quota.weigh(3000) is None
    quota.leave(0, 0.0, 3000)
    assert quota.in_flight == 0
