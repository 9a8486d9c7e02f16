"""Other features of HTTP/1.1, and the kinds of listeners."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from llamasup.core.proxy import ProxyConfig, bind, bind_unix
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.listeners.test_tls import Certificate
from tests.core.proxy.rig import CHAT, STREAM_HEAD, Rig, Wire, answer, chunk, field, get, post, status

EVENT = chunk(b"data: {}\n\n")
LARGE = b"x" * (3 << 20)
RUN = ProxyConfig(route_by_model=False)


def converse(client: Wire, rig: Rig) -> Wire:
    """Use all features on one connection, one after the other. Returns the connection of the child."""
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    assert child.message()[1] == b"{}"
    child.send(answer(b"plain"))
    assert client.message()[1] == b"plain"
    client.send(get(b"/a") + get(b"/b"))  # pipelined
    for path in (b"/a", b"/b"):
        assert child.head().split(b" ")[1] == path
        child.send(answer(path))
        assert client.message()[1] == path
    client.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    client.send(chunk(b"in "), chunk(b"pieces"), b"0\r\nX-Trailer: t\r\n\r\n")
    assert child.message()[1] == b"in pieces"
    child.send(STREAM_HEAD + EVENT)
    client.until(EVENT)
    child.send(EVENT + b"0\r\n\r\n")
    assert client.until(b"\r\n0\r\n\r\n") == EVENT + b"0\r\n\r\n"
    client.send(get(CHAT, b"Content-Length: 2", b"Expect: 100-continue", method=b"POST"))
    assert client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"{}")
    child.message()
    child.send(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert status(client.head()) == 204
    client.send(get(b"/props", method=b"HEAD") + get(b"/livez"))
    assert child.head().startswith(b"HEAD ")
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
    assert field(client.head(), b"content-length") == b"9"
    assert client.message()[1] == b'{"status":"ok"}'
    client.send(get(b"/props", b"Connection: close"))
    child = rig.accept()  # after an answer to HEAD, the upstream connection is not reused
    child.head()
    child.send(answer(b"last"))
    assert client.message()[1] == b"last"
    assert client.sees_the_end()
    return child


# --- listeners


def test_listener_on_tcp_supports_all_features(rig: Rig) -> None:
    converse(rig.connect(), rig)


def test_listener_on_ipv6_supports_all_features(make_rig: MakeRig) -> None:
    try:
        sockets = bind("::1", 0)
    except OSError:
        pytest.skip("there is no IPv6 loopback here")
    rig = make_rig(sockets=sockets)
    converse(rig.connect(), rig)
    client = rig.send(get(b"/livez").replace(b"localhost", b"[::1]:%d" % rig.address[1]))
    assert status(client.message()[0]) == 200


def test_listener_on_a_unix_socket_supports_all_features(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(sockets=[bind_unix(str(tmp_path / "front.sock"))])
    converse(rig.connect(), rig)


def test_inherited_socket_supports_all_features(make_rig: MakeRig) -> None:
    """As with systemd: clients may have connected before the proxy had the socket."""
    listening = socket.create_server(("127.0.0.1", 0))
    early = socket.create_connection(listening.getsockname())
    early.sendall(get(b"/livez"))
    rig = make_rig(sockets=[socket.socket(fileno=listening.detach())])
    first = Wire(early)
    assert status(first.message()[0]) == 200
    first.close()
    converse(rig.connect(), rig)


def test_listener_with_tls_supports_all_features(make_rig: MakeRig, tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    rig = make_rig(RUN, tls=certificate.context())

    def secured() -> Wire:
        return Wire(certificate.trusting().wrap_socket(rig.connect().sock, server_hostname="localhost"))

    client = secured()
    child = converse(client, rig)
    client.close()
    # A large body is forwarded while it arrives, and an early answer is read before its end.
    client = secured()
    client.send(get(CHAT, b"Content-Length: %d" % len(LARGE), method=b"POST"), LARGE[: 1 << 17])
    child.head()
    child.receive(1 << 17)
    child.send(answer(b"refused", code=b"400 Bad Request"))
    client.send(LARGE[: 1 << 17])
    head, body = client.message()
    assert (status(head), field(head, b"connection"), body) == (400, b"close", b"refused")
    assert isinstance(client.sock, ssl.SSLSocket)
    client.close()


# --- old clients, odd requests


@pytest.mark.parametrize("lines", [(), (b"Connection: keep-alive",)], ids=["", "keep-alive"])
def test_http_1_0_connection_ends_with_its_answer(rig: Rig, lines: tuple[bytes, ...]) -> None:
    """Also for a client that asks for keep-alive: a close is always correct."""
    client, child = rig.begin(get(b"/props", *lines).replace(b"HTTP/1.1", b"HTTP/1.0"))
    child.send(answer(b"whole"))
    head, body = client.message()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")  # a server sends its own version
    assert (field(head, b"connection"), body) == (b"close", b"whole")
    assert client.sees_the_end()


def test_http_1_0_client_gets_no_100_continue(rig: Rig) -> None:
    client = rig.connect()
    request = get(CHAT, b"Content-Length: 2", b"Expect: 100-continue", method=b"POST")
    client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    rig.ask(get(b"/livez"))
    assert client.is_quiet()
    client.send(b"{}")
    child = rig.accept()
    child.message()
    child.send(answer(b"fine"))
    assert client.message()[1] == b"fine"


def test_options_request_is_forwarded(rig: Rig) -> None:
    client = rig.send(get(CHAT, method=b"OPTIONS"))
    child = rig.accept()
    assert child.head().startswith(b"OPTIONS /v1/chat/completions ")
    child.send(answer(b"", b"Allow: POST"))
    assert field(client.message()[0], b"allow") == b"POST"


def test_options_asterisk_is_forwarded(rig: Rig) -> None:
    rig.send(get(b"*", method=b"OPTIONS"))
    assert rig.accept().head().startswith(b"OPTIONS * HTTP/1.1\r\n")


def test_preflight_with_body_is_answered_and_connection_kept(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(origins=("https://app.example",), route_by_model=False))
    client = rig.connect()
    preflight_headers = (b"Origin: https://app.example", b"Access-Control-Request-Method: POST")
    length = b"Content-Length: %d" % len(LARGE)
    client.send(get(CHAT, *preflight_headers, length, method=b"OPTIONS"), LARGE, get(b"/livez"))
    assert status(client.head()) == 204
    assert client.message()[1] == b'{"status":"ok"}'
    assert rig.in_flight() == 0


def test_head_of_nearly_64_kib_is_forwarded(rig: Rig) -> None:
    rig.send(get(b"/props", b"Accept: " + b"y" * 62_000))
    assert field(rig.accept().head(), b"accept") == b"y" * 62_000


def test_body_of_get_request_is_forwarded(rig: Rig) -> None:
    rig.send(get(b"/props", b"Content-Length: 4") + b"body")
    assert rig.accept().message()[1] == b"body"


def test_early_hints_before_final_head_are_ignored(rig: Rig) -> None:
    client, child = rig.begin(get())
    for byte in b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(b"real"):
        child.send(bytes([byte]))
    assert client.message()[1] == b"real"


# --- half-closed
#
# A half-closed connection looks like a closed one, with which a client cancels its request. To free the slot
# at once (S11), the proxy treats both alike, as nginx and Envoy do. Answers sent before still arrive.


def test_local_answer_reaches_half_closed_client(rig: Rig) -> None:
    client = rig.send(get(b"/livez") * 3)
    client.sock.shutdown(socket.SHUT_WR)
    assert client.rest().count(b"200 OK") == 3


def test_body_cut_by_half_close_is_never_forwarded_as_complete(make_rig: MakeRig) -> None:
    rig = make_rig(RUN)
    client = rig.send(get(CHAT, b"Content-Length: %d" % len(LARGE), method=b"POST"), LARGE[:-1])
    child = rig.accept()
    child.head()
    client.sock.shutdown(socket.SHUT_WR)
    assert len(child.rest()) < len(LARGE)
    assert client.sees_the_end()
    assert rig.record().outcome == "client_gone"


def test_response_within_socket_buffers_is_complete_for_slow_reader(rig: Rig) -> None:
    """A close after the answer does not cut the answer."""
    client, child = rig.begin(get(b"/props", b"Connection: close"))
    child.send(answer(LARGE))
    child.sock.shutdown(socket.SHUT_WR)
    assert rig.record().outcome == "ok"
    assert client.rest().endswith(LARGE)
