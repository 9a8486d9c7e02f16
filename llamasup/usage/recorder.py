"""Takes the finished requests of this llamasup. The event loop only appends each record to a list.

A thread (``writer.py``) adds the records up and saves the sums. It starts with the first request, and only
then imports what it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from llamasup.observability.counters import RequestRecord
from llamasup.usage.inbox import Inbox

if TYPE_CHECKING:
    from llamasup.usage.writer import UsageWriter

__all__ = ["UsageRecorder"]

# Records of 0.5 kB that wait for the thread; it adds 1,000 up in 2 ms.
MAX_PENDING: Final = 1_000
# If the thread does not keep up with the requests, the event loop helps.
MOST_PENDING: Final = 20_000
CLOSE_TIMEOUT_S: Final = 1.0
_NEVER: Final = float("inf")


class UsageRecorder:
    """``add`` and ``close`` are for the event loop's thread, ``report`` is for any other.

    ``keep_days``: how many days the file keeps, with today. ``make_writer`` is for tests.
    """

    def __init__(
        self, keep_days: int, *, make_writer: Callable[[Inbox, int], UsageWriter] | None = None
    ) -> None:
        self._keep_days = keep_days
        self._make_writer = make_writer
        self._inbox = Inbox()
        self._pending = self._inbox.pending
        self._thread: threading.Thread | None = None
        self._making = threading.Lock()
        self._made: UsageWriter | None = None

    def add(self, record: RequestRecord) -> None:
        """Count a finished request. Never waits."""
        inbox = self._inbox
        if record.model and not inbox.refuses:
            self._pending.append(record)
            if record.ended_s >= inbox.wake_at_s or len(self._pending) >= MAX_PENDING:
                self._wake()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Save the sums. Blocks for ``timeout_s`` at most."""
        self._inbox.closing = True
        self._inbox.wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def report(self, by: str = "model", since: str | None = None) -> Mapping[str, Any]:
        """The ``usage`` object of the contract, up to now. Blocks; raises UsageInvalid."""
        return self._writer().report(by, since)

    def _wake(self) -> None:
        inbox = self._inbox
        inbox.wake_at_s = _NEVER
        if self._thread is None:
            self._thread = threading.Thread(target=lambda: self._writer().run(), name="usage", daemon=True)
            self._thread.start()
        if not inbox.wake.is_set():
            inbox.wake.set()
        if len(inbox.pending) >= MOST_PENDING and self._made is not None:
            self._made.count_batch()

    def _writer(self) -> UsageWriter:
        with self._making:
            if self._made is None:
                from llamasup.usage.writer import UsageWriter

                self._made = (self._make_writer or UsageWriter)(self._inbox, self._keep_days)
            return self._made
