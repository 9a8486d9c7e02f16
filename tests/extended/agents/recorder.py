"""Forwards requests of clients to a llamasup, and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from msgspec import Struct

__all__ = ["Recorded", "recorder"]

_OF_THE_CONNECTION = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})


class Recorded(Struct, frozen=True):
    """A request, without the headers that belong to its connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def recorder(to: str) -> Iterator[tuple[str, list[Recorded]]]:
    """Yield the URL of a recorder in front of ``to``, and the list that its requests are added to."""
    address, requests = urlsplit(to), list[Recorded]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _forward(self) -> None:
            body = self._body()
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _OF_THE_CONNECTION
            }
            requests.append(Recorded(self.command, self.path, headers, body))
            upstream = HTTPConnection(str(address.hostname), int(address.port or 80))
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_THE_CONNECTION:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while chunk := answer.read1(65_536):
                self.wfile.write(chunk)
            upstream.close()
            self.close_connection = True

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while length := int(self.rfile.readline(), 16):
                body += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_HEAD = do_POST = _forward

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
