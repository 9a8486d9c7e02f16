"""Requests with the tools of agents, through a proxy."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import DEFAULT_RULES
from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.settings import Limits
from llamasup.features.agent_tools import stage
from llamasup.features.agent_tools.system_messages import PROBE
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import end_generation
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, error_of, field, post, status
from tests.features.agent_tools.agents import (
    APPLY_PATCH,
    FLAT,
    PATCH,
    WEATHER,
    call,
    events,
    fields,
    function,
    read,
    streamed,
)

RESPONSES = b"/v1/responses"
LAST_CHUNK = b"0\r\n\r\n"
IGNORED = b"x-llamasup-ignored-tools"
WEATHER_CALL = call(FLAT, fields({"city": "Paris"}))
PATCH_CALL = call("apply_patch", fields({"input": PATCH}))
STREAM = streamed(events(WEATHER_CALL, PATCH_CALL))


def request(*tools: Any, path: bytes = RESPONSES, lines: tuple[bytes, ...] = (), **more: Any) -> bytes:
    return post(path, json.dumps({"input": "hi", "tools": tools, **more}).encode(), *lines)


ASKED = request(WEATHER, APPLY_PATCH)


def begin(rig: Rig, sent: bytes = ASKED) -> tuple[Wire, Wire, dict[str, Any]]:
    """A client, its llama-server, and the body that this has received."""
    client = rig.send(sent)
    child = rig.accept()
    return client, child, json.loads(child.message()[1])


def whole(*output: Any) -> bytes:
    return json.dumps({"id": "r", "output": output}).encode()


def unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found, body = found + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return found


def kinds(stream: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in read(unchunked(stream))]


def test_call_in_a_whole_answer_is_one_of_the_client(rig: Rig) -> None:
    client, child, body = begin(rig)
    assert [tool["name"] for tool in body["tools"]] == [FLAT, "apply_patch"]
    child.send(answer(whole(WEATHER_CALL, PATCH_CALL)))
    head, found = client.message()
    assert (status(head), field(head, IGNORED)) == (200, None)
    weather, patch = json.loads(found)["output"]
    assert (weather["namespace"], weather["name"]) == ("mcp__weather", "get_weather")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", PATCH)
    client.send(ASKED)  # the connection is still open
    child.message()
    child.send(answer(whole()))
    assert client.message()[1] == whole()


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_stream_in_any_chunks_has_the_calls_of_the_client(rig: Rig, size: int) -> None:
    client, child, _body = begin(rig, request(WEATHER, APPLY_PATCH, stream=True))
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    child.send(STREAM_HEAD, b"".join(map(chunk, pieces)) + LAST_CHUNK)
    assert field(client.head(), b"transfer-encoding") == b"chunked"
    found = kinds(client.until(LAST_CHUNK))
    assert found[-4:] == ["output_item.done", "custom_tool_call_input.done", "output_item.done", "completed"]
    assert {"function_call_arguments.delta", "custom_tool_call_input.delta"} <= set(found)
    record = rig.record()
    assert (record.status, record.outcome) == (200, "ok")


@pytest.mark.parametrize(
    "framed",
    [
        answer(STREAM, b"Content-Type: text/event-stream"),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + STREAM,
    ],
    ids=["with a length", "until the end"],
)
def test_stream_without_chunks_gets_chunks(rig: Rig, framed: bytes) -> None:
    client, child, _body = begin(rig)
    child.send(framed)
    child.close()
    client.head()
    assert kinds(client.until(LAST_CHUNK))[-1] == "completed"


def test_client_of_http_1_0_gets_no_chunks(rig: Rig) -> None:
    client, child, _body = begin(rig, ASKED.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    child.send(STREAM_HEAD + chunk(STREAM) + LAST_CHUNK)
    client.head()
    assert read(client.rest())[-1]["type"] == "response.completed"


def test_whole_answer_in_chunks_gets_a_length(rig: Rig) -> None:
    client, child, _body = begin(rig)
    body = whole(WEATHER_CALL)
    child.send(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        *map(chunk, (body[:9], body[9:])),
        LAST_CHUNK,
    )
    assert json.loads(client.message()[1])["output"][0]["name"] == "get_weather"


@pytest.mark.parametrize("code", [b"400 Bad Request", b"500 Internal Server Error"])
def test_error_passes_unchanged(rig: Rig, code: bytes) -> None:
    client, child, _body = begin(rig)
    error = b'{"error":{"message":"function_call","code":400}}'
    child.send(answer(error, code=code))
    head, body = client.message()
    assert (status(head), body) == (int(code[:3]), error)


def test_compressed_answer_passes_unchanged_and_is_not_requested(rig: Rig) -> None:
    client = rig.send(request(WEATHER, lines=(b"Accept-Encoding: gzip, zstd",)))
    child = rig.accept()
    assert field(child.message()[0], b"accept-encoding") is None
    body = gzip.compress(whole(WEATHER_CALL))
    child.send(answer(body, b"Content-Encoding: gzip"))
    assert client.message()[1] == body


@pytest.mark.parametrize("size", [5, 60, 100])
def test_answer_that_is_too_large_passes_unchanged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(stage, "MAX_HELD", 50)
    client, child, _body = begin(rig)
    body = whole(WEATHER_CALL)
    sent = answer(body)
    child.send(sent[: -len(body) + size], sent[-len(body) + size :])
    assert client.message()[1] == body


def test_stream_that_is_cut_within_an_event_ends_with_an_error_event(rig: Rig, no_cause: float) -> None:
    client, child, _body = begin(rig)
    child.send(STREAM_HEAD + chunk(STREAM[:-40]))
    client.head()
    child.close()
    rest = client.rest()
    assert b"\n\nevent: error\n" in unchunked(rest)
    assert not rest.endswith(LAST_CHUNK)


def test_server_that_ends_within_a_whole_answer_is_an_error(rig: Rig) -> None:
    client, child, _body = begin(rig)
    sent = answer(whole(WEATHER_CALL))
    child.send(sent[:-5])
    child.close()
    end_generation(rig)
    assert error_of(client, 502)


def test_error_event_within_a_stream_passes(rig: Rig) -> None:
    client, child, _body = begin(rig)
    error = b'event: error\ndata: {"error":{"message":"Context size has been exceeded."}}\n\n'
    child.send(STREAM_HEAD + chunk(streamed(events(PATCH_CALL)[:4]) + error) + LAST_CHUNK)
    client.head()
    assert unchunked(client.until(LAST_CHUNK)).endswith(error)


def test_request_is_sent_again_as_it_was(rig: Rig) -> None:
    client, child, body = begin(rig)
    child.close()
    child = rig.accept()
    assert json.loads(child.message()[1]) == body
    child.send(answer(whole(WEATHER_CALL)))
    assert b"mcp__weather" in client.message()[1]


def test_tools_that_llama_server_ignores_are_named(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    stage._logged.clear()
    sent = request(function("a"), {"type": "web_search"}, {"type": "image_generation"})
    with caplog.at_level(logging.WARNING, "llamasup.proxy"):
        for _ in range(2):
            client = rig.send(sent)
            child = rig.accept()
            assert sent.endswith(child.message()[1])
            child.send(answer(b"{}"))
            head, body = client.message()
            assert (field(head, IGNORED), body) == (b"web_search, image_generation", b"{}")
            child.close()
            client.close()
    assert [record.message.count("tools of the type") for record in caplog.records] == [1, 1]


@pytest.mark.parametrize(
    "sent",
    [
        post(RESPONSES, b'{"input":"hi"}'),
        post(RESPONSES, b'{"input":"hi","tools":[{"type":"custom","name":"a"}'),
        request(function("a")),
        request(APPLY_PATCH, path=CHAT),
    ],
    ids=["no tools", "no JSON", "only functions", "another path"],
)
def test_other_requests_pass_unchanged(rig: Rig, sent: bytes) -> None:
    client = rig.send(sent)
    child = rig.accept()
    assert sent.endswith(b"\r\n\r\n" + child.message()[1])
    child.send(answer(whole(WEATHER_CALL)))
    assert client.message()[1] == whole(WEATHER_CALL)


def test_transparent_proxy_changes_no_tools(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(rules=replace(DEFAULT_RULES, transparent=True)))
    _client, _child, body = begin(rig)
    assert body["tools"] == [WEATHER, APPLY_PATCH]


def test_large_request_is_changed(make_rig: MakeRig) -> None:
    """A large body is forwarded while it arrives, unless it may be changed."""
    rig = make_rig(ProxyConfig(limits=replace(Limits(), stream_above_bytes=1000)))
    sent = request(WEATHER, input="x" * 500_000)
    client = rig.send(sent[:5000], sent[5000:])
    child = rig.accept()
    assert json.loads(child.message()[1])["tools"][0]["name"] == FLAT
    child.send(answer(whole(WEATHER_CALL)))
    assert b"mcp__weather" in client.message()[1]


# --- system messages in the middle

MOVED = b"x-llamasup-moved-system"
LATER = b'{"messages": [{"role":"user","content":"hi"}, {"role":"system","content":"Be kind."}]}'
PROMPTS = {
    True: json.dumps({"prompt": json.dumps(PROBE.body)}).encode(),
    False: b'{"prompt":"llamasup-0"}',
    None: b"{}",
}


def asked(rig: Rig, sent: bytes, *, keeps: bool | None) -> tuple[Wire, Wire]:
    """A client whose request made the proxy try the template, and the child that has the request next."""
    client = rig.send(sent)
    prober = rig.accept()
    head, body = prober.message()
    assert head.startswith(b"POST /apply-template ")
    assert json.loads(body) == PROBE.body
    prober.send(answer(PROMPTS[keeps]))
    return client, rig.accept()


@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
def test_system_message_moves_if_the_template_drops_it(rig: Rig, path: bytes) -> None:
    client, child = asked(rig, post(path, LATER), keeps=False)
    for _ in range(2):  # the template is tried once
        (only,) = json.loads(child.message()[1])["messages"]
        assert only == {"role": "user", "content": "hi\n\n<system-reminder>\nBe kind.\n</system-reminder>"}
        child.send(answer(b"{}"))
        head, body = client.message()
        assert (field(head, MOVED), body) == (b"1", b"{}")
        client.send(post(path, LATER))


@pytest.mark.parametrize("keeps", [True, None])
def test_request_passes_unchanged_if_the_template_keeps_it_or_is_unknown(
    rig: Rig, keeps: bool | None
) -> None:
    client, child = asked(rig, post(CHAT, LATER), keeps=keeps)
    assert child.message()[1] == LATER
    child.send(answer(b"{}"))
    head, body = client.message()
    assert (field(head, MOVED), body) == (None, b"{}")


def test_server_that_does_not_answer_the_probe_gets_the_request_unchanged(rig: Rig) -> None:
    client = rig.send(post(CHAT, LATER))
    prober = rig.accept()
    prober.message()
    prober.close()
    child = rig.accept()
    assert child.message()[1] == LATER
    child.send(answer(b"{}"))
    assert client.message()[1] == b"{}"


def test_client_that_leaves_during_the_probe_is_noticed(rig: Rig) -> None:
    client = rig.send(post(CHAT, LATER))
    prober = rig.accept()
    prober.message()
    client.close()
    assert rig.record().outcome == "client_gone"
    prober.send(answer(PROMPTS[False]))


def test_moved_request_is_sent_again_as_it_was(rig: Rig) -> None:
    client, child = asked(rig, post(CHAT, LATER), keeps=False)
    first = child.message()[1]
    child.close()
    child = rig.accept()
    assert child.message()[1] == first
    child.send(answer(b"{}"))
    assert field(client.message()[0], MOVED) == b"1"


def test_request_with_tools_and_a_later_system_message_changes_twice(rig: Rig) -> None:
    later = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "Be kind."}]
    client, child = asked(rig, request(WEATHER, {"type": "web_search"}, input=later), keeps=False)
    body = json.loads(child.message()[1])
    assert (len(body["input"]), body["tools"][0]["name"]) == (1, FLAT)
    child.send(answer(whole(WEATHER_CALL)))
    head, found = client.message()
    assert (field(head, MOVED), field(head, IGNORED)) == (b"1", b"web_search")
    assert json.loads(found)["output"][0]["namespace"] == "mcp__weather"


def test_stream_passes_in_its_own_chunks(rig: Rig) -> None:
    client, child = asked(rig, post(CHAT, LATER), keeps=False)
    child.message()
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK)
    client.head()
    assert client.until(LAST_CHUNK) == chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK


def test_large_conversation_is_changed(make_rig: MakeRig) -> None:
    """Under ``run``, a large body is forwarded while it arrives, but for the APIs of agents."""
    limits = replace(Limits(), stream_above_bytes=1000)
    rig = make_rig(ProxyConfig(route_by_model=False, limits=limits))
    sent = post(b"/v1/messages", LATER.replace(b"hi", b"x" * 500_000))
    _client, child = asked(rig, sent, keeps=False)
    assert len(json.loads(child.message()[1])["messages"]) == 1
