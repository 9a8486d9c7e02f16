"""TLS with a real ssl client: the proxy works the same, and failed handshakes log nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import ssl
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from llamasup.core.proxy import Limits, ProxyConfig
from llamasup.core.proxy.listeners.tls import TlsContext
from llamasup.errors import ConfigInvalid
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

_RESET = struct.pack("ii", 1, 0)


class Certificate:
    """A key and its certificate in files, which can be renewed."""

    def __init__(self, folder: Path) -> None:
        self.key, self.chain = folder / "key.pem", folder / "chain.pem"
        self.roll_out("first")

    def roll_out(self, name: str) -> None:
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(self.key), "-out", str(self.chain)]
        subprocess.run([*words, *names, *files], check=True, capture_output=True)

    def expire(self) -> None:
        """Replace the certificate by an expired one of the same key."""
        request, out = self.chain.with_name("request.pem"), ("-out", str(self.chain))
        for words in (
            ["req", "-new", "-key", str(self.key), "-subj", "/CN=expired", "-out", str(request)],
            ["x509", "-req", "-in", str(request), "-signkey", str(self.key), "-days", "-1", *out],
        ):
            subprocess.run(["openssl", *words], check=True, capture_output=True)

    def context(self) -> TlsContext:
        return TlsContext(str(self.key), str(self.chain))

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.chain))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def rig(make_rig: MakeRig, certificate: Certificate) -> Rig:
    return make_rig(tls=certificate.context())


def connect_tls(
    rig: Rig, context: ssl.SSLContext, *, name: str = "localhost", source: str | None = None
) -> Wire:
    raw = rig.connect(source=source).sock
    return rig.keep(Wire(context.wrap_socket(raw, server_hostname=name, suppress_ragged_eofs=False)))


def common_name(client: Wire) -> str:
    assert isinstance(client.sock, ssl.SSLSocket)
    peer = client.sock.getpeercert()
    assert peer is not None
    return str(dict(pair[0] for pair in peer["subject"])["commonName"])  # type: ignore[misc]


def test_request_and_answer_pass_and_connection_is_kept(rig: Rig, certificate: Certificate) -> None:
    client = connect_tls(rig, certificate.trusting())
    client.send(post(CHAT, b"{}"))
    child = rig.accept()
    for request in (b"", post(CHAT, b"{}")):
        client.send(request)
        assert child.message()[1] == b"{}"
        child.send(answer(b"hello"))
        assert client.message()[1] == b"hello"
    client.close()


@pytest.mark.parametrize(
    ("version", "offered", "agreed"),
    [
        (ssl.TLSVersion.TLSv1_2, ["http/1.1"], "http/1.1"),
        (ssl.TLSVersion.TLSv1_3, ["h2", "http/1.1"], "http/1.1"),
        (ssl.TLSVersion.TLSv1_3, ["h2"], None),
        (ssl.TLSVersion.TLSv1_3, [], None),
    ],
)
def test_alpn_agrees_on_http_1_1(
    rig: Rig, certificate: Certificate, version: ssl.TLSVersion, offered: list[str], agreed: str | None
) -> None:
    context = certificate.trusting()
    context.minimum_version = context.maximum_version = version
    if offered:
        context.set_alpn_protocols(offered)
    client = connect_tls(rig, context)
    assert isinstance(client.sock, ssl.SSLSocket)
    assert client.sock.selected_alpn_protocol() == agreed
    client.send(get(b"/livez"))
    assert status(client.message()[0]) == 200
    client.close()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_below_1_2_is_refused(rig: Rig, certificate: Certificate) -> None:
    context = certificate.trusting()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connect_tls(rig, context)
    await_no_connections(rig)


def test_stream_is_forwarded_chunk_by_chunk(rig: Rig, certificate: Certificate) -> None:
    client = connect_tls(rig, certificate.trusting())
    client.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD)
    for number in range(20):
        piece = chunk(b"data: %d\n\n" % number)
        child.send(piece)  # the next one only after this one has arrived
        assert (
            (client.head() and b"") + client.receive(len(piece)) == piece
            if number == 0
            else (client.receive(len(piece)) == piece)
        )
    child.send(b"0\r\n\r\n")
    assert client.receive(5) == b"0\r\n\r\n"
    client.close()


@pytest.mark.parametrize("leaving", ["orderly", "closed", "reset"])
def test_disconnect_during_stream_closes_upstream_connection(
    rig: Rig, certificate: Certificate, leaving: str
) -> None:
    client = connect_tls(rig, certificate.trusting())
    client.send(post(CHAT, b'{"stream":true}'))
    child = rig.accept()
    child.message()
    child.send(STREAM_HEAD, chunk(b"data: 1\n\n"))
    client.head()
    if leaving == "orderly":
        assert isinstance(client.sock, ssl.SSLSocket)
        client.sock.settimeout(0.0)
        with suppress(ssl.SSLError):  # the answer of the other side is missing or unread
            client.sock.unwrap()  # sends close_notify without a wait
    else:
        if leaving == "reset":
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.close()
    assert child.sees_the_end()
    eventually(lambda: rig.in_flight() == 0)
    client.close()
    await_no_connections(rig)


@pytest.mark.both_loops
def test_broken_answer_never_looks_complete(rig: Rig, certificate: Certificate) -> None:
    client = connect_tls(rig, certificate.trusting())
    client.send(get(b"/props"))
    child = rig.accept()
    child.head()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    client.head()
    client.receive(4)
    child.close()
    with pytest.raises((ConnectionResetError, ssl.SSLEOFError)):
        client.rest()
    client.close()


@pytest.mark.both_loops
def test_slow_reader_pauses_the_child(rig: Rig, certificate: Certificate) -> None:
    client = connect_tls(rig, certificate.trusting())
    client.send(get(b"/props"))
    child = rig.accept()
    child.head()
    child.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
    child.sock.settimeout(0.5)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < 64 << 20:
            sent += child.sock.send(bytes(1 << 16))
    assert sent < 32 << 20  # buffers of the kernel, and little of ours
    client.close()
    await_no_connections(rig)


@pytest.mark.both_loops
def test_client_reads_the_refusal_of_its_upload(
    make_rig: MakeRig, certificate: Certificate, clock: Clock
) -> None:
    """TLS has no half-close: the proxy reads until the client disconnects, or its time is over."""
    rig = make_rig(
        ProxyConfig(limits=Limits(body_bytes=1000, linger_s=100.0, sweep_s=0.05)), tls=certificate.context()
    )
    client = connect_tls(rig, certificate.trusting())
    client.send(get(CHAT, b"Transfer-Encoding: chunked", method=b"POST"))
    client.send(*[chunk(bytes(500))] * 3)
    head, _ = client.message()
    assert (status(head), field(head, b"connection")) == (413, b"close")
    client.send(*[chunk(bytes(500))] * 3)
    clock.pass_until_readable(client, 60.0)
    assert client.rest() == b""
    client.close()
    await_no_connections(rig)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\x00\x05hello", b""])
def test_client_without_tls_logs_nothing(
    rig: Rig, certificate: Certificate, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    good = connect_tls(rig, certificate.trusting())
    bad = rig.send(first)
    if not first:
        bad.close()
    else:
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in bad.rest()  # an alert of TLS at most
    good.send(get(b"/livez"))
    assert status(good.message()[0]) == 200
    good.close()
    await_no_connections(rig)
    assert caplog.records == []


@pytest.mark.both_loops
def test_incomplete_handshake_times_out(
    make_rig: MakeRig, certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(head_s=0.2)), tls=certificate.context())
    hello = rig.send(b"\x16\x03\x01")
    silent = rig.connect()
    assert hello.sees_the_end()
    assert silent.sees_the_end()
    await_no_connections(rig)
    assert caplog.records == []


def test_handshake_counts_as_connection_and_can_be_closed_for_another(
    make_rig: MakeRig, certificate: Certificate
) -> None:
    rig = make_rig(ProxyConfig(limits=Limits(connections=2)), tls=certificate.context())
    first = rig.connect(source="127.0.0.2")
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 1)
    second = rig.connect(source="127.0.0.3")
    third = connect_tls(rig, certificate.trusting())
    third.send(get(b"/livez"))
    assert status(third.message()[0]) == 200
    assert first.sees_the_end()
    second.close()
    third.close()


@pytest.mark.check("X8")
def test_unfinished_handshakes_cannot_keep_clients_with_a_key_out(
    make_rig: MakeRig, certificate: Certificate
) -> None:
    limits = Limits(connections=4, connections_per_client=2)
    rig = make_rig(ProxyConfig(api_keys=("sesame",), limits=limits), tls=certificate.context())
    known = connect_tls(rig, certificate.trusting())
    ask = get(b"/props", b"Authorization: Bearer sesame")
    known.send(ask)
    child = rig.accept()
    child.head()
    child.send(answer())
    known.message()
    shaking = [rig.connect() for _ in range(5)]
    for wire in shaking[:-1]:
        assert wire.sees_the_end()
    other = connect_tls(rig, certificate.trusting())
    for client in (other, known):
        client.send(ask)
        child.head()
        child.send(answer(b"served"))
        assert client.message()[1] == b"served"
        client.close()


def test_closing_proxy_ends_unfinished_handshakes(rig: Rig, certificate: Certificate) -> None:
    shaking = rig.send(b"\x16\x03\x01")
    shaken = connect_tls(rig, certificate.trusting())
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients)) == 2)
    rig.close_proxy()
    assert len(rig.proxy.clients) == 0
    assert shaking.sees_the_end()
    shaken.close()


def test_next_connection_uses_renewed_certificate(make_rig: MakeRig, tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    rig = make_rig(tls=certificate.context())
    before = connect_tls(rig, certificate.trusting())
    assert common_name(before) == "first"
    certificate.roll_out("second")
    after = connect_tls(rig, certificate.trusting(), name="127.0.0.1")  # without a name in the handshake
    assert common_name(after) == "second"
    for client in (before, after):
        client.send(get(b"/livez"))
        assert status(client.message()[0]) == 200
        client.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_expired_certificate_is_warned_about_once_at_start(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(tmp_path)
    certificate.expire()
    rig = make_rig(tls=certificate.context())
    (warning,) = warnings(caplog)
    assert re.search(r"chain\.pem' expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC\. Renew it", warning)
    for _ in range(2):
        client = connect_tls(rig, unverified())  # it is served nevertheless
        client.close()
    certificate.roll_out("second")
    client = connect_tls(rig, certificate.trusting())
    assert common_name(client) == "second"
    client.close()
    assert len(warnings(caplog)) == 1


def test_expired_renewal_is_warned_about(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(tmp_path)
    context = certificate.context()
    warned: list[str] = []
    context.when_warned = lambda message, remedy: warned.append(message)
    rig = make_rig(tls=context)
    connect_tls(rig, certificate.trusting()).close()
    assert warned == []
    certificate.expire()
    connect_tls(rig, unverified()).close()
    assert len(warned) == 1
    assert "expired on" in warned[0]
    assert warnings(caplog) == []  # reported once, by the callback


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_non_ascii_server_name_prints_no_traceback(
    rig: Rig,
    certificate: Certificate,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = certificate.trusting().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        handshake.do_handshake()
    hello = outgoing.read()
    assert hello.count(b"localhost") == 1
    bad = rig.send(hello.replace(b"localhost", b"l\xf6calhost"))
    assert bad.sock.recv(1)  # an answer or an alert
    bad.close()
    good = connect_tls(rig, certificate.trusting())
    good.send(get(b"/livez"))
    assert status(good.message()[0]) == 200
    good.close()
    await_no_connections(rig)
    assert (unraisable, caplog.records, capfd.readouterr().err) == ([], [], "")


def test_named_pipe_is_refused_as_certificate(certificate: Certificate, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for key, chain in ((pipe, certificate.chain), (certificate.key, pipe)):
        with pytest.raises(ConfigInvalid, match="is not a regular file"):
            TlsContext(str(key), str(chain))


def test_unusable_renewal_keeps_the_previous_certificate(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(tmp_path)
    trusting = certificate.trusting()
    rig = make_rig(tls=certificate.context())
    certificate.chain.write_text("half written")
    for _ in range(2):
        client = connect_tls(rig, trusting)
        assert common_name(client) == "first"
        client.close()
    (warning,) = warnings(caplog)
    assert str(certificate.chain) in warning


def test_handshakes_leak_no_descriptors(rig: Rig, certificate: Certificate) -> None:
    trusting = certificate.trusting()

    def some() -> None:
        for _ in range(10):
            good = connect_tls(rig, trusting)
            good.close()
            bad = rig.send(b"GET / HTTP/1.1\r\n\r\n")
            bad.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            bad.close()
        await_no_connections(rig)

    some()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    some()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208


def await_no_connections(rig: Rig) -> None:
    eventually(lambda: rig.call(lambda: len(rig.proxy.clients) + len(rig.proxy.tasks._running)) == 0)
