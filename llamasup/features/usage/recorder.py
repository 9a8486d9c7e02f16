"""Adds up the finished requests of this llamasup, in the event loop, and passes the sums to a thread.

The thread (``saver.py``) saves them once a minute, and at the end. It starts with the first request, and only
then imports what it needs. Without requests, there is no timer and the thread sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llamasup.core.control.interface import Host
from llamasup.core.observability.counters import HeldSlots, RequestRecord
from llamasup.core.observability.observer import Observer
from llamasup.core.system.batch_writer import BatchWriter
from llamasup.errors import without_errno
from llamasup.features.usage.ledger import Flush, Group, Ledger, Question, Saved, Work, day_at, key_of
from llamasup.features.usage.settings import USAGE, Usage

if TYPE_CHECKING:
    from llamasup.features.usage.saver import UsageSaver

_log = logging.getLogger(__name__)

# With the time of a write, a crash loses at most a minute.
SAVE_S: Final = 55.0
# The power of the machine changes with its load, so a long interval makes the division inexact.
READING_S: Final = 10.0
ANSWER_TIMEOUT_S: Final = 3.0
CLOSE_TIMEOUT_S: Final = 1.0
# Without this limit, a disk or a driver that hangs would let the lists of requests pile up.
MAX_WAITING: Final = 10
_NEVER: Final = float("inf")


def attach(host: Host) -> None:
    """Attach the count of the usage to a service, or the answer that it is not counted."""
    settings: Usage = host.settings.get(USAGE.name, USAGE.default)
    if not (settings.enabled and host.counts_usage):
        host.usage = _not_counted
        return
    recorder = UsageRecorder(settings.keep_days, held_slots=host.held_slots)
    host.usage = recorder.report
    host.observe(Observer(recorder.add, close=recorder.close))


async def _not_counted(by: str, since: str | None) -> Mapping[str, Any]:
    from llamasup.features.usage.report import not_counted  # here, to keep the start short
    from llamasup.features.usage.store import today

    return not_counted(by, since, today())


class UsageRecorder:
    """Counts requests, in the event loop's thread. ``keep_days``: how many days the file keeps, with today.
    ``held_slots`` returns the slots of the requests in flight; it is called for each reading of the energy
    counters.

    ``make_saver`` and the times are for tests.
    """

    def __init__(
        self,
        keep_days: int,
        *,
        held_slots: Callable[[], Sequence[HeldSlots]] = tuple,
        make_saver: Callable[[int], UsageSaver] | None = None,
        save_s: float = SAVE_S,
        reading_s: float = READING_S,
    ) -> None:
        self._keep_days = keep_days
        self._held_slots = held_slots
        self._make_saver = make_saver
        self._save_s = save_s
        self._reading_s = reading_s
        self._ledger = Ledger()
        self._work: list[Work] = []
        self._day = ""
        self._day_ends_s = 0.0
        self._next_reading_s = 0.0  # when the end of a request leads to a reading of the energy counters
        self._timer: asyncio.TimerHandle | None = None
        self._saver: UsageSaver | None = None  # made by the thread
        self._has_failed = False  # the thread could not make it
        self._writer: BatchWriter[Flush] = BatchWriter(self._save, name="usage", linger_s=0.0)

    def add(self, record: RequestRecord) -> None:
        """Count a finished request; nothing if it was not for a model. Never waits."""
        if not record.model:
            return
        now_s = record.ended_s
        if now_s >= self._day_ends_s:
            self._day, left_s = day_at(datetime.now(UTC).astimezone())
            self._day_ends_s = now_s + left_s
        group = self._ledger.count(record, self._day)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._save_s, self._pass_on)
        if self._next_reading_s == _NEVER:
            return
        held_s = min(record.slot_s, record.duration_s)
        if held_s > 0.0:
            self._work.append(Work(group, now_s - held_s, now_s, record.slot_s / held_s))
        if now_s >= self._next_reading_s:
            measures = self._may_measure
            self._next_reading_s = now_s + self._reading_s if measures else _NEVER
            work = self._take_work()
            if len(self._writer) < MAX_WAITING:
                self._writer.put(Flush(work=work, measures=measures))

    async def report(self, by: str = "model", since: str | None = None) -> Mapping[str, Any]:
        """Return the ``usage`` object of the contract, up to now. Saves the sums first. Raises UsageInvalid.

        A file that cannot be used is the ``problem`` in the object, which then has the unsaved sums alone.
        """
        from llamasup.features.usage.report import read_by, read_since, report
        from llamasup.features.usage.store import today

        groups = read_by(by)
        first = None if since is None else read_since(since, today())
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Saved] = loop.create_future()
        self._pass_on(Question(groups, first, partial(_answer, loop, answer)))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                saved = await answer
        except TimeoutError:
            problem = "The usage file cannot be used: the disk does not answer."
            return report([], groups, first, file=None, problem=problem)
        return report(saved.rows, groups, first, file=saved.file, problem=saved.problem)

    def close(self, timeout_s: float | None = None) -> None:
        """Save the sums. Blocks for ``timeout_s`` at most; by default ``CLOSE_TIMEOUT_S``."""
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        self._pass_on()
        if self._work and self._may_measure:  # last, as the driver of a GPU may be slow
            self._writer.put(Flush(work=self._take_work(), measures=True, saves=True))
        if not self._writer.close(timeout_s):
            _log.warning(
                "The last usage may not be saved: the disk or a driver took longer than %g s.", timeout_s
            )

    @property
    def _may_measure(self) -> bool:
        """Whether the machine has energy counters, as far as known."""
        return self._saver is None or self._saver.measures

    def _pass_on(self, question: Question | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sums = self._ledger.take()
        if sums or question is not None:
            self._writer.put(Flush(sums, saves=True, question=question))

    def _take_work(self) -> Sequence[Work]:
        """Take the work of the requests that have ended since the last reading, and of those in flight until
        now.
        """
        work, self._work = self._work, []
        for held in self._held_slots():
            group = Group(self._day, held.model, key_of(held.client))
            work.append(Work(group, held.since_s, _NEVER, held.slots))
        return work

    # --- in the thread

    def _save(self, flushes: list[Flush]) -> bool:
        if self._saver is None:
            try:
                from llamasup.features.usage.saver import UsageSaver

                self._saver = (self._make_saver or UsageSaver)(self._keep_days)
            except Exception as error:  # such as a Python without sqlite3
                if not self._has_failed:
                    self._has_failed = True
                    _log.exception("The usage cannot be counted")
                why = f"{type(error).__name__}: {without_errno(str(error))}"
                problem = f"The usage cannot be counted: {why}."
                for flush in flushes:
                    if flush.question is not None:
                        flush.question.answer(Saved((), None, problem))
                return True
        for flush in flushes:
            self._saver.take(flush)
        return True


def _answer(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Saved], saved: Saved) -> None:
    def set_answer() -> None:
        if not answer.done():  # else it was too late
            answer.set_result(saved)

    with suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(set_answer)
