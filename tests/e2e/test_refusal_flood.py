"""Clients without a key cannot fill the log: refusals are counted, and paths are cut."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup

HOST = b"Host: localhost\r\n"
LONG = b"x" * 16_000
REQUESTS = 2_000  # of each kind
# Each is a request that a client without a key may send, and its answer's status.
KINDS = {
    "without a key": (b"GET /v1/" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 401),
    "the control API": (b"GET /llamasup/v1/" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 403),
    "another host": (b"GET /" + LONG + b" HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    "another origin": (b"GET /" + LONG + b" HTTP/1.1\r\n" + HOST + b"Origin: http://evil\r\n\r\n", 403),
    "health": (b"GET /health?" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 200),
}
# Each of these ends its connection.
LAST = {
    "no HTTP": (b"\x16\x03\x01\x1b[2J\r\n\r\n", 400),
    "an endless head": (b"GET /" + LONG * 6, 431),
    "a body that is too large": (
        b"POST /" + LONG + b" HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999\r\n\r\n",
        401,
    ),
}


def connect(running: Llamasup) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(running.wait_for("ready")["port"])), PATIENCE_S)


def flood(running: Llamasup) -> None:
    for raw, status in KINDS.values():
        with connect(running) as sock, sock.makefile("rb") as answers:
            for _ in range(REQUESTS // 10):
                sock.sendall(raw * 10)
                for _ in range(10):
                    assert answers.readline().split()[1] == b"%d" % status
                    length = 0
                    while (line := answers.readline()) != b"\r\n":
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split(b":")[1])
                    answers.read(length)
    for raw, status in LAST.values():
        for _ in range(REQUESTS // 20):
            with connect(running) as sock:
                try:
                    sock.sendall(raw)
                    answer = sock.recv(1 << 16)
                except ConnectionError:  # closed before it had read all
                    continue
                assert not answer or answer.split()[1] == b"%d" % status


@pytest.mark.check("X8", "five lines of each kind, then one count a second")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_refused_requests_lead_to_a_bounded_number_of_bytes(
    tiny_model: Path, fake_server: Callable[..., str], log_format: str
) -> None:
    env = {**os.environ, "LLAMASUP_API_KEY": "the-key"}
    words = ("--runtime", fake_server(), "--log-format", log_format)
    with llamasup(tiny_model, *words, env=env) as running:
        running.wait_for("ready")
        before = len(running.stderr_text)
        began = time.monotonic()
        flood(running)
        took_s = time.monotonic() - began
        assert running.stop() == 0
        stderr = running.stderr_text[before:]
    # Each kind (a status) has its first lines and one more each second, of at most 2 KB.
    statuses = {status for _, status in (*KINDS.values(), *LAST.values()) if status >= 400}
    assert len(stderr) < len(statuses) * 2_000 * (6 + took_s) + 5_000, stderr[:10_000]
    assert "with status 401 (refused)" in stderr
    assert "x" * 600 not in stderr
    assert "\x1b" not in stderr
