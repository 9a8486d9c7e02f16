"""Defines what a service calls when a request has finished, at each event, and at its end."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from llamasup.core.observability.counters import RequestRecord
from llamasup.core.supervision.events import PublishedEvent


class Observer(Struct, frozen=True):
    """Sees the requests and the events of a service. What is None is not called.

    The service calls ``finished``, ``slow`` and ``event`` in the thread of its event loop, so they must not
    wait. ``close`` is called once, after the last request, and may block for a limited time.
    """

    finished: Callable[[RequestRecord], None] | None = None
    slow: Callable[[RequestRecord, int], None] | None = None
    """Called with slow requests at a limited rate, and with the number of those left out before."""
    event: Callable[[PublishedEvent], None] | None = None
    close: Callable[[], None] | None = None
