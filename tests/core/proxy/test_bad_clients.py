"""Hostile and broken clients: another client is served in the meantime, and everything is released later.

The rig checks that no callback of the loop raises an exception.
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

import pytest
from msgspec.structs import replace

from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.rig import (
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
SHORT_TIMEOUTS = Limits(head_s=0.3, body_idle_s=0.3, send_stall_s=0.3, linger_s=0.1, sweep_s=0.05)


def serve_another_client(rig: Rig) -> None:
    other = rig.send(post(CHAT, b"{}"), source="127.0.0.9")
    child = rig.accept()
    child.message()
    child.send(answer(b"served"))
    assert other.message()[1] == b"served"
    other.close()
    child.close()


def await_release(rig: Rig) -> None:
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients) + rig.endpoint.in_flight) == 0)


# --- slow clients


def send_slowly(client: Wire, rest: bytes) -> bytes:
    """Send ``rest`` byte by byte, with pauses. Returns the head of the answer."""
    for at in range(len(rest)):
        if select.select([client.sock], [], [], 0.05)[0]:
            break
        client.send(rest[at : at + 1])
    return client.head()


@pytest.mark.check("X8", "408, closed")
def test_head_sent_byte_by_byte_has_a_deadline(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=SHORT_TIMEOUTS))
    client = rig.send(b"GET /props HTTP/1.1\r\n")
    serve_another_client(rig)
    head = send_slowly(client, b"X: y\r\n" * 200)
    assert (status(head), field(head, b"connection")) == (408, b"close")
    assert b'"cause":"slow_request"' in client.rest()  # and then the connection ends
    client.close()
    await_release(rig)


def test_body_sent_byte_by_byte_is_read_while_bytes_arrive(make_rig: MakeRig, clock: Clock) -> None:
    """Bytes less than ``body_idle_s`` apart are a slow network. Only received bytes take memory."""
    rig = make_rig(ProxyConfig(limits=replace(SHORT_TIMEOUTS, body_idle_s=100.0)))
    client = rig.connect()
    body = b'{"prompt":"slow"}'
    client.send(post(CHAT, body)[: -len(body)])
    serve_another_client(rig)
    for at in range(len(body)):
        client.send(body[at : at + 1])
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer())
    assert status(client.message()[0]) == 200
    client.send(post(CHAT, body)[:-1])  # a body that stops arriving times out
    clock.pass_until_readable(client, 60.0)
    assert status(client.head()) == 408
    client.close()
    await_release(rig)


# --- a client that does not read


@pytest.mark.both_loops
def test_unread_stream_pauses_child_and_then_times_out(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(limits=SHORT_TIMEOUTS))
    client = rig.connect(receive_buffer=1 << 16)
    client.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD)
    event = chunk(b"data: " + b"x" * 8000 + b"\n\n")
    sent = 0
    while rig._records.empty():  # bytes after the disconnect are dropped
        child.send(event)
        sent += len(event)
    assert sent < 32 * MIB  # buffers of the kernel, and little of ours, because the child was paused
    assert rig.record().outcome == "client_gone"
    assert child.sees_the_end()
    serve_another_client(rig)
    client.close()
    await_release(rig)


# --- many clients


# Connects from ten addresses, because one would exceed its limit, reports the last connect, and waits.
_CROWD = """
import resource, socket, sys
host, port, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (number + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sources = [(f"127.0.1.{at % 10}", 0) for at in range(number)]
crowd = [socket.create_connection((host, port), source_address=source) for source in sources]
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
def test_five_thousand_idle_connections_delay_no_client(make_rig: MakeRig) -> None:
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
            eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == number)
            serve_another_client(rig)
        await_release(rig)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Resets:
    """Connects and resets at a steady rate until stopped; every third one sends a part of a request."""

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


@pytest.mark.extended
@pytest.mark.parametrize("number", [1_000, 10_000])
def test_thousand_connects_and_resets_per_second_delay_no_client(make_rig: MakeRig, number: int) -> None:
    rig = make_rig()
    resets = Resets(rig, 0.001)
    try:
        while resets.count < number:
            serve_another_client(rig)
            time.sleep(0.02)  # each leaves its port in TIME_WAIT, and there are 28,000
    finally:
        resets.stop()
    await_release(rig)


# --- large bodies


@pytest.mark.check("X8", "413, closed")
def test_announced_body_above_the_limit_is_refused_unread(rig: Rig) -> None:
    client = rig.send(get(CHAT, b"Content-Length: %d" % (32 * MIB + 1), method=b"POST"))
    serve_another_client(rig)
    head, body = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    error = json.loads(body)["error"]
    assert (error["cause"], error["remedy"]) == (
        "body_limit",
        "Send less, or raise the limit with --max-body (in a config: http.max_body).",
    )
    assert client.sees_the_end()
    client.close()
    await_release(rig)


@pytest.mark.check("X8", "413, closed")
def test_chunked_body_is_refused_at_the_limit(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig())  # with routing by model, bodies are buffered
    client = rig.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
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
    serve_another_client(rig)
    client.close()
    await_release(rig)


# --- invalid bodies


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
def test_invalid_body_is_forwarded_for_llama_server_to_refuse(
    make_rig: MakeRig, body: bytes, route_by_model: bool
) -> None:
    """llama-server gets the same bytes, and clients get its answer."""
    rig = make_rig(ProxyConfig(route_by_model=route_by_model))
    client = rig.send(post(CHAT, body))
    child = rig.accept()
    assert child.message()[1] == body
    child.send(answer(b'{"error":{}}', code=b"400 Bad Request"))
    assert status(client.message()[0]) == 400
    client.close()
    child.close()
    serve_another_client(rig)
    await_release(rig)


def test_body_nested_too_deep_to_find_its_model_is_refused(rig: Rig) -> None:
    """llama-server reads deeper: the default model would answer instead of the requested one."""
    head, refused = rig.ask(post(CHAT, TOO_DEEP))
    assert status(head) == 400
    assert b'"cause":"body_too_deep"' in refused.replace(b" ", b"")


def test_deeply_nested_body_is_forwarded_to_single_model(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(route_by_model=False))
    client = rig.send(post(CHAT, TOO_DEEP))
    child = rig.accept()
    assert child.message()[1] == TOO_DEEP
    child.send(answer())
    assert status(client.message()[0]) == 200


TOO_DEEP = b'{"model":"tiny","x":' + b"[" * 2000 + b"]" * 2000 + b"}"
