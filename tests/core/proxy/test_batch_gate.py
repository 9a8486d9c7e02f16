"""Requests of a batch give way to those of other clients."""

from __future__ import annotations

import json

import pytest

from llamasup.core.queueing.batch_lane import TURN_AFTER_S
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import send_chat
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Clock, Rig, Wire, answer, chunk, field, post, status

BATCH = b"X-Llamasup-Priority: batch"
LONG_AGO_S = 60.0


@pytest.fixture
def rig(make_rig: MakeRig, clock: Clock) -> Rig:
    return make_rig(max_concurrent=2)


def send_batch(rig: Rig, body: bytes = b"batch") -> Wire:
    return rig.send(post(CHAT, body, BATCH))


def cause_of(wire: Wire) -> tuple[int, str]:
    head, body = wire.message()
    return status(head), json.loads(body)["error"]["cause"]


def test_batch_is_served_while_no_other_client_is_there(rig: Rig) -> None:
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_batch_waits_while_another_client_has_a_request(rig: Rig) -> None:
    other = send_chat(rig, b"1")
    child = rig.accept()
    child.message()
    client = send_batch(rig)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["cause"] == "batch_waits"
    assert field(head, b"retry-after") == b"1"
    assert rig.record().outcome == "gave_way"
    child.send(answer(b"one"))
    assert other.message()[1] == b"one"


def test_batch_continues_some_time_after_the_last_request_of_others(rig: Rig, clock: Clock) -> None:
    other = send_chat(rig, b"1")
    child = rig.accept()
    child.message()
    child.send(answer(b"one"))
    other.message()
    assert cause_of(send_batch(rig)) == (503, "batch_waits")
    clock.pass_s(LONG_AGO_S)
    client = send_batch(rig)
    child.message()
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_request_of_another_client_ends_those_of_batches(rig: Rig) -> None:
    clients = [send_batch(rig, b"1"), send_batch(rig, b"2")]
    children = [rig.accept(), rig.accept()]
    for child in children:
        child.message()
    other = send_chat(rig, b"3")
    assert [cause_of(client) for client in clients] == [(503, "batch_preempted")] * 2
    assert [rig.record().outcome for _ in clients] == ["gave_way"] * 2
    for child in children:
        child.close()  # llama-server notices that its clients have gone
    child = rig.accept()
    assert child.message()[1] == b"3"
    child.send(answer(b"three"))
    assert other.message()[1] == b"three"


def test_begun_stream_of_a_batch_ends_with_an_error_event(rig: Rig) -> None:
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    assert b"data: 1" in client.until(b"data: 1\n\n")
    send_chat(rig, b"2")
    rest = client.rest()
    assert b'"batch_preempted"' in rest
    assert not rest.endswith(b"0\r\n\r\n")


def test_request_that_runs_no_model_ends_no_batch(rig: Rig) -> None:
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    rig.send(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
    rig.accept().message()
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"


@pytest.mark.usefixtures("no_cause")
def test_batch_learns_that_its_server_ended(rig: Rig) -> None:
    """Those of other clients are sent again. A batch first looks for the line that ended the server."""
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    child.close()
    assert cause_of(client) == (502, "upstream_broke")


def starve(rig: Rig, clock: Clock) -> None:
    """A batch has waited for a turn."""
    assert cause_of(send_batch(rig)) == (503, "batch_waits")
    clock.pass_s(TURN_AFTER_S)


def test_starved_batch_gets_a_turn_in_a_free_slot_beside_other_clients(rig: Rig, clock: Clock) -> None:
    send_chat(rig, b"1")
    rig.accept().message()
    starve(rig, clock)
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    assert cause_of(send_batch(rig)) == (503, "batch_waits")  # one request has the turn
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"
    assert cause_of(send_batch(rig)) == (503, "batch_waits")


def test_request_with_a_free_slot_does_not_end_a_turn(make_rig: MakeRig, clock: Clock) -> None:
    rig = make_rig(max_concurrent=3)
    send_chat(rig, b"1")
    rig.accept().message()
    starve(rig, clock)
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    send_chat(rig, b"2")
    assert rig.accept().message()[1] == b"2"
    child.send(answer(b"done"))
    assert client.message()[1] == b"done"


def test_turn_ends_when_a_request_of_another_client_would_wait(rig: Rig, clock: Clock) -> None:
    send_chat(rig, b"1")
    rig.accept().message()
    starve(rig, clock)
    client = send_batch(rig)
    child = rig.accept()
    child.message()
    send_chat(rig, b"2")
    assert cause_of(client) == (503, "batch_preempted")
    child.close()
    assert rig.accept().message()[1] == b"2"


def test_turn_waits_while_no_slot_is_free(rig: Rig, clock: Clock) -> None:
    for body in (b"1", b"2"):
        send_chat(rig, body)
        rig.accept().message()
    starve(rig, clock)
    client = send_batch(rig)
    head, body = client.message()
    assert json.loads(body)["error"]["cause"] == "batch_waits"
    assert field(head, b"retry-after") == b"60"
