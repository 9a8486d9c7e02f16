"""Clients that mean no good, or do no good: another one is served meanwhile, and all comes back afterwards.

That nothing is raised in a callback of the loop the rig sees to itself.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from llamasup.proxy import Limits, ProxyConfig
from tests.proxy.conftest import MakeRig
from tests.proxy.rig import (
    CHAT,
    STREAM_HEAD,
    Clock,
    Rig,
    Wire,
    answer,
    chunk,
    eventually,
    field,
    get,
    post,
    status,
)

MIB = 1 << 20
_RESET = struct.pack("ii", 1, 0)
IMPATIENT = Limits(head_s=0.3, body_idle_s=0.3, send_stall_s=0.3, linger_s=0.1, sweep_s=0.05)


def another_is_served(rig: Rig) -> None:
    other = rig.connect(source="127.0.0.9")
    other.send(post(CHAT, b"{}"))
    child = rig.accept()
    child.message()
    child.send(answer(b"served"))
    assert other.message()[1] == b"served"
    other.close()
    child.close()


def all_comes_back(rig: Rig) -> None:
    eventually(lambda: rig.call(lambda: rig.proxy.connections + rig.endpoint.in_flight) == 0)


# --- slow ones


def drips(client: Wire, rest: bytes) -> bytes:
    """What a client is told that sends ``rest`` byte by byte, a pause before each."""
    for at in range(len(rest)):
        if select.select([client.sock], [], [], 0.05)[0]:
            break
        client.send(rest[at : at + 1])
    return client.head()


def test_a_head_that_comes_byte_by_byte_has_its_time_and_no_more(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=IMPATIENT))
    client = rig.connect()
    client.send(b"GET /props HTTP/1.1\r\n")
    another_is_served(rig)
    head = drips(client, b"X-A: " + b"a" * 1000)
    assert (status(head), field(head, b"connection")) == (408, b"close")
    client.close()
    all_comes_back(rig)


def test_a_body_that_comes_byte_by_byte_is_read_as_long_as_it_comes(make_rig: MakeRig, clock: Clock) -> None:
    """Within ``body_idle_s`` of each other bytes are a slow network; memory is bounded by what has come."""
    rig = make_rig(ProxyConfig(limits=replace(IMPATIENT, body_idle_s=100.0)))
    client = rig.connect()
    body = b'{"prompt":"slow"}'
    client.send(post(CHAT, body)[: -len(body)])
    another_is_served(rig)
    for at in range(len(body)):
        client.send(body[at : at + 1])
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer())
    assert status(client.message()[0]) == 200
    client.send(post(CHAT, body)[:-1])  # and when it comes no more
    clock.pass_until_heard(client, 60.0)
    assert status(client.head()) == 408
    client.close()
    all_comes_back(rig)


# --- one that does not read


def test_a_stream_that_nobody_reads_is_held_back_and_then_given_up(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=IMPATIENT))
    client = rig.connect(receive_buffer=1 << 16)
    client.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD)
    event = chunk(b"data: " + b"x" * 8000 + b"\n\n")
    sent = 0
    while rig._records.empty():  # what it is sent from then on is dropped
        child.send(event)
        sent += len(event)
    assert sent < 32 * MIB  # buffers of the kernel, and little of ours: the child was paused
    another_is_served(rig)
    client.close()
    all_comes_back(rig)


# --- many


# Connects from ten addresses, for one would have too many, and says when all are there; then waits.
_CROWD = """
import resource, socket, sys
host, port, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (number + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sources = [(f"127.0.1.{at % 10}", 0) for at in range(number)]
crowd = [socket.create_connection((host, port), source_address=source) for source in sources]
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_five_thousand_idle_connections_hold_nobody_up(make_rig: MakeRig) -> None:
    number = 5_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number + 200:
        pytest.skip(f"{hard} descriptors are too few for {number} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 200), hard))
    try:
        rig = make_rig(ProxyConfig(limits=Limits(head_s=1e6)))
        words = [sys.executable, "-c", _CROWD, *map(str, rig.address), str(number)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"here\n"
            eventually(lambda: rig.call(lambda: rig.proxy.connections) == number)
            another_is_served(rig)
        all_comes_back(rig)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Resets:
    """Connects and resets at an even pace until it is stopped; every third sends a piece of a request."""

    def __init__(self, rig: Rig, each_s: float) -> None:
        self.count = 0
        self._rig = rig
        self._each_s = each_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            with socket.socket() as sock:
                sock.connect(self._rig.address)
                if self.count % 3 == 0:
                    sock.send(get(b"/livez")[: 10 + self.count % 40])
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.count += 1
            due += self._each_s
            time.sleep(max(0.0, due - time.monotonic()))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1_000, 10_000])
def test_a_thousand_connects_and_resets_a_second_hold_nobody_up(make_rig: MakeRig, number: int) -> None:
    rig = make_rig()
    resets = Resets(rig, 0.001)
    try:
        while resets.count < number:
            another_is_served(rig)
            time.sleep(0.02)  # each leaves its port in TIME_WAIT, and there are 28,000
    finally:
        resets.stop()
    all_comes_back(rig)


# --- large bodies


def test_forty_megabytes_that_are_announced_are_refused_unread(rig: Rig) -> None:
    client = rig.connect()
    client.send(post(CHAT, b"x" * 40 * MIB)[:100])
    another_is_served(rig)
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    assert json.loads(body)["error"]["cause"] == "body_limit"
    client.close()
    all_comes_back(rig)


def test_forty_megabytes_in_chunks_are_refused_at_the_limit(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig())  # routed by model: a body that must be read whole
    client = rig.connect()
    client.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    part = chunk(bytes(MIB))
    sent = 0
    while sent < 40 and not select.select([client.sock], [], [], 0)[0]:
        try:
            client.send(part)
        except ConnectionError:
            break
        sent += 1
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    assert json.loads(body)["error"]["cause"] == "body_limit"
    assert sent > 30
    another_is_served(rig)
    client.close()
    all_comes_back(rig)


# --- what is no request for a model


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500 + b"]" * 500,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"model":' + b"[" * 500 + b"]" * 500 + b"}",
        b"[" * 100_000,
        b'{"model":"tiny"',
        b'{"model":"tiny"}}',
        b"{model: tiny}",
        b"\xff\xfe{}",
        b"",
        b'{"model":7}',
        b'{"model":null}',
        b'{"model":["tiny"]}',
        b'{"model":{"name":"tiny"}}',
        b'{"model":true,"model":"tiny"}',
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("route_by_model", [True, False])
def test_a_body_that_makes_no_sense_is_llama_servers_to_refuse(
    make_rig: MakeRig, body: bytes, route_by_model: bool
) -> None:
    """It gets the very bytes: its answer is the one that clients know."""
    rig = make_rig(ProxyConfig(route_by_model=route_by_model))
    client = rig.connect()
    client.send(post(CHAT, body))
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer(b'{"error":{}}', code=b"400 Bad Request"))
    assert status(client.message()[0]) == 400
    client.close()
    child.close()
    another_is_served(rig)
    all_comes_back(rig)


def test_a_body_too_deep_to_tell_its_model_is_not_given_to_just_any(rig: Rig) -> None:
    """llama-server reads on below that: the default model would answer for the one that was named."""
    head, refused = rig.ask(post(CHAT, TOO_DEEP))
    assert status(head) == 400
    assert b'"cause":"body_too_deep"' in refused.replace(b" ", b"")


def test_where_there_is_one_model_its_server_reads_as_deep_as_it_likes(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False))
    client = rig.connect()
    client.send(post(CHAT, TOO_DEEP))
    child = rig.accept()
    assert child.message()[1] == TOO_DEEP
    child.send(answer())
    assert status(client.message()[0]) == 200


TOO_DEEP = b'{"model":"tiny","x":' + b"[" * 2000 + b"]" * 2000 + b"}"
