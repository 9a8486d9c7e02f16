"""A head without a body says nothing: a stream that has got no further when its server ends is sent again.

llama-server sends the head of a stream when a slot takes the request, and the first event after the prompt
(b11434).
"""

from __future__ import annotations

import json

import pytest

from llamasup.queueing.endpoint import Endpoint
from tests.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, chunk, get, post, status
from tests.proxy.test_waiting import EVENT, LOADING, STOPPING, becomes, ends, serves, wait_until

STREAM = b'{"stream":true}'
PATHS = [CHAT, b"/v1/completions", b"/completion", b"/v1/responses", b"/v1/messages"]


def in_its_prompt(rig: Rig, path: bytes = CHAT) -> tuple[Wire, Wire]:
    """A client that streams, and the child, which has sent the head and nothing more."""
    client = rig.connect()
    client.send(post(path, STREAM))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD)
    # Once it has answered another request, the head has been read.
    other = rig.connect()
    other.send(get())
    second = rig.accept()
    second.head()
    second.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    other.message()
    return client, child


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_still_in_its_prompt_when_the_server_dies_is_answered_by_the_next(
    rig: Rig, path: bytes
) -> None:
    client, child = in_its_prompt(rig, path)
    assert client.is_quiet()
    child.close()
    wait_until(rig, 1)
    ends(rig)
    new: Endpoint = serves(rig)
    child = rig.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD, EVENT, b"0\r\n\r\n")
    assert status(client.head()) == 200
    assert client.until(b"\r\n0\r\n\r\n") == EVENT + b"0\r\n\r\n"
    (record,) = [each for each in (rig.record(), rig.record()) if each.status == 200]
    assert (record.generation, record.replayed) == (new.generation, True)


def test_if_there_is_no_next_it_is_an_error_with_a_status(rig: Rig) -> None:
    client, _ = in_its_prompt(rig)
    becomes(rig, STOPPING)
    ends(rig, STOPPING)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["code"] == 503


def test_a_ping_ends_the_holding_back(rig: Rig) -> None:
    """It is what keeps a client, and what is between, from giving up."""
    client, child = in_its_prompt(rig)
    child.send(ping := chunk(b":\n\n"))
    assert status(client.head()) == 200
    assert client.until(ping) == ping
    ends(rig, LOADING)
    assert b'data: {"error":' in client.rest()


@pytest.mark.parametrize("cut", range(1, len(EVENT), 7))
def test_the_first_event_may_come_in_pieces(rig: Rig, cut: int) -> None:
    client, child = in_its_prompt(rig)
    child.send(EVENT[:cut])
    assert status(client.head()) == 200
    assert client.receive(cut) == EVENT[:cut]
    child.send(EVENT[cut:] + b"0\r\n\r\n")
    assert client.until(b"\r\n0\r\n\r\n") == EVENT[cut:] + b"0\r\n\r\n"


def test_a_stream_without_any_event_is_whole_all_the_same(rig: Rig) -> None:
    client, child = in_its_prompt(rig)
    child.send(b"0\r\n\r\n")
    assert status(client.head()) == 200
    assert client.receive(5) == b"0\r\n\r\n"


@pytest.mark.parametrize("junk", [b"zz\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"])
def test_what_is_no_chunk_is_an_error_with_a_status(rig: Rig, junk: bytes) -> None:
    client, child = in_its_prompt(rig)
    child.send(junk)
    assert status(client.message()[0]) == 502


def test_a_client_that_leaves_meanwhile_cancels(rig: Rig) -> None:
    client, child = in_its_prompt(rig)
    client.close()
    assert child.sees_the_end()


def test_what_is_never_sent_again_is_not_held_back(rig: Rig) -> None:
    """Events about the server, of which the first may come hours later."""
    client = rig.connect()
    client.send(get(b"/models/sse"))
    child = rig.accept()
    child.head()
    child.send(STREAM_HEAD)
    assert status(client.head()) == 200
