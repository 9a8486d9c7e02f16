"""The last bytes are those of a real llama-server (b11434) with a slot of 256 tokens."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.llama_server.token_counts import (
    ContextEnd,
    TokenCounts,
    context_end,
    context_refusal,
    read_token_counts,
)

WINDOW = ContextWindow(256, 256)
DRAFTING = ContextWindow(256, 208)
EXCEEDED = (
    b'{"error":{"code":400,"message":"request (5012 tokens) exceeds the available context size (4096 '
    b'tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":5012,"n_ctx":4096}}'
)
SHARED = b'{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}'


def chat(prompt: int, completion: int, reason: bytes = b"length") -> bytes:
    return (
        b'data: {"choices":[{"finish_reason":"%b","index":0,"delta":{}}],"timings":{"cache_n":0,'
        b'"prompt_n":%d,"prompt_ms":0.4,"predicted_n":%d,"predicted_ms":1.6,"predicted_per_second":9876.5}}\n\n'
        b"data: [DONE]\n\n" % (reason, prompt, completion)
    )


def end_of(tail: bytes, window: ContextWindow | None) -> ContextEnd | None:
    return context_end(tail, read_token_counts(tail), window)


def test_refusal_names_prompt_tokens_and_context() -> None:
    assert context_refusal(EXCEEDED) == ContextEnd("exceeded", 5012, 4096)


def test_a_cache_that_all_slots_share_and_have_filled_is_exceeded_too() -> None:
    assert context_refusal(SHARED) == ContextEnd("exceeded")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"error":{"message":"Loading model"}}',
        b'{"error":{"message":"a quota is exceeded","type":"rate_limit_error"}}',
        b'{"error":"exceed_context_size_error"}',
        EXCEEDED[:-2],
        b'{"error":' + b"[" * 5000 + b"exceeded",
    ],
)
def test_other_refusals_are_about_something_else(body: bytes) -> None:
    assert context_refusal(body) is None


def test_an_answer_that_fills_the_slot_with_its_prompt_was_cut() -> None:
    assert end_of(chat(25, 231), WINDOW) == ContextEnd("cut", 25, 256)


def test_an_answer_that_ends_before_that_ended_for_another_reason() -> None:
    assert end_of(chat(25, 230), WINDOW) is None


def test_an_answer_that_drafts_is_cut_a_draft_s_length_earlier() -> None:
    assert end_of(chat(12, 242), DRAFTING) == ContextEnd("cut", 12, 256)
    assert end_of(chat(12, 100), DRAFTING) is None


@pytest.mark.parametrize("reason", [b"stop", b"tool_calls"])
def test_answer_with_its_own_finish_reason_is_not_cut(reason: bytes) -> None:
    assert end_of(chat(25, 231, reason), WINDOW) is None


def test_more_tokens_than_the_slot_holds_means_that_the_first_were_forgotten() -> None:
    assert end_of(chat(25, 400), WINDOW) == ContextEnd("shifted", 25, 256)


def test_truncated_flag_counts_without_slots() -> None:
    said = b'{"truncated":true,"stop_type":"limit",' + chat(12, 244)[50:]
    assert end_of(said, None) == ContextEnd("cut")
    assert end_of(chat(12, 244), None) is None


def test_a_stream_that_the_shared_cache_broke_off_was_cut() -> None:
    assert end_of(b"data: " + SHARED + b"\n\n", WINDOW) == ContextEnd("cut")
    assert end_of(b'data: {"error":{"message":"no"}}\n\n', WINDOW) is None


def test_incomplete_counts_are_ignored() -> None:
    assert context_end(b"", TokenCounts(300), WINDOW) is None
    assert context_end(b"", TokenCounts(None, None, 300), WINDOW) is None
