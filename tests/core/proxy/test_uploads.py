"""Large bodies that are forwarded while they arrive, because they need not be decoded."""

from __future__ import annotations

import json
import socket

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.client_transport import PAUSED
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import (
    LOADING,
    STOPPING,
    await_queued,
    end_generation,
    make_unavailable,
    start_generation,
)
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, get, post, status
from tests.kit.patience import PATIENCE_S

KIB = 1 << 10
MIB = 1 << 20
PART = bytes(range(256)) * 512  # 128 KiB: more than one read ahead


def config(**limits: float) -> ProxyConfig:
    return ProxyConfig(route_by_model=False, limits=Limits(sweep_s=0.02, **limits))  # type: ignore[arg-type]


@pytest.fixture
def run(make_rig: MakeRig) -> Rig:
    """As in ``run`` and ``wrap``: one model, for any model name in a body."""
    return make_rig(config())


def announced(size: int, *lines: bytes) -> bytes:
    return get(CHAT, b"Content-Length: %d" % size, *lines, method=b"POST")


CHUNKED = get(CHAT, b"Transfer-Encoding: chunked", method=b"POST")


def uploading(rig: Rig, head: bytes = announced(16 * len(PART))) -> tuple[Wire, Wire]:
    """A client, and a child that has received the first part of sixteen."""
    client = rig.send(head, PART if head != CHUNKED else chunk(PART))
    child = rig.accept()
    child.head()
    if head == CHUNKED:
        assert dechunked(child, len(PART)) == PART
    else:
        assert child.receive(len(PART)) == PART
    return client, child


def dechunked(wire: Wire, size: int) -> bytes:
    """``size`` bytes of a chunked body, with complete chunks."""
    body = b""
    while len(body) < size:
        body += wire.receive(int(wire.until(b"\r\n"), 16))
        assert wire.receive(2) == b"\r\n"
    return body


def uploads(rig: Rig) -> int:
    return rig.call(lambda: rig.proxy.uploads)


# --- forwarding


def test_large_body_is_forwarded_while_it_arrives(run: Rig) -> None:
    client, child = uploading(run)
    for _ in range(15):  # each part arrives before the next is sent
        client.send(PART)
        assert child.receive(len(PART)) == PART
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    client.send(post(CHAT, b"next"))
    assert child.message()[1] == b"next"  # both connections are reused
    child.send(answer(b"too"))
    assert client.message()[1] == b"too"
    assert [run.record().outcome for _ in range(2)] == ["ok", "ok"]
    assert uploads(run) == 0


def test_forwarded_body_keeps_its_content_length(run: Rig) -> None:
    run.send(announced(2 * len(PART)), PART)
    head = run.accept().head()
    assert field(head, b"content-length") == b"%d" % (2 * len(PART))
    assert field(head, b"transfer-encoding") is None


def test_chunked_body_is_forwarded_with_new_chunks_and_without_trailers(run: Rig) -> None:
    client = run.send(CHUNKED, b"20000;name=value\r\n" + PART + b"\r\n")
    child = run.accept()
    head = child.head()
    assert field(head, b"transfer-encoding") == b"chunked"
    assert field(head, b"content-length") is None
    assert dechunked(child, len(PART)) == PART
    client.send(b"".join(chunk(b"%d" % n) for n in range(5)), b"0\r\nX-Trailer: t\r\n\r\n")
    assert dechunked(child, 5) == b"01234"
    assert child.receive(5) == b"0\r\n\r\n"
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    client.send(get())
    assert child.head().startswith(b"GET /props ")


