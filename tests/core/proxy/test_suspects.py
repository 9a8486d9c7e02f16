"""Requests whose server crashes are sent again one at a time, and the one that is the cause is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued, end_generation, send_chat, start_generation
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, Wire, answer, error_of, eventually, post


def crash(rig: Rig) -> None:
    end_generation(rig, crashed=True)


def refused(client: Wire) -> dict[str, Any]:
    error = error_of(client, 503)
    assert error["cause"] == "poison_request"
    return error


def poisoned(rig: Rig, body: bytes = b"poison") -> None:
    """A request that has crashed two servers; a third one serves."""
    client = send_chat(rig, body)
    for _ in range(2):
        rig.accept().message()
        crash(rig)
        start_generation(rig)
    refused(client)


def test_innocent_requests_are_answered_and_the_poison_is_refused(rig: Rig) -> None:
    clients = {body: send_chat(rig, body) for body in (b"a", b"poison", b"b")}
    for _ in clients:
        rig.accept().message()
    crash(rig)
    await_queued(rig, 3)
    clients[b"late"] = send_chat(rig, b"late")
    await_queued(rig, 4)
    start_generation(rig)
    seen = []
    for _ in range(4):
        child = rig.accept()
        body = child.message()[1]
        seen.append(body)
        if body == b"poison":
            crash(rig)
            start_generation(rig)
        else:
            child.send(answer(body, b"Connection: close"))
            assert clients[body].message()[1] == body
    assert sorted(seen[:3]) == [b"a", b"b", b"poison"]
    assert seen[3] == b"late"
    refused(clients[b"poison"])


def test_same_body_is_refused_at_once_and_others_are_served(rig: Rig) -> None:
    poisoned(rig)
    refused(send_chat(rig, b"poison"))
    client, child = rig.begin(post(CHAT, b"honest"))
    child.send(answer(b"served", b"Connection: close"))
    assert client.message()[1] == b"served"
    other_path, child = rig.begin(post(b"/completion", b"poison"))
    child.send(answer(b"served"))
    assert other_path.message()[1] == b"served"


def test_refused_request_explains_the_crashes_before(rig: Rig) -> None:
    explained: list[int] = []
    first = rig.backend.endpoint
    first.on_explained = lambda: explained.append(1)
    client = send_chat(rig, b"poison")
    rig.accept().message()
    crash(rig)
    assert not first.is_explained
    second = start_generation(rig)
    rig.accept().message()
    crash(rig)
    refused(client)
    assert (explained, second.is_explained) == ([1], True)


def test_connection_that_breaks_twice_without_a_crash_is_no_poison(rig: Rig) -> None:
    client = send_chat(rig, b"{}")
    for _ in range(2):
        child = rig.accept()
        child.message()
        child.close()
    assert error_of(client, 502)["cause"] == "upstream_broke"
    assert not rig.endpoint.crashed


@pytest.mark.parametrize("stops", [False, True])
def test_begun_stream_becomes_a_suspect_that_runs_alone(rig: Rig, *, stops: bool) -> None:
    """It cannot be sent again, but its client will send it again. A requested stop makes no suspects."""
    body = b'{"stream":true}'
    client, child = rig.begin(post(CHAT, body))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    end_generation(rig, crashed=not stops)
    assert b'data: {"error"' in client.rest()
    start_generation(rig)
    running, first = rig.begin(post(CHAT, b"honest"))
    again = send_chat(rig, body)
    if stops:
        rig.accept().message()
        return
    await_queued(rig, 1)
    late = send_chat(rig, b"late")
    await_queued(rig, 2)
    first.send(answer(b"served", b"Connection: close"))
    assert running.message()[1] == b"served"
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer(b"whole", b"Connection: close"))
    assert again.message()[1] == b"whole"
    child = rig.accept()
    assert child.message()[1] == b"late"
    child.send(answer(b"served"))
    assert late.message()[1] == b"served"
    assert not rig.backend.waiting.suspects.known  # it was answered


@pytest.mark.parametrize("crashed", [True, False])
def test_stream_that_another_program_cuts_is_no_suspect(rig: Rig, *, crashed: bool) -> None:
    """The connection breaks before the end of the process is known."""
    client, child = rig.begin(post(CHAT, b'{"stream":true}'))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    child.close()
    end_generation(rig, crashed=crashed)
    assert b'data: {"error"' in client.rest()
    assert bool(rig.backend.waiting.suspects.known) is crashed


@pytest.mark.parametrize("limits", [{"wait_timeout_s": 0.0}, {"max_queued": 0}])
def test_suspect_that_may_not_wait_runs_beside_others(make_rig: MakeRig, limits: dict[str, Any]) -> None:
    rig = make_rig(**limits)
    body = b'{"stream":true}'
    client, child = rig.begin(post(CHAT, body))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    crash(rig)
    client.rest()
    start_generation(rig)
    rig.begin(post(CHAT, b"honest"))
    again, child = rig.begin(post(CHAT, body))
    child.send(answer(b"whole"))
    assert again.message()[1] == b"whole"


def test_suspect_finds_an_idle_server_and_nothing_runs_beside_it(rig: Rig) -> None:
    body = b'{"stream":true}'
    client, child = rig.begin(post(CHAT, body))
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    crash(rig)
    client.rest()
    start_generation(rig)
    again = send_chat(rig, body)
    rig.accept().message()
    send_chat(rig, b"late")
    await_queued(rig, 1)
    crash(rig)
    refused(again)


def test_request_whose_client_has_left_is_a_suspect(rig: Rig) -> None:
    """A client does not wait for a server that hangs, and sends the same request to the next one."""
    client, _ = rig.begin(post(CHAT, b"hangs"))
    client.close()
    eventually(lambda: rig.call(lambda: rig.endpoint.at_work == 1 and rig.endpoint.in_flight == 0))
    crash(rig)
    start_generation(rig)
    again = send_chat(rig, b"hangs")
    rig.accept().message()
    crash(rig)
    refused(again)
