"""A child that crashes, sends invalid bytes or is missing: no incomplete response looks complete (S12)."""

from __future__ import annotations

import json
import threading

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.endpoint import generation_ended
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import (
    CHAT,
    EVENT,
    STREAM_HEAD,
    Rig,
    answer,
    chunk,
    field,
    get,
    post,
    status,
    streaming,
)

pytestmark = pytest.mark.usefixtures("no_cause")


def test_stream_broken_between_events_ends_with_error_event_and_no_last_chunk(rig: Rig) -> None:
    client, child = streaming(rig)
    child.close()
    size, _, rest = client.rest().partition(b"\r\n")
    event, end = rest[: int(size, 16)], rest[int(size, 16) :]
    assert event.startswith(b'data: {"error":{"message":"llama-server closed the connection"')
    assert event.endswith(b"}\n\n")
    assert end == b"\r\n"
    record = rig.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)


def test_stream_broken_within_event_is_reset(rig: Rig) -> None:
    client, child = streaming(rig)
    child.send(EVENT[:40])
    assert client.receive(40) == EVENT[:40]
    child.close()
    with pytest.raises(ConnectionResetError):
        client.rest()


def test_openai_client_raises_when_child_ends_during_stream(rig: Rig) -> None:
    import openai  # takes 0.7 s, and every worker imports this module

    host, port = rig.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as user:

        def child() -> None:
            wire = rig.accept()
            wire.message()
            wire.send(STREAM_HEAD + EVENT + EVENT)
            wire.close()

        thread = threading.Thread(target=child)
        thread.start()
        stream = user.chat.completions.create(model="m", messages=[], stream=True)
        parts = []
        with pytest.raises(openai.APIError, match="closed the connection"):
            for part in stream:
                parts.append(part.choices[0].delta.content)  # noqa: PERF401 - the loop is what raises
        thread.join()
    assert parts == ["hi", "hi"]


def test_broken_http_1_0_stream_ends_with_error_event(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b'{"stream":true}').replace(b"HTTP/1.1", b"HTTP/1.0"))
    child.send(STREAM_HEAD + EVENT)
    client.head()
    child.close()
    assert b'\n\ndata: {"error":{' in client.rest()


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"{}"),
    ],
    ids=["length", "chunked"],
)
def test_incomplete_plain_answer_is_reset(rig: Rig, begun: bytes) -> None:
    client, child = rig.begin(get())
    child.send(begun)
    client.head()
    child.close()
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert rig.record().outcome == "upstream_failed"


MALFORMED = {
    "no HTTP": b"garbage\r\n\r\n",
    "a bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi\r\n\r\n",
    "length and chunks": STREAM_HEAD[:-2] + b"Content-Length: 2\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhi",
    "more than its length": answer(b"hi") + b"there",
    "line ends behind its length": answer(b"hi") + b"\r\n",
    "two answers": answer(b"hi") + answer(b"there"),
    "two chunked answers": (STREAM_HEAD + EVENT + b"0\r\n\r\n") * 2,
    "a chunked answer and one without a body": STREAM_HEAD + b"0\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    "line ends behind its last chunk": STREAM_HEAD + b"0\r\n\r\n\r\n",
    "a bad chunk": STREAM_HEAD + b"xyz\r\n",
    "a body behind 204": b"HTTP/1.1 204 No Content\r\n\r\nhi",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
}


@pytest.mark.check("X9")
@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed_answer_becomes_a_502_and_never_a_200(rig: Rig, raw: bytes) -> None:
    client, child = rig.begin(get())
    child.send(raw)
    child.close()
    head, body = client.message()
    assert status(head) == 502
    error = json.loads(body)["error"]
    assert error["cause"] == "upstream_broke"
    assert error["message"].startswith("llama-server ")
    client.send(
        get(b"/livez")
    )  # no byte of the answer was forwarded, so the client's connection stays usable
    assert status(client.message()[0]) == 200


@pytest.mark.check("X9", "error event, no last chunk")
@pytest.mark.parametrize(
    "excess",
    [
        b"0\r\n\r\n\r\n",
        b"0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"0\r\n\r\nx",
        b"nonsense\r\n",
    ],
)
def test_bytes_after_the_end_of_a_stream_are_not_forwarded(rig: Rig, excess: bytes) -> None:
    client, child = streaming(rig)
    child.send(excess)
    assert b'data: {"error":' in client.rest()
    assert child.sees_the_end()


