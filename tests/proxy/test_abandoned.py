"""Requests whose clients have left: they keep place and quota until the child lets go of them (S11, X8)."""

from __future__ import annotations

from threading import Event

import pytest

from llamasup.http.context_end import ContextWindow
from llamasup.proxy import Limits, ProxyConfig
from llamasup.supervision.probes import traffic_of
from tests.proxy.conftest import MakeRig
from tests.proxy.key_files import keys_of
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, eventually, post, status
from tests.proxy.test_keys import chat, error_of, limited, over_limit

ONE_AT_A_TIME = ProxyConfig(key_file=keys_of("one name=one concurrent=1"))
EVENT = chunk(b"data: {}\n\n")


def abandons(rig: Rig, request: bytes) -> Wire:
    """A client sends this and leaves; the child, which has seen that."""
    client = rig.connect()
    client.send(request)
    child = rig.accept()
    child.message()
    client.close()
    assert child.sees_the_end()
    return child


def busy(rig: Rig) -> tuple[int, int, int]:
    """Places that are taken, requests in flight, requests that the child works for."""
    return rig.call(lambda: (rig.endpoint.busy, rig.endpoint.in_flight, rig.endpoint.at_work))


def refused(rig: Rig) -> bool:
    """Whether the key may have no other request now. Its request is left when it may."""
    client = rig.connect()
    client.send(chat(b"one"))
    if rig.call(lambda: rig.endpoint.in_flight):
        return False
    return error_of(client, 429)["cause"] == "key_concurrent"


@pytest.mark.check(
    "X8", "its place and the key's `concurrent` stay taken until llama-server closes the connection"
)
@pytest.mark.parametrize("ends", ["it closes", "its answer is whole", "its stream is whole"])
def test_an_abandoned_request_keeps_place_and_quota_until_its_slot_is_free(
    make_rig: MakeRig, ends: str
) -> None:
    rig = make_rig(ONE_AT_A_TIME, max_concurrent=1)
    child = abandons(rig, chat(b"one"))
    assert rig.record().outcome == "client_gone"
    assert busy(rig) == (1, 0, 1)
    assert refused(rig)
    assert rig.record().status == 429
    if ends == "it closes":
        child.close()
    elif ends == "its answer is whole":
        child.send(answer(b"x" * 100_000))
    else:
        child.send(STREAM_HEAD, EVENT, b"0\r\n\r\n")
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.connect()
    client.send(chat(b"one"))
    again = rig.accept()  # on a new connection: the half-closed one is used by no other request
    again.message()
    again.send(answer())
    assert status(client.message()[0]) == 200


@pytest.mark.check("X8", "each of its jobs is charged by the time until llama-server frees the slots")
@pytest.mark.parametrize(("prompts", "cost"), [(1, 100), (3, 300), (9, 400)])
def test_all_jobs_of_an_abandoned_request_are_charged_by_time(
    make_rig: MakeRig, prompts: int, cost: int
) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.endpoint, "max_concurrent", 4))
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 0.001))
    body = b'{"prompt":[%b]}' % b",".join([b'""'] * prompts)
    child = abandons(rig, post(b"/completion", body, b"Authorization: Bearer one"))
    assert rig.record().outcome == "client_gone"
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 10.0))
    clock.now += 10.0  # in which a token flows in each second
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", len(body) // 3 + cost - 60 + 1 - min(10, len(body) // 3))


@pytest.mark.check("X8", "at most the context of each of its items")
@pytest.mark.parametrize("prompts", [1, 3])
def test_an_abandoned_request_costs_no_more_than_its_context(make_rig: MakeRig, prompts: int) -> None:
    rig, clock = limited(make_rig, "tpm=60")
    rig.call(lambda: setattr(rig.endpoint, "max_concurrent", 4))
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 0.001))
    rig.call(lambda: setattr(rig.endpoint, "window", ContextWindow(500, 500)))
    body = b'{"prompt":[%b]}' % b",".join([b'""'] * prompts)
    child = abandons(rig, post(b"/completion", body, b"Authorization: Bearer one"))
    assert rig.record().outcome == "client_gone"
    charged = len(body) // 3  # for its prompts
    rig.call(lambda: setattr(rig.endpoint, "tokens_per_s", 10.0))
    clock.now += 100.0
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))
    client = rig.connect()
    client.send(chat(b"one"))
    over_limit(client, "key_tokens", 500 * prompts - charged - 60 + 1)


