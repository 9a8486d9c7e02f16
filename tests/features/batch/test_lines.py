from __future__ import annotations

import io
import json
from typing import Any

import pytest

from llamasup.features.batch.lines import (
    MAX_ID,
    BatchLine,
    PromptTemplate,
    RawLine,
    TemplateInvalid,
    raw_lines,
    read_line,
    template_of,
)

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines(content: bytes, most_bytes: int = 100) -> list[RawLine]:
    return list(raw_lines(io.BytesIO(content), most_bytes))


def mistake(**changes: Any) -> str:
    """Why a line with these changes is refused; None removes a field."""
    line = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    found = read_line(json.dumps(line).encode())
    assert isinstance(found, str)
    return found


def test_lines_have_numbers_and_places() -> None:
    found = lines(b"one\n\n  \ntwo\r\nthree")
    assert [(line.number, line.text) for line in found] == [(1, b"one"), (4, b"two"), (5, b"three")]
    content = b"one\n\n  \ntwo\r\nthree"
    assert [content[line.offset : line.offset + line.size] for line in found] == [b"one", b"two", b"three"]


def test_byte_order_mark_belongs_to_no_line() -> None:
    content = b"\xef\xbb\xbfone\ntwo\n"
    found = lines(content)
    assert [line.text for line in found] == [b"one", b"two"]
    assert content[found[0].offset :][: found[0].size] == b"one"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_at_the_limit_is_read_and_a_longer_one_is_skipped(end: bytes) -> None:
    found = lines(b"x" * 10 + end + b"y" * 11 + end + b"z" * 3_000_000 + end + b"last", most_bytes=10)
    assert [(line.number, line.text) for line in found] == [
        (1, b"x" * 10),
        (2, None),
        (3, None),
        (4, b"last"),
    ]
    assert found[2].size == 3_000_000 + len(end)


def test_long_last_line_without_an_end_is_skipped() -> None:
    assert [line.text for line in lines(b"x" * 50, most_bytes=10)] == [None]


def test_line_becomes_a_request() -> None:
    text = json.dumps({**GOOD, "body": {"model": "qwen", "prompt": "é"}}).encode()
    assert read_line(text) == BatchLine(
        "a", "/v1/completions", b'{"model": "qwen", "prompt": "\\u00e9"}', "qwen"
    )


def test_method_may_be_left_out() -> None:
    assert isinstance(read_line(b'{"custom_id":"a","url":"/v1/embeddings","body":{}}'), BatchLine)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"custom_id": None}, "missing field `custom_id`"),
        ({"custom_id": 7}, "Expected `str`, got `int` - at `$.custom_id`"),
        ({"custom_id": ""}, "custom_id has 0 characters"),
        ({"custom_id": "x" * (MAX_ID + 1)}, "custom_id has 513 characters"),
        ({"method": "GET"}, "method is 'GET'"),
        ({"url": "/v1/audio"}, "url is '/v1/audio'; it must be one of /v1/chat/completions"),
        ({"body": [1]}, "body is not a JSON object"),
        ({"body": {"model": 3}}, "body: Expected `str | null`"),
        ({"body": {"stream": True}}, "stream: true"),
    ],
)
def test_mistake_in_a_field_is_named(changes: dict[str, Any], why: str) -> None:
    assert why in mistake(**changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"custom_id": "\xff"}', "invalid UTF-8 at byte 16: 0xff"),
        (b'{"custom_id": ', "invalid JSON"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"hello", "not a JSON object"),
        (b'{"custom_id":"a","url":"/v1/completions","body":{"temperature":1e999}}', "out of range"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"a":' * 100_000, "invalid JSON"),
    ],
)
def test_line_that_is_no_object_is_refused(text: bytes, why: str) -> None:
    found = read_line(text)
    assert isinstance(found, str)
    assert why in found


# --- prompts


def filled(template: PromptTemplate, line: Any, number: int = 3) -> Any:
    return json.loads(template.fill(json.dumps(line).encode(), number))


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_usual_template_sends_the_prompt_alone(url: str, body: Any) -> None:
    assert filled(template_of(None, url), "Hi") == {"custom_id": "line-3", "url": url, "body": body}


def test_fields_of_a_line_fill_the_template() -> None:
    template = template_of(
        '{"prompt": "$a costs $$5: ${b}!", "max_tokens": "$n", "stop": ["$a"], "x": 1}', "/v1/completions"
    )
    found = filled(template, {"custom_id": "k", "a": "Tea", "b": "ok", "n": 7})
    assert found["custom_id"] == "k"
    assert found["body"] == {"prompt": "Tea costs $5: ok!", "max_tokens": 7, "stop": ["Tea"], "x": 1}


@pytest.mark.parametrize(
    ("template", "line", "why"),
    [
        ('{"prompt": "$a"}', {"b": 1}, "needs the field 'a'"),
        ('{"prompt": "5 $ off"}', {"b": 1}, r"invalid \$"),
        ('{"prompt": "$prompt"}', 7, "neither a string nor an object"),
        ('{"prompt": "$prompt"}', {"prompt": "x", "custom_id": 1}, "custom_id is not a string"),
    ],
)
def test_line_that_does_not_fit_the_template_is_refused(template: str, line: Any, why: str) -> None:
    with pytest.raises(TemplateInvalid, match=why):
        filled(template_of(template, "/v1/completions"), line)


def test_prompt_that_is_no_json_is_refused() -> None:
    with pytest.raises(TemplateInvalid, match="invalid JSON"):
        template_of(None, "/v1/completions").fill(b"hello", 1)


@pytest.mark.parametrize(("text", "why"), [("{", "invalid JSON"), ("[]", "not a JSON object")])
def test_template_that_is_no_object_is_refused(text: str, why: str) -> None:
    with pytest.raises(TemplateInvalid, match=why):
        template_of(text, "/v1/completions")
