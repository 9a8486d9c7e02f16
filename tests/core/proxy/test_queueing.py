"""Requests that wait for a permit: their order, and the answers to the others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.downstream import Downstream
from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import LOADING, await_queued, end_generation, make_unavailable, send_chat
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import (
    CHAT,
    STREAM_HEAD,
    Rig,
    Wire,
    answer,
    chunk,
    error_of,
    field,
    get,
    post,
    status,
)


def receive_request(rig: Rig, body: bytes) -> Wire:
    """The child, whose next request has this body."""
    child = rig.accept()
    assert child.message()[1] == body
    return child


def answer_all(rig: Rig, child: Wire, count: int) -> list[bytes]:
    """Answer ``count`` requests on one connection; returns the bodies of those after the first."""
    order = []
    for number in range(count):
        child.send(answer(b"done"))
        if number < count - 1:
            order.append(child.message()[1])
    return order


def queue_up(rig: Rig, requests: Sequence[tuple[bytes, str, tuple[bytes, ...]]]) -> list[Wire]:
    clients = []
    for number, (body, address, lines) in enumerate(requests, start=1):
        clients.append(rig.send(post(CHAT, body, *lines), source=address))
        await_queued(rig, number)
    return clients


@pytest.fixture
def one_permit(make_rig: MakeRig) -> Rig:
    return make_rig(max_concurrent=1)


@pytest.mark.parametrize("by_key", [True, False])
def test_request_of_a_greedy_client_makes_room_in_a_full_queue(make_rig: MakeRig, *, by_key: bool) -> None:
    config = (
        ProxyConfig(key_file=keys_of("greedy-1 name=greedy\npolite-1 name=polite\n"))
        if by_key
        else ProxyConfig()
    )
    rig = make_rig(config, max_concurrent=1, max_queued=2)

    def ask(name: str, body: bytes) -> Wire:
        lines = (b"Authorization: Bearer " + name.encode() + b"-1",) if by_key else ()
        source = "127.0.0.1" if by_key or name == "polite" else "127.0.0.2"
        return rig.send(post(CHAT, body, *lines), source=source)

    first, child = ask("greedy", b"1"), rig.accept()
    child.message()
    second = ask("greedy", b"2")
    await_queued(rig, 1)
    third = ask("greedy", b"3")
    await_queued(rig, 2)
    polite = ask("polite", b"4")
    assert error_of(third, 429)["cause"] == "queue_full"
    again = ask("greedy", b"3")
    assert error_of(again, 429)["cause"] == "queue_full"
    for client in (first, second, polite):
        child.send(answer(b"done"))
        assert client.message()[1] == b"done"
        if client is not polite:
            child.message()
    assert [rig.record().status for _ in range(5)] == [429, 429, 200, 200, 200]


def test_next_request_is_sent_once_a_permit_is_free(one_permit: Rig) -> None:
    rig = one_permit
    first, second = send_chat(rig, b"1"), None
    child = receive_request(rig, b"1")
    second = send_chat(rig, b"2")
    await_queued(rig, 1)
    assert child.is_quiet()
    child.send(answer(b"one"))
    assert child.message()[1] == b"2"
    assert first.message()[1] == b"one"
    child.send(answer(b"two"))
    assert second.message()[1] == b"two"
    assert [rig.record().outcome for _ in range(2)] == ["ok", "ok"]
    assert rig.call(lambda: (rig.endpoint.busy, len(rig.backend.waiting))) == (0, 0)


def test_two_addresses_take_turns(one_permit: Rig) -> None:
    rig = one_permit
    send_chat(rig, b"0")
    child = receive_request(rig, b"0")
    many, few = "127.0.0.1", "127.0.0.2"
    queue_up(rig, [*((b"m%d" % n, many, ()) for n in range(4)), (b"f0", few, ()), (b"f1", few, ())])
    order = answer_all(rig, child, 7)
    assert order == [b"m0", b"f0", b"m1", b"f1", b"m2", b"m3"]


def test_low_priority_waits_for_others_and_high_needs_a_key(one_permit: Rig) -> None:
    rig = one_permit
    send_chat(rig, b"0")
    child = receive_request(rig, b"0")
    low, high = (b"X-Llamasup-Priority: low",), (b"X-Llamasup-Priority: high",)
    here = "127.0.0.1"
    queue_up(rig, [(b"low", here, low), (b"normal", here, ()), (b"high", here, high)])
    assert answer_all(rig, child, 4) == [b"normal", b"high", b"low"]  # without a key, high is normal


def test_invalid_priority_is_a_400(rig: Rig) -> None:
    head, body = rig.ask(post(CHAT, b"{}", b"X-Llamasup-Priority: urgent"))
    assert (status(head), json.loads(body)["error"]["cause"]) == (400, "bad_priority")


def test_requests_about_the_server_need_no_permit(one_permit: Rig) -> None:
    rig = one_permit
    send_chat(rig, b"0")
    receive_request(rig, b"0")
    for request in (get(b"/props"), get(b"/slots"), post(b"/tokenize", b"{}"), get(CHAT)):
        client = rig.send(request)
        child = rig.accept()
        child.head()
        child.send(answer(b"props", b"Connection: close"))
        assert client.message()[1] == b"props"


def test_full_queue_is_a_429_with_estimated_retry_after(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1, max_queued=2)
    rig.endpoint.held_s = 7.0
    for number in range(3):
        send_chat(rig, b"%d" % number)
        await_queued(rig, number)
    head, body = rig.ask(post(CHAT, b"3"))
    error = json.loads(body)["error"]
    assert (status(head), field(head, b"retry-after")) == (429, b"7")
    assert (error["code"], error["type"], error["cause"]) == (429, "rate_limit_error", "queue_full")
    assert error["message"] == "The model is busy with 1 request, and 2 more wait"
    assert error["eta_s"] == 7.0
    assert "percent" not in error
    record = rig.record()
    assert (record.status, record.outcome) == (429, "unavailable")
    assert receive_request(rig, b"0").is_quiet()  # the refused request was not sent


def test_request_that_waits_too_long_for_a_permit_is_a_503(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1, wait_timeout_s=0.05)
    send_chat(rig, b"0")
    receive_request(rig, b"0")
    head, body = send_chat(rig, b"1").message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    error = json.loads(body)["error"]
    assert error["message"] == "The model is busy with 1 request; this request has waited for 0.05 s"
    assert error["cause"] == "busy"
    record = rig.record()
    assert (record.outcome, record.waited_s) == ("unavailable", 0.0)
    assert record.queue_s >= 0.05


def test_server_timing_reports_wait_for_permit_and_position(one_permit: Rig) -> None:
    rig = one_permit
    send_chat(rig, b"0")
    child = receive_request(rig, b"0")
    send_chat(rig, b"1")
    await_queued(rig, 1)
    client = send_chat(rig, b"2")
    await_queued(rig, 2)
    answer_all(rig, child, 3)
    head, _ = client.message()
    timing = field(head, b"server-timing") or b""
    found = re.fullmatch(rb'queue;dur=([\d.]+);desc="position 2", load;dur=0.0', timing)
    assert found is not None, timing
    records = [rig.record() for _ in range(3)]
    assert records[2].queue_s * 1000 == pytest.approx(float(found[1]), abs=0.11)  # two roundings
    assert (records[2].waited_s, records[2].queue_s > 0.0) == (0.0, True)


def test_request_of_client_that_leaves_the_queue_is_never_sent(one_permit: Rig) -> None:
    rig = one_permit
    send_chat(rig, b"0")
    child = receive_request(rig, b"0")
    leaves, stays = send_chat(rig, b"1"), send_chat(rig, b"2")
    await_queued(rig, 2)
    leaves.close()
    await_queued(rig, 1)
    record = rig.record()
    assert (record.outcome, record.status) == ("client_gone", 499)
    assert answer_all(rig, child, 2) == [b"2"]
    assert stays.message()[1] == b"done"


def test_after_a_crash_next_generation_gets_all_requests_in_order(one_permit: Rig) -> None:
    rig = one_permit
    clients = [send_chat(rig, b"0")]
    receive_request(rig, b"0")
    for number in (1, 2):
        clients.append(send_chat(rig, b"%d" % number))
        await_queued(rig, number)
    end_generation(rig)
    await_queued(rig, 3)
    waiting = rig.backend.waiting
    new = Endpoint("tiny", 2, rig.endpoint.address, max_concurrent=1, on_permit_free=waiting.permit_freed)

    def tell() -> None:
        rig.backend.endpoint, rig.backend.unavailable = new, None
        waiting.changed()

    rig.call(tell)
    child = receive_request(rig, b"0")  # it was in flight, and keeps its position
    assert answer_all(rig, child, 3) == [b"1", b"2"]
    assert [client.message()[1] for client in clients] == [b"done"] * 3
    assert [rig.record().replayed for _ in clients] == [True, False, False]
    assert rig.proxy.metrics.replays == {"tiny": 1}


def test_queued_requests_stay_queued_while_model_restarts(one_permit: Rig) -> None:
    rig = one_permit
    busy = send_chat(rig, b"0")
    child = receive_request(rig, b"0")
    send_chat(rig, b"1")
    await_queued(rig, 1)
    make_unavailable(rig, LOADING)  # it drains: requests in flight may finish, and no other is sent
    child.send(answer(b"done"))
    assert busy.message()[1] == b"done"
    assert child.is_quiet()
    assert rig.call(lambda: len(rig.backend.waiting)) == 1


def test_slow_reader_loses_its_permit_after_a_few_seconds(make_rig: MakeRig) -> None:
    """llama-server does not wait for the reader, and has most likely finished."""
    rig = make_rig(
        ProxyConfig(limits=Limits(sweep_s=0.01, lag_s=0.05, write_buffer_bytes=1024)), max_concurrent=1
    )
    slow = rig.connect(receive_buffer=4096)
    slow.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD)
    child.sock.setblocking(False)
    (connection,) = rig.call(lambda: tuple(rig.proxy.clients))
    assert isinstance(connection, Downstream)
    while not rig.call(lambda: connection.paused):
        with suppress(BlockingIOError):
            child.sock.send(chunk(b"x" * 8192))
    waits = send_chat(rig, b"1")
    other = receive_request(rig, b"1")
    assert rig.in_flight() == 2  # the slow client is still served
    other.send(answer(b"done"))
    assert waits.message()[1] == b"done"
    assert rig.call(lambda: rig.endpoint.busy) == 0


def test_upload_takes_its_permit_when_it_is_complete(make_rig: MakeRig) -> None:
    """A slow sender delays no other client: llama-server begins only with the last byte."""
    config = ProxyConfig(route_by_model=False, limits=Limits(stream_above_bytes=1024))
    rig = make_rig(config, max_concurrent=1)
    uploads = rig.connect()
    body = b"x" * 4096
    request = post(CHAT, body)
    uploads.send(request[:-1])
    child = rig.accept()
    child.until(body[:-1])
    assert rig.call(lambda: rig.endpoint.busy) == 0
    quick = send_chat(rig, b"quick")
    other = receive_request(rig, b"quick")
    uploads.send(request[-1:])
    child.receive(1)
    while rig.call(lambda: rig.endpoint.busy) != 2:
        pass
    send_chat(rig, b"later")
    await_queued(rig, 1)
    other.send(answer(b"done"))
    assert quick.message()[1] == b"done"
    assert other.is_quiet()  # more requests are in flight than permits
    child.send(answer(b"uploaded"))
    assert uploads.message()[1] == b"uploaded"
    works_at_next = other if not other.is_quiet() else child
    assert works_at_next.message()[1] == b"later"
