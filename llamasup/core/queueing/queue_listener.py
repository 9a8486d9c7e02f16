"""The messages of the queue to a waiting request: its outcome, and its outlook until then."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.unavailable import Unavailable


class QueueListener(Protocol):
    """Gets the outcome of each wait of its entry, once, and never during ``enter`` or ``requeue``."""

    @property
    def body(self) -> bytes:
        """The request's body, to choose one of several replicas."""
        ...

    def served(self, lease: Lease) -> None: ...

    def refused(self, why: Unavailable) -> None: ...


class Outlook(Struct, frozen=True):
    """The expectation of a waiting request. ``position``: 1 for the next.

    ``wait_s``: an estimate of the wait; None: not known.

    ``loads``: it waits for a generation, and not only for a permit. ``percent``: how much of it is loaded.
    ``eta_s``: when it will serve; None: not known.
    """

    position: int
    wait_s: float | None
    loads: bool
    percent: float | None = None
    eta_s: float | None = None
