"""Requests of many megabytes arrive complete at a real llama-server, and llamasup does not buffer them."""

from __future__ import annotations

import base64
import http.client
import json
import random
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, llamasup

pytestmark = pytest.mark.one_runtime

MIB = 1 << 20
PIECE = 64 * 1024


def chat_of_size(size: int) -> bytes:
    """A chat with one message as long as a large picture. ``/apply-template`` answers with the whole text."""
    text = base64.b64encode(random.Random(1).randbytes(size * 3 // 4)).decode()
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


class DirectConnection(http.client.HTTPConnection):
    """A connection to llama-server's own socket."""

    def __init__(self, running: Llamasup) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        (child,) = [process.cmdline() for process in running.children() if "--host" in process.cmdline()]
        self._path = child[child.index("--host") + 1]

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def ask(
    connection: http.client.HTTPConnection, path: str, body: bytes | Iterable[bytes]
) -> tuple[int, bytes]:
    """Send a request; chunked if ``body`` is an iterable."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def pieces(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), PIECE):
        yield body[at : at + PIECE]


@pytest.fixture
def server(runtime: str, tiny_model: Path) -> Iterator[Llamasup]:
    with llamasup(tiny_model, "--runtime", runtime) as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


def peak_bytes(running: Llamasup) -> int:
    """The peak memory of llamasup so far."""
    text = Path(f"/proc/{running.pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.M)
    assert found is not None
    return int(found[1]) * 1024


def test_twenty_megabytes_arrive_whole_without_being_held_in_memory(server: Llamasup) -> None:
    body = chat_of_size(20 * MIB)
    direct = DirectConnection(server)
    expected = ask(direct, "/apply-template", body)
    direct.close()
    assert expected[0] == 200
    assert len(expected[1]) > 20 * MIB
    front = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_S)
    assert ask(front, "/tokenize", b'{"content":"warm"}')[0] == 200
    before = peak_bytes(server)
    for form in (body, pieces(body)):
        assert ask(front, "/apply-template", form) == expected
    front.close()
    # The replay copy and the buffers of both directions take about a MiB; a buffered body would take 20.
    assert peak_bytes(server) - before < len(body) / 2


def test_prompt_of_megabytes_is_tokenized_as_without_llamasup(server: Llamasup) -> None:
    words = random.Random(2).choices(["some", "words", "and", "their", "like", "\u00fc", "x"], k=400_000)
    body = json.dumps({"content": " ".join(words)}).encode()
    direct = DirectConnection(server)
    expected = ask(direct, "/tokenize", body)
    direct.close()
    front = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_S)
    assert ask(front, "/tokenize", pieces(body)) == expected
    assert ask(front, "/tokenize", body) == expected
    front.close()


def test_refusal_of_llama_server_reaches_the_client_during_the_upload(server: Llamasup) -> None:
    front = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_S)
    front.connect()
    front.putrequest("POST", "/no-such-path")
    front.putheader("Content-Length", str(30 * MIB))
    front.endheaders(b"x" * MIB)
    response = front.getresponse()
    assert response.status == 404
    assert json.loads(response.read())["error"]["message"] == "File Not Found"
    assert response.headers["Connection"] == "close"
    front.close()
