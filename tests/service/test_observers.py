from __future__ import annotations

import time

from msgspec.structs import replace

from llamasup.core.observability.counters import RequestRecord
from llamasup.core.observability.last_hour import LastHour
from llamasup.core.supervision.events import StateChanged, Stopped
from llamasup.core.supervision.states import State
from llamasup.service.observers import LastHourObserver, SlowRequests

SLOW = RequestRecord(
    request_id="1",
    method="POST",
    path="/completion",
    route="/completion",
    model="tale",
    generation=1,
    status=200,
    tokens_prompt=5,
    tokens_cached=0,
    tokens_completion=8,
    tokens_per_s=4.0,
    queue_s=0.0,
    first_byte_s=2.0,
    duration_s=4.0,
    bytes_out=100,
    outcome="ok",
)


def test_slow_requests_for_models_are_reported_at_a_limited_rate() -> None:
    reported: list[str] = []
    slow = SlowRequests(1.0, lambda record, _: reported.append(record.outcome))
    slow.finished(replace(SLOW, first_byte_s=0.5))
    slow.finished(replace(SLOW, model=""))
    assert reported == []
    slow.finished(replace(SLOW, model="", outcome="unavailable"))
    assert reported == ["unavailable"]
    for _ in range(1000):
        slow.finished(SLOW)
    assert len(reported) < 1000


def test_last_hour_has_the_requests_for_models_and_the_memory_after_a_change_of_state() -> None:
    last_hour = LastHour(time.monotonic() - 1000.0)
    observer = LastHourObserver(last_hour, lambda: 7)

    def shown() -> tuple[float, float]:
        series = last_hour.series(time.monotonic())
        return (
            sum(value or 0.0 for value in series["tokens_per_s"]),
            sum(value or 0.0 for value in series["memory_bytes"]),
        )

    observer.event(Stopped())
    observer.finished(replace(SLOW, model=""))
    assert shown() == (0.0, 0.0)
    observer.event(StateChanged("tale", State.READY, 1))
    observer.finished(SLOW)
    tokens, memory = shown()
    assert tokens > 0.0
    assert memory >= 7.0
