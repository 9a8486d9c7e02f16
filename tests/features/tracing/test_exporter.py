"""The thread that sends spans: to a collector that works, is slow, fails or is missing."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from llamasup._version import __version__
from llamasup.core.system.batch_writer import BATCH
from llamasup.core.system.extras import install_command
from llamasup.features.tracing import exporter as module
from llamasup.features.tracing.attach import span_exporter
from llamasup.features.tracing.exporter import MAX_PENDING, SpanExporter
from llamasup.features.tracing.settings import Sampler, TracingSettings
from tests.features.tracing.collector import Collector, collector, plain
from tests.features.tracing.records import PARENT, TRACE, record
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port

AT_ONCE = {"Retry-After": "0"}


@pytest.fixture
def receiver() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected before it is sent, and a failed request is repeated at once."""
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.001)


@contextmanager
def exporting(url: str, **settings: Any) -> Iterator[SpanExporter]:
    exporter = SpanExporter(TracingSettings(f"{url}/v1/traces", **settings))
    try:
        yield exporter
    finally:
        exporter.close(PATIENCE_S)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("gzip", [False, True])
def test_spans_of_a_request_arrive(receiver: Collector, gzip: bool) -> None:
    resource, headers = (("service.name", "mine"),), (("api-key", "k"),)
    with exporting(receiver.url, headers=headers, resource=resource, gzip=gzip) as exporter:
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True, outcome="revoked"))
    ((path, sent, request),) = receiver.requests
    names = ("content-type", "user-agent", "api-key", "content-encoding")
    assert (path, *(sent.get(name) for name in names)) == (
        *("/v1/traces", "application/x-protobuf", f"llamasup/{__version__}", "k"),
        "gzip" if gzip else None,
    )
    assert receiver.resource() == {"service.name": "mine"}
    scope = request.resource_spans[0].scope_spans[0].scope
    assert (scope.name, scope.version) == ("llamasup", __version__)
    root, *children = receiver.spans
    assert [span.name for span in receiver.spans] == ["llamasup.request", "queue", "prompt", "generation"]
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert (root.kind, root.end_time_unix_nano - root.start_time_unix_nano) == (Span.SPAN_KIND_SERVER, 4e9)
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "revoked")
    attributes = plain(root.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == 12
    assert attributes["llamasup.tokens_per_s"] == 10.0
    assert attributes["llamasup.replayed"] is False
    for child in children:
        assert (child.kind, child.status.code) == (Span.SPAN_KIND_INTERNAL, Status.STATUS_CODE_UNSET)
    assert exporter.dropped() == 0


def test_requests_that_are_not_sampled_or_have_no_model_are_not_sent(receiver: Collector) -> None:
    with exporting(receiver.url, sampler=Sampler(0.0)) as exporter:
        exporter.write(record())
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=False))
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True, model=""))
        assert "spans" not in threads()
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True, request_id="this"))
    roots = [span for span in receiver.spans if span.name == "llamasup.request"]
    assert [span.parent_span_id.hex() for span in roots] == [PARENT]


@pytest.mark.parametrize(
    ("answers", "said", "lost"),
    [
        ([], "", 0),
        ([(503, AT_ONCE), (429, AT_ONCE), (502, AT_ONCE), (504, AT_ONCE)], "it answers 503", 0),
        ([(503, AT_ONCE)] * 20, "it answers 503", 0),  # more often than the SDK tries
        ([(200, {"Connection": "close"})], "", 0),
        ([(500, {}), (400, {})], "it answers 500", 2),
        ([(301, {"Location": "/"})], "it answers 301", 1),
    ],
)
def test_collector_that_fails_is_reported_once(
    receiver: Collector,
    caplog: pytest.LogCaptureFixture,
    answers: list[tuple[int, Mapping[str, str]]],
    said: str,
    lost: int,
) -> None:
    """The same spans are sent again if the status allows it; the others are counted."""
    receiver.answers = list(answers)
    with exporting(receiver.url) as exporter:
        for done in (1, 2, 3):
            exporter.write(record())
            eventually(lambda done=done: len(receiver.requests) + exporter.dropped() == done)  # type: ignore[misc]
    assert (exporter.dropped(), len(receiver.spans)) == (lost, 4 * (3 - lost))
    why = "Requests are served as before. llamasup_traces_dropped_total counts those whose spans are lost."
    assert caplog.messages == [f"spans cannot be sent to {receiver.url}/v1/traces: {said}. {why}"] * bool(
        said
    )


