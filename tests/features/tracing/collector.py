"""A trace collector: takes OTLP over HTTP on loopback, decodes it, and fails as a test says."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.kit.patience import PATIENCE_S

__all__ = ["Collector", "collector", "plain"]


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""

    def value(one: KeyValue) -> Any:
        return getattr(one.value, str(one.value.WhichOneof("value")))

    return {one.key: value(one) for one in attributes}


class Collector:
    """``answers``: the statuses of the next requests; afterwards it answers 200. ``hangs``: until ``go``.

    ``rejected``: how many spans each answer says were rejected; None: it is not an answer of OTLP.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[int, Mapping[str, str]]] = []
        self.requests: list[tuple[str, Mapping[str, str], ExportTraceServiceRequest]] = []
        self.rejected: int | None = 0
        self.hangs = False
        self.asked = threading.Event()
        self.go = threading.Event()

    @property
    def spans(self) -> list[Span]:
        """All spans of the requests that were accepted."""
        return [
            span
            for _, _, request in list(self.requests)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def resource(self) -> dict[str, Any]:
        _, _, request = self.requests[0]
        return plain(request.resource_spans[0].resource.attributes)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.asked.set()
            if state.hangs:
                state.go.wait(PATIENCE_S)
            status, headers = state.answers.pop(0) if state.answers else (200, {})
            if status == 200:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                headers_sent = {name.lower(): value for name, value in self.headers.items()}
                state.requests.append((self.path, headers_sent, request))
            response = ExportTraceServiceResponse()
            if state.rejected:
                response.partial_success.rejected_spans = state.rejected
            answer = b"<html>" if state.rejected is None else response.SerializeToString()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            """A client that stops waits for no answer."""

    with Server(("127.0.0.1", port), Handler) as server:
        state = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.go.set()
            server.shutdown()
            thread.join(PATIENCE_S)
