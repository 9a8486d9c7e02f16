"""The control client sends its key only to a trusted llamasup, and checks the answers."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.errors import ControlFailed, NotAllowed, NotRunning
from tests.core.control.fake import PATIENCE_S


class Other:
    """Another program, which gives everybody the same answer and keeps what it was told."""

    def __init__(self, body: bytes, certificate: tuple[str, str] | None, status: bytes) -> None:
        self.heard = b""
        self._body, self._status = body, status
        self._tls = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*certificate)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        with suppress(OSError):  # it is over
            while True:
                self._serve(self.listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(PATIENCE_S)
        with client, suppress(ssl.SSLError):
            talk = client if self._tls is None else self._tls.wrap_socket(client, server_side=True)
            with talk:
                self.heard += talk.recv(65536)
                head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (
                    self._status,
                    len(self._body),
                )
                talk.sendall(head + self._body)


@contextmanager
def another(
    body: bytes, certificate: tuple[str, str] | None = None, status: bytes = b"200 OK"
) -> Iterator[Other]:
    other = Other(body, certificate, status)
    thread = threading.Thread(target=other.run)
    thread.start()
    try:
        yield other
    finally:
        other.listener.shutdown(socket.SHUT_RDWR)
        other.listener.close()
        thread.join()


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "Https"])
def test_key_is_not_sent_to_a_server_with_untrusted_certificate(
    scheme: str, certificate: tuple[str, str]
) -> None:
    with another(b"{}", certificate) as other:
        place = ControlAddress(f"{scheme}://localhost:{other.port}", api_key="sk-secret")
        with ControlClient(place) as client, pytest.raises(NotRunning) as caught:
            client.status()
    assert other.heard == b""
    assert "SSL_CERT_FILE" in caught.value.remedy


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"null",
        b"1",
        b'{"pid":1,"url":"x","models":[{}]}',
        b"<html>",
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_other_program_is_detected(body: bytes) -> None:
    with another(body) as other, ControlClient(ControlAddress(f"http://127.0.0.1:{other.port}")) as client:
        with pytest.raises(ControlFailed, match="does not answer GET /llamasup/v1/status"):
            client.status()
        if body[:1] != b"{":
            with pytest.raises(ControlFailed, match="does not answer POST"):
                client.load("tiny")


@pytest.mark.parametrize(
    ("api_key", "remedy"), [(None, "--api-key-file"), ("sk-old", "Perhaps it was revoked.")]
)
def test_refused_key_has_the_remedy_of_a_command(api_key: str | None, remedy: str) -> None:
    refusal = b'{"error":{"message":"no","cause":"api_key","remedy":"perhaps it was revoked"}}'
    with another(refusal, status=b"401 Unauthorized") as other:
        address = ControlAddress(f"http://127.0.0.1:{other.port}", api_key=api_key)
        with ControlClient(address) as client, pytest.raises(NotAllowed) as caught:
            client.status()
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("event", [b"data: {", b"data: " + b"[" * 100_000])
def test_invalid_event_is_an_error_of_llamasup(event: bytes) -> None:
    with (
        another(event + b"\n\n") as other,
        ControlClient(ControlAddress(f"http://127.0.0.1:{other.port}")) as client,
        pytest.raises(ControlFailed, match="llamasup sent an invalid event"),
    ):
        list(client.events())
