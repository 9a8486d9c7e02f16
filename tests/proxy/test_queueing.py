"""Requests that wait for a place: who is served when, and what the others are told."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

import pytest

from llamasup.proxy import Limits, ProxyConfig
from llamasup.proxy.downstream import Downstream
from llamasup.queueing.endpoint import Endpoint
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, field, get, post, status
from tests.proxy.test_waiting import LOADING, asked, becomes, ends, wait_until


def asks(rig: Rig, body: bytes, *lines: bytes, address: str = "127.0.0.1", path: bytes = CHAT) -> Wire:
    """A client at an address of its own: all of 127.0.0.0/8 is this machine."""
    sock = socket.socket()
    sock.bind((address, 0))
    client = rig.keep(Wire(sock))
    sock.connect(rig.address)
    client.send(post(path, body, *lines))
    return client


def works_at(rig: Rig, body: bytes) -> Wire:
    """The child, which gets this request next."""
    child = rig.accept()
    assert child.message()[1] == body
    return child


def serves_all(rig: Rig, child: Wire, count: int) -> list[bytes]:
    """One after the other, on one connection; which they were."""
    order = []
    for number in range(count):
        child.send(answer(b"done"))
        if number < count - 1:
            order.append(child.message()[1])
    return order


def queue_up(rig: Rig, requests: Sequence[tuple[bytes, str, tuple[bytes, ...]]]) -> list[Wire]:
    clients = []
    for number, (body, address, lines) in enumerate(requests, start=1):
        clients.append(asks(rig, body, *lines, address=address))
        wait_until(rig, number)
    return clients


@pytest.fixture
def one_place(make_rig: MakeRig) -> Rig:
    return make_rig(max_concurrent=1)


def test_the_next_is_sent_as_soon_as_a_place_is_free_and_not_before(one_place: Rig) -> None:
    rig = one_place
    first, second = asked(rig, b"1"), None
    child = works_at(rig, b"1")
    second = asked(rig, b"2")
    wait_until(rig, 1)
    assert child.is_quiet()
    child.send(answer(b"one"))
    assert child.message()[1] == b"2"
    assert first.message()[1] == b"one"
    child.send(answer(b"two"))
    assert second.message()[1] == b"two"
    assert [rig.record().outcome for _ in range(2)] == ["ok", "ok"]
    assert rig.call(lambda: (rig.endpoint.busy, len(rig.backend.waiting))) == (0, 0)


def test_two_addresses_take_turns(one_place: Rig) -> None:
    rig = one_place
    asked(rig, b"0")
    child = works_at(rig, b"0")
    many, few = "127.0.0.1", "127.0.0.2"
    queue_up(rig, [*((b"m%d" % n, many, ()) for n in range(4)), (b"f0", few, ()), (b"f1", few, ())])
    order = serves_all(rig, child, 7)
    assert order == [b"m0", b"f0", b"m1", b"f1", b"m2", b"m3"]


def test_low_priority_waits_for_all_others_and_high_is_not_for_everybody(one_place: Rig) -> None:
    rig = one_place
    asked(rig, b"0")
    child = works_at(rig, b"0")
    low, high = (b"X-Llamasup-Priority: low",), (b"X-Llamasup-Priority: high",)
    here = "127.0.0.1"
    queue_up(rig, [(b"low", here, low), (b"normal", here, ()), (b"high", here, high)])
    assert serves_all(rig, child, 4) == [b"normal", b"high", b"low"]  # without a key, high is normal


def test_a_priority_that_is_none_is_a_400(rig: Rig) -> None:
    head, body = rig.ask(post(CHAT, b"{}", b"X-Llamasup-Priority: urgent"))
    assert (status(head), json.loads(body)["error"]["cause"]) == (400, "bad_priority")


def test_what_is_asked_about_the_server_waits_for_no_place(one_place: Rig) -> None:
    rig = one_place
    asked(rig, b"0")
    works_at(rig, b"0")
    for request in (get(b"/props"), get(b"/slots"), post(b"/tokenize", b"{}"), get(CHAT)):
        client = rig.connect()
        client.send(request)
        child = rig.accept()
        child.head()
        child.send(answer(b"told", b"Connection: close"))
        assert client.message()[1] == (b"told")


def test_a_full_queue_is_a_429_with_the_time_until_it_moves(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1, max_queued=2)
    rig.endpoint.held_s = 7.0
    for number in range(3):
        asked(rig, b"%d" % number)
        wait_until(rig, number)
    head, body = rig.ask(post(CHAT, b"3"))
    error = json.loads(body)["error"]
    assert (status(head), field(head, b"retry-after")) == (429, b"21")
    assert (error["code"], error["type"], error["cause"]) == (429, "rate_limit_error", "queue_full")
    assert error["message"] == "The model is busy with 1 request, and 2 more wait"
    record = rig.record()
    assert (record.status, record.outcome) == (429, "unavailable")
    assert works_at(rig, b"0").is_quiet()  # and it was sent nowhere


def test_who_waits_too_long_for_a_place_is_a_503_that_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(max_concurrent=1, wait_timeout_s=0.05)
    asked(rig, b"0")
    works_at(rig, b"0")
    head, body = asked(rig, b"1").message()
    assert (status(head), field(head, b"retry-after")) == (503, b"1")
    error = json.loads(body)["error"]
    assert error["message"] == "The model is busy with 1 request; this request has waited for 0.05 s"
    assert error["cause"] == "busy"
    record = rig.record()
    assert (record.outcome, record.waited_s) == ("unavailable", 0.0)
    assert record.queue_s >= 0.05


def test_the_answer_says_how_long_it_waited_for_its_place_and_at_which(one_place: Rig) -> None:
    rig = one_place
    asked(rig, b"0")
    child = works_at(rig, b"0")
    asked(rig, b"1")
    wait_until(rig, 1)
    client = asked(rig, b"2")
    wait_until(rig, 2)
    serves_all(rig, child, 3)
    head, _ = client.message()
    timing = field(head, b"server-timing") or b""
    found = re.fullmatch(rb'queue;dur=([\d.]+);desc="position 2", load;dur=0.0', timing)
    assert found is not None, timing
    records = [rig.record() for _ in range(3)]
    assert records[2].queue_s * 1000 == pytest.approx(float(found[1]), abs=0.11)  # two roundings
    assert (records[2].waited_s, records[2].queue_s > 0.0) == (0.0, True)


def test_who_leaves_while_queued_is_never_sent_and_keeps_nobody_waiting(one_place: Rig) -> None:
    rig = one_place
    asked(rig, b"0")
    child = works_at(rig, b"0")
    leaves, stays = asked(rig, b"1"), asked(rig, b"2")
    wait_until(rig, 2)
    leaves.close()
    wait_until(rig, 1)
    record = rig.record()
    assert (record.outcome, record.status) == ("client_gone", 499)
    assert serves_all(rig, child, 2) == [b"2"]
    assert stays.message()[1] == b"done"


def test_a_crash_while_some_wait_sends_all_to_the_next_generation_in_their_order(one_place: Rig) -> None:
    rig = one_place
    clients = [asked(rig, b"0")]
    works_at(rig, b"0")
    for number in (1, 2):
        clients.append(asked(rig, b"%d" % number))
        wait_until(rig, number)
    ends(rig)
    wait_until(rig, 3)
    waiting = rig.backend.waiting
    new = Endpoint("tiny", 2, rig.endpoint.address, max_concurrent=1, on_permit_free=waiting.permit_freed)

    def tell() -> None:
        rig.backend.endpoint, rig.backend.unavailable = new, None
        waiting.changed()

    rig.call(tell)
    child = works_at(rig, b"0")  # which was broken off: it has its old place
    assert serves_all(rig, child, 3) == [b"1", b"2"]
    assert [client.message()[1] for client in clients] == [b"done"] * 3
    assert [rig.record().replayed for _ in clients] == [True, False, False]
    assert rig.proxy.metrics.replays == {"tiny": 1}


def test_those_who_wait_for_a_place_wait_on_when_the_model_is_restarted(one_place: Rig) -> None:
    rig = one_place
    busy = asked(rig, b"0")
    child = works_at(rig, b"0")
    asked(rig, b"1")
    wait_until(rig, 1)
    becomes(rig, LOADING)  # it drains: what is in flight may finish, and nobody follows
    child.send(answer(b"done"))
    assert busy.message()[1] == b"done"
    assert child.is_quiet()
    assert rig.call(lambda: len(rig.backend.waiting)) == 1


def test_who_does_not_read_keeps_the_place_for_a_few_seconds_only(make_rig: MakeRig) -> None:
    """llama-server goes on without its client, and has most likely finished."""
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
    waits = asked(rig, b"1")
    other = works_at(rig, b"1")
    assert rig.in_flight() == 2  # the slow one is served still
    other.send(answer(b"done"))
    assert waits.message()[1] == b"done"
    assert rig.call(lambda: rig.endpoint.busy) == 0


def test_an_upload_takes_its_place_when_it_is_whole(make_rig: MakeRig) -> None:
    """Whoever sends slowly keeps nobody waiting: llama-server begins nothing before it has the last byte."""
    config = ProxyConfig(route_by_model=False, limits=Limits(stream_above_bytes=1024))
    rig = make_rig(config, max_concurrent=1)
    uploads = rig.connect()
    body = b"x" * 4096
    request = post(CHAT, body)
    uploads.send(request[:-1])
    child = rig.accept()
    child.until(body[:-1])
    assert rig.call(lambda: rig.endpoint.busy) == 0
    quick = asked(rig, b"quick")
    other = works_at(rig, b"quick")
    uploads.send(request[-1:])
    child.receive(1)
    while rig.call(lambda: rig.endpoint.busy) != 2:
        pass
    asked(rig, b"later")
    wait_until(rig, 1)
    other.send(answer(b"done"))
    assert quick.message()[1] == b"done"
    assert other.is_quiet()  # one in flight is one too many already
    child.send(answer(b"uploaded"))
    assert uploads.message()[1] == b"uploaded"
    works_at_next = other if not other.is_quiet() else child
    assert works_at_next.message()[1] == b"later"
