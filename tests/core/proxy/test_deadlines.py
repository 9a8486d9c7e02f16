"""The request timeout, and the idle timeout of responses."""

from __future__ import annotations

import json

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.downstream import Downstream
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import LOADING, await_queued
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Clock, answer, chunk, get, post, status, streaming

PING = chunk(b":\n\n")


def timed(request_timeout_s: float | None = None, **limits: float) -> ProxyConfig:
    return ProxyConfig(
        route_by_model=False,
        request_timeout_s=request_timeout_s,
        limits=Limits(sweep_s=0.01, **limits),  # type: ignore[arg-type]
    )


# --- the request timeout


def test_timed_out_request_is_a_504_and_ends_at_the_child(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    client = rig.send(post(CHAT, b"{}"))
    child = rig.accept()
    child.message()  # the kernel accepts before the proxy sends
    clock.pass_s(100.0)
    head, body = client.message()
    error = json.loads(body)["error"]
    assert (status(head), error["code"], error["cause"]) == (504, 504, "request_timeout")
    assert error["message"] == "request timed out after 100 s"
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 504)
    assert record.duration_s >= 100.0
    client.send(get(b"/livez"))  # no byte of an answer was sent, so the connection stays usable
    assert status(client.message()[0]) == 200


def test_timed_out_stream_ends_with_error_event(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    client, child = streaming(rig)
    clock.pass_s(100.0)
    event = client.rest()
    assert b'"cause":"request_timeout"' in event
    assert not event.endswith(b"0\r\n\r\n")
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 200)


def test_request_timeout_includes_the_wait(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    rig.backend.unavailable = LOADING
    client = rig.send(post(CHAT, b"{}"))
    await_queued(rig, 1)
    clock.pass_s(100.0)
    head, body = client.message()
    assert (status(head), json.loads(body)["error"]["cause"]) == (504, "request_timeout")
    await_queued(rig, 0)
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 504)
    assert record.waited_s > 0.0


def test_request_timeout_includes_time_of_slow_reader(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    _, child = streaming(rig)
    clock.pass_s(99.8)
    while rig._records.empty():  # bytes after the timeout are dropped
        child.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
    assert rig.record().outcome == "timed_out"


def test_request_timeout_excludes_time_of_slow_body(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0, body_idle_s=1000.0))
    client, other = rig.connect(), rig.connect()
    client.send(post(CHAT, b"body")[:-1])
    other.send(post(CHAT, b"{}"))
    rig.accept().message()
    clock.pass_s(100.0)
    assert status(other.message()[0]) == 504  # its time is over
    client.send(b"y")
    child = rig.accept()
    child.message()
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


# --- the idle timeout


def test_stalled_stream_ends_with_error_event(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.1))
    client, child = streaming(rig)
    assert b'"cause":"upstream_idle"' in client.rest()
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)


def test_stalled_answer_is_reset(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.1))
    client, child = rig.begin(post(CHAT, b"{}"))
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
    client.head()
    assert client.receive(4) == b"some"
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert child.sees_the_end()


@pytest.mark.parametrize("begun", [b"", STREAM_HEAD], ids=["nothing", "a stream's head"])
def test_idle_timeout_does_not_apply_before_first_token(make_rig: MakeRig, begun: bytes) -> None:
    rig = make_rig(timed(upstream_idle_s=0.05))
    slow, child = rig.begin(post(CHAT, b'{"stream":true}'))
    child.send(begun)
    idle, _ = streaming(rig)
    assert b'"cause":"upstream_idle"' in idle.rest()  # so much time has passed
    child.send(STREAM_HEAD[len(begun) :] + EVENT + b"0\r\n\r\n")
    assert slow.until(b"\r\n0\r\n\r\n").endswith(EVENT + b"0\r\n\r\n")


def test_pings_prevent_idle_timeout(make_rig: MakeRig, clock: Clock) -> None:
    """The watchdog of the server judges whether the model makes progress."""
    rig = make_rig(timed(upstream_idle_s=100.0))
    pinged, child = streaming(rig)
    idle, _ = streaming(rig)
    idle.sock.settimeout(0.02)
    received = b""
    while b"upstream_idle" not in received:
        child.send(PING)
        assert pinged.receive(len(PING)) == PING
        clock.pass_s(30.0)
        try:
            received += idle.sock.recv(1000)
        except TimeoutError:
            continue
    child.send(b"0\r\n\r\n")
    assert pinged.receive(5) == b"0\r\n\r\n"


def test_slow_reader_does_not_cause_upstream_idle_timeout(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(upstream_idle_s=100.0, send_stall_s=1e9))
    client, child = streaming(rig)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    child.send(b"ffffffff\r\n")
    child.sock.setblocking(False)
    full = 0
    while full < 3:  # three attempts in a row find every buffer full
        try:
            child.sock.send(b"x" * 65_536)
            full = 0
        except BlockingIOError:
            full = full + 1 if rig.call(lambda: connection.paused) else 0
    idle, _ = streaming(rig)
    clock.pass_until_readable(idle, 60.0)
    assert b'"cause":"upstream_idle"' in idle.rest()
    assert rig.in_flight() == 1
    assert client.receive(10) == b"ffffffff\r\n"


def test_idle_timeout_does_not_apply_to_server_events(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.05))
    watcher, child = streaming(rig, request=get(b"/models/sse"))
    idle, _ = streaming(rig)
    assert b'"cause":"upstream_idle"' in idle.rest()
    child.send(EVENT)
    assert watcher.receive(len(EVENT)) == EVENT
