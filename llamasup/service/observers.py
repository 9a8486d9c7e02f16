"""Observers that belong to no feature: the last hour, slow requests, and the metrics of loads."""

from __future__ import annotations

import time
from collections.abc import Callable

from llamasup.core.observability.access_record import SlowLog, admit_slow, waiting_time_s
from llamasup.core.observability.counters import Metrics, RequestRecord
from llamasup.core.observability.last_hour import LastHour
from llamasup.core.supervision.events import ModelUnloading, PublishedEvent, ServerExited, StateChanged
from llamasup.core.supervision.states import State


class LastHourObserver:
    """Adds each request for a model, and the memory of all models after each change of a server's state."""

    def __init__(self, last_hour: LastHour, held_bytes: Callable[[], int]) -> None:
        self._last_hour = last_hour
        self._held_bytes = held_bytes

    def finished(self, record: RequestRecord) -> None:
        if record.model:
            self._last_hour.add_request(
                time.monotonic(),
                duration_s=record.duration_s,
                queue_s=record.queue_s,
                first_byte_s=record.first_byte_s,
                tokens=record.tokens_completion or 0,
            )

    def event(self, event: PublishedEvent) -> None:
        if isinstance(event, StateChanged):
            self._last_hour.note_memory(time.monotonic(), self._held_bytes())


class SlowRequests:
    """Reports requests that waited longer than ``limit_s``, at a limited rate (``Observer.slow``)."""

    def __init__(self, limit_s: float, report: Callable[[RequestRecord, int], None]) -> None:
        self._limit_s = limit_s
        self._report = report
        self._log = SlowLog(time.monotonic())

    def finished(self, record: RequestRecord) -> None:
        is_for_model = record.model or record.outcome == "unavailable"
        if is_for_model and waiting_time_s(record.first_byte_s, record.duration_s) > self._limit_s:
            left_out = self._log.left_out
            self._log, admitted = admit_slow(self._log, time.monotonic())
            if admitted:
                self._report(record, left_out)


class LoadMetrics:
    """Counts loads with their times, restarts and evictions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s: dict[str, float] = {}

    def event(self, event: PublishedEvent) -> None:
        match event:
            case StateChanged(model, State.STARTING, _):
                self._began_s[model] = time.monotonic()
                self._metrics.count_load(model)
            case StateChanged(model, State.READY, _):
                began_s = self._began_s.pop(model, None)
                if began_s is not None:  # None if the model was renamed since
                    self._metrics.observe_load(model, time.monotonic() - began_s)
            case ServerExited(model, _, _, diagnosis, restart_in_s) if restart_in_s is not None:
                self._metrics.count_restart(model, diagnosis.cause)
            case ModelUnloading(model, reason, _):
                self._metrics.count_eviction(model, reason)
            case _:
                pass
