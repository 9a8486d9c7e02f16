"""The RPC workers that a llama-server of this process uses. They answer no other client.

A question to such a worker would only wait, and leave a dead connection that the worker accepts later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

__all__ = ["USED", "UsedWorkers"]


class UsedWorkers:
    """Counts the users of each worker. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()

    def add(self, workers: Iterable[str]) -> None:
        with self._lock:
            self._users.update(workers)

    def remove(self, workers: Iterable[str]) -> None:
        with self._lock:
            self._users.subtract(workers)
            self._users = +self._users

    def __contains__(self, worker: str) -> bool:
        with self._lock:
            return worker in self._users


USED = UsedWorkers()
