"""Adds the finished requests up in a thread, and saves the sums once a minute and at the end.

The thread sleeps without a timer while everything is saved (P7). A file that cannot be written never disturbs
a request or a stop: the sums stay in memory, and the next requests lead to another attempt. The energy
counters are read when a request has ended, at most every ``READING_S``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from llamasup.errors import FolderUnusable
from llamasup.observability.counters import RequestRecord
from llamasup.usage.attribution import Reading, Work, divided, energy_between
from llamasup.usage.energy import read_energy
from llamasup.usage.inbox import Inbox
from llamasup.usage.ledger import Group, Ledger, Sums
from llamasup.usage.report import read_by, read_since, report
from llamasup.usage.store import CorruptFile, NewerFile, move_aside, read_rows, save, usage_file

__all__ = ["UsageWriter", "today"]

_log = logging.getLogger(__name__)

# With the time of a write, a crash loses at most a minute.
SAVE_S: Final = 55.0
READING_S: Final = 10.0
BATCH: Final = 100  # added up in one go: this holds the interpreter for 0.2 ms
ANSWER_TIMEOUT_S: Final = 3.0
_NEVER: Final = float("inf")


class UsageWriter:
    """``keep_days``: how many days the file keeps, with today. ``path`` returns the file; ``measure`` reads
    the energy counters.
    """

    def __init__(
        self,
        inbox: Inbox,
        keep_days: int,
        *,
        path: Callable[[], Path] = usage_file,
        measure: Callable[[], Reading | None] = read_energy,
        save_s: float = SAVE_S,
        reading_s: float = READING_S,
    ) -> None:
        self._inbox = inbox
        self._keep_days = keep_days
        self._find_path = path
        self._measure = measure
        self._save_s = save_s
        self._reading_s = reading_s
        self._counting = threading.Lock()  # for the ledger and the work; never held for I/O
        self._ledger = Ledger()
        self._work: list[Work] = []
        self._reading: Reading | None = None
        self._can_measure = True
        self._saving = threading.Lock()  # for the file, and what follows
        self._cleaned_on: date | None = None
        self._problem = ""

    def run(self) -> None:
        """Until the inbox closes, or the file turns out to be that of a newer llamasup."""
        inbox = self._inbox
        due_s, next_reading_s = _NEVER, 0.0
        while not inbox.refuses:
            inbox.wake_at_s = 0.0 if due_s == _NEVER else next_reading_s
            if due_s != _NEVER:
                inbox.wake.wait(max(0.0, due_s - monotonic()))
            elif not inbox.pending:  # else a request ended before ``wake_at_s`` was set
                inbox.wake.wait()
            inbox.wake.clear()
            is_last = inbox.closing
            self._count_pending()
            if is_last:
                self._save_last()
                return
            now_s = monotonic()
            if now_s >= next_reading_s:
                next_reading_s = now_s + self._reading_s if self._divide_energy() else _NEVER
            if due_s == _NEVER and self._ledger:
                due_s = now_s + self._save_s
            elif now_s >= due_s:
                with self._saving:
                    self._save()
                due_s = _NEVER  # after a failure, the next request leads to another attempt

    def report(self, by: str, since: str | None) -> Mapping[str, Any]:
        """The ``usage`` object of the contract. Saves the sums first. For any thread; raises UsageInvalid.

        A file that cannot be used is the ``problem`` in the object, which then has the unsaved sums alone.
        """
        groups = read_by(by)
        first = None if since is None else read_since(since, today())
        file: Path | None = None
        rows: list[tuple[Group, Sums]] = []
        self._count_pending()
        if not self._saving.acquire(timeout=ANSWER_TIMEOUT_S):
            problem = "The usage file cannot be used: the disk does not answer."
        else:
            try:
                self._save()
                problem = self._problem
                file = self._find_path()
                rows += read_rows(file, first)
            except FolderUnusable as error:
                problem = self._problem or error.message
            finally:
                self._saving.release()
        with self._counting:
            rows += [row for row in self._ledger.rows() if first is None or row[0].day >= first.isoformat()]
            path = None if file is None else str(file)
            return report(rows, groups, first, file=path, problem=problem or None)

    def count_batch(self) -> None:
        """Add pending records to the ledger. For any thread."""
        with self._counting:
            records = self._inbox.pending[:BATCH]
            if not records:
                return
            offset_s = datetime.now(UTC).timestamp() - monotonic()
            for record, day in zip(records, _days(records, offset_s), strict=True):
                group = self._ledger.count(record, day)
                if self._can_measure and group is not None and record.slot_s > 0.0:
                    began_s = record.ended_s - min(record.slot_s, record.duration_s)
                    self._work.append(Work(group, began_s, record.ended_s, record.slot_s))
            del self._inbox.pending[: len(records)]

    def _count_pending(self) -> None:
        while self._inbox.pending:
            self.count_batch()
            sleep(0)  # let the event loop run

    def _divide_energy(self) -> bool:
        """Read the counters, and divide the energy since the last reading. False if there are none: they do
        not appear while llamasup runs.
        """
        if not self._can_measure:
            return False
        before, self._reading = self._reading, self._measure()
        with self._counting:
            work, self._work = self._work, []
            if self._reading is None:
                self._can_measure = False
            elif before is not None and (energy_uj := energy_between(before, self._reading)) is not None:
                self._ledger.add_energy(divided(energy_uj, before.at_s, self._reading.at_s, work))
        return self._can_measure

    def _save_last(self) -> None:
        with self._saving:
            self._save()
        if self._reading is not None and self._divide_energy():  # last, as the GPU's driver may be slow
            with self._saving:
                self._save()

    def _save(self) -> None:
        """Write the sums, or keep them and report the problem once. For the thread that holds ``_saving``."""
        if self._inbox.refuses:
            return
        with self._counting:
            taken = self._ledger.take()
        if not taken:
            return
        try:
            path = self._find_path()
            try:
                self._write(path, taken)
            except CorruptFile as error:
                _replace_corrupt(path, error)
                self._write(path, taken)
            self._problem = ""
        except NewerFile as error:
            self._inbox.refuses = True
            self._report(error, "llamasup counts no usage until its next start.")
        except FolderUnusable as error:
            with self._counting:
                self._ledger.put_back(taken)
            self._report(error, "Until then, the usage is not saved.")

    def _write(self, path: Path, taken: Mapping[Group, Sums]) -> None:
        day = today()
        oldest = None if self._cleaned_on == day else day - timedelta(days=self._keep_days - 1)
        save(path, taken, delete_before=oldest)
        self._cleaned_on = day

    def _report(self, error: FolderUnusable, consequence: str) -> None:
        if error.message != self._problem:
            self._problem = error.message
            _log.warning("%s\n  → %s %s", error.message, error.remedy, consequence)


def _replace_corrupt(path: Path, error: CorruptFile) -> None:
    try:
        aside = move_aside(path, error)
    except OSError:
        raise error from None
    if aside is not None:
        _log.warning("%s\n  → llamasup has renamed it to %s, and begins a new one.", error.message, aside)


def today() -> date:
    """The local day."""
    return datetime.now(UTC).astimezone().date()


def _days(records: Sequence[RequestRecord], offset_s: float) -> Iterator[str]:
    """The local day on which each request ended. ``offset_s``: from the monotonic clock to UTC."""

    def day(record: RequestRecord) -> str:
        ended = datetime.fromtimestamp(offset_s + record.ended_s, UTC)
        return ended.astimezone().date().isoformat()

    first, last = day(records[0]), day(records[-1])
    if first == last:
        return iter([first] * len(records))
    return map(day, records)
