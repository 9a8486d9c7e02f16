"""Sends the spans of finished requests to a trace collector, in a thread.

The event loop only appends the record to a queue, and drops it if the queue is full. A collector that is dead
or slow delays neither a request nor, by more than ``CLOSE_TIMEOUT_S``, the end of llamasup.

The SDK of OpenTelemetry encodes and sends the spans. Its ``BatchSpanProcessor`` is not used: it takes spans,
which the event loop would have to make, does not count dropped spans, and waits for up to 30 s at the end.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from random import getrandbits
from time import monotonic, time_ns
from typing import Any, Final

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from llamasup._version import __version__
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.system.batch_writer import BatchWriter
from llamasup.features.tracing.settings import TracingSettings, is_sampled
from llamasup.features.tracing.spans import spans_of

_log = logging.getLogger(__name__)

# Records that wait for the collector, about 1 KiB each: a minute without it at 60 requests per second.
MAX_PENDING: Final = 4000
LINGER_S: Final = 1.0  # one request to the collector per second, or per 100 records
RETRY_S: Final = 5.0  # after the SDK has tried for ``TracingSettings.timeout_s``
CLOSE_TIMEOUT_S: Final = 1.0
WARN_AGAIN_S: Final = 600.0  # a collector that fails again and again is reported this often
_THREAD: Final = "spans"
_RETRYABLE: Final = frozenset({429, 502, 503, 504})  # of the OTLP specification


class SpanExporter:
    """Exports spans in a thread of its own. ``write`` and ``dropped`` are for the event loop's thread."""

    def __init__(self, settings: TracingSettings) -> None:
        self._settings = settings
        self._lost = 0  # counted by the exporter's thread
        self._closing = threading.Event()
        self._warned_s = float("-inf")
        self._resource = Resource(dict(settings.resource))
        self._collector = _Collector(self._report)
        self._exporter = OTLPSpanExporter(
            settings.url,
            certificate_file=settings.certificate or _authorities(),
            headers={"User-Agent": f"llamasup/{__version__}", **dict(settings.headers)},
            timeout=settings.timeout_s,
            compression=Compression.Gzip if settings.gzip else Compression.NoCompression,
            session=self._collector,
        )
        # The SDK logs each attempt. ``_report`` says the same, at most every ten minutes.
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(lambda line: line.threadName != _THREAD)
        self._writer = BatchWriter(self._export, name=_THREAD, linger_s=LINGER_S, max_waiting=MAX_PENDING)

    def __repr__(self) -> str:
        counts = f"{len(self._writer)} waiting, {self.dropped()} lost"
        return f"<SpanExporter to {self._settings.shown_url}: {counts}>"

    def write(self, record: RequestRecord) -> None:
        """Queue the record of a request for a model. Never waits."""
        sampler = self._settings.sampler
        if record.model and is_sampled(sampler, record.trace_id, record.parent_sampled, getrandbits(64)):
            self._writer.put((monotonic(), record))

    def dropped(self) -> int:
        """Return the number of requests whose spans were lost so far."""
        return self._writer.rejected + self._writer.lost + self._lost

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the pending spans. Blocks for ``timeout_s`` at most."""
        self._closing.set()
        self._writer.close(timeout_s)
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends the waits of a thread that is still busy

    # --- in the thread

    def _export(self, taken: list[tuple[float, RequestRecord]]) -> bool:
        """Send until it succeeds, cannot succeed, or llamasup ends. The queue fills up meanwhile."""
        offset_ns, ids = time_ns() - round(monotonic() * 1e9), RandomIdGenerator()
        spans = [
            span
            for ended_s, record in taken
            for span in spans_of(record, offset_ns + round(ended_s * 1e9), ids, self._resource)
        ]
        while True:
            self._collector.begin()
            self._exporter.export(spans)
            if self._collector.is_delivered or not self._collector.may_retry or self._closing.is_set():
                break
            self._closing.wait(RETRY_S)
        if not self._collector.is_delivered:
            self._lost += len(taken)
        # Once llamasup ends, a collector that fails gets no further batch.
        return self._collector.is_delivered or not self._closing.is_set()

    def _report(self, problem: str) -> None:
        """Show the first problem, and then one every ``WARN_AGAIN_S``."""
        if monotonic() - self._warned_s > WARN_AGAIN_S:
            self._warned_s = monotonic()
            _log.warning(
                "spans cannot be sent to %s: %s. Requests are served as before."
                " llamasup_traces_dropped_total counts those whose spans are lost.",
                self._settings.shown_url,
                problem,
            )


class _Collector(requests.Session):
    """The connection to the collector. It keeps what the SDK does not return: why sending failed."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.trust_env = False  # neither a proxy nor passwords of ~/.netrc
        self._report = report
        self.begin()

    def begin(self) -> None:
        self.is_delivered = self.may_retry = False

    def request(self, *args: Any, **options: Any) -> requests.Response:
        try:
            response = super().request(*args, **options)
        except OSError as error:  # also all errors of requests
            self.may_retry = isinstance(error, requests.ConnectionError | requests.Timeout)
            self._report(_reason(error))
            raise
        self.is_delivered = response.ok and not response.is_redirect
        self.may_retry = response.status_code in _RETRYABLE
        if not self.is_delivered:
            self._report(f"it answers {response.status_code}")
        elif rejected := _rejected_spans(response.content):
            self._report(f"it rejects spans ({rejected} of the last request)")
        return response


def _authorities() -> str | None:
    """Return the authorities that this machine trusts. The SDK would use those of the package certifi."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath


def _rejected_spans(answer: bytes) -> int:
    """Return how many spans the collector rejected, according to its answer to a request that succeeded."""
    try:
        rejected: int = ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
    except DecodeError:  # not an answer of OTLP, but the status says that the spans are accepted
        return 0
    return rejected


def _reason(error: OSError) -> str:
    if isinstance(error, requests.Timeout):
        return "it does not answer in time"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__ if isinstance(error, requests.RequestException) else str(error)
