"""Exports a trace of each request to an OpenTelemetry collector (docs/observability.md).

Begin with ``exporter``, which queues the requests for a thread. The SDK of OpenTelemetry encodes and
sends their spans.
"""
