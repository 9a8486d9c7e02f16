"""Attaches the span exporter to a service, if the environment names a trace collector."""

from __future__ import annotations

from llamasup.core.control.interface import Host
from llamasup.core.observability.observer import Observer


def attach(host: Host) -> None:
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in host.environ):
        return
    from llamasup.features.tracing.exporter import span_exporter  # here, to keep the start short

    if (spans := span_exporter(host.environ)) is not None:
        host.metrics.traces_dropped = spans.dropped
        host.observe(Observer(spans.write, close=spans.close))
