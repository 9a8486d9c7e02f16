"""The part of the usage in the event loop, with its thread and a real file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import pytest

from llamasup.core.observability.counters import HeldSlots
from llamasup.errors import UsageInvalid
from llamasup.features.usage import recorder as recorders
from llamasup.features.usage.attribution import Counter, Reading
from llamasup.features.usage.ledger import Flush
from llamasup.features.usage.recorder import UsageRecorder
from llamasup.features.usage.saver import UsageSaver
from llamasup.features.usage.store import read_rows, usage_file
from tests.features.usage.records import record
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S


class WatchedSaver(UsageSaver):
    """Remembers the flushes. ``hold`` blocks the thread."""

    def __init__(self, keep_days: int) -> None:
        super().__init__(keep_days, measure=lambda: None)
        self.flushes: list[Flush] = []
        self.changed = threading.Condition()
        self.entered = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    def take(self, flush: Flush) -> None:
        self.entered.set()
        assert self.hold.wait(PATIENCE_S)
        super().take(flush)
        with self.changed:
            self.flushes.append(flush)
            self.changed.notify_all()

    def until(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.flushes) >= count, PATIENCE_S)


def recorder_of(
    saver: UsageSaver, *, held_slots: Sequence[HeldSlots] = (), **times_s: float
) -> UsageRecorder:
    return UsageRecorder(400, held_slots=lambda: held_slots, make_saver=lambda _: saver, **times_s)


def saved_requests() -> int:
    return sum(sums.requests for _, sums in read_rows(usage_file()))


@async_test
async def test_ten_thousand_requests_are_saved_at_the_end() -> None:
    recorder = UsageRecorder(400)
    for number in range(10_000):
        recorder.add(record(client=f"key:k{number % 7}", ended_s=monotonic()))
    recorder.close(PATIENCE_S)
    rows = read_rows(usage_file())
    assert len({group.key for group, _ in rows}) == 7
    assert sum(sums.requests for _, sums in rows) == 10_000
    assert sum(sums.tokens_prompt for _, sums in rows) == 100_000
    assert sum(sums.slot_us for _, sums in rows) == 15_000_000_000


@async_test
async def test_sums_are_saved_some_time_after_the_first_request() -> None:
    saver = WatchedSaver(400)

    recorder = recorder_of(saver, save_s=0.0)
    recorder.add(record())
    recorder.add(record())
    await asyncio.to_thread(saver.until, 2)
    assert await asyncio.to_thread(saved_requests) == 2
    recorder.add(record())
    await asyncio.to_thread(saver.until, 3)
    recorder.close(PATIENCE_S)
    assert [flush.saves for flush in saver.flushes] == [False, True, True]  # first a reading
    assert saved_requests() == 3


@async_test
async def test_request_without_a_model_is_not_counted() -> None:
    recorder = UsageRecorder(400)
    recorder.add(record(model=""))
    recorder.close(PATIENCE_S)
    assert not usage_file().exists()


@async_test
async def test_report_is_up_to_date_and_saves(tmp_path: Path) -> None:
    recorder = UsageRecorder(400)
    assert (await recorder.report())["rows"] == []
    recorder.add(record(client="key:phone"))
    recorder.add(record(model="other"))
    report = await recorder.report("key,model", "0d")
    assert [(row["key"], row["model"], row["requests"]) for row in report["rows"]] == [
        ("", "other", 1),
        ("phone", "tiny", 1),
    ]
    assert (report["file"], report["problem"]) == (str(usage_file()), None)
    assert await asyncio.to_thread(saved_requests) == 2
    recorder.close(PATIENCE_S)


@pytest.mark.parametrize(("by", "since"), [("week", None), ("model", "soon")])
@async_test
async def test_invalid_question_is_an_error_and_saves_nothing(by: str, since: str | None) -> None:
    recorder = UsageRecorder(400)
    recorder.add(record())
    with pytest.raises(UsageInvalid):
        await recorder.report(by, since)
    assert not usage_file().exists()
    recorder.close(PATIENCE_S)


@async_test
async def test_disk_that_hangs_delays_neither_a_report_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorders, "ANSWER_TIMEOUT_S", 0.01)
    saver = WatchedSaver(400)
    saver.hold.clear()

    recorder = recorder_of(saver)
    recorder.add(record())
    report = await recorder.report()
    assert report["rows"] == []
    assert "the disk does not answer" in report["problem"]
    recorder.close(0.01)
    assert "The last usage may not be saved" in caplog.text
    saver.hold.set()  # the late answer is ignored
    await asyncio.to_thread(saver.until, 2)
    assert saved_requests() == 1


@async_test
async def test_saver_that_cannot_be_made_is_the_problem_and_nothing_piles_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "ANSWER_TIMEOUT_S", PATIENCE_S)

    def make(_: int) -> UsageSaver:
        raise ModuleNotFoundError("No module named '_sqlite3'")

    recorder = UsageRecorder(400, make_saver=make, save_s=0.0, reading_s=0.0)
    recorder.add(record())
    for _ in range(2):
        report = await recorder.report()
        assert "ModuleNotFoundError: No module named '_sqlite3'" in report["problem"]
    for number in range(100):
        recorder.add(record(ended_s=1000.0 + number))
    recorder.close(PATIENCE_S)
    assert len(recorder._writer) == 0
    assert caplog.messages == ["The usage cannot be counted"]


def test_answer_after_the_end_of_the_event_loop_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "ANSWER_TIMEOUT_S", 0.01)
    saver = WatchedSaver(400)
    saver.hold.clear()
    recorder = recorder_of(saver)

    async def main() -> None:
        assert (await recorder.report())["problem"]

    asyncio.run(main())
    saver.hold.set()
    saver.until(1)
    recorder.close(PATIENCE_S)


class Measuring(WatchedSaver):
    """Each reading is a second and 1,000 µJ after the one before."""

    def __init__(self) -> None:
        super().__init__(400)
        self._measure = self._next
        self._readings = 0

    def _next(self) -> Reading:
        self._readings += 1
        return Reading(999.0 + self._readings, {"package": Counter(1000 * self._readings)})


@async_test
async def test_energy_is_read_at_the_ends_of_requests_but_not_at_each() -> None:
    saver = Measuring()

    recorder = recorder_of(saver, reading_s=10.0)
    recorder.add(record(ended_s=1000.0, slot_s=1.0))
    for number in range(50):
        recorder.add(record(ended_s=1000.5 + 0.01 * number, slot_s=0.5))
    recorder.add(record(slot_s=0.0, ended_s=1009.0))  # it never had a slot
    recorder.close(PATIENCE_S)
    # The first end, the sums, and the energy of the rest at the end.
    assert [(flush.measures, flush.saves, len(flush.work)) for flush in saver.flushes] == [
        (True, False, 1),
        (False, True, 0),
        (True, True, 50),
    ]
    [(_, sums)] = read_rows(usage_file())
    assert sums.energy_uj == 990  # from 1000.0 to 1000.99


class Steady(UsageSaver):
    """A machine that needs 100 W. It is read at ``now_s``."""

    def __init__(self) -> None:
        super().__init__(
            400, measure=lambda: Reading(self.now_s, {"package": Counter(round(self.now_s * 1e8))})
        )
        self.now_s = 0.0


@async_test
async def test_long_request_gets_its_energy_for_all_the_time_that_it_had_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """240 s, while a short request for another model ends every ten seconds."""
    monkeypatch.setattr(recorders, "ANSWER_TIMEOUT_S", PATIENCE_S)
    saver = Steady()
    in_flight = [HeldSlots("long", "key:phone", 0.0, 1)]
    recorder = recorder_of(saver, held_slots=in_flight, save_s=10_000.0, reading_s=10.0)

    for end_s in range(10, 250, 10):
        saver.now_s = float(end_s)
        if end_s == 240:
            in_flight.clear()
            recorder.add(
                record(model="long", client="key:phone", ended_s=240.0, slot_s=240.0, duration_s=240.0)
            )
        recorder.add(record(model="short", ended_s=float(end_s), slot_s=1.0, duration_s=1.0))
        await recorder.report()  # the thread has read the counters
    recorder.close(PATIENCE_S)
    energy_j = {group.model: (sums.energy_uj or 0) / 1e6 for group, sums in read_rows(usage_file())}
    assert sum(energy_j.values()) == pytest.approx(
        23_000.0
    )  # without the ten seconds before the first reading
    assert energy_j["short"] == pytest.approx(23 * 1000.0 / 11, abs=100.0)


@async_test
async def test_reading_is_due_again_after_a_while() -> None:
    saver = Measuring()

    recorder = recorder_of(saver, reading_s=10.0)
    for at_s in (1000.0, 1005.0, 1010.0, 1011.0):
        recorder.add(record(ended_s=at_s))
    await asyncio.to_thread(saver.until, 2)
    assert [len(flush.work) for flush in saver.flushes] == [1, 2]
    recorder.close(PATIENCE_S)


@async_test
async def test_without_counters_no_work_is_kept() -> None:
    saver = WatchedSaver(400)

    recorder = recorder_of(saver, reading_s=10.0)
    recorder.add(record(ended_s=1000.0))
    await asyncio.to_thread(saver.until, 1)
    for number in range(20):
        recorder.add(record(ended_s=1010.0 + 10.0 * number))
    recorder.close(PATIENCE_S)
    assert sum(flush.measures for flush in saver.flushes) == 1
    assert saved_requests() == 21


@async_test
async def test_thread_that_hangs_gets_no_more_work() -> None:
    saver = WatchedSaver(400)
    saver.hold.clear()

    recorder = recorder_of(saver, reading_s=10.0)
    recorder.add(record(ended_s=1000.0))
    assert await asyncio.to_thread(saver.entered.wait, PATIENCE_S)  # the thread has this one alone
    for number in range(1, 100):
        recorder.add(record(ended_s=1000.0 + 10.0 * number))
    saver.hold.set()
    recorder.close(PATIENCE_S)
    assert len(saver.flushes) <= recorders.MAX_WAITING + 3
    assert saved_requests() == 100
