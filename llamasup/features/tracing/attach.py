"""Attaches the span exporter to a service, if the environment names a trace collector."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamasup.core.control.interface import Host
from llamasup.core.observability.observer import Observer
from llamasup.core.system.extras import install_command
from llamasup.core.system.own_command import python_executable
from llamasup.errors import ConfigInvalid

if TYPE_CHECKING:
    from llamasup.features.tracing.exporter import SpanExporter

_log = logging.getLogger(__name__)


def attach(host: Host) -> None:
    if (spans := span_exporter(host.environ)) is not None:
        host.metrics.traces_dropped = spans.dropped
        host.observe(Observer(spans.write, close=spans.close))


def span_exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    """Return the exporter of ``environ``; None if tracing is off. Warns if it is on and cannot work."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in environ):
        return None
    from llamasup.features.tracing.settings import read_settings  # here, to keep the start short

    try:
        if (settings := read_settings(environ)) is None:
            return None
    except ConfigInvalid as error:
        _log.warning("no spans are sent: %s %s", error.message, error.remedy)
        return None
    try:
        from llamasup.features.tracing.exporter import SpanExporter
    except ImportError as error:
        _log.warning("no spans are sent to %s: %s", settings.shown_url, _no_sdk(error))
        return None
    return SpanExporter(settings)


def _no_sdk(error: ImportError) -> str:
    if python_executable() is None:
        return "this application has no support for traces."
    return f"the SDK of OpenTelemetry is missing ({error}). Install it: {install_command('otel')}"
