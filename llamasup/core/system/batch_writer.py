"""A thread that formats and writes what other threads queue, in batches.

One wake-up and one system call for many lines: a busy event loop only appends to a queue. The queue has a
bound, or the owner decides what it drops.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Formatted in one go. This holds the interpreter for 0.3 ms, and streams must not wait longer.
BATCH: Final = 100


class BatchWriter(Generic[T]):
    """A queue whose items a thread passes to ``write``.

    ``write`` gets at most ``BATCH`` items at a time, in order, in the thread; it returns False to end.

    ``linger_s``: how long the thread collects items before it writes. ``max_waiting``: ``put`` drops an item
    while so many wait, and counts it in ``rejected``; then only one thread may call ``put``.

    An exception of ``write`` loses its batch: ``lost`` counts the items. The first one is logged.

    If the system allows no further thread, the items wait: each ``put`` tries again to start the thread.
    """

    def __init__(
        self,
        write: Callable[[list[T]], bool],
        *,
        name: str,
        linger_s: float,
        max_waiting: int | None = None,
    ) -> None:
        self.rejected = 0
        self.lost = 0
        self._write = write
        self._name = name
        self._linger_s = linger_s
        self._max_waiting = max_waiting
        self._items: deque[T] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._over = False
        self._has_failed = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._items)

    def put(self, item: T, *, hurry: bool = False) -> None:
        """Queue an item. Never waits. ``hurry``: write it, and all before it, without delay."""
        if self._over:
            return
        if self._max_waiting is not None and len(self._items) >= self._max_waiting:
            self.rejected += 1
            return
        self._items.append(item)
        if self._thread is None:
            self._start()
        if hurry and not self._hurry.is_set():
            self._hurry.set()
        if not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Write the items that wait. Blocks for ``timeout_s`` at most; False if the writer is still busy.

        Without a thread, it blocks until all are written.
        """
        self._closing = True
        self._hurry.set()
        self._wake.set()
        if self._items and self._thread is None:
            self._start()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        if self._items:
            self._run()
        return True

    def _start(self) -> None:
        problem: RuntimeError | None = None
        with self._starting:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit on processes and threads is reached
                problem = None if self._has_failed else error
                self._has_failed = True
            else:
                self._thread = thread
        if problem is not None:  # without the lock: this very writer may write the warning
            _log.warning("The thread %r cannot start yet, and its output waits: %s", self._name, problem)

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            self._over = True  # what is put now would stay for ever
            self._items.clear()

    def _write_all(self) -> None:
        items = self._items
        while True:
            self._wake.wait()
            if not self._hurry.is_set():  # a wait may take 5 ms longer, while another thread computes
                self._hurry.wait(self._linger_s)
            # Before the items are taken: later ones wake the thread again.
            self._wake.clear()
            self._hurry.clear()
            is_last = self._closing
            while items:
                if not self._write_batch([items.popleft() for _ in range(min(BATCH, len(items)))]):
                    return
            if is_last:
                return

    def _write_batch(self, batch: list[T]) -> bool:
        try:
            return self._write(batch)
        except Exception:
            if not self.lost:
                _log.exception("The thread %r has lost what it had to write", self._name)
            self.lost += len(batch)
            return True
