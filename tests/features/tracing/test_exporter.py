"""The thread that sends spans: to a collector that works, is slow, fails or is missing."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamasup.core.system.batch_writer import BATCH
from llamasup.features.tracing import exporter as module
from llamasup.features.tracing.exporter import MAX_PENDING, SpanExporter, span_exporter
from llamasup.features.tracing.settings import Sampler, TracingSettings
from tests.features.tracing.collector import Collector, collector
from tests.features.tracing.records import PARENT, TRACE, record
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port


@pytest.fixture
def receiver() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected before it is sent, and a failed request is repeated at once."""
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    monkeypatch.setattr(module, "delay_s", lambda attempt, asked_s, dice: 0.001)


@contextmanager
def exporting(url: str, **settings: Any) -> Iterator[SpanExporter]:
    exporter = SpanExporter(TracingSettings(f"{url}/v1/traces", **settings))
    try:
        yield exporter
    finally:
        exporter.close(PATIENCE_S)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_spans_of_a_request_arrive(receiver: Collector) -> None:
    resource = (("service.name", "mine"),)
    with exporting(receiver.url, headers=(("api-key", "k"),), resource=resource) as exporter:
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True))
    ((path, headers, _),) = receiver.requests
    assert (path, headers["Content-Type"], headers["api-key"]) == (
        "/v1/traces",
        "application/x-protobuf",
        "k",
    )
    assert receiver.resource() == {"service.name": "mine"}
    assert [span.name for span in receiver.spans] == ["llamasup.request", "queue", "prompt", "generation"]
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    assert receiver.spans[0].parent_span_id.hex() == PARENT
    assert exporter.dropped() == 0


def test_body_may_be_compressed(receiver: Collector) -> None:
    with exporting(receiver.url, gzip=True) as exporter:
        exporter.write(record())
    ((_, headers, _),) = receiver.requests
    assert (headers["Content-Encoding"], len(receiver.spans)) == ("gzip", 4)


def test_requests_that_are_not_sampled_or_have_no_model_are_not_sent(receiver: Collector) -> None:
    with exporting(receiver.url, sampler=Sampler(0.0)) as exporter:
        exporter.write(record())
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=False))
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True, model=""))
        exporter.write(record(trace_id=TRACE, parent_id=PARENT, parent_sampled=True, request_id="this"))
    roots = [span for span in receiver.spans if span.name == "llamasup.request"]
    assert [span.parent_span_id.hex() for span in roots] == [PARENT]


def test_without_a_request_there_is_no_thread(receiver: Collector) -> None:
    with exporting(receiver.url):
        assert "spans" not in threads()


def test_busy_collector_gets_the_same_spans_again(
    receiver: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(503, {"Retry-After": "0"}), (429, {})]
    with exporting(receiver.url) as exporter:
        exporter.write(record())
        eventually(lambda: receiver.requests)
    assert len(receiver.spans) == 4
    assert exporter.dropped() == 0
    (warning,) = caplog.messages
    assert warning == (
        f"spans cannot be sent to {receiver.url}/v1/traces: it answers 503. Requests are served as before."
        " llamasup_traces_dropped_total counts those whose spans are lost."
    )


def test_refused_spans_are_counted_and_said_once(
    receiver: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(500, {}), (400, {})]
    with exporting(receiver.url) as exporter:
        for lost in (1, 2):
            exporter.write(record())
            eventually(lambda lost=lost: exporter.dropped() == lost)  # type: ignore[misc]
        exporter.write(record())
        eventually(lambda: receiver.requests)
    assert exporter.dropped() == 2
    (warning,) = caplog.messages
    assert "it answers 500" in warning


def test_collector_that_rejects_spans_is_reported(
    receiver: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.rejected = 3
    with exporting(receiver.url) as exporter:
        exporter.write(record())
    (warning,) = caplog.messages
    assert "it rejects spans (3 of the last request)" in warning


def test_connection_that_the_collector_closed_is_opened_again(receiver: Collector) -> None:
    with exporting(receiver.url) as exporter:
        receiver.answers = [(200, {"Connection": "close"})]
        for number in (1, 2, 3):
            exporter.write(record())
            eventually(lambda number=number: len(receiver.requests) == number)  # type: ignore[misc]
    assert exporter.dropped() == 0


def test_spans_of_before_the_collector_started_arrive(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with exporting(f"http://127.0.0.1:{port}") as exporter:
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
    eventually(
        lambda: "spans" not in threads(), "the end of the thread"
    )  # although the collector still hangs


def test_slow_answer_is_a_failure(receiver: Collector, caplog: pytest.LogCaptureFixture) -> None:
    receiver.hangs = True
    with exporting(receiver.url, timeout_s=0.05) as exporter:
        exporter.write(record())
        eventually(lambda: caplog.messages)
    assert "it does not answer in time" in caplog.text
    assert exporter.dropped() == 1


def test_dead_collector_gets_one_attempt_at_the_end() -> None:
    exporter = SpanExporter(TracingSettings(f"http://127.0.0.1:{free_port()}/v1/traces"))
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
        eventually(lambda: caplog.messages)
    assert "No such file or directory" in caplog.text


# --- when it is made -----------------------------------------------------------------------------------

ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def test_variables_turn_it_on() -> None:
    assert span_exporter({}) is None
    exporter = span_exporter(ON)
    assert repr(exporter) == "<SpanExporter to http://127.0.0.1:4318/v1/traces: 0 waiting, 0 lost>"


def test_invalid_variable_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert span_exporter({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    (line,) = caplog.messages
    assert line.startswith("no spans are sent: $OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but llamasup sends")


@pytest.mark.parametrize("parent_exists", [True, False])
def test_missing_extra_is_a_warning_with_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parent_exists: bool
) -> None:
    def find_spec(name: str) -> None:
        if not parent_exists:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with caplog.at_level(logging.WARNING):
        assert span_exporter(ON) is None
    (line,) = caplog.messages
    assert line == (
        "no spans are sent to http://127.0.0.1:4318/v1/traces: the package opentelemetry-proto is missing."
        ' Install it: pip install "llamasup[otel]"'
    )


def test_message_of_an_application_without_python_does_not_name_pip(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "frozen", "llamasup", raising=False)
    with caplog.at_level(logging.WARNING):
        assert span_exporter(ON) is None
    (line,) = caplog.messages
    assert line.endswith("/v1/traces: this application has no support for traces.")


def test_package_that_cannot_be_imported_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, receiver: Collector
) -> None:
    broken: dict[str, ModuleType | None] = {"llamasup.features.tracing.otlp": None}
    monkeypatch.delattr("llamasup.features.tracing.otlp", raising=False)
    for name, found in broken.items():
        monkeypatch.setitem(sys.modules, name, found)
    with exporting(receiver.url) as exporter:
        exporter.write(record())
        eventually(lambda: exporter.dropped() == 1)
        exporter.write(record())
        eventually(lambda: exporter.dropped() == 2)
    (line,) = caplog.messages
    assert "spans cannot be made" in line