@pytest.mark.parametrize("rejected", [3, None])
def test_collector_that_rejects_spans_is_reported(
    receiver: Collector, caplog: pytest.LogCaptureFixture, rejected: int | None
) -> None:
    receiver.rejected = rejected
    with exporting(receiver.url) as exporter:
        exporter.write(record())
    assert ["it rejects spans (3 of the last request)" in line for line in caplog.messages] == [True] * bool(
        rejected
    )
    assert exporter.dropped() == 0


def test_spans_of_before_the_collector_started_arrive(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with exporting(f"http://127.0.0.1:{port}", timeout_s=0.5) as exporter:
        exporter.write(record())
        eventually(lambda: caplog.messages)
        with collector(port) as late:
            eventually(lambda: late.requests)
            assert len(late.spans) == 4
            assert exporter.dropped() == 0
    (warning,) = caplog.messages
    assert "Connection refused" in warning


def test_hanging_collector_delays_no_request_and_no_end(receiver: Collector) -> None:
    """``write`` returns while the collector hangs, and ``close`` does not wait for it."""
    receiver.hangs = True
    exporter = SpanExporter(TracingSettings(f"{receiver.url}/v1/traces", timeout_s=PATIENCE_S))
    exporter.write(record())
    assert receiver.asked.wait(PATIENCE_S)
    exporter.write(record())
    exporter.close(timeout_s=0.05)
    assert not receiver.requests
    receiver.go.set()
    eventually(lambda: "spans" not in threads(), "the end of the thread")


def test_slow_answer_is_a_failure(receiver: Collector, caplog: pytest.LogCaptureFixture) -> None:
    receiver.hangs = True
    with exporting(receiver.url, timeout_s=0.05) as exporter:
        exporter.write(record())
        eventually(lambda: caplog.messages)
    assert "it does not answer in time" in caplog.text
    assert exporter.dropped() == 1


def test_dead_collector_gets_one_attempt_at_the_end() -> None:
    exporter = SpanExporter(TracingSettings(f"http://127.0.0.1:{free_port()}/v1/traces", timeout_s=0.5))
    for _ in range(3 * BATCH):
        exporter.write(record())
    exporter.close(PATIENCE_S)
    assert "spans" not in threads()
    assert exporter.dropped() >= 1


def test_ten_thousand_requests_need_bounded_memory_while_the_collector_hangs(receiver: Collector) -> None:
    receiver.hangs = True
    with exporting(receiver.url) as exporter:
        exporter.write(record())
        assert receiver.asked.wait(PATIENCE_S)
        tracemalloc.start()
        for number in range(10_000):
            exporter.write(record(request_id=f"r-{number}"))
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert exporter.dropped() == 10_000 - MAX_PENDING
        assert used < MAX_PENDING * 1024
        receiver.go.set()
    roots = [span for span in receiver.spans if span.name == "llamasup.request"]
    assert len(roots) == MAX_PENDING + 1


def test_unreadable_certificate_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with exporting("https://127.0.0.1:9", certificate=str(tmp_path / "missing.pem")) as exporter:
        exporter.write(record())
        eventually(lambda: exporter.dropped() == 1)
    assert "missing.pem" in caplog.text


# --- when it is made -----------------------------------------------------------------------------------

ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def test_variables_turn_it_on() -> None:
    assert span_exporter({}) is None
    assert span_exporter({**ON, "OTEL_SDK_DISABLED": "true"}) is None
    exporter = span_exporter(ON)
    assert repr(exporter) == "<SpanExporter to http://127.0.0.1:4318/v1/traces: 0 waiting, 0 lost>"


def test_invalid_variable_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert span_exporter({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    (line,) = caplog.messages
    assert line.startswith("no spans are sent: $OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but llamasup sends")


@pytest.mark.parametrize(
    ("is_bundle", "end"),
    [
        (False, f" Install it: {install_command('otel')}"),
        (True, "/v1/traces: this application has no support for traces."),
    ],
)
def test_missing_extra_is_a_warning_with_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_bundle: bool, end: str
) -> None:
    monkeypatch.setitem(sys.modules, module.__name__, None)
    if is_bundle:
        monkeypatch.setattr(sys, "frozen", "llamasup", raising=False)
    assert span_exporter(ON) is None
    (line,) = caplog.messages
    assert line.startswith("no spans are sent to http://127.0.0.1:4318/v1/traces: th")
    assert line.endswith(end)
