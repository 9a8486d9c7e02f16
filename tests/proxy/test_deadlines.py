"""The time that a request may take in all, and the time that a response may stand still."""

from __future__ import annotations

import json

import pytest

from llamasup.proxy import Limits, ProxyConfig
from llamasup.proxy.downstream import Downstream
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, get, post, status
from tests.proxy.test_waiting import LOADING, wait_until

EVENT = chunk(b'data: {"choices":[]}\n\n')
PING = chunk(b":\n\n")


def timed(request_timeout_s: float | None = None, **limits: float) -> ProxyConfig:
    return ProxyConfig(
        route_by_model=False,
        request_timeout_s=request_timeout_s,
        limits=Limits(sweep_s=0.01, **limits),  # type: ignore[arg-type]
    )


def streaming(rig: Rig, path: bytes = CHAT, request: bytes | None = None) -> tuple[Wire, Wire]:
    client = rig.connect()
    client.send(request or post(path, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    return client, child


# --- the whole of a request


def test_a_request_that_has_had_its_time_is_a_504_and_ends_at_the_child(
    make_rig: MakeRig, clock: Clock
) -> None:
    rig = make_rig(timed(100.0))
    client = rig.connect()
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    clock.pass_s(100.0)
    head, body = client.message()
    error = json.loads(body)["error"]
    assert (status(head), error["code"], error["cause"]) == (504, 504, "request_timeout")
    assert error["message"] == "request timed out after 100 s"
    child.message()
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 504)
    assert record.duration_s >= 100.0
    client.send(get(b"/livez"))  # nothing of an answer went out: the connection is sound
    assert status(client.message()[0]) == 200


def test_a_stream_that_has_had_its_time_ends_with_the_error(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    client, child = streaming(rig)
    clock.pass_s(100.0)
    event = client.rest()
    assert b'"cause":"request_timeout"' in event
    assert not event.endswith(b"0\r\n\r\n")
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 200)


def test_its_time_goes_on_while_it_waits(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    rig.backend.unavailable = LOADING
    client = rig.connect()
    client.send(post(CHAT, b"{}"))
    wait_until(rig, 1)
    clock.pass_s(100.0)
    head, body = client.message()
    assert (status(head), json.loads(body)["error"]["cause"]) == (504, "request_timeout")
    wait_until(rig, 0)
    record = rig.record()
    assert (record.outcome, record.status) == ("timed_out", 504)
    assert record.waited_s > 0.0


def test_its_time_goes_on_while_its_client_does_not_read(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0))
    _, child = streaming(rig)
    clock.pass_s(99.8)
    while rig._records.empty():  # what it is sent from then on is dropped
        child.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
    assert rig.record().outcome == "timed_out"


def test_the_time_of_a_body_that_comes_slowly_is_not_counted(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(100.0, body_idle_s=1000.0))
    client, other = rig.connect(), rig.connect()
    client.send(post(CHAT, b"body")[:-1])
    other.send(post(CHAT, b"{}"))
    rig.accept().message()
    clock.pass_s(100.0)
    assert status(other.message()[0]) == 504  # which took that time
    client.send(b"y")
    child = rig.accept()
    child.message()
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"


# --- a response that stands still


def test_a_stream_that_stands_still_is_broken_off_with_the_error(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.1))
    client, child = streaming(rig)
    assert b'"cause":"upstream_idle"' in client.rest()
    assert child.sees_the_end()
    record = rig.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)


def test_an_answer_that_stands_still_is_cut_off(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.1))
    client = rig.connect()
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    child.message()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
    client.head()
    assert client.receive(4) == b"some"
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert child.sees_the_end()


@pytest.mark.parametrize("begun", [b"", STREAM_HEAD], ids=["nothing", "a stream's head"])
def test_a_prompt_may_take_its_time(make_rig: MakeRig, begun: bytes) -> None:
    rig = make_rig(timed(upstream_idle_s=0.05))
    slow = rig.connect()
    slow.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(begun)
    idle, _ = streaming(rig)
    assert b'"cause":"upstream_idle"' in idle.rest()  # that long it has taken now
    child.send(STREAM_HEAD[len(begun) :] + EVENT + b"0\r\n\r\n")
    assert slow.until(b"\r\n0\r\n\r\n").endswith(EVENT + b"0\r\n\r\n")


def test_pings_are_signs_of_life(make_rig: MakeRig, clock: Clock) -> None:
    """That the model gets on is for the watch over the server to judge, which asks it."""
    rig = make_rig(timed(upstream_idle_s=100.0))
    pinged, child = streaming(rig)
    idle, _ = streaming(rig)
    idle.sock.settimeout(0.02)
    said = b""
    while b"upstream_idle" not in said:
        child.send(PING)
        assert pinged.receive(len(PING)) == PING
        clock.pass_s(30.0)
        try:
            said += idle.sock.recv(1000)
        except TimeoutError:
            continue
    child.send(b"0\r\n\r\n")
    assert pinged.receive(5) == b"0\r\n\r\n"


def test_a_client_that_does_not_read_is_not_the_childs_fault(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(timed(upstream_idle_s=100.0, send_stall_s=1e9))
    client, child = streaming(rig)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    child.send(b"ffffffff\r\n")
    child.sock.setblocking(False)
    full = 0
    while full < 3:  # three looks in a row find every buffer full
        try:
            child.sock.send(b"x" * 65_536)
            full = 0
        except BlockingIOError:
            full = full + 1 if rig.call(lambda: connection.paused) else 0
    idle, _ = streaming(rig)
    clock.pass_until_heard(idle, 60.0)
    assert b'"cause":"upstream_idle"' in idle.rest()
    assert rig.in_flight() == 1
    assert client.receive(10) == b"ffffffff\r\n"


def test_events_about_the_server_may_be_far_apart(make_rig: MakeRig) -> None:
    rig = make_rig(timed(upstream_idle_s=0.05))
    watcher, child = streaming(rig, request=get(b"/models/sse"))
    idle, _ = streaming(rig)
    assert b'"cause":"upstream_idle"' in idle.rest()
    child.send(EVENT)
    assert watcher.receive(len(EVENT)) == EVENT
