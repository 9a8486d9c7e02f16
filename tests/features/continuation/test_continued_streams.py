"""A stream whose llama-server ends is continued by the next one, if the model continues streams."""

from __future__ import annotations

import json

import pytest

from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.settings import Limits
from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import FAILED, STOPPING, await_queued, end_generation, start_generation
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, eventually, post
from tests.core.proxy.test_causes import error_in
from tests.features.continuation.streams import PIECES, SERVERS, ChatServer, MessagesServer, framed

LAST_CHUNK = b"0\r\n\r\n"
FIRST, SECOND = ChatServer("first"), ChatServer("second")
BODY = json.dumps(ChatServer.body).encode()


def set_continues(rig: Rig) -> Rig:
    rig.call(lambda: setattr(rig.backend.waiting, "continues_streams", True))
    return rig


def start_next(rig: Rig, *, repeats: bool | None = True) -> Endpoint:
    new = start_generation(rig)
    rig.call(lambda: setattr(new, "repeats_begun_message", repeats))
    return new


@pytest.fixture
def continuing(rig: Rig) -> Rig:
    return set_continues(rig)


def begun(rig: Rig, pieces: int = 3, request: bytes | None = None) -> tuple[Wire, Wire]:
    """A client that has received this many pieces of the text, and its server."""
    client, child = rig.begin(request or post(CHAT, BODY))
    events = framed(FIRST.stream(PIECES))[: pieces + 1]
    child.send(STREAM_HEAD + events[0])
    for event in events[1:]:
        child.send(event)
    client.until(events[-1])
    return client, child


def cut(rig: Rig, child: Wire) -> Endpoint:
    """The server ends, and the next one is ready."""
    child.close()
    await_queued(rig, 1)
    end_generation(rig)
    return start_next(rig)


def continue_on(rig: Rig, pieces: int = 3, limit: str = "max_tokens") -> Wire:
    """The next server gets the request, and begins to answer it."""
    child = rig.accept()
    body = json.loads(child.message()[1])
    assert body["messages"][-1] == {"role": "assistant", "content": "".join(PIECES[:pieces])}
    assert body[limit] == 8 - pieces
    return child


def rest_of(pieces: int = 3) -> bytes:
    stream = SECOND.stream(PIECES[pieces:], prompt=17 + pieces, prefix="".join(PIECES[:pieces]))
    return STREAM_HEAD + b"".join(framed(stream)) + LAST_CHUNK


@pytest.mark.parametrize(
    ("told", "taken"),
    [(b'{"tokens":[1,2,3,4,5]}', 5), (b'{"tokens":[1]}', 3), (b"no", 3), (b'{"tokens":7}', 3)],
)
def test_text_that_a_stop_string_may_have_held_back_is_counted_by_the_model(
    continuing: Rig, told: bytes, taken: int
) -> None:
    request = post(CHAT, json.dumps({**ChatServer.body, "stop": ["z"]}).encode())
    _, child = begun(continuing, request=request)
    cut(continuing, child)
    counting = continuing.accept()
    head, body = counting.message()
    assert head.startswith(b"POST /tokenize ")
    assert json.loads(body) == {"content": "".join(PIECES[:3])}
    counting.send(answer(told))
    body = continuing.accept().message()[1]
    assert json.loads(body)["max_tokens"] == 8 - taken


def test_client_that_leaves_while_its_text_is_counted_gets_no_more(continuing: Rig) -> None:
    request = post(CHAT, json.dumps({**ChatServer.body, "stop": ["z"]}).encode())
    client, child = begun(continuing, request=request)
    cut(continuing, child)
    counting = continuing.accept()
    counting.message()
    client.close()
    eventually(lambda: continuing.in_flight() == 0)
    counting.send(answer(b'{"tokens":[1]}'))
    other = continuing.send(post(CHAT, b"{}"))
    assert b"messages" not in continuing.accept().message()[1]
    other.close()


