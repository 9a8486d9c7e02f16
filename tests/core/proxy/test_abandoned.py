"""Requests of disconnected clients keep permit and quota until the child closes the connection (S11, X8)."""

from __future__ import annotations

from threading import Event

import pytest

from llamasup.core.llama_server.answers import ContextWindow
from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.queueing.endpoint import generation_ended
from llamasup.core.supervision.probes import traffic_of
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import (
    CHAT,
    STREAM_HEAD,
    Clock,
    Rig,
    Wire,
    answer,
    chunk,
    error_of,
    eventually,
    post,
    status,
)
from tests.core.proxy.test_keys import chat, limited, over_limit

ONE_AT_A_TIME = ProxyConfig(key_file=keys_of("one name=one concurrent=1"))
EVENT = chunk(b"data: {}\n\n")


def abandon_request(rig: Rig, request: bytes) -> Wire:
    """A client sends ``request`` and disconnects. Returns the child, after it has noticed."""
    client, child = rig.begin(request)
    client.close()
    assert child.sees_the_end()
    return child


def busy(rig: Rig) -> tuple[int, int, int]:
    """Permits in use, requests in flight, requests on which the child works."""
    return rig.call(lambda: (rig.endpoint.busy, rig.endpoint.in_flight, rig.endpoint.at_work))


def key_is_refused(rig: Rig) -> bool:
    """Whether the key may have no other request now. If it may, its request is left in flight."""
    client = rig.send(chat(b"one"))
    if rig.call(lambda: rig.endpoint.in_flight):
        return False
    return error_of(client, 429)["cause"] == "key_concurrent"


@pytest.mark.check("X8")
@pytest.mark.parametrize("ends", ["it closes", "its answer is whole", "its stream is whole"])
def test_abandoned_request_keeps_permit_and_quota_until_its_slot_is_free(
    make_rig: MakeRig, ends: str
) -> None:
    rig = make_rig(ONE_AT_A_TIME, max_concurrent=1)
    child = abandon_request(rig, chat(b"one"))
    assert rig.record().outcome == "client_gone"
    assert busy(rig) == (1, 0, 1)
    assert key_is_refused(rig)
    assert rig.record().status == 429
    if ends == "it closes":
        child.close()
    elif ends == "its answer is whole":
        child.send(answer(b"x" * 100_000))
    else:
        child.send(STREAM_HEAD, EVENT, b"0\r\n\r\n")
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.send(chat(b"one"))
    again = rig.accept()  # on a new connection, because no other request uses the half-closed one
    again.message()
    again.send(answer())
    assert status(client.message()[0]) == 200


@pytest.mark.check("X8")
@pytest.mark.parametrize(("prompts", "cost"), [(1, 100), (3, 300), (9, 400)])
def test_all_jobs_of_abandoned_request_are_charged_by_time(
    make_rig: MakeRig, prompts: int, cost: int
) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.endpoint, "max_concurrent", 4))
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 0.001))
    body = b'{"prompt":[%b]}' % b",".join([b'""'] * prompts)
    child = abandon_request(rig, post(b"/completion", body, b"Authorization: Bearer one"))
    assert rig.record().outcome == "client_gone"
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 10.0))
    clock.now += 10.0  # one token per second flows into the quota
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.send(chat(b"one"))
    over_limit(client, "key_tokens", len(body) // 3 + cost - 60 + 1 - min(10, len(body) // 3))


@pytest.mark.check("X8")
@pytest.mark.parametrize("prompts", [1, 3])
def test_abandoned_request_costs_no_more_than_its_context(make_rig: MakeRig, prompts: int) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.endpoint, "max_concurrent", 4))
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 0.001))
    rig.call(lambda: setattr(rig.endpoint, "window", ContextWindow(500, 500)))
    body = b'{"prompt":[%b]}' % b",".join([b'""'] * prompts)
    child = abandon_request(rig, post(b"/completion", body, b"Authorization: Bearer one"))
    assert rig.record().outcome == "client_gone"
    charged = len(body) // 3  # for its prompts
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 10.0))
    clock.now += 100.0
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.send(chat(b"one"))
    over_limit(client, "key_tokens", 500 * prompts - charged - 60 + 1)


