"""The counts of answers of several items, wherever they stand and however reads cut them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from llamasup.core.llama_server.token_counts import (
    TAIL_BYTES,
    TokenCounts,
    TokenMeter,
    read_token_counts,
    tail_of,
)


def timings(cached: int, evaluated: int, predicted: int) -> dict[str, float]:
    return {
        "cache_n": cached,
        "prompt_n": evaluated,
        "prompt_ms": 0.4,
        "predicted_n": predicted,
        "predicted_ms": 1.6,
        "predicted_per_second": 50.5,
    }


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": 1, **details}


def token(index: int, **more: object) -> dict[str, Any]:
    return {"choices": [{"finish_reason": None, "index": index, "delta": {"content": "x"}}], **more}


def completion(index: int, evaluated: int, predicted: int, **more: object) -> dict[str, Any]:
    return {
        "index": index,
        "content": "x",
        "tokens_predicted": predicted,
        "tokens_evaluated": evaluated,
        **more,
    }


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def stream(*events: object) -> bytes:
    each = [chunk(b"data: " + msgspec.json.encode(event) + b"\n\n") for event in events]
    return b"".join(each) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def plain(answer: object) -> bytes:
    return msgspec.json.encode(answer)


FAKE = '"},"usage":{"prompt_tokens":0},"index":7,"timings":{"prompt_n":0,"predicted_n":0}'
PROBS = [{"id": 1, "token": FAKE, "logprob": -1.5}] * 300

# The label of the route, whether it streams, the answer, its items, and what they cost.
ANSWERS: dict[str, tuple[str, bool, bytes, int, TokenCounts | None]] = {
    "chat": (
        "/v1/chat/completions",
        False,
        plain({"choices": [{"index": 0}], "usage": usage(9, 4, 2), "timings": timings(4, 5, 2)}),
        1,
        TokenCounts(9, 4, 2, 50.5),
    ),
    "n of a chat, which tells of one": (
        "/v1/chat/completions",
        False,
        plain({"choices": [{"index": 0}, {"index": 1}, {"index": 2}], "usage": usage(9, 4, 2)}),
        3,
        TokenCounts(9, 4, 2),
    ),
    "n of a chat, as a stream": (
        "/v1/chat/completions",
        True,
        stream(
            *(token(1), token(0), token(1), token(1, timings=timings(8, 1, 2)), token(0), token(0)),
            token(0, timings=timings(0, 9, 4)),
        ),
        2,
        TokenCounts(18, 8, 6, 50.5),
    ),
    "n of a chat, as a stream, with usage": (
        "/v1/chat/completions",
        True,
        stream(
            *(
                token(0),
                token(1),
                token(1),
                {"choices": [], "usage": usage(9, 8, 2), "timings": timings(8, 1, 2)},
            ),
            *(token(0), {"choices": [], "usage": usage(9, 0, 4)}),
        ),
        2,
        TokenCounts(18, 8, 6, 50.5),
    ),
    "with timings in each event, and tools": (
        "/v1/chat/completions",
        True,
        stream(
            token(0, timings=timings(0, 9, 1)),
            {
                "choices": [{"index": 1, "delta": {"tool_calls": [{"index": 0, "arguments": "{"}]}}],
                "timings": timings(8, 1, 1),
            },
            token(0, timings=timings(0, 9, 2)),
            token(1, timings=timings(8, 1, 2)),
        ),
        2,
        TokenCounts(18, 8, 4, 50.5),
    ),
    "prompts": (
        "/completion",
        False,
        plain(
            [completion(at, 9, 4, generation_settings={"n": 1}, timings=timings(1, 8, 4)) for at in range(5)]
        ),
        5,
        TokenCounts(45, 5, 20, 50.5),
    ),
    "prompts, as a stream": (
        "/completion",
        True,
        b"6\r\ndata: \r\n"
        + stream(
            *(None, completion(1, 9, 1), completion(0, 5, 1), completion(1, 9, 2, timings=timings(8, 1, 2))),
            *(completion(0, 5, 2), completion(0, 5, 2, stop=True, timings=timings(0, 5, 2))),
        ),
        2,
        TokenCounts(14, 8, 4, 50.5),
    ),
    "probabilities behind the counts": (
        "/completion",
        False,
        plain(completion(0, 9, 4, timings=timings(1, 8, 4), completion_probabilities=PROBS)),
        1,
        TokenCounts(9, 1, 4, 50.5),
    ),
    "a stream whose last event was cut down": (
        "/completion",
        True,
        stream(completion(0, 9, 1), completion(0, 9, 2), {"content": ""}),
        1,
        TokenCounts(9, None, 2),
    ),
    "a part of the fields": (
        "/completion",
        False,
        plain({"tokens_predicted": 4}),
        1,
        TokenCounts(None, None, 4),
    ),
    "fields without counts": ("/completion", False, plain({"content": FAKE}), 1, None),
    "embeddings": (
        "/v1/embeddings",
        False,
        plain(
            {
                "usage": {"prompt_tokens": 12, "total_tokens": 12},
                "data": [{"embedding": [0.125] * 999, "index": at} for at in range(3)],
            }
        ),
        3,
        TokenCounts(12),
    ),
    "a message": (
        "/v1/messages",
        False,
        plain({"usage": {"cache_read_input_tokens": 4, "input_tokens": 5, "output_tokens": 2}}),
        1,
        TokenCounts(9, 4, 2),
    ),
    "messages": (
        "/v1/messages",
        True,
        stream(
            {"message": {"usage": {"cache_read_input_tokens": 4, "input_tokens": 5, "output_tokens": 0}}},
            {"message": {"usage": {"cache_read_input_tokens": 8, "input_tokens": 1, "output_tokens": 0}}},
            *({"type": "content_block_delta", "index": 1}, {"usage": {"output_tokens": 3}}),
            {"type": "message_delta", "usage": {"output_tokens": 2}},
        ),
        1,
        TokenCounts(18, 12, 5),
    ),
    "a response": (
        "/v1/responses",
        True,
        stream(
            {"response": {"status": "in_progress"}},
            {
                "response": {
                    "usage": {
                        "input_tokens": 9,
                        "output_tokens": 2,
                        "input_tokens_details": {"cached_tokens": 4},
                    }
                },
                "timings": timings(4, 5, 2),
            },
        ),
        1,
        TokenCounts(9, 4, 2, 50.5),
    ),
    "of another build": (
        "/completion",
        False,
        plain({"timings": {"prompt_n": 4, "predicted_n": 2}}),
        1,
        TokenCounts(4, 0, 2),
    ),
    "with blanks": (
        "/v1/completions",
        False,
        json.dumps([{"index": at, "usage": usage(9, 4, 2)} for at in range(2)], indent=1).encode(),
        2,
        TokenCounts(18, 8, 4),
    ),
    "half a count": ("/completion", False, plain({"timings": {"prompt_n": 4}, "usage": {}}), 1, None),
}


def reads(answer: bytes, size: int) -> Iterator[bytes]:
    return (answer[at : at + size] for at in range(0, len(answer), size))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_counts_of_all_items_add_up_wherever_reads_cut(
    answer: tuple[str, bool, bytes, int, TokenCounts | None],
) -> None:
    label, streams, raw, items, counts = answer
    for size in (len(raw), 4096, 1460, 100, 7 if len(raw) > 3000 else 1):
        meter = TokenMeter(label, streams=streams)
        for piece in reads(raw, size):
            meter.read(piece)
        assert (size, meter.items, meter.counts()) == (size, items, counts)
        assert meter.events == (raw.count(b"data: {") if streams else 0)


@pytest.mark.parametrize("answer", [each for each in ANSWERS.values() if each[1]])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_events_may_come_one_by_one(
    answer: tuple[str, bool, bytes, int, TokenCounts | None], together: int
) -> None:
    label, _, raw, items, counts = answer
    meter = TokenMeter(label, streams=True)
    events = [each + b"\n\n\r\n" for each in raw.split(b"\n\n\r\n")]
    for at in range(0, len(events), together):
        meter.read(b"".join(events[at : at + together]))
    assert (meter.items, meter.counts()) == (items, counts)
    assert meter.events == raw.count(b"data: {")


def test_events_are_counted_and_an_abandoned_answer_keeps_its_counts() -> None:
    meter = TokenMeter("/completion", streams=True)
    for number in range(1, 31):
        meter.read(chunk(b"data: " + msgspec.json.encode(completion(0, 9, number)) + b"\n\n"))
    assert (meter.events, meter.items, meter.items_reported, meter.prompts_reported) == (30, 1, 1, 1)
    assert meter.counts() == TokenCounts(9, None, 30)


def test_items_above_the_limit_share_one_count() -> None:
    meter = TokenMeter("/completion", streams=False)
    for number in range(5000):
        meter.read(plain(completion(number, 1, 1)))
    counts = meter.counts()
    assert counts is not None
    assert (meter.items, counts.completion) == (4097, 4097)


def test_kept_bytes_of_an_answer_are_bounded() -> None:
    meter = TokenMeter("/completion", streams=False)
    for _ in range(100):
        meter.read(b"x" * 100_000)
    assert len(meter._rest) <= 2048


# --- at the end of an answer -------------------------------------------------------------------------

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


def framed(payload: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(payload), payload)


@pytest.mark.parametrize(
    ("tail", "counts"),
    [
        (b'{"choices":[],"object":"chat.completion",' + USAGE + b',"id":"1",' + TIMINGS + b"}", WHOLE),
        (b'{"content":"hi","tokens_cached":39,' + TIMINGS + b"}", WHOLE),
        (b'{"choices":[],' + USAGE + b"}", COUNTED),
        (framed(b"data: {" + TIMINGS + b"}\n\n") + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n", WHOLE),
        (framed(b"data: {" + USAGE + b"," + TIMINGS + b"}\n\n") + b"0\r\n\r\n", WHOLE),
        (
            framed(b'event: message_delta\ndata: {"usage":{"output_tokens":16}}\n\n') + b"0\r\n\r\n",
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
    split = b"".join(framed(body[at : at + size]) for at in range(0, len(body), size))
    assert read_token_counts(split + b"0\r\n\r\n") == WHOLE


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
    opening = framed(
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
