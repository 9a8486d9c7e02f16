"""The client of a server that ended: it gets cause and remedy, which the supervisor knows a little later."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.settings import Limits
from llamasup.core.queueing.endpoint import generation_ended
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, get, post, status, streaming

KILLED = generation_ended(
    "The kernel killed llama-server because the memory ran out.",
    cause="out_of_memory_host",
    remedy="Use a smaller context.",
)
LONG = ProxyConfig(limits=Limits(cause_wait_s=3600.0))
NOT_REPEATABLE = get()


def error_in(rest: bytes) -> dict[str, Any]:
    """The error of the event that ends a stream."""
    start = rest.index(b'data: {"error"') + len(b"data: ")
    error: dict[str, Any] = json.loads(rest[start : rest.index(b"\n\n", start)])["error"]
    return error


def end_generation(rig: Rig, why: HttpError = KILLED) -> None:
    rig.call(lambda: rig.endpoint.close(why))


def await_held(rig: Rig) -> None:
    """Wait until the proxy has seen that the server closed its connection."""
    while not rig.call(lambda: len(rig.proxy.awaiting_cause)):
        pass


def test_cut_stream_ends_with_cause_and_remedy(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    client, child = streaming(rig)
    child.close()
    await_held(rig)
    assert client.is_quiet()
    end_generation(rig)
    rest = client.rest()
    assert error_in(rest) == {
        "message": "The kernel killed llama-server because the memory ran out.",
        "type": "server_error",
        "code": 502,
        "cause": "out_of_memory_host",
        "remedy": "Use a smaller context.",
    }
    assert not rest.endswith(b"0\r\n\r\n")
    record = rig.record()
    assert (record.outcome, record.status) == ("upstream_failed", 200)
    assert rig.in_flight() == 0


def test_request_that_cannot_be_sent_again_gets_cause_and_remedy(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    client, child = rig.begin(NOT_REPEATABLE)
    child.close()
    await_held(rig)
    end_generation(rig)
    head, body = client.message()
    assert status(head) == 502
    error = json.loads(body)["error"]
    assert (error["cause"], error["remedy"]) == ("out_of_memory_host", "Use a smaller context.")
    assert rig.record().outcome == "upstream_failed"


def test_refused_connection_gets_cause_and_remedy(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    rig.stop_listening()
    client = rig.send(NOT_REPEATABLE)
    await_held(rig)
    end_generation(rig)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["cause"] == "out_of_memory_host"


def test_cause_of_a_generation_that_ended_first_reaches_the_client(rig: Rig) -> None:
    client, _child = streaming(rig)
    end_generation(rig)
    assert error_in(client.rest())["cause"] == "out_of_memory_host"


def test_unknown_cause_is_awaited_for_a_limited_time(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(cause_wait_s=0.01)))
    client, child = streaming(rig)
    child.close()
    assert error_in(client.rest())["cause"] == "upstream_broke"
    end_generation(rig)  # too late, and harmless
    assert rig.record().outcome == "upstream_failed"


@pytest.mark.parametrize(
    "sent",
    [STREAM_HEAD + EVENT[:40], b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"],
    ids=["in an event", "no stream"],
)
def test_answer_that_cannot_carry_an_error_is_reset_at_once(make_rig: MakeRig, sent: bytes) -> None:
    rig = make_rig(LONG)
    client, child = rig.begin(post(CHAT, b'{"stream":true}'))
    child.send(sent)
    client.head()
    child.close()
    with pytest.raises(ConnectionResetError):
        client.rest()


def test_malformed_answer_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    client, child = rig.begin(NOT_REPEATABLE)
    child.send(b"HTTP/9 nonsense\r\n\r\n")
    assert status(client.message()[0]) == 502


def test_client_that_leaves_does_not_wait_for_the_cause(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    client, child = streaming(rig)
    child.close()
    await_held(rig)
    client.close()
    assert rig.record().outcome == "client_gone"
    assert rig.in_flight() == 0
    end_generation(rig)


def test_permit_is_free_while_the_cause_is_awaited(make_rig: MakeRig) -> None:
    rig = make_rig(LONG, max_concurrent=1)
    _client, child = streaming(rig)
    child.close()
    await_held(rig)
    other, _child = rig.begin(post(CHAT, b"{}"))
    assert other.is_quiet()
    assert rig.call(lambda: rig.endpoint.busy) == 1


def test_upload_to_a_server_that_ends_gets_the_cause(make_rig: MakeRig) -> None:
    """The body is too large to keep, and half of it has been sent."""
    limits = Limits(cause_wait_s=3600.0, stream_above_bytes=1024, replay_bytes=2048)
    rig = make_rig(ProxyConfig(limits=limits, route_by_model=False))
    client = rig.send(post(CHAT, b" " * 300_000)[:200_000])
    child = rig.accept()
    child.head()
    child.receive(100_000)
    child.close()
    await_held(rig)
    end_generation(rig)
    head, body = client.message()
    assert status(head) == 502
    assert json.loads(body)["error"]["cause"] == "out_of_memory_host"


def test_proxy_closes_while_a_client_waits_for_the_cause(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    client, child = streaming(rig)
    child.close()
    await_held(rig)
    rig.close_proxy()
    with pytest.raises(ConnectionResetError):
        client.rest()


def test_thousand_streams_that_are_cut_at_once_all_get_the_cause(make_rig: MakeRig) -> None:
    rig = make_rig(LONG)
    clients, children = zip(*(streaming(rig) for _ in range(1000)), strict=True)
    for child in children:
        child.close()
    while rig.call(lambda: len(rig.proxy.awaiting_cause)) < 1000:
        pass
    end_generation(rig)
    assert {error_in(client.rest())["cause"] for client in clients} == {"out_of_memory_host"}
    assert rig.in_flight() == 0
