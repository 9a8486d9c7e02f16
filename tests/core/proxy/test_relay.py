"""Valid requests and responses: the parts that are forwarded, and the parts that the proxy rewrites."""

from __future__ import annotations

import json

import pytest

from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, answer, chunk, field, get, post, status
from tests.kit.patience import PATIENCE_S

EVENTS = [b'data: {"n":%d}\n\n' % n for n in range(20)]


def test_plain_request_and_its_answer_are_forwarded(rig: Rig) -> None:
    client = rig.send(post(CHAT, b'{"model":"m"}', b"Content-Type: application/json"))
    child = rig.accept()
    head, body = child.message()
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
    assert field(head, b"content-type") == b"application/json"
    assert body == b'{"model":"m"}'
    child.send(answer(b'{"fine":true}', b"Content-Type: application/json; charset=utf-8"))
    head, body = client.message()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert field(head, b"server") == b"llama.cpp"
    assert body == b'{"fine":true}'
    assert rig.backend.requested_models == ["m"]
    assert rig.in_flight() == 0


def test_stream_is_forwarded_chunk_by_chunk_unchanged(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b'{"stream":true}'))
    child.send(STREAM_HEAD)
    for number, event in enumerate(EVENTS):  # each arrives before the next is sent
        child.send(chunk(event))
        if number == 0:  # the head arrives with it, and not before (test_held_heads.py)
            head = client.head()
            assert field(head, b"transfer-encoding") == b"chunked"
            assert field(head, b"content-length") is None
        assert client.receive(len(chunk(event))) == chunk(event)
    child.send(b"0\r\n\r\n")
    assert client.receive(5) == b"0\r\n\r\n"
    assert rig.record().outcome == "ok"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_response_in_tiny_pieces_is_the_same_response(rig: Rig, size: int) -> None:
    client, child = rig.begin(get())
    body = chunk(b"one") + chunk(b"two\n\n") + b"0\r\nX-Trailer: t\r\n\r\n"
    whole = STREAM_HEAD + body
    for at in range(0, len(whole), size):
        child.send(whole[at : at + size])
    client.head()
    assert client.receive(len(body)) == body
    client.send(get())
    assert child.head().startswith(b"GET /props ")  # the connection is reused


@pytest.mark.both_loops
def test_large_body_of_known_length_is_forwarded(rig: Rig) -> None:
    body = bytes(range(256)) * 8192
    client = rig.send(get())
    child = rig.accept()
    for again in (True, False):
        child.head()
        child.send(answer(body))
        head, received = client.message()
        assert status(head) == 200
        assert received == body
        if again:
            client.send(get())


@pytest.mark.check("X5")
def test_key_of_the_child_replaces_credentials_of_the_client(make_rig: MakeRig) -> None:
    rig = make_rig(api_key="childs-own")
    rig.send(get(b"/props", b"Authorization: Bearer users", b"x-api-key: users"))
    head = rig.accept().head()
    assert field(head, b"authorization") == b"Bearer childs-own"
    assert field(head, b"x-api-key") is None
    assert b"users" not in head


@pytest.mark.check("X9")
@pytest.mark.parametrize(
    "line",
    [
        b"Connection: keep-alive",
        b"Keep-Alive: timeout=5",
        b"Proxy-Authorization: Basic eA==",
        b"Proxy-Connection: keep-alive",
        b"TE: trailers",
        b"Trailer: X",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMA",
        b"Forwarded: for=1.2.3.4",
        b"X-Forwarded-For: 1.2.3.4",
        b"X-Forwarded-Anything: x",
        b"X-Real-IP: 1.2.3.4",
        b"X-Conversation-Id: c",
        b"Origin: http://localhost",
    ],
)
def test_hop_by_hop_and_forwarding_headers_are_dropped(rig: Rig, line: bytes) -> None:
    rig.send(get(b"/props", line, b"Accept: yes"))
    head = rig.accept().head()
    assert field(head, line.partition(b":")[0].lower()) is None
    assert field(head, b"accept") == b"yes"


