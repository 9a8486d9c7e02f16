"""Events that some requests and builds have, in the first part of a stream and in the next one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.http.chunks import chunk
from llamasup.features.continuation.answer import Event, NotContinued
from llamasup.features.continuation.apis import API_BY_ROUTE
from llamasup.features.continuation.stream import Recording
from tests.features.continuation.streams import (
    ChatServer,
    CompletionServer,
    MessagesServer,
    ResponsesServer,
    data,
    framed,
)

CHAT = {**ChatServer.body, "max_tokens": 2}


def joined(
    route: str, request: dict[str, Any], first: list[Any], second: list[Any], *, repeats: bool = True
) -> list[Any]:
    """What the client gets of the ``second`` events after the ``first`` ones."""
    record = Recording(route, json.dumps(request).encode())
    got: list[bytes] = []
    record.begin(lambda _: None)
    for read in framed([data(event) for event in first]):
        record.relay(read)
    record.continued_body()
    record.begin(got.append, repeats=repeats)
    for event in second:
        record.relay(chunk(data(event).encode()))
    texts = [piece.partition(b"data: ")[2].partition(b"\n\n")[0] for piece in got]
    return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    text = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": {**text, **more}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("had", "event", "repeats", "new"),
    [
        (["Once"], "Once there", True, " there"),
        (["Once"], "Once", True, ""),  # and then it ends
        (["ha"], "ha", False, "ha"),
        (["1"], "10", False, "10"),
    ],
)
def test_what_is_new_in_the_first_event(had: list[str], event: str, repeats: bool, new: str) -> None:
    first = [delta(piece) for piece in had]
    got = joined(ChatServer.route, ChatServer.body, first, [delta(event), delta(" lived")], repeats=repeats)
    assert got == [*([delta(new)] if new else []), delta(" lived")]


@pytest.mark.parametrize("event", ["Once they were", "Once", " Once there"])
def test_beginning_that_is_repeated_with_a_change_is_refused(event: str) -> None:
    with pytest.raises(NotContinued, match="in another way"):
        joined(ChatServer.route, ChatServer.body, [delta("Once"), delta(" there ")], [delta(event)])


def test_text_that_was_held_back_is_generated_again() -> None:
    """llama-server holds " garden" back, because it may begin a stop string."""
    first = [
        {"content": " a", "tokens": [357], "tokens_predicted": 1},
        {"content": "", "tokens": [975], "tokens_predicted": 2},
    ]
    record = Recording("/completion", json.dumps({"prompt": "P", "n_predict": 9}).encode())
    record.begin(lambda _: None)
    for event in first:
        record.relay(chunk(data(event).encode()))
    assert json.loads(record.continued_body()) == {"prompt": ["P", 357], "n_predict": 8}


def test_character_of_several_tokens_is_continued_as_text() -> None:
    """Only its last token is in the stream."""
    first = {"content": "\U0001f98a", "tokens": [143], "tokens_predicted": 4}
    record = Recording("/completion", json.dumps({"prompt": "P", "n_predict": 9}).encode())
    record.begin(lambda _: None)
    record.relay(chunk(data(first).encode()))
    assert json.loads(record.continued_body()) == {"prompt": "P\U0001f98a", "n_predict": 5}


def test_rest_with_another_kind_of_content_is_refused() -> None:
    start = {"type": "content_block_start", "content_block": {"type": "text"}}
    thinks = {"type": "content_block_start", "content_block": {"type": "thinking"}}
    with pytest.raises(NotContinued, match="another kind of content"):
        joined(MessagesServer.route, MessagesServer.body, [start], [thinks])


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ({"cache_n": 3, "prompt_n": 1, "predicted_n": 5}, {"cache_n": 2, "prompt_n": 0, "predicted_n": 7}),
        ({"prompt_n": 8, "predicted_n": 5}, {"prompt_n": 6, "predicted_n": 7}),
    ],
)
def test_timings_count_the_whole(timings: dict[str, int], expected: dict[str, int]) -> None:
    """As the access log and the quotas read them."""
    first = [delta("Once"), delta(" there")]
    got = joined(ChatServer.route, {**CHAT, "max_tokens": 9}, first, [{"timings": timings}])
    assert got[0]["timings"] == expected


def test_tool_call_after_the_text_is_passed_on() -> None:
    call = delta(tool_calls=[{"index": 0, "id": "a"}])
    end = delta(finish="tool_calls")
    first = [delta("Once")]
    assert joined(ChatServer.route, ChatServer.body, first, [delta("Once"), call, end])[-2:] == [call, end]


def test_limit_leaves_no_room_for_a_tool_call() -> None:
    call = delta(tool_calls=[{"index": 0, "id": "a"}])
    second = [delta("Once there was"), call, delta(finish="tool_calls"), "[DONE]"]
    got = joined(ChatServer.route, CHAT, [delta("Once"), delta(" there")], second)
    assert got == [delta(finish="length"), "[DONE]"]


def test_progress_of_the_prompt_is_not_sent_again() -> None:
    progress = {"choices": [{"index": 0, "delta": {}, "text": ""}], "prompt_progress": {"total": 9}}
    texts: list[dict[str, Any]] = [
        {"choices": [{"text": "Once"}]},
        progress,
        {"choices": [{"text": " there"}]},
    ]
    texts[0]["id"] = "a"
    got = joined("/v1/completions", {"prompt": "P"}, texts[:1], texts[1:])
    assert [event["choices"][0]["text"] for event in got] == [" there"]
    got = joined(ChatServer.route, CHAT, [progress, delta("Once")], [progress, delta("Once there")])
    assert got == [delta(" there")]
    begun = {"content": "Once", "tokens": [1]}
    got = joined(CompletionServer.route, CompletionServer.body, [{"prompt_progress": {}}, begun], [progress])
    assert got == []


def progressing(event: dict[str, Any]) -> dict[str, Any]:
    """As b10068 sends them with ``return_progress``: such an event may have the begun text."""
    return {**event, "prompt_progress": {"total": 9, "cache": 0, "processed": 9, "time_ms": 1}}


@pytest.mark.parametrize("more", ["", " a"])
def test_begun_text_that_comes_with_the_progress_of_the_prompt_is_compared(more: str) -> None:
    first = [progressing(delta("")), delta("Once"), delta(" upon")]
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}
    second = [opening, progressing(delta("Once upon" + more)), progressing(opening), opening, delta(" time")]
    got = joined(ChatServer.route, ChatServer.body, first, second)
    assert got == [*([delta(more)] if more else []), delta(" time")]
    with pytest.raises(NotContinued, match="another way"):
        joined(ChatServer.route, ChatServer.body, first, [progressing(delta("Once more"))])
    with_nothing = joined(
        ChatServer.route, ChatServer.body, first, [progressing({"choices": []}), delta("Once upon a")]
    )
    assert with_nothing == [delta(" a")]


def test_progress_in_responses_is_not_sent_again() -> None:
    opening = [
        {"type": "response.created", "response": {"id": "r1"}},
        {"type": "response.in_progress", "response": {"id": "r1"}},
    ]
    text = {"type": "response.output_text.delta", "delta": "Once"}
    again = [
        *opening,
        progressing(text),
        progressing(opening[1]),
        {**text, "delta": " there"},
    ]
    got = joined(
        ResponsesServer.route, ResponsesServer.body, [*opening, progressing(opening[1]), text], again
    )
    assert got == [{**text, "delta": " there"}]


def test_tokens_are_counted_as_the_stream_itself_counts_them() -> None:
    """Text that a stop string has held back comes in one event, and what the client has begun is no token."""
    held = {**delta(" there was"), "timings": {"predicted_n": 4}}
    for first, pieces in (
        ([delta("Once"), held], 4),
        ([progressing(delta("Once")), delta(" there")], 1),
    ):
        sent = API_BY_ROUTE[ChatServer.route].sent(Event("", data) for data in first)
        assert sent.pieces == pieces


@pytest.mark.parametrize(
    ("more", "event", "uncounted"),
    [
        ({}, delta("Once"), ""),
        ({}, delta("Ünce"), "Ünce"),
        ({"stop": ["z"]}, delta("Once"), "Once"),
        ({"stop": "z"}, delta("Once"), "Once"),
        ({"stop": []}, delta("Once"), ""),
        ({"stop": ["z"]}, {**delta("Once"), "timings": {"predicted_n": 2}}, ""),
    ],
)
def test_text_whose_events_may_have_several_tokens_is_to_be_counted(
    more: dict[str, Any], event: dict[str, Any], uncounted: str
) -> None:
    record = Recording(ChatServer.route, json.dumps({**ChatServer.body, "max_tokens": 9, **more}).encode())
    record.begin(lambda _: None)
    for read in framed([data(event)]):
        record.relay(read)
    record.continued_body()
    assert record.uncounted == uncounted
    known = json.loads(record.continued_body(5))
    assert known["max_tokens"] == 4
    assert record.pieces == 5


def test_completion_with_few_fields_is_joined() -> None:
    begun = {"content": "Once", "tokens": [1]}
    second = [{"content": " there"}, {"content": "", "stop": True}]
    assert joined(CompletionServer.route, CompletionServer.body, [begun], second) == second


def test_events_of_messages_that_have_no_text_are_passed_on() -> None:
    start = {"type": "content_block_start", "content_block": {"type": "text"}}
    begun = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Once"}}
    ping = {"type": "ping"}
    signature = {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": ""}}
    got = joined(MessagesServer.route, MessagesServer.body, [ping, start, begun], [ping, signature, start])
    assert got == [ping, signature]


def test_usage_without_a_total_counts_the_whole() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 1}}
    got = joined(ChatServer.route, CHAT, [delta("Once"), delta(" there")], [usage])
    assert got[0]["usage"] == {"prompt_tokens": 18, "completion_tokens": 2}


@pytest.mark.parametrize(
    "event", [delta(finish="stop"), {"choices": [{"text": "", "finish_reason": "stop"}]}]
)
def test_end_without_text_is_an_end(event: dict[str, Any]) -> None:
    route = ChatServer.route if "delta" in event["choices"][0] else "/v1/completions"
    with pytest.raises(NotContinued, match="complete but for its end"):
        joined(route, {"prompt": "a", **ChatServer.body}, [event], [])
