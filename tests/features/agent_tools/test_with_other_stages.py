"""The calls are named back, whatever other stages do with the answer or the request."""

from __future__ import annotations

import json

from tests.core.proxy.generations import end_generation
from tests.core.proxy.rig import STREAM_HEAD, Rig, answer, chunk, field
from tests.features.agent_tools.agents import (
    APPLY_PATCH,
    FLAT,
    PATCH,
    WEATHER,
    call,
    events,
    read,
    streamed,
)
from tests.features.agent_tools.test_stage import (
    LAST_CHUNK,
    PATCH_CALL,
    WEATHER_CALL,
    begin,
    kinds,
    request,
    unchunked,
    whole,
)
from tests.features.continuation.streams import PIECES, ResponsesServer, framed
from tests.features.continuation.test_continued_streams import cut, set_continues
from tests.features.repair.test_answers import ERROR_EVENT, MISMATCH
from tests.features.repair.test_second_try import MARKED, SERVER_ERROR, TOOLS, set_repairs

IGNORED = b"x-llamasup-ignored-tools"
FIRST, SECOND = ResponsesServer("first"), ResponsesServer("second")


def test_stream_of_text_is_continued_by_the_next_server(rig: Rig) -> None:
    set_continues(rig)
    client, child, sent = begin(rig, request(WEATHER, stream=True, max_output_tokens=8))
    begun = framed(FIRST.stream(PIECES))[:7]
    child.send(STREAM_HEAD + b"".join(begun) + chunk(b'event: response.output_text.delta\ndata: {"ha')[:-9])
    client.until(begun[-1].split(b"\r\n")[1])
    cut(rig, child)
    child = rig.accept()
    rest = json.loads(child.message()[1])
    assert rest["tools"] == sent["tools"]
    stream = SECOND.stream(PIECES[3:], prefix="".join(PIECES[:3]))
    child.send(STREAM_HEAD + b"".join(framed(stream)) + LAST_CHUNK)
    received = client.until(LAST_CHUNK)
    assert "".join(PIECES[3:]) in "".join(
        event.get("delta", "") for event in map(json.loads, _data(unchunked(received.lstrip(b"\r\n"))))
    )
    assert rig.record().continued


def _data(stream: bytes) -> list[bytes]:
    return [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]


def test_stream_with_a_call_ends_with_an_error_event_and_whole_events(rig: Rig) -> None:
    set_continues(rig)
    client, child, _body = begin(rig, request(APPLY_PATCH, stream=True))
    begun = streamed(events(PATCH_CALL)[:9])
    child.send(STREAM_HEAD + chunk(begun))
    client.head()
    client.until(b"custom_tool_call_input.delta")
    child.close()
    end_generation(rig)
    rest = client.rest()
    assert b"event: error\n" in rest
    assert b"the answer has more than text" in rest
    assert not rest.endswith(LAST_CHUNK)


def test_kept_stream_has_the_calls_of_the_client(rig: Rig) -> None:
    set_continues(rig)
    client, child, _body = begin(rig, request(APPLY_PATCH, stream=True))
    child.send(STREAM_HEAD + chunk(streamed(events(PATCH_CALL))) + LAST_CHUNK)
    client.head()
    assert kinds(client.until(LAST_CHUNK))[-3:] == [
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]


def test_second_try_has_the_same_tools_and_its_answer_is_translated(rig: Rig) -> None:
    set_repairs(rig, TOOLS)
    client, child, first = begin(rig, request(WEATHER, {"type": "web_search"}))
    child.send(answer(MISMATCH, code=SERVER_ERROR))
    child = rig.accept()
    second = json.loads(child.message()[1])
    assert second.pop("seed") >= 0
    assert second == first
    child.send(answer(whole(WEATHER_CALL)))
    head, body = client.message()
    assert (field(head, MARKED), field(head, IGNORED)) == (b"tool_call", b"web_search")
    assert json.loads(body)["output"][0]["namespace"] == "mcp__weather"


def test_held_error_of_a_stream_is_replaced_by_a_translated_stream(rig: Rig) -> None:
    set_repairs(rig, TOOLS)
    client, child, _body = begin(rig, request(APPLY_PATCH, stream=True))
    child.send(STREAM_HEAD + chunk(ERROR_EVENT) + LAST_CHUNK)
    child.message()
    child.send(STREAM_HEAD + chunk(streamed(events(PATCH_CALL))) + LAST_CHUNK)
    client.head()
    assert read(unchunked(client.until(LAST_CHUNK)))[-1]["response"]["output"][0]["input"] == PATCH


def test_malformed_arguments_of_a_renamed_call_are_repaired(rig: Rig) -> None:
    set_repairs(rig, TOOLS)
    items = [call("get_weather", '{"city": "Par', namespace="mcp__weather")]
    client, child, body = begin(rig, request(WEATHER, input=items))
    (item,) = body["input"]
    assert (item["name"], "namespace" in item) == (FLAT, False)
    assert json.loads(item["arguments"]) == {"malformed_arguments": '{"city": "Par'}
    child.send(answer(whole()))
    assert field(client.message()[0], MARKED) == b"arguments"
