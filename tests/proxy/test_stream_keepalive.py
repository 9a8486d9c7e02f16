"""Streams that wait with SSE comments, for clients whose operator opted in: every way that they can go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic

import pytest

from llamasup.http.heads import HeadRules
from llamasup.proxy import Limits, ProxyConfig
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, get, post, status
from tests.proxy.test_waiting import FAILED, LOADING, asked, becomes, ends, serves, wait_until

KEEPALIVE_S = 0.03
COMMENT = b": waiting\n\n"
STREAM = b'{"stream":true}'
EVENT = chunk(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def config(**options: object) -> ProxyConfig:
    limits = Limits(sweep_s=0.01)
    return ProxyConfig(stream_keepalive_s=KEEPALIVE_S, limits=limits, **options)  # type: ignore[arg-type]


@pytest.fixture
def kept(make_rig: MakeRig) -> Rig:
    """A proxy that keeps streams alive, before a model that loads."""
    rig = make_rig(config())
    rig.backend.unavailable = LOADING
    return rig


def waits(rig: Rig, path: bytes = CHAT, request: bytes = b"") -> tuple[Wire, bytes]:
    """A client that has had a comment, and the head before it."""
    client = rig.connect()
    client.send(request or post(path, STREAM))
    head = client.head()
    client.until(COMMENT)
    return client, head


def body_of(wire: Wire) -> bytes:
    """What is in the chunks until the last one, comments left out; the connection stays open."""
    body = b""
    while size := int(wire.until(b"\r\n"), 16):
        body += wire.receive(size)
        assert wire.receive(2) == b"\r\n"
    assert wire.receive(2) == b"\r\n"
    return body.replace(COMMENT, b"")


def cut_body_of(wire: Wire) -> bytes:
    """What is in the chunks of a stream that is closed without a last one."""
    rest, body = wire.rest(), b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size:  # the end of a chunk that was begun to be read
            continue
        length = int(size, 16)
        assert length > 0, "a last chunk: it looks complete"
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    return body.replace(COMMENT, b"")


def error_in(body: bytes) -> dict[str, object]:
    assert body.startswith(b"data: "), body
    assert body.endswith(b"\n\n")
    found: dict[str, object] = json.loads(body[6:])["error"]
    return found


def test_a_stream_that_waits_for_its_model_gets_comments_and_then_its_events(kept: Rig) -> None:
    client, head = waits(kept)
    assert status(head) == 200
    assert field(head, b"content-type") == b"text/event-stream"
    assert field(head, b"transfer-encoding") == b"chunked"
    assert field(head, b"x-request-id") is not None
    client.until(COMMENT)
    client.until(COMMENT)
    serves(kept)
    child = kept.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    assert client.receive(2) == b"\r\n"  # of the last comment's chunk
    assert body_of(client) == b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'
    record = kept.record()
    assert (record.outcome, record.status, record.generation) == ("ok", 200, 2)
    assert record.waited_s >= KEEPALIVE_S
    client.send(get(b"/livez"))  # the connection is as good as new
    assert status(client.message()[0]) == 200


def test_comments_go_on_while_llama_server_works_at_the_prompt(make_rig: MakeRig) -> None:
    rig = make_rig(config())
    client = asked(rig, STREAM)
    child = rig.accept()
    child.message()
    client.until(COMMENT)
    child.send(STREAM_HEAD)  # a slot took it; nothing is said of that
    client.until(COMMENT)
    client.until(COMMENT)
    child.send(EVENT)
    assert client.until(EVENT).count(b"HTTP/1.1") == 0
    child.send(DONE)
    client.until(DONE)
    assert rig.record().outcome == "ok"


def test_comments_come_while_a_request_is_queued(make_rig: MakeRig) -> None:
    rig = make_rig(config(), max_concurrent=1)
    busy = asked(rig, b"{}")
    child = rig.accept()
    child.message()
    client, _ = waits(rig)
    child.send(answer(b"done"))
    assert busy.message()[1] == b"done"
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    client.until(DONE)


def test_token_counts_are_read_behind_comments_as_ever(kept: Rig) -> None:
    client, _ = waits(kept)
    serves(kept)
    child = kept.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b'data: {"usage":{"completion_tokens":5,"prompt_tokens":7}}\n\n') + DONE)
    client.until(DONE)
    record = kept.record()
    assert (record.tokens_prompt, record.tokens_completion) == (7, 5)


def test_a_request_that_has_had_comments_alone_can_be_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(config())
    client = asked(rig, STREAM)
    rig.accept().message()
    client.until(COMMENT)
    ends(rig)
    wait_until(rig, 1)
    client.until(COMMENT)
    serves(rig)
    child = rig.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    client.until(DONE)
    record = rig.record()
    assert (record.outcome, record.replayed) == ("ok", True)


# --- what goes wrong

PATHS = [CHAT, b"/completion", b"/v1/messages", b"/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_of_llama_servers_is_an_error_event_of_the_api(kept: Rig, path: bytes) -> None:
    client, _ = waits(kept, path)
    serves(kept)
    child = kept.accept()
    child.message()
    refusal = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'
    child.send(answer(refusal, code=b"400 Bad Request"))
    body = cut_body_of(client)
    named = path in (b"/v1/messages", b"/v1/responses")
    assert body.startswith(b'event: error\ndata: {"type":"error"' if named else b'data: {"error"')
    assert json.loads(body.partition(b"data: ")[2])["error"]["message"] == "too long"
    record = kept.record()
    assert (record.outcome, record.status, record.generation) == ("error_event", 200, 2)


@pytest.mark.parametrize(
    "response",
    [
        answer(b"<html>", code=b"500 Internal Server Error"),
        answer(b'{"content":"not streamed"}'),
        b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"oops") + b"0\r\n\r\n",
        b"HTTP/1.1 503 Gone\r\nContent-Length: 0\r\n\r\n",
        answer(b"x" * 200_000, code=b"500 Internal Server Error"),
    ],
    ids=["html", "an answer that is no stream", "chunked", "empty", "huge"],
)
def test_what_is_neither_stream_nor_error_is_told_as_an_error(kept: Rig, response: bytes) -> None:
    client, _ = waits(kept)
    serves(kept)
    child = kept.accept()
    child.message()
    child.send(response)
    error = error_in(cut_body_of(client))
    assert error["message"] == f"llama-server answered {status(response)} where a stream was asked for"
    assert kept.record().outcome == "error_event"


def test_an_error_that_breaks_off_is_an_error_event_too(kept: Rig) -> None:
    client, _ = waits(kept)
    serves(kept)
    child = kept.accept()
    child.message()
    child.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\n{")
    child.close()
    assert error_in(cut_body_of(client))["message"] == "llama-server closed the connection"
    record = kept.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)


def test_a_model_that_fails_meanwhile_is_an_error_event_with_cause_and_remedy(kept: Rig) -> None:
    client, _ = waits(kept)
    becomes(kept, FAILED)
    error = error_in(cut_body_of(client))
    assert (error["code"], error["cause"], error["remedy"]) == (503, "out_of_memory", "use a smaller context")
    record = kept.record()
    assert (record.outcome, record.status) == ("unavailable", 200)


def test_a_wait_that_takes_too_long_is_an_error_event(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(), wait_timeout_s=1000.0)
    rig.backend.unavailable = LOADING
    client, _ = waits(rig)
    room = rig.backend.waiting
    room._clock = clock
    clock.pass_s(1000.0)
    rig.call(room._on_timer)
    message = str(error_in(cut_body_of(client))["message"])
    assert message.endswith("this request has waited for 1000 s")


def test_a_request_that_is_out_of_time_is_an_error_event(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(request_timeout_s=1000.0))
    client = asked(rig, STREAM)
    rig.accept().message()
    client.until(COMMENT)
    clock.pass_s(1000.0)
    assert error_in(cut_body_of(client))["code"] == 504
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 200)


def test_a_stream_that_breaks_behind_its_comments_ends_as_any_other(kept: Rig) -> None:
    client, _ = waits(kept)
    serves(kept)
    child = kept.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    ends(kept)
    assert error_in(cut_body_of(client))["message"] == "llama-server was killed"


def test_a_client_that_leaves_frees_its_place(kept: Rig) -> None:
    client, _ = waits(kept)
    client.close()
    wait_until(kept, 0)
    record = kept.record()
    assert (record.outcome, record.status) == ("client_gone", 200)


# --- who gets none

PLAIN = [
    post(CHAT, b'{"stream":false}'),
    post(CHAT, b"{}"),
    post(CHAT, b'{"stream":"yes"}'),
    post(CHAT, b"no JSON"),
    post(b"/v1/embeddings", STREAM),
    post(b"/tokenize", STREAM),
]


@pytest.mark.parametrize("request_", PLAIN)
def test_who_asks_for_no_stream_gets_no_comment(kept: Rig, request_: bytes) -> None:
    client = kept.connect()
    client.send(request_)
    wait_until(kept, 1)
    waits(kept)  # beside it, one who does
    assert client.is_quiet()


def test_without_the_option_nothing_is_said_before_the_answer(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(sweep_s=0.01)))
    rig.backend.unavailable = LOADING
    client = asked(rig, STREAM)
    wait_until(rig, 1)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    rig.call(lambda: connection.sweep(monotonic() + 60.0))
    assert client.is_quiet()


def test_a_page_whose_origin_only_llama_server_can_judge_gets_its_own_head(make_rig: MakeRig) -> None:
    rig = make_rig(config(rules=HeadRules(transparent=True)))
    client = rig.connect()
    client.send(post(CHAT, STREAM, b"Origin: http://page.example"))
    child = rig.accept()
    child.message()
    waits_beside = asked(rig, STREAM)
    waits_beside.until(COMMENT)
    waits_beside.until(COMMENT)
    assert client.is_quiet()
    child.send(STREAM_HEAD + EVENT + DONE)
    assert client.until(DONE).startswith(b"HTTP/1.1 200 OK\r\nServer: llama.cpp")


# --- other framings


def http_1_0(body: bytes) -> bytes:
    return post(CHAT, body).replace(b"HTTP/1.1", b"HTTP/1.0")


def until_close(kept: Rig) -> tuple[Wire, Wire]:
    client, head = waits(kept, request=http_1_0(STREAM))
    assert field(head, b"transfer-encoding") is None
    assert field(head, b"connection") == b"close"
    serves(kept)
    child = kept.accept()
    child.message()
    return client, child


def test_an_http_1_0_client_gets_comments_and_events_without_chunks(kept: Rig) -> None:
    client, child = until_close(kept)
    child.send(STREAM_HEAD + EVENT + DONE)
    body = client.rest().replace(COMMENT, b"")
    assert body == b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'


def test_an_http_1_0_client_is_told_of_an_error_without_chunks(kept: Rig) -> None:
    client, child = until_close(kept)
    child.send(answer(b'{"error":{"message":"no"}}', code=b"400 Bad Request"))
    assert error_in(client.rest().replace(COMMENT, b"")) == {"message": "no"}


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b"data: 1\n\ndata: 2\n\n"


def with_length(child: Wire) -> None:
    child.send(SSE + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS)


def with_close(child: Wire) -> None:
    child.send(SSE + b"\r\n" + EVENTS)
    child.close()


@pytest.mark.parametrize("sends", [with_length, with_close])
def test_events_that_are_not_chunked_are_chunked_behind_the_comments(
    kept: Rig, sends: Callable[[Wire], None]
) -> None:
    client, _ = waits(kept)
    serves(kept)
    child = kept.accept()
    child.message()
    sends(child)
    client.until(b"\r\n")
    assert body_of(client) == EVENTS


def test_events_that_are_not_chunked_stay_so_for_http_1_0(kept: Rig) -> None:
    client, child = until_close(kept)
    with_length(child)
    assert client.rest().replace(COMMENT, b"") == EVENTS