def test_one_read_is_forwarded_as_one_chunk(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    client.send(b"".join(chunk(b"x") for _ in range(100)))
    size = int(child.until(b"\r\n"), 16)
    assert size > 1  # two reads make two chunks


def test_small_body_is_buffered(run: Rig) -> None:
    client, second = run.connect(), run.connect()
    client.send(announced(1000), b"x" * 999)
    second.send(announced(10 * MIB), b"x" * 64 * KIB)  # only received bytes count, not announced ones
    run.ask(get(b"/livez"))
    assert run.in_flight() == 0
    client.send(b"x")
    assert run.accept().message()[1] == b"x" * 1000


def test_body_with_model_name_is_buffered(rig: Rig) -> None:
    client = rig.send(announced(2 * len(PART)), PART)
    rig.ask(get(b"/livez"))
    assert rig.in_flight() == 0
    client.send(PART)
    assert rig.accept().message()[1] == PART * 2


def test_requests_pipelined_after_upload_are_answered_in_order(run: Rig) -> None:
    client, child = uploading(run, announced(len(PART) + 5))
    client.send(b"after" + post(b"/a", b"a") + get(b"/livez") + get(b"/b")[:10])
    assert child.receive(5) == b"after"
    client.send(get(b"/b")[10:])
    assert child.is_quiet()
    for name in (b"read", b"a"):
        child.send(answer(name))
        assert client.message()[1] == name
        if name == b"read":
            assert child.message()[1] == b"a"
    assert client.message()[1] == b'{"status":"ok"}'
    assert child.head().startswith(b"GET /b ")


def test_client_that_expects_100_continue_gets_it_once(run: Rig) -> None:
    client = run.send(announced(2 * len(PART), b"Expect: 100-continue"))
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(PART)
    child = run.accept()
    assert field(child.head(), b"expect") is None
    client.send(PART)
    assert child.receive(2 * len(PART)) == 2 * PART
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_http_1_0_client_may_send_a_large_body(run: Rig) -> None:
    client, child = uploading(run, announced(len(PART) + 1).replace(b"HTTP/1.1", b"HTTP/1.0"))
    client.send(b"x")
    assert child.receive(1) == b"x"
    child.send(answer(b"read"))
    head, body = client.message()
    assert (field(head, b"connection"), body) == (b"close", b"read")
    assert client.sees_the_end()


def fills(rig: Rig, client: Wire) -> int:
    """The only client sends until it is paused. Returns the bytes that it has sent, with its first part."""
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    client.sock.setblocking(False)
    sent, full = len(PART), 0
    while full < 3:  # three attempts in a row find every buffer full, and the client paused
        try:
            sent += client.sock.send(b"x" * (64 * KIB))
            full = 0
        except BlockingIOError:
            full = full + 1 if rig.call(lambda: connection._phase) is PAUSED else 0
        assert sent < 31 * MIB
    client.sock.settimeout(PATIENCE_S)
    return sent


def sends(client: Wire, child: Wire, size: int) -> None:
    """The client sends ``size`` bytes, and the child reads them."""
    while size:
        part = b"x" * min(MIB, size)
        client.send(part)
        assert child.receive(len(part)) == part
        size -= len(part)


@pytest.mark.both_loops
def test_slow_child_pauses_the_client(run: Rig) -> None:
    client, child = uploading(run, announced(31 * MIB))
    sent = fills(run, client)
    assert sent < 24 * MIB  # buffers of the kernel, and little of ours
    child.receive(sent - len(PART))
    sends(client, child, 31 * MIB - sent)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_number_of_uploads_is_limited(make_rig: MakeRig) -> None:
    rig = make_rig(config(uploads=2))
    first, second = (uploading(rig) for _ in range(2))
    third = rig.send(announced(2 * len(PART)), PART)
    rig.ask(get(b"/livez"))
    assert (rig.in_flight(), uploads(rig)) == (2, 2)
    first[0].close()
    assert first[1].sees_the_end()
    second[0].send(PART * 15)
    second[1].receive(15 * len(PART))
    second[1].send(answer())
    second[0].message()
    assert uploads(rig) == 0
    third.send(PART)
    assert second[1].message()[1] == PART * 2  # complete, on the connection that became free


# --- the end of an upload


def test_chunked_upload_above_the_limit_is_a_413(make_rig: MakeRig) -> None:
    rig = make_rig(config(body_bytes=200 * KIB))
    client, child = uploading(rig, CHUNKED)
    client.send(chunk(PART))
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    assert json.loads(body)["error"]["cause"] == "body_limit"
    assert len(child.rest()) <= 200 * KIB
    assert client.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("refused", 413)
    assert (rig.in_flight(), uploads(rig)) == (0, 0)


def test_upload_with_malformed_chunk_is_a_400(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    client.send(b"nonsense\r\n" + get(b"/never"))
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (400, b"close")
    assert child.sees_the_end()
    assert client.sees_the_end()


def test_stalled_upload_is_a_408(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=100.0))
    client, child = uploading(rig)
    clock.pass_until_readable(client, 60.0)
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (408, b"close")
    assert json.loads(body)["error"]["message"] == "the request's body took too long"
    assert child.sees_the_end()
    assert rig.record().outcome == "refused"


def test_upload_in_single_bytes_does_not_extend_its_deadline(make_rig: MakeRig, clock: Clock) -> None:
    """It holds a thread of llama-server."""
    rig = make_rig(config(body_idle_s=100.0))
    client, _ = uploading(rig)
    client.sock.settimeout(0.01)
    answered = b""
    while not answered:
        client.send(b"x")
        clock.pass_s(30.0)
        try:
            answered = client.sock.recv(100)
        except TimeoutError:
            continue
    assert status(answered) == 408


def send_slowly(rig: Rig, clock: Clock, step_s: float) -> tuple[Wire, Wire]:
    """A client that has sent four parts, with a pause before all but the first."""
    client, child = uploading(rig, announced(5 * len(PART)))
    for _ in range(3):
        clock.pass_s(step_s)
        client.send(PART)
        assert child.receive(len(PART)) == PART
    return client, child


@pytest.mark.check("X8", "408 below 16 KiB/s")
def test_forwarded_body_has_a_total_deadline(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = send_slowly(rig, clock, 300.0)
    clock.pass_s(200.0)  # 1,100 s in all, and 200 s since its last piece
    assert status(client.message()[0]) == 408
    assert child.sees_the_end()


def test_forwarded_body_above_the_minimum_rate_is_served(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=64))  # time for 2,048 s more with each part
    client, child = send_slowly(rig, clock, 900.0)
    client.send(PART)
    assert child.receive(len(PART)) == PART
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_deadline_of_upload_excludes_pauses_of_the_child(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = uploading(rig, announced(31 * MIB))
    sent = fills(rig, client)
    clock.pass_s(100_000.0)
    child.receive(sent - len(PART))
    sends(client, child, 31 * MIB - sent - 1)
    clock.pass_s(500.0)
    sends(client, child, 1)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_upload_buffered_after_a_crash_gets_a_new_deadline(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(config(body_idle_s=1000.0, body_rate_bytes=1 * MIB))
    client, child = send_slowly(rig, clock, 300.0)
    end_generation(rig)
    assert child.sees_the_end()
    clock.pass_s(200.0)
    client.send(PART)
    await_queued(rig, 1)
    start_generation(rig)
    again = rig.accept()
    assert again.message()[1] == PART * 5
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"


def test_disconnect_during_upload_closes_upstream_connection(run: Rig) -> None:
    client, child = uploading(run)
    client.close()
    assert child.sees_the_end()
    record = run.record()
    assert (record.outcome, record.status) == ("client_gone", 499)
    assert (run.in_flight(), uploads(run)) == (0, 0)


# --- answers before the body is complete


def test_early_answer_is_forwarded_at_once_and_both_connections_close(run: Rig) -> None:
    client, child = uploading(run)
    child.send(answer(b'{"error":1}', code=b"400 Bad Request"))
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (400, b"close")
    assert body == b'{"error":1}'
    client.send(PART)  # read and dropped, so that the client reads its answer before any reset
    assert client.sees_the_end()
    assert child.sees_the_end()
    assert run.record().outcome == "ok"
    assert uploads(run) == 0


@pytest.mark.both_loops
@pytest.mark.parametrize("code", [b"401 Unauthorized", b"404 Not Found", b"403 Forbidden"])
def test_answer_of_child_that_closed_without_reading_is_forwarded(run: Rig, code: bytes) -> None:
    """As llama-server (b11434), if the head is enough to refuse a request."""
    client = run.send(announced(16 * len(PART)), PART)
    child = run.accept()
    child.head()
    (connection,) = run.call(lambda: tuple(run.proxy.clients))
    assert isinstance(connection, Downstream)

    def meanwhile() -> None:  # the answer is unread when the next write fails
        child.send(answer(b"refused", code=code))
        child.close()
        connection.data_received(PART)

    run.call(meanwhile)
    head, body = client.message()
    assert head.startswith(b"HTTP/1.1 " + code)
    assert body == b"refused"
    assert client.sees_the_end()


def test_stream_may_begin_before_the_upload_is_complete(run: Rig) -> None:
    client, child = uploading(run)
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    assert field(client.head(), b"connection") == b"close"
    assert client.until(b"1\n\n\r\n") == chunk(b"data: 1\n\n")
    client.send(PART * 15)
    assert child.receive(15 * len(PART)) == PART * 15
    child.send(b"0\r\n\r\n")
    assert client.rest() == b"0\r\n\r\n"
    assert child.sees_the_end()


@pytest.mark.both_loops
def test_invalid_upload_after_begin_of_answer_resets_the_answer(run: Rig) -> None:
    client, child = uploading(run, CHUNKED)
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    client.head()
    client.send(b"nonsense\r\n")
    assert client.receive(4) == b"half"
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert child.sees_the_end()


@pytest.mark.usefixtures("no_cause")
def test_child_that_closes_during_upload_is_a_502(run: Rig) -> None:
    client = run.send(get(b"/v1/streams/lookup", b"Content-Length: 1000000", method=b"POST"), PART)
    child = run.accept()
    child.head()
    child.close()
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (502, b"close")
    assert client.sees_the_end()


# --- sent again


def test_forwarded_body_is_sent_again_after_a_crash(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    end_generation(run)
    new: Endpoint = start_generation(run)
    again = run.accept()
    assert again.message()[1] == PART * 2
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    record = run.record()
    assert (record.generation, record.replayed) == (new.generation, True)


@pytest.mark.parametrize("head", [announced(2 * len(PART)), CHUNKED], ids=["length", "chunked"])
def test_crash_during_upload_buffers_body_for_next_generation(run: Rig, head: bytes) -> None:
    client, child = uploading(run, head)
    end_generation(run)
    assert child.sees_the_end()
    assert uploads(run) == 0
    client.send(*(chunk(PART), b"0\r\n\r\n") if head == CHUNKED else (PART,))
    await_queued(run, 1)
    start_generation(run)
    again = run.accept()
    head, body = again.message()
    assert body == PART * 2
    again.send(answer(b"saved"))
    assert client.message()[1] == b"saved"
    assert not run.record().replayed  # the first generation had not begun with it


def test_copy_of_forwarded_body_counts_until_its_answer_begins(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    bodies = run.proxy.bodies
    assert run.call(lambda: bodies.held_bytes) == 2 * len(PART)
    child.send(answer(b"read"))
    assert client.message()[1] == b"read"
    assert run.call(lambda: bodies.held_bytes) == 0


def test_forwarded_body_without_memory_for_a_copy_is_not_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(config(bodies_bytes=len(PART)))
    client, child = uploading(rig, announced(2 * len(PART)))
    client.send(PART)
    child.receive(len(PART))
    assert rig.call(lambda: rig.proxy.bodies.held_bytes) == 0
    end_generation(rig)
    assert status(client.message()[0]) == 503
    assert rig.record().outcome == "revoked"


def test_forwarded_body_above_replay_limit_is_not_sent_again(run: Rig) -> None:
    client, child = uploading(run)
    client.send(PART * 15)
    child.receive(15 * len(PART))
    end_generation(run)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["message"] == "llama-server was killed"
    assert run.record().outcome == "revoked"


def test_forwarded_body_above_replay_limit_is_not_held(run: Rig) -> None:
    client, child = uploading(run)
    client.send(PART * 14)
    child.receive(14 * len(PART))
    (connection,) = run.call(lambda: tuple(run.proxy.clients))
    assert isinstance(connection, Downstream)
    request = run.call(lambda: connection._reader.partial)
    assert request is not None
    assert connection._upload is not None
    assert run.call(connection._upload._received) == b""
    assert (request.body, request._received) == (b"", None)
    client.send(PART)
    child.receive(len(PART))
    child.send(answer())
    client.message()


def test_upload_on_closing_connection_moves_to_another(run: Rig) -> None:
    client, stale = run.begin(get())
    stale.send(answer())
    client.message()
    client.send(announced(2 * len(PART)), PART)
    stale.head()
    stale.close()
    fresh = run.accept()
    assert fresh.head().startswith(b"POST ")
    client.send(PART)
    assert fresh.receive(2 * len(PART)) == PART * 2
    fresh.send(answer(b"read"))
    assert client.message()[1] == b"read"


def test_upload_is_buffered_and_queued_while_nothing_serves(run: Rig) -> None:
    make_unavailable(run, LOADING)
    client = run.send(announced(2 * len(PART)), PART)
    run.ask(get(b"/livez"))
    client.send(PART)
    await_queued(run, 1)
    start_generation(run)
    child = run.accept()
    assert child.message()[1] == PART * 2
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_upload_is_buffered_while_server_is_unreachable(run: Rig) -> None:
    run.stop_listening()
    client = run.send(announced(2 * len(PART)), PART)
    run.ask(get(b"/livez"))
    run.listen_again()
    client.send(PART)
    child = run.accept()
    assert child.message()[1] == PART * 2
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_stop_during_upload_is_answered_at_once(run: Rig) -> None:
    client, child = uploading(run, announced(2 * len(PART)))
    make_unavailable(run, STOPPING)
    end_generation(run, STOPPING)
    assert child.sees_the_end()
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (503, b"close")


def test_closing_proxy_ends_uploads(run: Rig) -> None:
    client, child = uploading(run)
    run.close_proxy()
    assert child.sees_the_end()
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert (run.in_flight(), run.proxy.uploads) == (0, 0)


@pytest.mark.both_loops
def test_reset_of_paused_client_ends_the_upload(run: Rig) -> None:
    client, child = uploading(run, announced(31 * MIB))
    client.sock.setblocking(False)
    sent = len(PART)
    with pytest.raises(BlockingIOError):
        while True:
            sent += client.sock.send(b"x" * 64 * KIB)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    child.rest()  # the bytes in flight, then the end
    assert run.record().outcome == "client_gone"


def test_crash_during_upload_counts_once_for_its_key(make_rig: MakeRig) -> None:
    key_file = keys_of("secret name=one concurrent=1")
    rig = make_rig(ProxyConfig(key_file=key_file, route_by_model=False))
    authorized = b"Authorization: Bearer secret"
    client, _ = uploading(rig, announced(2 * len(PART), authorized))
    end_generation(rig)
    start_generation(rig)
    client.send(PART)
    again = rig.accept()
    assert again.message()[1] == PART * 2
    second = rig.send(post(CHAT, b"{}", authorized))
    assert status(second.message()[0]) == 429  # the first request counts as the only concurrent one
    again.send(answer())
    assert status(client.message()[0]) == 200
    client.send(post(CHAT, b"{}", authorized))
    again.message()
    again.send(answer())
    assert status(client.message()[0]) == 200


@pytest.mark.parametrize("whole", [False, True], ids=["in mid-body", "behind its body"])
def test_disconnect_after_crash_during_upload_releases_quota(make_rig: MakeRig, *, whole: bool) -> None:
    key_file = keys_of("secret name=one concurrent=1")
    rig = make_rig(ProxyConfig(key_file=key_file, route_by_model=False))
    authorized = b"Authorization: Bearer secret"
    client, child = uploading(rig, announced(2 * len(PART), authorized))
    end_generation(rig)
    assert child.sees_the_end()
    if whole:
        client.send(PART)
        await_queued(rig, 1)
    client.close()
    record = rig.record()
    assert (record.status, record.outcome, record.client) == (499, "client_gone", "key:one")
    start_generation(rig)
    second, again = rig.begin(post(CHAT, b"{}", authorized))
    again.send(answer())
    assert status(second.message()[0]) == 200
