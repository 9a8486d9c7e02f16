"""SSE comments to streams that wait (``stream_keepalive_s``), and all ways in which they continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic

import pytest
from msgspec.structs import replace

from llamasup.core.http.heads import HeadRules
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import (
    FAILED,
    LOADING,
    await_queued,
    end_generation,
    make_unavailable,
    send_chat,
    start_generation,
)
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, get, post, status

KEEPALIVE_S = 0.03
COMMENT = b": waiting\n\n"
STREAM = b'{"stream":true}'
EVENT = chunk(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def config(**options: object) -> ProxyConfig:
    limits = Limits(sweep_s=0.01)
    return ProxyConfig(stream_keepalive_s=KEEPALIVE_S, limits=limits, **options)  # type: ignore[arg-type]


@pytest.fixture
def keepalive_rig(make_rig: MakeRig) -> Rig:
    """A proxy with stream keep-alive, whose model loads."""
    rig = make_rig(config())
    rig.backend.unavailable = LOADING
    return rig


def waiting_stream(
    rig: Rig, path: bytes = CHAT, request: bytes = b"", comment: bytes = COMMENT
) -> tuple[Wire, bytes]:
    """A client that has received a comment, and the head before it."""
    client = rig.send(request or post(path, STREAM))
    head = client.head()
    client.until(comment)
    return client, head


def body_of(wire: Wire) -> bytes:
    """The content of the chunks until the last one, without comments; the connection stays open."""
    body = b""
    while size := int(wire.until(b"\r\n"), 16):
        body += wire.receive(size)
        assert wire.receive(2) == b"\r\n"
    assert wire.receive(2) == b"\r\n"
    return body.replace(COMMENT, b"")


def cut_body_of(wire: Wire) -> bytes:
    """The content of the chunks of a stream that is closed without a last chunk."""
    rest, body = wire.rest(), b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size:  # the end of a chunk that was read in part
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


def test_stream_that_waits_for_its_model_gets_comments_and_then_events(keepalive_rig: Rig) -> None:
    client, head = waiting_stream(keepalive_rig)
    assert status(head) == 200
    assert field(head, b"content-type") == b"text/event-stream"
    assert field(head, b"transfer-encoding") == b"chunked"
    assert field(head, b"x-request-id") is not None
    client.until(COMMENT)
    client.until(COMMENT)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    assert client.receive(2) == b"\r\n"  # of the last comment's chunk
    assert body_of(client) == b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'
    record = keepalive_rig.record()
    assert (record.outcome, record.status, record.generation) == ("ok", 200, 2)
    assert record.waited_s >= KEEPALIVE_S
    client.send(get(b"/livez"))  # the connection is reused
    assert status(client.message()[0]) == 200


def test_comments_continue_while_llama_server_works_on_the_prompt(make_rig: MakeRig) -> None:
    rig = make_rig(config())
    client, child = rig.begin(post(CHAT, STREAM))
    client.until(COMMENT)
    child.send(STREAM_HEAD)  # the head of llama-server, which the client does not get
    client.until(COMMENT)
    client.until(COMMENT)
    child.send(EVENT)
    assert client.until(EVENT).count(b"HTTP/1.1") == 0
    child.send(DONE)
    client.until(DONE)
    assert rig.record().outcome == "ok"


def test_queued_request_gets_comments_with_its_position(make_rig: MakeRig) -> None:
    rig = make_rig(config(), max_concurrent=1)
    busy, child = rig.begin(post(CHAT, b"{}"))
    client, _ = waiting_stream(rig, comment=b": position 1\n\n")
    rig.endpoint.held_s = 8.0
    client.until(b": position 1, about 8 s\n\n")
    child.send(answer(b"done"))
    assert busy.message()[1] == b"done"
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    client.until(DONE)


def test_request_that_waits_for_a_load_gets_comments_with_its_progress(keepalive_rig: Rig) -> None:
    loading = replace(LOADING, percent=43.2, eta_s=12.3)
    keepalive_rig.backend.unavailable = loading
    client, _ = waiting_stream(keepalive_rig, comment=b": loading 43 %, 12 s left\n\n")
    keepalive_rig.backend.unavailable = replace(loading, percent=50.0, eta_s=74.0)
    client.until(b": loading 50 %, 1 min 14 s left\n\n")
    keepalive_rig.backend.unavailable = replace(loading, percent=None)
    client.until(b": loading, 12 s left\n\n")
    keepalive_rig.backend.unavailable = replace(loading, percent=50.0, eta_s=None)
    client.until(b": loading 50 %\n\n")
    keepalive_rig.backend.unavailable = replace(loading, percent=None, eta_s=None, retry_after_s=1.0)
    client.until(COMMENT)


def test_token_counts_are_read_after_comments(keepalive_rig: Rig) -> None:
    client, _ = waiting_stream(keepalive_rig)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b'data: {"usage":{"completion_tokens":5,"prompt_tokens":7}}\n\n') + DONE)
    client.until(DONE)
    record = keepalive_rig.record()
    assert (record.tokens_prompt, record.tokens_completion) == (7, 5)


def test_request_that_had_only_comments_can_be_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(config())
    client = send_chat(rig, STREAM)
    rig.accept().message()
    client.until(COMMENT)
    end_generation(rig)
    await_queued(rig, 1)
    client.until(COMMENT)
    start_generation(rig)
    child = rig.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD + EVENT + DONE)
    client.until(DONE)
    record = rig.record()
    assert (record.outcome, record.replayed) == ("ok", True)


# --- failures

PATHS = [CHAT, b"/completion", b"/v1/messages", b"/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_refusal_by_llama_server_is_an_error_event_of_the_api(keepalive_rig: Rig, path: bytes) -> None:
    client, _ = waiting_stream(keepalive_rig, path)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    refusal = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'
    child.send(answer(refusal, code=b"400 Bad Request"))
    body = cut_body_of(client)
    named = path in (b"/v1/messages", b"/v1/responses")
    assert body.startswith(b'event: error\ndata: {"type":"error"' if named else b'data: {"error"')
    assert json.loads(body.partition(b"data: ")[2])["error"]["message"] == "too long"
    record = keepalive_rig.record()
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
def test_answer_that_is_no_stream_is_an_error_event(keepalive_rig: Rig, response: bytes) -> None:
    client, _ = waiting_stream(keepalive_rig)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    child.send(response)
    error = error_in(cut_body_of(client))
    assert error["message"] == f"llama-server answered with status {status(response)} instead of a stream"
    assert keepalive_rig.record().outcome == "error_event"


@pytest.mark.usefixtures("no_cause")
def test_incomplete_error_answer_is_an_error_event(keepalive_rig: Rig) -> None:
    client, _ = waiting_stream(keepalive_rig)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    child.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\n{")
    child.close()
    assert error_in(cut_body_of(client))["message"] == "llama-server closed the connection"
    record = keepalive_rig.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)


def test_failed_model_is_an_error_event_with_cause_and_remedy(keepalive_rig: Rig) -> None:
    client, _ = waiting_stream(keepalive_rig)
    make_unavailable(keepalive_rig, FAILED)
    error = error_in(cut_body_of(client))
    assert (error["code"], error["cause"], error["remedy"]) == (
        503,
        "out_of_memory",
        "Use a smaller context.",
    )
    record = keepalive_rig.record()
    assert (record.outcome, record.status) == ("unavailable", 200)


def test_wait_timeout_is_an_error_event(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(), wait_timeout_s=1000.0)
    rig.backend.unavailable = LOADING
    client, _ = waiting_stream(rig)
    queue = rig.backend.waiting
    queue._clock = clock
    clock.pass_s(1000.0)
    rig.call(queue.changed)
    message = str(error_in(cut_body_of(client))["message"])
    assert message.endswith("this request has waited for 1000 s")


def test_request_timeout_is_an_error_event(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(request_timeout_s=1000.0))
    client = send_chat(rig, STREAM)
    rig.accept().message()
    client.until(COMMENT)
    clock.pass_s(1000.0)
    assert error_in(cut_body_of(client))["code"] == 504
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 200)


def test_stream_broken_after_comments_ends_with_error_event(keepalive_rig: Rig) -> None:
    client, _ = waiting_stream(keepalive_rig)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    end_generation(keepalive_rig)
    assert error_in(cut_body_of(client))["message"] == "llama-server was killed"


def test_disconnect_during_comments_leaves_the_queue(keepalive_rig: Rig) -> None:
    client, _ = waiting_stream(keepalive_rig)
    client.close()
    await_queued(keepalive_rig, 0)
    record = keepalive_rig.record()
    assert (record.outcome, record.status) == ("client_gone", 200)


# --- requests without comments

PLAIN = [
    post(CHAT, b'{"stream":false}'),
    post(CHAT, b"{}"),
    post(CHAT, b'{"stream":"yes"}'),
    post(CHAT, b"no JSON"),
    post(b"/v1/embeddings", STREAM),
    post(b"/tokenize", STREAM),
]


@pytest.mark.parametrize("request_", PLAIN)
def test_request_without_stream_gets_no_comment(keepalive_rig: Rig, request_: bytes) -> None:
    client = keepalive_rig.send(request_)
    await_queued(keepalive_rig, 1)
    waiting_stream(keepalive_rig)  # another client gets comments
    assert client.is_quiet()


def test_without_the_option_no_comment_is_sent(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(sweep_s=0.01)))
    rig.backend.unavailable = LOADING
    client = send_chat(rig, STREAM)
    await_queued(rig, 1)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    rig.call(lambda: connection.sweep(monotonic() + 60.0))
    assert client.is_quiet()


def test_page_with_origin_checked_by_llama_server_gets_no_early_head(make_rig: MakeRig) -> None:
    rig = make_rig(config(rules=HeadRules(transparent=True)))
    client, child = rig.begin(post(CHAT, STREAM, b"Origin: http://page.example"))
    waits_beside = send_chat(rig, STREAM)
    waits_beside.until(COMMENT)
    waits_beside.until(COMMENT)
    assert client.is_quiet()
    child.send(STREAM_HEAD + EVENT + DONE)
    assert client.until(DONE).startswith(b"HTTP/1.1 200 OK\r\nServer: llama.cpp")


# --- other framings


def http_1_0(body: bytes) -> bytes:
    return post(CHAT, body).replace(b"HTTP/1.1", b"HTTP/1.0")


def until_close(keepalive_rig: Rig) -> tuple[Wire, Wire]:
    client, head = waiting_stream(keepalive_rig, request=http_1_0(STREAM))
    assert field(head, b"transfer-encoding") is None
    assert field(head, b"connection") == b"close"
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    return client, child


def test_http_1_0_client_gets_comments_and_events_without_chunks(keepalive_rig: Rig) -> None:
    client, child = until_close(keepalive_rig)
    child.send(STREAM_HEAD + EVENT + DONE)
    body = client.rest().replace(COMMENT, b"")
    assert body == b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'


def test_http_1_0_client_gets_error_event_without_chunks(keepalive_rig: Rig) -> None:
    client, child = until_close(keepalive_rig)
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
def test_unchunked_events_are_chunked_after_comments(
    keepalive_rig: Rig, sends: Callable[[Wire], None]
) -> None:
    client, _ = waiting_stream(keepalive_rig)
    start_generation(keepalive_rig)
    child = keepalive_rig.accept()
    child.message()
    sends(child)
    client.until(b"\r\n")
    assert body_of(client) == EVENTS


def test_unchunked_events_stay_unchunked_for_http_1_0(keepalive_rig: Rig) -> None:
    client, child = until_close(keepalive_rig)
    with_length(child)
    assert client.rest().replace(COMMENT, b"") == EVENTS
