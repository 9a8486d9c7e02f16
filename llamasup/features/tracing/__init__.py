"""Exports a trace of each request to an OpenTelemetry collector (docs/observability.md).

Begin with ``exporter``, which has a thread of its own; all other modules are pure.
"""
