"""llama-server's answers → those of Ollama's API. The events are those of a real llama-server (b11434)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from llamasup.features.ollama.answer_format import (
    BrokenAnswer,
    Lines,
    Times,
    error_line,
    error_text,
    loaded,
    status_of_error,
    whole,
)
from llamasup.features.ollama.requests import Kind, OllamaRequest

NOW = b"2026-11-27T10:00:00Z"
TIMES = Times(1.5, 0.25)
TIMINGS = {"cache_n": 20, "prompt_n": 2, "prompt_ms": 10.5, "predicted_n": 3, "predicted_ms": 4.25}
METRICS = {
    "total_duration": 1_500_000_000,
    "load_duration": 250_000_000,
    "prompt_eval_count": 22,
    "prompt_eval_duration": 10_500_000,
    "eval_count": 3,
    "eval_duration": 4_250_000,
}


def of(kind: Kind, **more: Any) -> OllamaRequest:
    return OllamaRequest(kind, "m:latest", b"", {}, **more)


def event(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    return json.dumps({"choices": [choice], "object": "chat.completion.chunk"}).encode()


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 22}, "timings": TIMINGS}).encode()


def stream(request: OllamaRequest, *events: bytes) -> list[Any]:
    lines = Lines(request)
    made = b"".join(lines.add(each, NOW) for each in events) + lines.last(NOW, TIMES)
    return [json.loads(line) for line in made.splitlines()]


# --- streams ---------------------------------------------------------------------------------------


def test_tokens_of_a_chat_are_lines_and_the_last_has_the_numbers() -> None:
    first, second, last = stream(
        of(Kind.CHAT),
        event({"role": "assistant", "content": None}),
        event({"content": "Grü"}),
        event({"content": '"ß'}),
        event({}, "stop"),
        USAGE,
        b"[DONE]",
    )
    common = {"model": "m:latest", "created_at": NOW.decode()}
    assert first == {**common, "message": {"role": "assistant", "content": "Grü"}, "done": False}
    assert second["message"]["content"] == '"ß'
    assert last == {
        **common,
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        **METRICS,
    }


def test_answer_that_fills_its_limit_ends_with_length() -> None:
    *_, last = stream(of(Kind.CHAT), event({}, "length"), b"[DONE]")
    assert last["done_reason"] == "length"
    assert last["eval_count"] == 0  # a build that reports no timings


def test_text_of_generate_is_called_response() -> None:
    thought, first, last = stream(
        of(Kind.GENERATE),
        event({"reasoning_content": "hm"}),
        event({"content": "yes"}),
        event({}, "stop"),
        USAGE,
        b"[DONE]",
    )
    assert (thought["response"], thought["thinking"]) == ("", "hm")
    assert (first["response"], "message" in first) == ("yes", False)
    assert (last["response"], last["done"]) == ("", True)


def test_thoughts_of_a_chat_are_in_its_message() -> None:
    thought, _ = stream(of(Kind.CHAT), event({"reasoning_content": "hm"}), b"[DONE]")
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}


def test_raw_completion_is_streamed() -> None:
    timings = {"content": "", "stop": True, "stop_type": "limit", "timings": TIMINGS}
    first, last = stream(
        of(Kind.RAW),
        json.dumps({"content": " year", "tokens": [464], "stop": False}).encode(),
        json.dumps(timings).encode(),
    )
    assert (first["response"], first["done"]) == (" year", False)
    assert {name: last[name] for name in METRICS} == METRICS
    assert last["done_reason"] == "length"


def test_pieces_of_tool_calls_are_joined() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    begin = {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "weather"}}]}
    message, last = stream(
        of(Kind.CHAT),
        event(begin),
        event(call(0, arguments='{"city":')),
        event(call(0, arguments='"Rome"}')),
        event(call(1, name="clock", arguments="")),
        event({}, "tool_calls"),
        b"[DONE]",
    )
    assert message["message"]["tool_calls"] == [
        {"id": "c0", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"index": 1, "name": "clock", "arguments": {}}},
    ]
    assert (last["done"], last["done_reason"], "tool_calls" in last["message"]) == (True, "stop", False)


@pytest.mark.parametrize("arguments", ['{"city":', "[1]", "x", "[" * 100_000])
def test_tool_call_with_broken_arguments_is_an_error(arguments: str) -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": arguments}}]}
    with pytest.raises(BrokenAnswer, match="'weather' are not a JSON object"):
        stream(of(Kind.CHAT), event(call), event({}, "tool_calls"), b"[DONE]")


@pytest.mark.parametrize("arguments", ["", '{"city":', '{"city": "R'])
def test_tool_call_that_the_limit_cut_is_left_out(arguments: str) -> None:
    def call(index: int, arguments: str) -> dict[str, Any]:
        return {"index": index, "function": {"name": "weather", "arguments": arguments}}

    (last,) = stream(
        of(Kind.CHAT), event({"tool_calls": [call(0, arguments)]}), event({}, "length"), b"[DONE]"
    )
    assert (last["done_reason"], "tool_calls" in last["message"]) == ("length", False)
    calls = [call(0, '{"city":"Rome"}'), call(1, arguments)]
    message, last = stream(of(Kind.CHAT), event({"tool_calls": calls}), event({}, "length"), b"[DONE]")
    assert [each["function"]["index"] for each in message["message"]["tool_calls"]] == [0]
    choice = {"message": {"content": "a", "tool_calls": calls}, "finish_reason": "length"}
    found = answer(of(Kind.CHAT), {"choices": [choice]})
    assert (found["done_reason"], len(found["message"]["tool_calls"])) == ("length", 1)
    broken = [call(0, arguments or "x"), call(1, "{}")]
    with pytest.raises(BrokenAnswer):  # this one the limit did not cut
        stream(of(Kind.CHAT), event({"tool_calls": broken}), event({}, "length"), b"[DONE]")


def test_logprobs_have_alternatives_only_if_asked() -> None:
    tokens = [
        {
            "id": 5,
            "token": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top_logprobs": [{"id": 6, "token": "b", "bytes": [98], "logprob": -1.5}],
        }
    ]
    logprobs = {"content": tokens}
    own = {"token": "a", "logprob": -0.5, "bytes": [97]}
    top = {"token": "b", "logprob": -1.5, "bytes": [98]}
    plain, _ = stream(of(Kind.CHAT), event({"content": "a"}, logprobs=logprobs), b"[DONE]")
    many, _ = stream(of(Kind.CHAT, alternatives=True), event({"content": "a"}, logprobs=logprobs), b"[DONE]")
    none, _ = stream(of(Kind.CHAT), event({"content": "a"}, logprobs={"content": None}), b"[DONE]")
    assert plain["logprobs"] == [own]
    assert many["logprobs"] == [{**own, "top_logprobs": [top]}]
    assert "logprobs" not in none


def test_logprobs_of_tokens_without_a_text_come_with_the_next_line() -> None:
    def token(text: str) -> dict[str, Any]:
        return {"content": [{"token": text, "logprob": -0.5}]}

    first, last = stream(
        of(Kind.CHAT),
        event({"content": ""}, logprobs=token("half")),
        event({"content": "é"}, logprobs=token("é")),
        event({"tool_calls": []}, "stop", logprobs=token("end")),
        b"[DONE]",
    )
    assert [each["token"] for each in first["logprobs"]] == ["half", "é"]
    assert [each["token"] for each in last["logprobs"]] == ["end"]


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAW])
def test_text_that_is_not_utf_8_is_an_error(kind: Kind) -> None:
    broken = b'{"stop_type":"\xff","choices":[{"finish_reason":"\xff"}]}'
    with pytest.raises(BrokenAnswer, match="not the JSON of its API"):
        Lines(of(kind)).add(broken, NOW)
    with pytest.raises(BrokenAnswer, match="not the JSON of its API"):
        whole(of(kind), broken, NOW, TIMES)


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAW])
def test_error_within_a_stream_is_reported(kind: Kind) -> None:
    with pytest.raises(BrokenAnswer, match="out of memory"):
        Lines(of(kind)).add(b'{"error":{"code":500,"message":"out of memory"}}', NOW)


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAW])
@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"choices":5,"content":[],"stop":5}'])
def test_event_that_is_not_the_api_of_llama_server_is_an_error(kind: Kind, broken: bytes) -> None:
    with pytest.raises(BrokenAnswer, match="not the JSON of its API"):
        Lines(of(kind)).add(broken, NOW)


def test_stream_without_its_last_event_broke_off() -> None:
    with pytest.raises(BrokenAnswer, match="broke off"):
        stream(of(Kind.CHAT), event({"content": "a"}))


# --- whole answers ---------------------------------------------------------------------------------


def answer(request: OllamaRequest, body: Any) -> Any:
    return json.loads(whole(request, json.dumps(body).encode(), NOW, TIMES))


def test_whole_chat() -> None:
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, call]}
    found = answer(
        of(Kind.CHAT), {"choices": [{"message": message, "finish_reason": "tool_calls"}], "timings": TIMINGS}
    )
    assert found == {
        "model": "m:latest",
        "created_at": NOW.decode(),
        "message": {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [
                {"id": "x", "function": {"index": at, "name": "f", "arguments": {}}} for at in (0, 1)
            ],
        },
        "done": True,
        "done_reason": "stop",
        **METRICS,
    }


def test_whole_texts_of_generate() -> None:
    chat = {"choices": [{"message": {"content": "yes"}, "finish_reason": "length"}]}
    raw = {"content": "yes", "stop": True, "stop_type": "eos", "timings": TIMINGS}
    for kind, body, reason in ((Kind.GENERATE, chat, "length"), (Kind.RAW, raw, "stop")):
        found = answer(of(kind), body)
        assert (found["response"], found["done"], found["done_reason"]) == ("yes", True, reason)
    assert answer(of(Kind.GENERATE), {"choices": []})["response"] == ""


def test_whole_logprobs() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -0.5}]}
    chat = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "logprobs": logprobs}]}
    assert answer(of(Kind.CHAT), chat)["logprobs"] == [{"token": "a", "logprob": -0.5}]


def test_embeddings_are_in_the_order_of_the_texts() -> None:
    body = {
        "usage": {"prompt_tokens": 8},
        "data": [{"embedding": [0.5, 1e-7], "index": 1}, {"embedding": [1.0, 2.0], "index": 0}],
    }
    assert answer(of(Kind.EMBED), body) == {
        "model": "m:latest",
        "embeddings": [[1.0, 2.0], [0.5, 1e-7]],
        "total_duration": 1_500_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_count": 8,
    }
    assert answer(of(Kind.EMBEDDINGS), body) == {"embedding": [1.0, 2.0]}


def test_shorter_embedding_is_normalized_again() -> None:
    body = {"data": [{"embedding": [3.0, 4.0, 5.0]}, {"embedding": [0.0, 0.0, 1.0], "index": 1}]}
    first, second = answer(of(Kind.EMBED, dimensions=2), body)["embeddings"]
    assert first == pytest.approx([0.6, 0.8])
    assert second == [0.0, 0.0]
    assert math.dist(*answer(of(Kind.EMBED, dimensions=9), body)["embeddings"]) > 1


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.RAW, Kind.EMBED, Kind.EMBEDDINGS])
def test_whole_answer_that_is_not_the_api_of_llama_server_is_an_error(kind: Kind) -> None:
    for body in (b"", b"[", b"[]", b'{"choices":1,"content":[],"stop":1,"data":1}'):
        with pytest.raises(BrokenAnswer, match="not the JSON of its API"):
            whole(of(kind), body, NOW, TIMES)


def test_answer_without_an_embedding_is_an_error() -> None:
    with pytest.raises(BrokenAnswer, match="no embedding"):
        whole(of(Kind.EMBEDDINGS), b'{"data":[]}', NOW, TIMES)


# --- loads and errors ------------------------------------------------------------------------------


def test_loads_have_the_form_of_their_path() -> None:
    def of_load(kind: Kind, reason: str = "load") -> Any:
        return json.loads(loaded(of(kind), NOW, reason=reason))

    chat, generate = of_load(Kind.CHAT), of_load(Kind.GENERATE, "unload")
    assert (chat["message"], chat["done"], chat["done_reason"]) == (
        {"role": "assistant", "content": ""},
        True,
        "load",
    )
    assert (generate["response"], generate["done_reason"]) == ("", "unload")
    assert of_load(Kind.EMBED) == {"model": "m:latest", "embeddings": []}
    assert of_load(Kind.EMBEDDINGS) == {"embedding": []}
    assert json.loads(whole(of(Kind.CHAT, loads=True), b'{"tokens":[]}', NOW, TIMES)) == chat


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error":{"code":400,"message":"too long"}}', "too long"),
        (b'{"error":{"message":"too long","remedy":"cut it"}}', "too long. cut it"),
        (b'{"error":{"type":"server_error"}}', "server_error"),
        (b'{"error":{}}', "llama-server failed"),
        (b"nothing", "llama-server failed"),
    ],
)
def test_error_is_one_sentence(body: bytes, sentence: str) -> None:
    assert error_text(body) == sentence
    assert json.loads(error_line(sentence)) == {"error": sentence}


def test_error_with_a_path_that_is_not_utf_8_is_json() -> None:
    assert "cannot read" in json.loads(error_line("cannot read /models/\udcff.gguf"))["error"]


def test_error_of_the_request_is_a_400() -> None:
    assert status_of_error(500, "image input is not supported - hint: …") == 400
    assert status_of_error(501, "This server does not support embeddings. Start it with …") == 400
    assert status_of_error(500, "out of memory") == 500
    assert status_of_error(400, "too long") == 400
