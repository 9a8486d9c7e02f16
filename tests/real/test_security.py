"""The same attacks with a real llama-server behind the proxy, on both runtimes (X4, X5, X7, X9).

If an attack works on llama-server itself, the test shows that first: otherwise it would prove nothing.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.core.proxy.rig import PATIENCE_S, Wire, field, status
from tests.e2e.driver import Llamasup, llamasup, wrapped
from tests.kit.runtimes import harmless_tool
from tests.real.clients import Request, bare_server, environment, free_port, response_to
from tests.security.test_framing import REFUSED
from tests.security.test_paths import spellings


@pytest.fixture(scope="module")
def server(runtime: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llamasup]:
    env = environment(None if runtime == "embedded" else runtime, tmp_path_factory.mktemp("home"))
    with llamasup(tiny_model, "--runtime", runtime, env=env) as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


def connect(running: Llamasup) -> Wire:
    return Wire(socket.create_connection(("127.0.0.1", int(running.wait_for("ready")["port"])), PATIENCE_S))


def tokenize(text: str, *, lines: bytes = b"", chunked: bool = False) -> bytes:
    body = json.dumps({"content": text}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + lines
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    middle = len(body) // 2
    pieces = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (body[:middle], body[middle:]))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\nHost: evil\r\n\r\n"


SMUGGLED = "POST /props HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
VARIANTS = {
    "by length": tokenize(SMUGGLED),
    "in chunks with extensions and trailers": tokenize(SMUGGLED, chunked=True),
    "by length, upgrade offered": tokenize(SMUGGLED, lines=b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    "in chunks, upgrade offered": tokenize(
        SMUGGLED, lines=b"Connection: upgrade\r\nUpgrade: websocket\r\n", chunked=True
    ),
    "what Connection names": tokenize(SMUGGLED, lines=b"Connection: host, content-length\r\n"),
}


@pytest.mark.check("X9", "a real server answers only what was sent")
@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS)
def test_request_inside_a_body_is_never_answered(server: Llamasup, raw: bytes) -> None:
    wire = connect(server)
    wire.send(tokenize(SMUGGLED))
    _, expected = wire.message()
    wire.send(raw + tokenize("next") + raw)
    answers = [wire.message() for _ in range(3)]
    assert [status(head) for head, _ in answers] == [200, 200, 200]
    assert [body == expected for _, body in answers] == [True, False, True]
    assert len(json.loads(expected)["tokens"]) > len(json.loads(answers[1][1])["tokens"])
    assert wire.is_quiet()
    wire.close()


@pytest.mark.check("X9")
def test_broken_framing_gets_one_answer_and_the_server_keeps_serving(server: Llamasup) -> None:
    for how, raw in REFUSED.items():
        wire = connect(server)
        wire.send(raw + SMUGGLED.encode() + tokenize("next"))
        head, _ = wire.message()
        assert (how, status(head) in (400, 505)) == (how, True)
        assert field(head, b"connection") == b"close"
        assert wire.sees_the_end(), how
        wire.close()
    wire = connect(server)
    wire.send(tokenize("next"))
    assert status(wire.head()) == 200
    wire.close()


def child_socket(running: Llamasup) -> str:
    found = [
        str(connection.laddr) for child in running.children() for connection in child.net_connections("unix")
    ]
    (path,) = {path for path in found if path.startswith("/")}
    return path


def status_without_proxy(path: str, raw: bytes) -> int:
    """The status with which the child itself answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(path)
        sock.sendall(raw)
        return int(sock.recv(1 << 16).split(b" ", 2)[1])


