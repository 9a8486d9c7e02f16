"""The pieces of a streamed answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.errors import ControlFailed
from llamasup.features.chat.answer import Cost, chunk_of, safe

USAGE = {"prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}


def line(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}"


@pytest.mark.parametrize("text", ["", ": keep-alive", "data: [DONE]", "data:", "event: x", "id: 7"])
def test_lines_without_a_chunk(text: str) -> None:
    assert chunk_of(text) is None


def test_chunk_has_text_or_thoughts_or_an_error() -> None:
    chunk = chunk_of(
        line(choices=[{"delta": {"role": "assistant", "content": "Hi", "tool_calls": []}}], id="x")
    )
    assert chunk is not None
    assert chunk.choices[0].delta.content == "Hi"
    chunk = chunk_of(line(choices=[{"delta": {"content": None, "reasoning_content": "Hm"}}]))
    assert chunk is not None
    assert (chunk.choices[0].delta.content, chunk.choices[0].delta.reasoning_content) == (None, "Hm")
    chunk = chunk_of(line(error={"message": "gone", "cause": "interrupted"}))
    assert chunk is not None
    assert chunk.error == {"message": "gone", "cause": "interrupted"}


@pytest.mark.parametrize("text", ["data: <html>", "data: []", 'data: {"choices": 1}', "data: " + "[" * 5000])
def test_answer_of_another_program_is_an_error(text: str) -> None:
    with pytest.raises(ControlFailed, match="no chunk of a chat completion"):
        chunk_of(text)


@pytest.mark.parametrize(
    ("events", "context", "shown"),
    [
        ([], 4096, ""),
        ([{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}], None, "4 tokens"),
        (
            [
                {"choices": [{"delta": {}, "finish_reason": "length"}]},
                {"choices": [], "usage": USAGE, "timings": {"predicted_per_second": 12.345, "cache_n": 40}},
            ],
            4096,
            "7 tokens · 12.3 tok/s · 40 of 50 prompt tokens cached · context 57 of 4,096 · "
            "stopped at the limit of tokens",
        ),
        ([{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}], None, "7 tokens · 40 of 50"
         " prompt tokens cached"),
    ],
)  # fmt: skip
def test_cost_of_an_answer(events: list[dict[str, Any]], context: int | None, shown: str) -> None:
    cost = Cost()
    for event in events:
        chunk = chunk_of(line(**event))
        assert chunk is not None
        cost.add(chunk)
    assert cost.text(context) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe\n\tend", "Größe\n\tend"),
        ("👩‍💻", "👩‍💻"),  # joined by U+200D
        ("\x1b[2J\x1b]0;title\x07", "\ufffd[2J\ufffd]0;title\ufffd"),
        ("a\r\nb\rc", "a\nbc"),
        ("\x9b31m", "\ufffd31m"),
        ("abc\u202edcba\u2066x", "abcdcbax"),
        ("\ud800", "\ufffd"),
    ],
)
def test_text_of_a_model_cannot_move_the_cursor(text: str, shown: str) -> None:
    assert safe(text) == shown