@pytest.mark.check("X9")
def test_headers_named_by_connection_are_dropped_both_ways(rig: Rig) -> None:
    client = rig.send(get(b"/props", b"Connection: keep-alive, Range", b"Range: 1", b"Accept: 2"))
    child = rig.accept()
    head = child.head()
    assert field(head, b"range") is None
    assert field(head, b"accept") == b"2"
    child.send(answer(b"{}", b"Connection: ETag", b"ETag: 1", b"Age: 2", b"Keep-Alive: timeout=5"))
    head = client.head()
    assert field(head, b"etag") is None
    assert field(head, b"keep-alive") is None
    assert field(head, b"age") == b"2"


def test_valid_request_id_is_kept_and_invalid_one_replaced(rig: Rig) -> None:
    client = rig.connect()
    ids = []
    for sent_id in (b"mine-1", b"not sane", b"x" * 200):
        client.send(get(b"/livez", b"X-Request-Id: " + sent_id))
        ids.append(field(client.message()[0], b"x-request-id"))
    assert ids[0] == b"mine-1"
    assert ids[1] not in (None, b"not sane")
    assert ids[2] not in (None, ids[1])


def test_server_timing_reports_the_waiting_time(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(answer())
    timing = field(client.head(), b"server-timing")
    assert timing is not None
    assert timing.startswith(b"queue;dur=")
    float(timing.partition(b"=")[2])


def test_upstream_connection_is_reused(rig: Rig) -> None:
    client = rig.connect()
    child = None
    for n in range(5):
        client.send(get())
        child = child or rig.accept()
        child.head()
        child.send(answer(b"%d" % n))
        assert client.message()[1] == b"%d" % n


def test_upstream_connection_carries_at_most_a_hundred_requests(rig: Rig) -> None:
    client = rig.send(get())
    child = rig.accept()
    for _ in range(99):
        child.head()
        child.send(answer())
        client.message()
        client.send(get())
    child.head()
    child.send(answer())
    client.message()
    assert child.sees_the_end()


@pytest.mark.parametrize(
    "response",
    [
        answer(code=b"404 Not Found"),
        answer(b"{}", b"Connection: close"),
        answer().replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["an error", "connection close", "HTTP/1.0"],
)
def test_upstream_connection_is_closed_after(rig: Rig, response: bytes) -> None:
    client, child = rig.begin(get())
    child.send(response)
    head, _ = client.message()
    assert field(head, b"connection") is None
    assert child.sees_the_end()
    client.send(get())  # the client's connection is kept, and uses a new one to the child
    child = rig.accept()
    child.head()
    child.send(answer(b"again"))
    assert client.message()[1] == b"again"


def test_pipelined_requests_are_answered_in_order_one_at_a_time(rig: Rig) -> None:
    client = rig.send(get(b"/a") + get(b"/livez") + post(b"/b", b"body") + get(b"/c"))
    child = rig.accept()
    assert child.head().startswith(b"GET /a ")
    assert child.is_quiet()
    assert client.is_quiet()
    child.send(answer(b"a"))
    assert client.message()[1] == b"a"
    assert client.message()[1] == b'{"status":"ok"}'
    head, body = child.message()
    assert head.startswith(b"POST /b ")
    assert body == b"body"
    child.send(answer(b"b"))
    assert client.message()[1] == b"b"
    assert child.head().startswith(b"GET /c ")
    child.send(answer(b"c"))
    assert client.message()[1] == b"c"


def test_requests_that_arrive_while_one_runs_wait_for_it(rig: Rig) -> None:
    client, child = rig.begin(get(b"/a"))
    client.send(get(b"/b")[:20])
    client.send(get(b"/b")[20:] + get(b"/livez"))
    child.send(answer(b"a"))
    assert client.message()[1] == b"a"
    assert child.head().startswith(b"GET /b ")
    child.send(answer(b"b"))
    assert client.message()[1] == b"b"
    assert client.message()[1] == b'{"status":"ok"}'


def test_endless_pipelining_pauses_the_client(rig: Rig) -> None:
    client, child = rig.begin(get(b"/a"))
    client.sock.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 64 << 20:
            sent += client.sock.send(get(b"/b") * 1000)
    client.sock.settimeout(PATIENCE_S)
    assert sent < 32 << 20  # only the buffers of the kernel
    child.send(answer(b"a"))
    assert client.message()[1] == b"a"


def test_thousand_pipelined_requests_are_answered_in_order_and_delay_no_client(rig: Rig) -> None:
    client, other = rig.connect(), rig.connect()
    ids = [b"id-%d" % n for n in range(1000)]
    client.send(b"".join(get(b"/livez", b"X-Request-Id: " + id_) for id_ in ids))
    other.send(get(b"/livez"))
    assert status(other.message()[0]) == 200
    assert [field(client.message()[0], b"x-request-id") for _ in ids] == ids


def test_chunked_request_is_forwarded_with_a_length(rig: Rig) -> None:
    client = rig.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    for piece in (b'{"mod', b'el":"', b'm"}'):
        client.send(chunk(piece))
    client.send(b"0\r\nX-Trailer: 1\r\n\r\n")
    child = rig.accept()
    head, body = child.message()
    assert body == b'{"model":"m"}'
    assert field(head, b"transfer-encoding") is None
    assert field(head, b"x-trailer") is None
    child.send(answer())
    assert status(client.message()[0]) == 200
    assert rig.backend.requested_models == ["m"]


def test_request_in_single_bytes_is_the_same_request(rig: Rig) -> None:
    client = rig.connect()
    for byte in post(CHAT, b'{"model":"m"}', b"Accept: b"):
        client.send(bytes([byte]))
    head, body = rig.accept().message()
    assert field(head, b"accept") == b"b"
    assert body == b'{"model":"m"}'


def test_query_is_forwarded_unchanged(rig: Rig) -> None:
    rig.send(get(b"/slots?fail_on_no_slot=1&x=%2F%20"))
    assert rig.accept().head().startswith(b"GET /slots?fail_on_no_slot=1&x=%2F%20 HTTP/1.1\r\n")


def test_absolute_target_is_reduced_to_its_path(rig: Rig) -> None:
    rig.send(get(b"http://localhost:8080/props?a=b"))
    assert rig.accept().head().startswith(b"GET /props?a=b HTTP/1.1\r\nHost: localhost\r\n")


def test_client_that_expects_100_continue_gets_it(rig: Rig) -> None:
    client = rig.send(get(CHAT, b"Content-Length: 4", b"Expect: 100-continue", method=b"POST"))
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"body")
    child = rig.accept()
    head, body = child.message()
    assert field(head, b"expect") is None
    assert body == b"body"
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_answer_to_head_request_has_a_length_and_no_body(rig: Rig) -> None:
    client = rig.send(get(b"/props", method=b"HEAD"))
    child = rig.accept()
    assert child.head().startswith(b"HEAD /props ")
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
    assert field(client.head(), b"content-length") == b"1234"
    client.send(get(b"/livez"))
    assert client.message()[1] == b'{"status":"ok"}'


@pytest.mark.parametrize("code", [b"204 No Content", b"304 Not Modified"])
def test_answer_without_body_by_its_status_is_forwarded(rig: Rig, code: bytes) -> None:
    client, child = rig.begin(get())
    child.send(b"HTTP/1.1 " + code + b"\r\n\r\n")
    assert client.head().startswith(b"HTTP/1.1 " + code)
    client.send(get())
    child.head()
    child.send(answer(b"next"))
    assert client.message()[1] == b"next"


def test_interim_answers_of_the_child_are_dropped(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(b"real")
    )
    head, body = client.message()
    assert status(head) == 200
    assert body == b"real"


def test_body_that_ends_with_the_connection_closes_the_clients_connection(rig: Rig) -> None:
    client, child = rig.begin(get())
    child.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
    assert field(client.head(), b"connection") == b"close"
    child.send(b" bytes")
    child.close()
    assert client.rest() == b"some bytes"


def test_http_1_0_client_gets_body_without_chunks_and_a_close(rig: Rig) -> None:
    client = rig.send(b"GET /props HTTP/1.0\r\n\r\n".replace(b"\r\n\r\n", b"\r\nHost: localhost\r\n\r\n"))
    child = rig.accept()
    assert child.head().startswith(b"GET /props HTTP/1.1\r\n")
    child.send(STREAM_HEAD + chunk(b"one ")[:4])
    head = client.head()
    assert field(head, b"transfer-encoding") is None
    assert field(head, b"connection") == b"close"
    child.send(chunk(b"one ")[4:] + chunk(b"two") + b"0\r\n\r\n")
    assert client.rest() == b"one two"


def test_connection_close_of_client_is_answered_and_done(rig: Rig) -> None:
    client, child = rig.begin(get(b"/props", b"Connection: close") + get(b"/never"))
    child.send(answer(b"last"))
    head, body = client.message()
    assert field(head, b"connection") == b"close"
    assert body == b"last"
    assert client.sees_the_end()


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA")
CHUNKED = get(b"/a", *UPGRADE, b"Transfer-Encoding: chunked", method=b"POST")
HIDDEN = get(b"/hidden")  # a request inside a body is not served


@pytest.mark.parametrize(
    ("request_", "sent"),
    [
        (post(b"/a", b"body", *UPGRADE), b"body"),
        (CHUNKED + chunk(b"bo") + chunk(b"dy") + b"0\r\n\r\n", b"body"),
        (CHUNKED + chunk(HIDDEN) + b"0\r\n\r\n", HIDDEN),
    ],
    ids=["length", "chunked", "a request in a chunk"],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_offered_upgrade_is_ignored_and_body_read(rig: Rig, request_: bytes, sent: bytes, size: int) -> None:
    client = rig.connect()
    whole = request_ + get(b"/livez")
    for at in range(0, len(whole), size):
        client.send(whole[at : at + size])
    child = rig.accept()
    head, body = child.message()
    assert field(head, b"upgrade") is None
    assert body == sent
    child.send(answer(b"a"))
    assert client.message()[1] == b"a"
    assert client.message()[1] == b'{"status":"ok"}'


def test_offered_upgrade_without_a_body_is_ignored(rig: Rig) -> None:
    client = rig.send(get(b"/livez", b"Connection: Upgrade", b"Upgrade: h2c") + get(b"/livez"))
    assert client.message()[1] == b'{"status":"ok"}'
    assert client.message()[1] == b'{"status":"ok"}'


def test_record_describes_request_and_its_cost(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT + b"?secret=1", b'{"stream":true}', b"X-Request-Id: r-1"))
    last = {
        "choices": [],
        "timings": {"cache_n": 3, "prompt_n": 4, "predicted_n": 5, "predicted_per_second": 50.5},
    }
    ending = (
        chunk(b"data: " + json.dumps(last).encode() + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )
    child.send(STREAM_HEAD + chunk(EVENTS[0]), ending[:80], ending[80:])
    client.until(b"\r\n0\r\n\r\n")
    record = rig.record()
    assert (record.request_id, record.method, record.path) == ("r-1", "POST", "/v1/chat/completions")
    assert (record.model, record.generation, record.status, record.outcome) == ("tiny", 1, 200, "ok")
    counts = (record.tokens_prompt, record.tokens_cached, record.tokens_completion, record.tokens_per_s)
    assert counts == (7, 3, 5, 50.5)
    assert record.bytes_out == len(chunk(EVENTS[0]) + ending)
    assert record.first_byte_s is not None
    assert 0 <= record.queue_s <= record.first_byte_s <= record.duration_s
    metrics = rig.proxy.metrics
    assert metrics.requests == {("tiny", "/v1/chat/completions", 200): 1}
    assert metrics.models["tiny"].tokens == {"prompt": 7, "cached": 3, "completion": 5}


@pytest.mark.parametrize(
    "body", [b"", b"no json", b'{"model":7}', b"[" * 100_000, b"\xff", b'{"model":null}']
)
def test_body_without_model_is_forwarded(rig: Rig, body: bytes) -> None:
    rig.send(post(CHAT, body))
    assert rig.accept().message()[1] == body
    assert rig.backend.requested_models == [None]
