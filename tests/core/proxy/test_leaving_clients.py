"""Clients that disconnect or stall: the child notices at once, and no buffer grows without limit (S11)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, Rig, answer, chunk, field, get, post, streaming
from tests.kit.patience import PATIENCE_S, eventually

BUFFER = 1 << 17  # of the client: small, but not below the segments of loopback, which would make it slow


def test_disconnect_during_stream_closes_upstream_connection(rig: Rig) -> None:
    client, child = streaming(rig)
    client.close()
    assert child.sees_the_end()
    assert rig.in_flight() == 0
    record = rig.record()
    assert (record.outcome, record.status) == ("client_gone", 200)


def test_disconnect_before_response_closes_upstream_connection(rig: Rig) -> None:
    client, child = rig.begin(post(CHAT, b"{}"))
    client.close()
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("client_gone", 499)
    assert rig.in_flight() == 0


@pytest.mark.both_loops
def test_reset_by_client_closes_upstream_connection(rig: Rig) -> None:
    client, child = streaming(rig)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert child.sees_the_end()


@pytest.mark.both_loops
def test_half_closed_client_counts_as_disconnected(rig: Rig) -> None:
    client, child = streaming(rig)
    client.sock.shutdown(socket.SHUT_WR)
    assert child.sees_the_end()
    assert client.sees_the_end()


def test_disconnect_during_body_forwards_nothing(rig: Rig) -> None:
    client = rig.send(post(CHAT, b"body")[:-1])
    client.close()
    rig.ask(get(b"/livez"))
    assert rig.backend.requested_models == []


def test_disconnect_after_pipelining_cancels_running_request(rig: Rig) -> None:
    client, child = rig.begin(get(b"/a") + get(b"/b"))
    client.close()
    assert child.sees_the_end()
    assert rig.backend.requested_models == [None]


@pytest.mark.both_loops
def test_slow_reader_pauses_the_child(rig: Rig) -> None:
    client, child = streaming(rig, receive_buffer=BUFFER)
    piece = chunk(b"x" * 65_536)
    child.sock.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 256 << 20:
            sent += child.sock.send(piece[sent % len(piece) :])  # a send may take only a part
    assert sent < 32 << 20  # buffers of the kernel and one of ours; then the child has to wait
    child.sock.settimeout(PATIENCE_S)
    received = 0
    while received < sent:
        received += len(client.sock.recv(1 << 20))
    assert received == sent
    rest = len(piece) - sent % len(piece)  # the last one went out in part
    child.send(piece[-rest:] + b"0\r\n\r\n")
    assert client.receive(rest + 5) == piece[-rest:] + b"0\r\n\r\n"
    assert rig.record().outcome == "ok"


def test_paused_upstream_connection_is_reused(rig: Rig) -> None:
    client = rig.connect(receive_buffer=BUFFER)
    body = b"x" * (1 << 20)
    client.send(get())
    child = rig.accept()
    child.head()
    child.send(answer(body))
    head = client.head()
    assert client.receive(int(field(head, b"content-length") or 0)) == body
    client.send(get())
    child.head()
    child.send(answer(b"next"))
    assert client.message()[1] == b"next"


def test_stalled_client_delays_no_other(rig: Rig) -> None:
    stalled, child = streaming(rig, receive_buffer=BUFFER)
    child.sock.setblocking(False)
    # If the machine stalls in the meantime, the client times out and the connection is closed.
    with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
        while True:
            child.sock.send(chunk(b"x" * 65_536))
    client, other = rig.begin(get())
    other.send(answer(b"served"))
    assert client.message()[1] == b"served"
    stalled.close()


def test_drain_closes_idle_connections_and_others_after_their_response(rig: Rig) -> None:
    idle = rig.send(get(b"/livez"))
    idle.message()
    busy, child = rig.begin(get())
    rig.call(rig.proxy.stop_accepting)
    rig.call(rig.proxy.drain)
    assert idle.sees_the_end()
    child.send(answer(b"last"))
    head, body = busy.message()
    assert field(head, b"connection") == b"close"
    assert body == b"last"
    assert busy.sees_the_end()
    with pytest.raises(ConnectionRefusedError):
        rig.connect()


def test_idle_upstream_connection_is_closed_before_the_child_closes_it(rig: Rig) -> None:
    from llamasup.core.proxy.upstream.pool import IDLE_S

    client, child = rig.begin(get())
    child.send(answer())
    client.message()
    pool = rig.proxy.pool_of(rig.endpoint)
    upstream = rig.call(lambda: pool._idle[0])
    rig.call(lambda: setattr(upstream, "idle_since", upstream.idle_since - IDLE_S))
    client.send(get())
    assert child.sees_the_end()
    assert rig.accept().head().startswith(b"GET /props ")


def test_short_connections_leak_no_descriptors(rig: Rig) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def come_and_go() -> None:
        for n in range(50):
            client = rig.send((b"", b"GET", get(b"/livez"), get(b"/a"))[n % 4])
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

    def settle() -> None:
        while rig.call(
            lambda: len(rig.proxy.clients) + rig.endpoint.in_flight + len(rig.proxy.tasks._running)
        ):
            pass

    come_and_go()
    settle()
    before = descriptors()
    for _ in range(4):
        come_and_go()
    settle()
    # The kernel may still hold connections that the loop has not accepted: they end after `settle`.

    def all_gone() -> bool:
        settle()
        return descriptors() <= before + 1

    eventually(all_gone)


def test_failing_record_listener_does_not_fail_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ValueError("not the client's fault")

    monkeypatch.setattr(rig.proxy, "_on_finished", fail)
    assert rig.ask(get(b"/livez"))[1] == b'{"status":"ok"}'


@pytest.mark.both_loops
def test_closing_proxy_closes_all_connections(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, child = streaming(rig)
    waiting = rig.send(get(b"/livez"))
    waiting.message()
    rig.close_proxy()
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert waiting.sees_the_end()
    assert child.sees_the_end()
    assert len(rig.proxy.clients) == 0
    assert rig.in_flight() == 0