@pytest.mark.check("X7", "403, also for `%uXXXX`")
def test_routes_that_llama_server_opens_stay_closed_with_strict(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    env = environment(None if runtime == "embedded" else runtime, tmp_path)
    program = [sys.executable, "-m", "llamasup.embedded"] if runtime == "embedded" else [runtime]
    flags = [
        "-m",
        str(tiny_model),
        "--port",
        str(free_port()),
        "--props",
        "--api-prefix",
        "/p",
        "--api-key",
        "k",
    ]
    flags += ["--slot-save-path", str(tmp_path)] + (
        [] if runtime == "embedded" else ["--tools", harmless_tool(runtime)]
    )
    closed = [(b"POST", b"/p/props", b"{}"), (b"POST", b"/p/slots/0", b'{"filename":"x"}')]
    if runtime != "embedded":
        closed.append((b"GET", b"/p/tools", b""))
    accepted: set[str] = set()
    with wrapped(*program, *flags, options=["--strict"], env=env) as running:
        running.wait_for("ready")
        for method, path, body in closed:
            for how, spelled in spellings(path).items():
                spelled += b"?action=erase" if b"?" not in spelled and b"lot" in path else b""
                lines = b"Host: localhost\r\nX-Api-Key: k\r\nContent-Length: %d\r\n" % len(body)
                raw = method + b" " + spelled + b" HTTP/1.1\r\n" + lines + b"\r\n" + body
                if status_without_proxy(child_socket(running), raw) == 200:
                    accepted.add(how)
                wire = connect(running)
                wire.send(raw)
                head, _ = wire.message()
                assert (how, status(head)) == (how, 403)
                wire.close()
        assert running.stop() == 0
    assert accepted >= {"plain", "with a query", "a letter in %XX", "a letter in %uXXXX"}


@pytest.mark.check("X5", "no TCP port, folder of mode 0700")
def test_only_its_owner_can_reach_a_real_child(server: Llamasup) -> None:
    path = Path(child_socket(server))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for child in server.children():
        assert child.net_connections("inet") == []
        assert not [word for word in child.cmdline() if word == "--api-key"]


class NoContentHandler(BaseHTTPRequestHandler):
    """Answers every GET with 204."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.check("X9", "100 answers of a real server")
def test_204_that_announces_a_body_corrupts_no_later_answer(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    if runtime == "embedded":
        pytest.skip("the embedded runtime has no /cors-proxy")
    with HTTPServer(("127.0.0.1", 0), NoContentHandler) as target:
        thread = threading.Thread(target=target.serve_forever)
        thread.start()
        try:
            path = f"/cors-proxy?url=http://127.0.0.1:{target.server_port}/"
            request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()
            env = environment(runtime, tmp_path)
            command = [runtime, "-m", str(tiny_model), "--port", str(port := free_port()), "--ui-mcp-proxy"]
            with bare_server(command, env=env):
                bare = response_to(
                    HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S), Request("GET", path)
                )
            if bare.status != 204:
                pytest.skip(f"the /cors-proxy of this build answers {bare.status} in place of a 204")
            with wrapped(*command, env=env) as running:
                running.wait_for("ready")
                with closing(connect(running)) as wire:
                    wire.send(tokenize("next"))
                    _, expected = wire.message()
                    for number in range(100):
                        wire.send(request)
                        assert (number, status(wire.head())) == (number, 204)
                        wire.send(tokenize("next"))
                        head, body = wire.message()
                        assert (number, status(head), body) == (number, 200, expected)
                assert running.stop() == 0
        finally:
            target.shutdown()
            thread.join()


@pytest.mark.check("X8", "1,200 connections, silent or with half a head")
def test_connections_without_a_key_do_not_lock_out_other_clients(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    env = environment(None if runtime == "embedded" else runtime, tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    request = tokenize("next", lines=b"Authorization: Bearer sesame\r\n")
    with ExitStack() as stack:
        running = stack.enter_context(
            llamasup(tiny_model, "--runtime", runtime, "--api-key-file", str(keys), env=env)
        )
        running.wait_for("ready")
        known = stack.enter_context(closing(connect(running)))
        known.send(request)
        head, expected = known.message()
        assert status(head) == 200
        for number in range(1200):
            wire = stack.enter_context(closing(connect(running)))
            wire.send(b"GET /v1/models HTTP/1.1\r\nHost: " if number % 2 else b"")
        for wire in (stack.enter_context(closing(connect(running))), known):
            wire.send(request)
            head, body = wire.message()
            assert (status(head), body) == (200, expected)
        assert running.stop() == 0
