"""Observers that belong to no feature: the charts of the last hour, and the reports of slow requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from llamasup.core.observability.access_record import SlowLog, admit_slow, waiting_time_s
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.observability.last_hour import LastHour
from llamasup.core.supervision.events import PublishedEvent, StateChanged


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
