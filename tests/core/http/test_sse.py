"""Token counts in every form that llama-server writes, complete or split, and in other texts."""

from __future__ import annotations

import json

import pytest

from llamasup.core.http.sse import TAIL_BYTES, TokenCounts, error_event, error_of, read_token_counts, tail_of

TIMINGS = (
    b'"timings":{"cache_n":23,"prompt_n":1,"prompt_ms":0.4,"prompt_per_token_ms":0.4,"prompt_per_second":2500.0,'
    b'"predicted_n":16,"predicted_ms":1.6,"predicted_per_token_ms":0.1,"predicted_per_second":9876.5}'
)
USAGE = (
    b'"usage":{"completion_tokens":16,"prompt_tokens":24,"total_tokens":40,'
    b'"prompt_tokens_details":{"cached_tokens":23}}'
)
WHOLE = TokenCounts(24, 23, 16, 9876.5)
COUNTED = TokenCounts(24, 23, 16, None)


def chunk(payload: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(payload), payload)


@pytest.mark.parametrize(
    ("tail", "counts"),
    [
        (b'{"choices":[],"object":"chat.completion",' + USAGE + b',"id":"1",' + TIMINGS + b"}", WHOLE),
        (b'{"content":"hi","tokens_cached":39,' + TIMINGS + b"}", WHOLE),
        (b'{"choices":[],' + USAGE + b"}", COUNTED),
        (chunk(b"data: {" + TIMINGS + b"}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", WHOLE),
        (chunk(b"data: {" + USAGE + b"," + TIMINGS + b"}\n\n") + b"0\r\n\r\n", WHOLE),
        (
            chunk(b'event: message_delta\ndata: {"usage":{"output_tokens":16}}\n\n') + b"0\r\n\r\n",
            TokenCounts(None, None, 16, None),
        ),
        (
            b'{"type":"message","usage":{"cache_read_input_tokens":23,"input_tokens":1,"output_tokens":16}}',
            COUNTED,
        ),
        (
            b'data: {"type":"response.completed","response":{"usage":{"input_tokens":24,"output_tokens":16,'
            b'"total_tokens":40,"input_tokens_details":{"cached_tokens":23}}}}\n\n',
            COUNTED,
        ),
        (b'{"object":"list","usage":{"prompt_tokens":5,"total_tokens":5},"data":[]}', TokenCounts(5)),
        (
            b'{"timings":{"prompt_n":4,"prompt_ms":1.5,"predicted_n":2,"predicted_per_second":1e3}}',
            TokenCounts(4, None, 2, 1000.0),
        ),
        (
            b'{"timings":{"predicted_n":2, "cache_n": 3, "prompt_n": 4}}',
            TokenCounts(7, 3, 2, None),
        ),
    ],
    ids=[
        "chat",
        "completion",
        "without timings",
        "stream",
        "stream with usage",
        "anthropic stream",
        "anthropic",
        "responses stream",
        "embedding",
        "an older build",
        "in another order",
    ],
)
def test_counts_are_read_in_every_shape(tail: bytes, counts: TokenCounts) -> None:
    assert read_token_counts(tail) == counts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_chunk_framing_may_split_the_numbers_anywhere(size: int) -> None:
    body = b"{" + USAGE + b"," + TIMINGS + b"}"
    framed = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))
    assert read_token_counts(framed + b"0\r\n\r\n") == WHOLE


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"{}",
        b"data: [DONE]\n\n",
        b'{"usage":null,"timings":null}',
        b'{"usage":{}}',
        b'{"usage":{"prompt_tokens":1.2.3}}',
        b'{"usage":{"prompt_tokens":-1}}',
        b'{"usage":{"prompt_tokens":1e999}}',
        b'{"usage":{"prompt_tokens":%s}}' % (b"9" * 5000),
        b'{"error":{"message":"no"}}',
    ],
)
def test_answer_without_counts_has_none(tail: bytes) -> None:
    assert read_token_counts(tail) is None


def test_a_model_that_talks_of_usage_is_not_believed() -> None:
    said = '{"usage":{"prompt_tokens":999999},"timings":{"predicted_n":999999}}'
    body = json.dumps(
        {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "content": said}, separators=(",", ":")
    )
    assert read_token_counts(body.encode()) == TokenCounts(1, None, 2, None)
    assert read_token_counts(json.dumps({"content": said}).encode()) is None


def test_the_last_count_is_the_one() -> None:
    early = b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}\n'
    assert read_token_counts(early + b"{" + USAGE + b"}") == COUNTED


def test_a_message_s_stream_counts_its_prompt_in_its_first_event() -> None:
    opening = chunk(
        b'event: message_start\ndata: {"type":"message_start","message":{"content":[],"usage":'
        b'{"cache_read_input_tokens":8,"input_tokens":17,"output_tokens":0}}}\n\n'
    )
    ending = b'data: {"type":"message_delta","usage":{"output_tokens":231}}\n\n'
    assert read_token_counts(ending, opening) == TokenCounts(25, 8, 231, None)
    assert read_token_counts(ending, opening + ending) == TokenCounts(25, 8, 231, None)  # a short answer
    assert read_token_counts(ending, b"data: {}") == TokenCounts(None, None, 231, None)


def test_timings_of_absurd_length_are_not_counts() -> None:
    assert read_token_counts(TIMINGS.replace(b"23", b"9" * 5000)) == TokenCounts(1, None, 16, 9876.5)


def test_the_tail_is_the_end_of_the_pieces_and_bounded() -> None:
    assert tail_of([]) == b""
    assert tail_of([b"one", b"", b"two"]) == b"onetwo"
    assert tail_of([b"x" * 20_000, b"end"]) == b"x" * (TAIL_BYTES - 3) + b"end"
    assert tail_of([b"never seen", b"y" * 20_000]) == b"y" * TAIL_BYTES


def test_an_error_event_is_named_where_the_api_names_its_events() -> None:
    body = b'{"error":{"message":"m"}}'
    assert error_event(b"/v1/chat/completions", body) == b'data: {"error":{"message":"m"}}\n\n'
    assert (
        error_event(b"/v1/messages", body)
        == b'event: error\ndata: {"type":"error","error":{"message":"m"}}\n\n'
    )
    for event in (error_event(b"/v1/responses", body), error_event(b"/completion", body)):
        json.loads(event.partition(b"data: ")[2])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            b'{\n  "error": {\n"code": 400, "message": "no \\"messages\\"", "type": "invalid_request"}\n}',
            {"code": 400, "message": 'no "messages"', "type": "invalid_request"},
        ),
        (b'{"error":{}}', {}),
        (b'{"content":"an answer after all"}', None),
        (b"<html>", None),
        (b"\xff", None),
        (b"", None),
        (b"[" * 100_000, None),
    ],
)
def test_an_error_that_comes_where_a_stream_was_promised_fits_into_one_event(
    body: bytes, told: dict[str, object] | None
) -> None:
    error = error_of(400, body)
    assert b"\n" not in error
    synthetic = {
        "message": "llama-server answered with status 400 instead of a stream",
        "type": "server_error",
        "code": 400,
    }
    assert json.loads(error) == {"error": synthetic if told is None else told}
