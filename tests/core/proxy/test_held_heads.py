"""The head of a stream is held until its first event: until then the request can be sent again.

llama-server sends the head of a stream when a slot takes the request, and the first event after the prompt
(b11434).
"""

from __future__ import annotations

import json

import pytest

from llamasup.core.queueing.endpoint import Endpoint
from tests.core.proxy.generations import (
    LOADING,
    STOPPING,
    await_queued,
    end_generation,
    make_unavailable,
    start_generation,
)
from tests.core.proxy.rig import CHAT, EVENT, STREAM_HEAD, Rig, Wire, chunk, get, post, status

STREAM = b'{"stream":true}'
PATHS = [CHAT, b"/v1/completions", b"/completion", b"/v1/responses", b"/v1/messages"]


def stream_with_held_head(rig: Rig, path: bytes = CHAT) -> tuple[Wire, Wire]:
    """A client that waits for a stream, and the child, which has sent only the head."""
    client, child = rig.begin(post(path, STREAM))
    child.send(STREAM_HEAD)
    # Once another request has been answered, the head has been read.
    other, second = rig.begin(get())
    second.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    other.message()
    return client, child


@pytest.mark.parametrize("path", PATHS)
def test_stream_without_first_event_is_sent_to_next_generation(rig: Rig, path: bytes) -> None:
    client, child = stream_with_held_head(rig, path)
    assert client.is_quiet()
    child.close()
    await_queued(rig, 1)
    end_generation(rig)
    new: Endpoint = start_generation(rig)
    child = rig.accept()
    assert child.message()[1] == STREAM
    child.send(STREAM_HEAD, EVENT, b"0\r\n\r\n")
    assert status(client.head()) == 200
    assert client.until(b"\r\n0\r\n\r\n") == EVENT + b"0\r\n\r\n"
    (record,) = [record for record in (rig.record(), rig.record()) if record.status == 200]
    assert (record.generation, record.replayed) == (new.generation, True)


def test_stream_without_first_event_or_next_generation_is_a_503(rig: Rig) -> None:
    client, _ = stream_with_held_head(rig)
    make_unavailable(rig, STOPPING)
    end_generation(rig, STOPPING)
    head, body = client.message()
    assert status(head) == 503
    assert json.loads(body)["error"]["code"] == 503


def test_ping_releases_held_head(rig: Rig) -> None:
    """A ping keeps clients and proxies from closing the connection."""
    client, child = stream_with_held_head(rig)
    child.send(ping := chunk(b":\n\n"))
    assert status(client.head()) == 200
    assert client.until(ping) == ping
    end_generation(rig, LOADING)
    assert b'data: {"error":' in client.rest()


@pytest.mark.parametrize("cut", range(1, len(EVENT), 7))
def test_first_event_in_pieces_releases_held_head(rig: Rig, cut: int) -> None:
    client, child = stream_with_held_head(rig)
    child.send(EVENT[:cut])
    assert status(client.head()) == 200
    assert client.receive(cut) == EVENT[:cut]
    child.send(EVENT[cut:] + b"0\r\n\r\n")
    assert client.until(b"\r\n0\r\n\r\n") == EVENT[cut:] + b"0\r\n\r\n"


def test_stream_without_events_is_complete(rig: Rig) -> None:
    client, child = stream_with_held_head(rig)
    child.send(b"0\r\n\r\n")
    assert status(client.head()) == 200
    assert client.receive(5) == b"0\r\n\r\n"


@pytest.mark.parametrize("junk", [b"zz\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"])
def test_malformed_chunk_after_held_head_is_a_502(rig: Rig, junk: bytes) -> None:
    client, child = stream_with_held_head(rig)
    child.send(junk)
    assert status(client.message()[0]) == 502


def test_disconnect_while_head_is_held_cancels_request(rig: Rig) -> None:
    client, child = stream_with_held_head(rig)
    client.close()
    assert child.sees_the_end()


def test_head_of_non_replayable_request_is_not_held(rig: Rig) -> None:
    """Events about the server: the first may arrive hours later."""
    client, child = rig.begin(get(b"/models/sse"))
    child.send(STREAM_HEAD)
    assert status(client.head()) == 200