def test_stream_is_continued_by_the_next_generation(continuing: Rig) -> None:
    client, child = begun(continuing)
    new = cut(continuing, child)
    continue_on(continuing).send(rest_of())
    rest = client.until(LAST_CHUNK)
    events = "".join(FIRST.stream(PIECES)[4:]).encode()
    for event in events.split(b"\n\n"):
        assert event in rest
    assert b'"id":"second"' not in rest
    assert b"the next one continued it" in rest
    record = continuing.record()
    assert (record.outcome, record.status, record.generation) == ("ok", 200, new.generation)
    assert (record.continued, record.replayed) == (True, True)
    assert (record.tokens_prompt, record.tokens_completion) == (17, 8)
    assert record.first_byte_s is not None
    assert record.first_byte_s < record.duration_s
    assert continuing.proxy.metrics.continued == {("tiny", "continued"): 1}
    assert continuing.in_flight() == 0


def test_stream_that_fills_a_shared_context_with_others_is_continued_alone(continuing: Rig) -> None:
    continuing.endpoint.share, continuing.endpoint.repeats_begun_message = 8192, True
    client, child = begun(continuing)
    child.send(chunk(b'data: {"error":{"code":500,"message":"Context size has been exceeded."}}\n\n'))
    continue_on(continuing).send(rest_of())
    assert b"exceeded" not in client.until(LAST_CHUNK)
    assert continuing.record().continued


def test_connection_stays_open_after_a_continued_stream(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    child = continue_on(continuing)
    child.send(rest_of())
    client.until(LAST_CHUNK)
    client.send(post(CHAT, b"{}"))
    child.message()
    child.send(answer(b"next"))
    assert client.message()[1] == b"next"


def test_model_that_does_not_continue_ends_with_an_error_event(rig: Rig) -> None:
    client, child = begun(rig)
    child.close()
    end_generation(rig)
    assert error_in(client.rest())["message"] == "llama-server was killed"
    assert rig.record().continued is False
    assert rig.proxy.metrics.continued == {}


@pytest.mark.parametrize("revoked", [False, True])
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.route)
def test_complete_answer_ends_as_usual_if_the_server_ends_before_the_body(
    continuing: Rig, server: type[ChatServer], revoked: bool
) -> None:
    client, child = continuing.begin(post(server.route.encode(), json.dumps(server.body).encode()))
    stream = b"".join(framed(server("first").stream(PIECES)))
    child.send(STREAM_HEAD + stream[:50])
    child.send(stream[50:])
    client.until(stream[-40:])
    if revoked:
        end_generation(continuing)
        assert child.sees_the_end()
    child.close()
    assert client.until(LAST_CHUNK) == LAST_CHUNK
    assert continuing.record().outcome == "ok"
    if not revoked:
        end_generation(continuing)
    start_next(continuing)
    client.send(post(CHAT, b"{}"))
    child = continuing.accept()
    child.message()
    child.send(answer(b"next"))
    assert client.message()[1] == b"next"