def test_next_request_in_queue_gets_permit_once_abandoned_request_releases_it(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_concurrent=1)
    first, second = rig.connect(), rig.connect()
    first.send(post(CHAT, b"1"))
    child = rig.accept()
    child.message()
    second.send(post(CHAT, b"2"))
    await_queued(rig, 1)
    first.close()
    assert child.sees_the_end()
    assert rig.call(lambda: len(rig.backend.waiting)) == 1
    child.close()
    other = rig.accept()
    assert other.message()[1] == b"2"
    other.send(answer(b"two"))
    assert second.message()[1] == b"two"


@pytest.mark.both_loops
def test_abandoned_answer_is_drained_even_if_client_had_paused_it(rig: Rig) -> None:
    client = rig.connect(receive_buffer=1 << 17)
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    child.message()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 30))
    child.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            child.sock.send(b"x" * 65_536)
    child.sock.settimeout(60)
    client.close()
    assert child.sees_the_end()
    assert busy(rig) == (1, 0, 1)
    child.send(b"x" * (8 << 20))  # more than all buffers hold: the proxy reads and drops it
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_drain_does_not_wait_for_abandoned_request(make_rig: MakeRig) -> None:
    rig = make_rig(ONE_AT_A_TIME)
    idle = Event()
    client, child = rig.begin(chat(b"one"))
    rig.call(lambda: rig.endpoint.once_idle(idle.set))
    assert not idle.is_set()
    client.close()
    assert idle.wait(60)
    assert busy(rig) == (1, 0, 1)
    rig.call(lambda: rig.endpoint.close(generation_ended("it was asked to stop")))
    assert busy(rig) == (0, 0, 0)
    quota = rig.proxy.keys._quotas["one"]
    assert quota.in_flight == 0
    assert child.sees_the_end()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            child.send(b"x" * 65_536)  # the connection is closed now, not only half-closed


def test_closing_proxy_releases_abandoned_request(make_rig: MakeRig) -> None:
    rig = make_rig(ONE_AT_A_TIME)
    abandon_request(rig, chat(b"one"))
    assert busy(rig) == (1, 0, 1)
    rig.close_proxy()
    assert busy(rig) == (0, 0, 0)


def test_timed_out_request_keeps_its_permit_until_slot_is_free(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(ProxyConfig(request_timeout_s=600.0, limits=Limits(sweep_s=0.01)), max_concurrent=1)
    client, child = rig.begin(post(CHAT, b"{}"))
    clock.pass_s(601)  # once the child has the request, however busy the machine is
    assert status(client.message()[0]) == 504
    assert busy(rig) == (1, 0, 1)
    assert child.sees_the_end()
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_abandoned_request_without_permit_is_aborted(rig: Rig) -> None:
    child = abandon_request(rig, post(b"/tokenize", b"{}"))
    assert busy(rig) == (0, 0, 0)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            child.send(b"x" * 65_536)


def test_abandoned_request_not_sent_completely_is_aborted(rig: Rig) -> None:
    client = rig.send(post(CHAT, b"x" * (16 << 20)))
    child = rig.accept()
    child.head()
    client.close()
    assert rig.record().outcome == "client_gone"
    assert busy(rig) == (0, 0, 0)
    with pytest.raises((AssertionError, ConnectionResetError)):
        child.receive(16 << 20)


def test_end_of_child_releases_abandoned_request(rig: Rig) -> None:
    child = abandon_request(rig, post(CHAT, b"{}"))
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_watchdog_counts_abandoned_request_as_in_flight(rig: Rig) -> None:
    child = abandon_request(rig, post(CHAT, b"{}"))
    # Otherwise a hung server with all permits in use would look idle, because other requests are queued.
    assert rig.call(lambda: traffic_of(rig.endpoint)).in_flight == 1
    child.close()
    eventually(lambda: rig.call(lambda: traffic_of(rig.endpoint)).in_flight == 0)
