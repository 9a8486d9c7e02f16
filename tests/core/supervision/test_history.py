"""The last events of an instance."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.supervision import states as lc
from llamasup.core.supervision.states import MAX_RECORDS, History, State

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
KILLED = Diagnosis("killed", "killed while it read a secret prompt", "", ("a line of its log",), False, 75)


def test_record_has_time_event_state_generation_and_cause() -> None:
    history = History()
    history.add(NOON, lc.WarmupSucceeded(1), State.READY, 1)
    history.add(NOON + timedelta(seconds=1.5), lc.Exited(1, KILLED), State.STARTING, 2)
    assert history.as_json() == [
        {
            "time": "2026-03-01T12:00:00.000+00:00",
            "event": "warmup_succeeded",
            "state": "ready",
            "generation": 1,
        },
        {
            "time": "2026-03-01T12:00:01.500+00:00",
            "event": "exited",
            "state": "starting",
            "generation": 2,
            "cause": "killed",
        },
    ]
    assert str(history).splitlines() == [
        "2026-03-01T12:00:00.000+00:00 warmup_succeeded ready 1",
        "2026-03-01T12:00:01.500+00:00 exited starting 2 killed",
    ]


def test_message_and_log_of_a_diagnosis_are_left_out() -> None:
    history = History()
    history.add(NOON, lc.Exited(1, KILLED), State.STARTING, 2)
    assert "secret" not in str(history)
    assert "log" not in str(history)


def test_equal_events_in_a_row_are_one_record() -> None:
    """A server makes progress every second, for minutes."""
    history = History()
    for second in range(1000):
        history.add(NOON + timedelta(seconds=second), lc.Progressed(1), State.LOADING, 1)
    history.add(NOON, lc.Progressed(2), State.LOADING, 2)
    first, second_ = history.records
    assert (first.count, second_.count) == (1000, 1)
    assert first.time == NOON + timedelta(seconds=999)
    assert first.as_json()["count"] == 1000


def test_only_the_last_records_are_kept() -> None:
    history = History()
    for generation in range(1000):
        history.add(NOON, lc.Healthy(generation), State.WARMING, generation)
    assert [record.generation for record in history.records] == list(range(1000 - MAX_RECORDS, 1000))
