"""Events that some requests and builds have, in the first part of a stream and in the next one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.continuation.answer import NotContinued
from llamasup.continuation.stream import Recording
from llamasup.http.chunks import chunk
from tests.continuation.streams import ChatServer, CompletionServer, MessagesServer, data, framed

CHAT = {**ChatServer.body, "max_tokens": 2}


def joined(route: str, request: dict[str, Any], first: list[Any], second: list[Any]) -> list[Any]:
    """What the client gets of the ``second`` events after the ``first`` ones."""
    record = Recording(route, json.dumps(request).encode())
    got: list[bytes] = []
    record.begin(lambda _: None)
    for read in framed([data(event) for event in first]):
        record.relay(read)
    record.continued_body()
    record.begin(got.append)
    for event in second:
        record.relay(chunk(data(event).encode()))
    texts = [piece.partition(b"data: ")[2].partition(b"\n\n")[0] for piece in got]
    return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    text = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": {**text, **more}, "finish_reason": finish}]}


def test_build_that_does_not_repeat_the_beginning_continues_it() -> None:
    got = joined(ChatServer.route, ChatServer.body, [delta("Once"), delta(" there")], [delta(" lived")])
    assert got == [delta(" lived")]


@pytest.mark.parametrize(
    ("had", "event", "new"),
    [
        (["ha"], "ha", "ha"),  # the same token once more
        (["ha"], "haha", "ha"),  # repeated
        (["ha", "ha"], "haha", ""),  # repeated, and no new token yet
        (["He"], "Help", "lp"),
        (["Hello there"], "Help", "Help"),
    ],
)
def test_what_is_new_in_the_first_event(had: list[str], event: str, new: str) -> None:
    got = joined(ChatServer.route, ChatServer.body, [delta(piece) for piece in had], [delta(event)])
    assert got == ([delta(new)] if new else [])


@pytest.mark.parametrize("event", ["Once there was", "Once there lived a hare", "Once upon a time"])
def test_beginning_that_is_repeated_with_a_change_is_refused(event: str) -> None:
    had = [delta(" Once"), delta(" there "), delta("was")]
    with pytest.raises(NotContinued, match="in another way"):
        joined(ChatServer.route, ChatServer.body, had, [delta(event)])


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
    progress = {"choices": [], "prompt_progress": {"total": 9}}
    got = joined(ChatServer.route, CHAT, [progress, delta("Once")], [progress, delta("Once there")])
    assert got == [delta(" there")]
    begun = {"content": "Once", "tokens": [1]}
    got = joined(CompletionServer.route, CompletionServer.body, [{"prompt_progress": {}}, begun], [progress])
    assert got == []


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