def test_bytes_beyond_content_length_reset_the_connection(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst")
    client.head()
    assert client.receive(5) == b"first"
    child.send(b"second and more")
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert child.sees_the_end()


def test_unexpected_bytes_close_idle_upstream_connection(rig: Rig) -> None:
    client, first = rig.begin(get())
    first.send(answer())
    client.message()
    first.send(answer(b"unasked"))
    assert first.sees_the_end()
    client.send(get())
    second = rig.accept()
    second.head()
    second.send(answer(b"asked"))
    assert client.message()[1] == b"asked"


def test_request_on_closing_connection_is_sent_again_once(rig: Rig) -> None:
    client, stale = rig.begin(get())
    stale.send(answer())
    client.message()
    client.send(post(CHAT, b"precious"))
    stale.message()
    stale.close()  # the child closes the idle connection before it has read the request
    fresh = rig.accept()
    assert fresh.message()[1] == b"precious"
    fresh.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    client.send(get())
    fresh.head()
    fresh.close()
    again = rig.accept()
    again.head()
    again.close()  # the close of a new connection is not this race
    assert status(client.message()[0]) == 502


def test_request_on_new_connection_is_not_sent_again(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.close()
    assert status(client.message()[0]) == 502


def test_request_is_not_sent_again_after_first_byte_of_answer(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(answer())
    client.message()
    client.send(get())
    child.head()
    child.send(b"H")
    child.close()
    assert status(client.message()[0]) == 502


def test_child_that_does_not_listen_is_a_503_with_retry_after(rig: Rig) -> None:
    rig.stop_listening()
    client = rig.send(get())
    head, body = client.message()
    assert status(head) == 503
    assert field(head, b"retry-after") == b"1"
    assert json.loads(body)["error"]["cause"] == "upstream_unreachable"
    assert rig.in_flight() == 0


def test_missing_generation_is_a_503_with_message_of_backend(rig: Rig) -> None:
    rig.backend.unavailable = HttpError(503, "Loading model", retry_after_s=2.5)
    head, body = rig.ask(post(CHAT, b"{}"))
    assert status(head) == 503
    assert field(head, b"retry-after") == b"3"
    assert body == b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    assert rig.record().outcome == "unavailable"


def test_lease_revoked_before_response_is_a_503_with_the_reason(rig: Rig) -> None:
    client, child = rig.begin(get())
    rig.call(lambda: rig.endpoint.close(generation_ended("the model is being restarted")))
    head, body = client.message()
    assert status(head) == 503
    assert field(head, b"retry-after") == b"1"
    assert json.loads(body)["error"]["message"] == "the model is being restarted"
    assert child.sees_the_end()
    assert rig.record().outcome == "revoked"


def test_lease_revoked_during_stream_ends_it_with_error_event(rig: Rig) -> None:
    client, child = streaming(rig)
    rig.call(lambda: rig.endpoint.close(generation_ended("the model is being restarted")))
    assert b'data: {"error":{"message":"the model is being restarted"' in client.rest()
    assert child.sees_the_end()


def test_end_of_generation_closes_its_idle_connections(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(answer())
    client.message()
    rig.call(lambda: rig.endpoint.close(generation_ended("stopped")))
    assert child.sees_the_end()


@pytest.mark.both_loops
def test_early_answer_to_large_upload_is_forwarded_and_connection_closed(rig: Rig) -> None:
    client = rig.send(post(CHAT, b"x" * (8 << 20)))
    child = rig.accept()
    child.head()
    child.send(answer(b'{"error":1}', code=b"200 OK"))
    assert client.message()[1] == b'{"error":1}'
    while child.sock.recv(1 << 20):
        pass  # the bytes in flight, then the end


def test_concurrent_requests_get_one_upstream_connection_each(make_rig: MakeRig) -> None:
    rig = make_rig()
    clients = [rig.connect() for _ in range(20)]
    for n, client in enumerate(clients):
        client.send(get(b"/%d" % n))
    children = [rig.accept() for _ in clients]
    for child in reversed(children):
        path = child.head().split(b" ")[1]
        child.send(answer(path))
    assert [client.message()[1] for client in clients] == [b"/%d" % n for n in range(20)]
    assert rig.in_flight() == 0
