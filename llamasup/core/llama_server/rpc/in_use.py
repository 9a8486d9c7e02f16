"""The RPC workers that a llama-server of this process uses. They answer no other client.

A question to such a worker would only wait, and leave a dead connection that the worker accepts later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from llamasup.core.http.address import parse_worker

_Use = tuple[tuple[str, int], str]
"""The worker's identity, and its user."""


class UsedWorkers:
    """The users of each worker, such as "the model a". All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: Counter[_Use] = Counter()

    def add(self, workers: Iterable[str], user: str) -> None:
        with self._lock:
            self._uses.update(_uses(workers, user))

    def remove(self, workers: Iterable[str], user: str) -> None:
        """Undo one ``add`` with the same arguments."""
        with self._lock:
            self._uses.subtract(_uses(workers, user))
            self._uses = +self._uses

    def user_of(self, worker: str) -> str | None:
        """Return the user of a worker; None if no llama-server of this process uses it."""
        identity = parse_worker(worker).identity
        with self._lock:
            return next((user for used, user in self._uses if used == identity), None)


def _uses(workers: Iterable[str], user: str) -> list[_Use]:
    return [(parse_worker(worker).identity, user) for worker in workers]


USED = UsedWorkers()