def test_rest_that_lacks_only_the_end_of_its_body_is_complete(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    child = continue_on(continuing)
    child.send(rest_of().removesuffix(LAST_CHUNK))
    client.until(b"[DONE]\n\n")
    child.close()
    client.until(LAST_CHUNK)
    record = continuing.record()
    assert (record.outcome, record.continued, record.tokens_completion) == ("ok", True, 8)


def test_half_an_event_is_not_sent(continuing: Rig) -> None:
    client, child = begun(continuing)
    half = framed(FIRST.stream(PIECES))[4][:40]
    child.send(half)
    cut(continuing, child)
    continue_on(continuing).send(rest_of())
    received = client.until(LAST_CHUNK)
    assert received.count(b'"content":" a"') == 1


def test_stopped_generation_continues_on_the_next_one(continuing: Rig) -> None:
    """A restart whose drain timeout is over."""
    client, child = begun(continuing)
    end_generation(continuing)
    assert child.sees_the_end()
    start_next(continuing)
    continue_on(continuing).send(rest_of())
    client.until(LAST_CHUNK)
    assert continuing.record().outcome == "ok"


def test_waiting_stream_gets_comments(make_rig: MakeRig) -> None:
    rig = set_continues(make_rig(ProxyConfig(limits=Limits(sweep_s=0.01), stream_keepalive_s=0.05)))
    client, child = begun(rig)
    child.close()
    await_queued(rig, 1)
    end_generation(rig)
    client.until(b": ")
    start_next(rig)
    continue_on(rig).send(rest_of())
    client.until(LAST_CHUNK)
    assert rig.record().continued


def test_stream_that_began_with_comments_is_continued(make_rig: MakeRig) -> None:
    rig = set_continues(make_rig(ProxyConfig(limits=Limits(sweep_s=0.01), stream_keepalive_s=0.05)))
    client, child = rig.begin(post(CHAT, BODY))
    client.until(b": waiting\n\n")
    events = framed(FIRST.stream(PIECES))[:4]
    child.send(STREAM_HEAD + b"".join(events))
    client.until(events[-1])
    cut(rig, child)
    continue_on(rig).send(rest_of())
    client.until(LAST_CHUNK)
    assert rig.record().continued


def test_http_1_0_client_gets_the_events_without_chunks(continuing: Rig) -> None:
    request = post(CHAT, BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    client, child = continuing.begin(request)
    events = FIRST.stream(PIECES)[:4]
    child.send(STREAM_HEAD + b"".join(framed(events)))
    client.until(events[-1].encode())
    cut(continuing, child)
    continue_on(continuing).send(rest_of())
    rest = client.rest()
    expected = "".join(FIRST.stream(PIECES)[4:]).encode()
    assert rest.startswith(expected)
    assert b"\r\n" not in rest


def test_second_end_ends_the_stream(continuing: Rig) -> None:
    """As a request is sent again only once."""
    client, child = begun(continuing)
    cut(continuing, child)
    child = continue_on(continuing)
    child.send(STREAM_HEAD + framed(SECOND.stream(PIECES[3:], prefix="".join(PIECES[:3])))[1])
    client.until(b'" a"')
    child.close()
    end_generation(continuing)
    assert error_in(client.rest())["code"] == 502
    record = continuing.record()
    assert (record.outcome, record.continued) == ("upstream_failed", True)


def test_error_has_the_reason_of_a_refusal(continuing: Rig) -> None:
    request = post(CHAT, json.dumps({**ChatServer.body, "response_format": {"type": "json_object"}}).encode())
    client, child = begun(continuing, request=request)
    child.close()
    end_generation(continuing)
    message = str(error_in(client.rest())["message"])
    assert message.endswith("(not continued: the state of the grammar of response_format is lost)")
    assert continuing.proxy.metrics.continued == {("tiny", "refused"): 1}


def test_stream_of_a_model_that_stops_ends(continuing: Rig) -> None:
    client, child = begun(continuing)
    end_generation(continuing, STOPPING)
    assert child.sees_the_end()
    message = str(error_in(client.rest())["message"])
    assert message.endswith("(not continued: it was sent again before, or no llama-server can take it)")
    assert continuing.record().continued is False
    assert continuing.proxy.metrics.continued == {("tiny", "refused"): 1}


def test_next_server_that_continues_no_messages_ends_the_stream(continuing: Rig) -> None:
    client, child = begun(continuing)
    child.close()
    await_queued(continuing, 1)
    end_generation(continuing)
    start_next(continuing, repeats=None)
    continue_on(continuing).send(rest_of())
    rest = client.rest()
    assert error_in(rest)["cause"] == "not_continued"
    assert b'" a"' not in rest


def test_failure_while_the_stream_waits_ends_it(continuing: Rig) -> None:
    client, child = begun(continuing)
    child.close()
    await_queued(continuing, 1)
    end_generation(continuing, FAILED)
    assert error_in(client.rest())["cause"] == "out_of_memory"


def test_other_text_of_the_next_generation_is_not_sent(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    child = continue_on(continuing)
    events = framed(SECOND.stream(PIECES[3:], prefix="Once they lived"))
    child.send(STREAM_HEAD + events[0] + events[1] + events[2])
    rest = client.rest()
    assert error_in(rest)["cause"] == "not_continued"
    assert b" they" not in rest
    assert not rest.endswith(LAST_CHUNK)
    assert child.sees_the_end()
    assert continuing.record().outcome == "upstream_failed"


def test_other_text_that_is_complete_at_once_is_not_sent(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    stream = framed(SECOND.stream(PIECES[3:], prefix="Once they lived"))
    continue_on(continuing).send(STREAM_HEAD + b"".join(stream) + LAST_CHUNK)
    assert error_in(client.rest())["cause"] == "not_continued"
    assert continuing.record().outcome == "error_event"


def test_refusal_of_the_next_generation_ends_the_stream(continuing: Rig) -> None:
    client, child = begun(continuing)
    cut(continuing, child)
    error = b'{"error":{"code":400,"message":"prefill is not possible","type":"invalid_request_error"}}'
    continue_on(continuing).send(answer(error, code=b"400 Bad Request"))
    assert error_in(client.rest())["message"] == "prefill is not possible"
    assert continuing.record().outcome == "error_event"


def test_client_that_leaves_ends_the_wait(continuing: Rig) -> None:
    client, child = begun(continuing)
    child.close()
    await_queued(continuing, 1)
    client.close()
    await_queued(continuing, 0)
    record = continuing.record()
    assert (record.outcome, record.status, record.continued) == ("client_gone", 200, False)
    assert (record.tokens_estimated, record.bytes_out > 100) == (3 + record.bytes_in // 3, True)
    assert record.first_byte_s is not None


def test_prompt_tokens_of_messages_are_those_of_the_first_part(continuing: Rig) -> None:
    first, second = MessagesServer("first"), MessagesServer("second")
    client, child = continuing.begin(post(b"/v1/messages", json.dumps(MessagesServer.body).encode()))
    events = framed(first.stream(PIECES))[:4]
    child.send(STREAM_HEAD + b"".join(events))
    client.until(events[-1])
    cut(continuing, child)
    child = continuing.accept()
    child.message()
    stream = second.stream(PIECES[2:], prompt=90, prefix="".join(PIECES[:2]))
    child.send(STREAM_HEAD + b"".join(framed(stream)) + LAST_CHUNK)
    client.until(LAST_CHUNK)
    record = continuing.record()
    assert (record.tokens_prompt, record.tokens_completion) == (17, 8)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.route)
def test_undisturbed_stream_is_forwarded_unchanged(continuing: Rig, server: type[ChatServer]) -> None:
    client, child = continuing.begin(post(server.route.encode(), json.dumps(server.body).encode()))
    stream = b"".join(framed(server("first").stream(PIECES))) + LAST_CHUNK
    for at in range(0, len(stream), 50):
        child.send(STREAM_HEAD * (at == 0) + stream[at : at + 50])
    client.head()
    assert client.until(LAST_CHUNK).endswith(stream[-200:])
    assert continuing.record().continued is False


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        STREAM_HEAD.replace(b"200 OK", b"500 Error") + b"4\r\nhalf",
    ],
    ids=["no stream", "an error"],
)
def test_other_answers_are_not_continued(continuing: Rig, sent: bytes) -> None:
    client, child = continuing.begin(post(CHAT, BODY))
    child.send(sent)
    client.head()
    child.close()
    end_generation(continuing)
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert continuing.proxy.metrics.continued == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [(b"/v1/embeddings", BODY), (CHAT, json.dumps({**ChatServer.body, "x": "x" * 1024 * 1024}).encode())],
    ids=["another form", "a request of more than 1 MiB"],
)
def test_answers_that_cannot_be_kept_are_not_continued(continuing: Rig, path: bytes, body: bytes) -> None:
    client, child = continuing.begin(post(path, body))
    events = framed(FIRST.stream(PIECES))[:3]
    child.send(STREAM_HEAD + b"".join(events))
    client.until(events[-1])
    child.close()
    end_generation(continuing)
    assert error_in(client.rest())["message"] == "llama-server was killed"
    assert continuing.proxy.metrics.continued == {}


def test_events_after_a_failure_are_not_relayed(continuing: Rig) -> None:
    """They may be in the same round of the event loop as those that failed."""
    client, child = begun(continuing)
    cut(continuing, child)
    child = continue_on(continuing)
    events = framed(SECOND.stream(PIECES[3:], prefix="Once they lived"))

    def receive_two_reads() -> None:
        (connection,) = continuing.proxy.clients
        relay = connection._exchange.relay  # type: ignore[attr-defined]
        relay(events[1])
        relay(events[2])

    child.send(STREAM_HEAD + events[0])
    while not continuing.call(lambda: [one._exchange.status for one in continuing.proxy.clients] == [200]):  # type: ignore[attr-defined]
        pass
    continuing.call(receive_two_reads)
    assert error_in(client.rest())["cause"] == "not_continued"
