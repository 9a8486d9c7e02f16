"""Requests that have filled the context which they share are sent again, one at a time."""

from __future__ import annotations

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued, send_chat
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, answer, chunk, error_of, eventually, post

FULL = (
    b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 88\r\n\r\n"
    b'{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}'
)


@pytest.fixture
def shared(rig: Rig) -> Rig:
    rig.endpoint.share, rig.endpoint.max_concurrent = 8192, 4
    return rig


def fill(rig: Rig, *bodies: bytes) -> list[bytes]:
    """The server ends all requests, whose prompts and answers together are too long."""
    children = [rig.accept() for _ in bodies]
    seen = [child.message()[1] for child in children]
    for child in children:
        child.send(FULL)
        child.close()
    return seen


def test_each_is_answered_alone(shared: Rig) -> None:
    clients = {body: send_chat(shared, body) for body in (b"a", b"b", b"c")}
    fill(shared, *clients)
    for left in (2, 1, 0):
        child = shared.accept()
        body = child.message()[1]
        await_queued(shared, left)  # nothing runs beside it
        child.send(answer(body, b"Connection: close"))
        assert clients.pop(body).message()[1] == body
    assert shared.endpoint.failures == 0


def test_the_one_that_is_too_long_alone_gets_the_error(shared: Rig) -> None:
    clients = {body: send_chat(shared, body) for body in (b"long", b"short")}
    fill(shared, *clients)
    for _ in range(2):
        child = shared.accept()
        body = child.message()[1]
        child.send(FULL if body == b"long" else answer(body, b"Connection: close"))
        if body == b"long":
            assert error_of(clients[b"long"], 500)["message"] == "Context size has been exceeded."
        else:
            assert clients[b"short"].message()[1] == b"short"


def test_where_each_slot_has_its_own_context_nothing_is_sent_again(rig: Rig) -> None:
    client = send_chat(rig, b"a")
    fill(rig, b"a")
    assert error_of(client, 500)["message"] == "Context size has been exceeded."


def test_other_errors_are_not_sent_again(shared: Rig) -> None:
    client = send_chat(shared, b"a")
    child = shared.accept()
    child.message()
    child.send(FULL.replace(b"Context size has been exceeded.", b"Another limit has been exceeded"))
    assert error_of(client, 500)["message"] == "Another limit has been exceeded"


def test_stream_that_begins_with_the_error_is_sent_again(shared: Rig) -> None:
    client = send_chat(shared, b"a")
    child = shared.accept()
    child.message()
    child.send(STREAM_HEAD, chunk(b"data: " + FULL.split(b"\r\n\r\n")[1] + b"\n\n"))
    again = shared.accept()
    assert again.message()[1] == b"a"
    again.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_error_that_arrives_in_two_parts_is_recognized(shared: Rig) -> None:
    client = send_chat(shared, b"a")
    child = shared.accept()
    child.message()
    head, body = FULL.split(b"\r\n\r\n")
    for part in (head + b"\r\n\r\n", body[:40], body[40:]):
        child.send(part)
        for _ in range(2):
            shared.call(lambda: None)  # the loop has read it
    again = shared.accept()
    assert again.message()[1] == b"a"
    again.send(answer(b"served"))
    assert client.message()[1] == b"served"


def test_long_request_leaves_fewer_places_to_others(shared: Rig) -> None:
    long = send_chat(shared, b"x" * 4 * 3 * 8192)
    first = shared.accept()
    first.message()
    waits = send_chat(shared, b"a")
    await_queued(shared, 1)
    first.send(answer(b"done"))
    assert long.message()[1] == b"done"
    assert first.message()[1] == b"a"
    first.send(answer(b"served"))
    assert waits.message()[1] == b"served"


def test_long_upload_takes_the_permits_of_several_slots(make_rig: MakeRig) -> None:
    """It has none while it arrives."""
    rig = make_rig(ProxyConfig(route_by_model=False), max_concurrent=4)
    rig.endpoint.share = 8192
    body = b"x" * 4 * 2 * 9000
    client = rig.send(post(CHAT, body)[:-1])
    child = rig.accept()
    child.head()
    client.send(b"x")
    assert child.receive(len(body)) == body
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 3)
    child.send(answer(b"served"))
    assert client.message()[1] == b"served"
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 0)


def test_answer_takes_more_permits_as_it_grows(make_rig: MakeRig) -> None:
    """The prompt takes half of the slot's share, so the other half is full with 10 events."""
    rig = make_rig(ProxyConfig(limits=Limits(sweep_s=0.02)), max_concurrent=4)
    rig.endpoint.share = 20
    client = send_chat(rig, b"x" * 40)
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD + chunk(b"x" * 2000))
    client.head()
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 1)
    child.send(chunk(b"x" * 200))
    eventually(lambda: rig.call(lambda: rig.endpoint.busy) == 2)
