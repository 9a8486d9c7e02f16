"""What the event loop's thread passes to the writer's thread."""

from __future__ import annotations

import threading

from llamasup.observability.counters import RequestRecord

__all__ = ["Inbox"]


class Inbox:
    """``pending``: finished requests that are not added up yet. ``wake_at_s``: a request that ends
    at this time or later (monotonic) wakes the writer. ``refuses``: the writer takes no more records.
    """

    __slots__ = ("closing", "pending", "refuses", "wake", "wake_at_s")

    def __init__(self) -> None:
        self.pending: list[RequestRecord] = []
        self.wake = threading.Event()
        self.wake_at_s = 0.0
        self.closing = False
        self.refuses = False
