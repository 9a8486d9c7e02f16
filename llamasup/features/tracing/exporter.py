"""Sends the spans of finished requests to a trace collector (OTLP over HTTP), in its own thread.

The event loop only appends the record to a queue, and drops it if the queue is full. A collector that is dead
or slow delays neither a request nor, by more than ``CLOSE_TIMEOUT_S``, the end of llamasup.
"""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import logging
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from random import getrandbits, random
from time import monotonic, time_ns
from typing import Final
from urllib.parse import urlsplit

from llamasup._version import __version__
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.system.batch_writer import BatchWriter
from llamasup.core.system.own_command import python_executable
from llamasup.features.tracing.delivery import Delivered, Delivery, Failed, delay_s, delivery_of
from llamasup.features.tracing.settings import (
    TracingProblem,
    TracingSettings,
    is_sampled,
    read_settings,
)
from llamasup.features.tracing.spans import is_traced, spans_of

__all__ = ["CLOSE_TIMEOUT_S", "MAX_PENDING", "SpanExporter", "span_exporter"]

_log = logging.getLogger(__name__)

# Records that wait for the collector, about 1 KiB each: a minute without it at 60 requests per second.
MAX_PENDING: Final = 4000
LINGER_S: Final = 1.0  # one request to the collector per second, or per 100 records
CLOSE_TIMEOUT_S: Final = 1.0
WARN_AGAIN_S: Final = 600.0  # a collector that fails again and again is reported this often
_ANSWER_BYTES: Final = 65_536


def _no_package() -> str:
    if python_executable() is None:
        return "this application has no support for traces."
    return 'the package opentelemetry-proto is missing. Install it: pip install "llamasup[otel]"'


def span_exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    """Return the exporter of ``environ``; None if tracing is off. Warns if it is on and cannot work."""
    match read_settings(environ):
        case None:
            return None
        case TracingProblem(message, remedy):
            _log.warning("no spans are sent: %s %s", message, remedy)
            return None
        case settings:
            if not _has_package():
                _log.warning("no spans are sent to %s: %s", settings.shown_url, _no_package())
                return None
            return SpanExporter(settings)


def _has_package() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.proto") is not None
    except ModuleNotFoundError:  # not even its parent
        return False


class SpanExporter:
    """Exports spans in a thread of its own. ``write`` and ``dropped`` are for the event loop's thread."""

    def __init__(self, settings: TracingSettings) -> None:
        self._settings = settings
        self._lost = 0  # counted by the exporter's thread
        self._closing = threading.Event()
        self._collector = _Collector(settings)
        self._warned_s = float("-inf")
        self._writer = BatchWriter(self._export, name="spans", linger_s=LINGER_S, max_waiting=MAX_PENDING)

    def __repr__(self) -> str:
        counts = f"{len(self._writer)} waiting, {self.dropped()} lost"
        return f"<SpanExporter to {self._settings.shown_url}: {counts}>"

    def write(self, record: RequestRecord) -> None:
        """Queue the record. Never waits."""
        if not is_traced(record):
            return
        if not is_sampled(self._settings.sampler, record.trace_id, record.parent_sampled, getrandbits(64)):
            return
        self._writer.put((monotonic(), record))

    def dropped(self) -> int:
        """Return the number of requests whose spans were lost so far."""
        return self._writer.rejected + self._writer.lost + self._lost

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the pending spans. Blocks for ``timeout_s`` at most."""
        self._closing.set()
        if self._writer.close(timeout_s):
            self._collector.close()
        else:
            self._collector.abort()

    # --- in the thread

    def _export(self, taken: list[tuple[float, RequestRecord]]) -> bool:
        offset_ns = time_ns() - round(monotonic() * 1e9)
        spans = [
            span
            for ended_s, record in taken
            for span in spans_of(record, offset_ns + round(ended_s * 1e9), os.urandom)
        ]
        try:
            # Here, in the thread: the import takes 25 ms, and 6 MiB.
            from llamasup.features.tracing.otlp import encoded
        except ImportError as error:
            self._warn(f"spans cannot be made ({error}). Reinstall the package opentelemetry-proto.")
            self._lost += len(taken)
            return True
        delivery = self._deliver(encoded(spans, self._settings.resource))
        if isinstance(delivery, Failed):
            self._lost += len(taken)
        if self._closing.is_set():  # and perhaps too late for ``close``
            self._collector.close()
        # Once llamasup ends, a collector that fails gets no further batch.
        return isinstance(delivery, Delivered) or not self._closing.is_set()

    def _deliver(self, body: bytes) -> Delivery:
        """Send until it succeeds, cannot succeed, or llamasup ends. The queue fills up meanwhile."""
        attempt = 0
        while True:
            delivery = self._collector.post(body)
            attempt += 1
            self._report(delivery)
            if isinstance(delivery, Delivered) or not delivery.retries or self._closing.is_set():
                return delivery
            self._closing.wait(delay_s(attempt, delivery.after_s, random()))  # noqa: S311 - not a secret

    def _report(self, delivery: Delivery) -> None:
        match delivery:
            case Delivered(0):
                return
            case Delivered(rejected):
                problem = f"it rejects spans ({rejected} of the last request)"
            case Failed(reason):
                problem = reason
        self._warn(
            f"spans cannot be sent to {self._settings.shown_url}: {problem}. Requests are served as before."
            " llamasup_traces_dropped_total counts those whose spans are lost."
        )

    def _warn(self, text: str) -> None:
        """Show the first problem, and then one every ``WARN_AGAIN_S``."""
        if monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = monotonic()
            _log.warning("%s", text)


class _Collector:
    """A connection to the collector, kept open between batches."""

    def __init__(self, settings: TracingSettings) -> None:
        parts = urlsplit(settings.url)
        self._settings = settings
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._target = parts._replace(scheme="", netloc="").geturl()
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"llamasup/{__version__}",
            **({"Content-Encoding": "gzip"} if settings.gzip else {}),
            **dict(settings.headers),
        }
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> Delivery:
        if self._settings.gzip:
            body = gzip.compress(body)
        was_open = self._connection is not None
        try:
            try:
                return self._post(body)
            except (ConnectionError, http.client.BadStatusLine):
                if not was_open:  # else the collector may have closed an idle connection
                    raise
                return self._post(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Failed(_reason(error))

    def abort(self) -> None:
        """Interrupt ``post``, from another thread."""
        connection = self._connection
        if connection is not None and (sock := connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _post(self, body: bytes) -> Delivery:
        from llamasup.features.tracing.otlp import rejected_spans  # late, as in the exporter

        connection = self._connection = self._connection or self._connect()
        try:
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            answer = response.read(_ANSWER_BYTES)
        except BaseException:
            self.close()
            raise
        if not response.isclosed():  # its answer is longer
            self.close()
        delivery = delivery_of(response.status, response.headers.get("Retry-After"))
        return Delivered(rejected_spans(answer)) if isinstance(delivery, Delivered) else delivery

    def _connect(self) -> http.client.HTTPConnection:
        timeout_s = self._settings.timeout_s
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=self._settings.certificate)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