def test_the_next_in_the_queue_gets_the_place_of_an_abandoned_request_when_it_is_free(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_concurrent=1)
    first, second = rig.connect(), rig.connect()
    first.send(post(CHAT, b"1"))
    child = rig.accept()
    child.message()
    second.send(post(CHAT, b"2"))
    eventually(lambda: rig.call(lambda: len(rig.backend.waiting)) == 1)
    first.close()
    assert child.sees_the_end()
    assert rig.call(lambda: len(rig.backend.waiting)) == 1
    child.close()
    other = rig.accept()
    assert other.message()[1] == b"2"
    other.send(answer(b"two"))
    assert second.message()[1] == b"two"


def test_an_abandoned_answer_is_read_on_though_its_client_had_paused_it(rig: Rig) -> None:
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
    child.send(b"x" * (8 << 20))  # more than all buffers hold: it is read, and dropped
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_a_drain_does_not_wait_for_an_abandoned_request(make_rig: MakeRig) -> None:
    rig = make_rig(ONE_AT_A_TIME)
    idle = Event()
    client = rig.connect()
    client.send(chat(b"one"))
    child = rig.accept()
    child.message()
    rig.call(lambda: rig.endpoint.once_idle(idle.set))
    assert not idle.is_set()
    client.close()
    assert idle.wait(60)
    assert busy(rig) == (1, 0, 1)
    rig.call(lambda: rig.endpoint.close("it was asked to stop"))
    assert busy(rig) == (0, 0, 0)
    quota = rig.proxy.keys._quotas["one"]
    assert quota.in_flight == 0
    assert child.sees_the_end()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            child.send(b"x" * 65_536)  # the connection itself is gone now, not only one half of it


def test_nothing_is_left_of_an_abandoned_request_when_the_proxy_closes(make_rig: MakeRig) -> None:
    rig = make_rig(ONE_AT_A_TIME)
    abandons(rig, chat(b"one"))
    assert busy(rig) == (1, 0, 1)
    rig.close_proxy()
    assert busy(rig) == (0, 0, 0)


def test_a_request_that_has_had_all_of_its_time_keeps_its_place_too(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(request_timeout_s=0.05, limits=Limits(sweep_s=0.01)), max_concurrent=1)
    client = rig.connect()
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    child.message()
    assert status(client.message()[0]) == 504
    assert busy(rig) == (1, 0, 1)
    assert child.sees_the_end()
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_work_that_needs_no_place_is_broken_off(rig: Rig) -> None:
    child = abandons(rig, post(b"/tokenize", b"{}"))
    assert busy(rig) == (0, 0, 0)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            child.send(b"x" * 65_536)


def test_a_request_that_the_child_has_not_read_is_broken_off(rig: Rig) -> None:
    client = rig.connect()
    client.send(post(CHAT, b"x" * (16 << 20)))
    child = rig.accept()
    child.head()
    client.close()
    assert rig.record().outcome == "client_gone"
    assert busy(rig) == (0, 0, 0)
    with pytest.raises((AssertionError, ConnectionResetError)):
        child.receive(16 << 20)


def test_a_child_that_is_gone_leaves_nothing_of_an_abandoned_request(rig: Rig) -> None:
    child = abandons(rig, post(CHAT, b"{}"))
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    child.close()
    eventually(lambda: busy(rig) == (0, 0, 0))


def test_the_watch_sees_that_the_child_works_for_an_abandoned_request(rig: Rig) -> None:
    child = abandons(rig, post(CHAT, b"{}"))
    # Else a server that is stuck with every place taken would be idle in its eyes: the others wait here.
    assert rig.call(lambda: traffic_of(rig.endpoint)).in_flight == 1
    child.close()
    eventually(lambda: rig.call(lambda: traffic_of(rig.endpoint)).in_flight == 0)
