"""Decides when the bytes for a connection are written: at once, or at the end of the loop's round (pure).

A write wakes the process that reads, if that process sleeps. In a virtual machine this costs 8 µs, a quarter
of a request. While one round of the loop handles many events, the client and llama-server handle each write
long before the next one, and sleep again. So a busy proxy collects the writes of a round, and makes them one
after another: the first one wakes the reader, which is still awake for the others.

Collecting costs a callback for each round, so it pays only if a round has several writes. Whether it has is
known only while writes are collected, so the outbox tries it now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["LATE_BYTES", "ROUNDS", "TRY_EVERY", "WRITES_PER_ROUND", "Outbox"]

TRY_EVERY: Final = 1024
"""Writes at once after which the outbox tries to collect."""
ROUNDS: Final = 32
"""Rounds after which the outbox counts the writes that it has collected. Collecting has an effect on the
number of events of a round only after some rounds.
"""
WRITES_PER_ROUND: Final = 4
"""With fewer writes in a round, on average, writes are made at once again: they wait, and save little."""
LATE_BYTES: Final = 16 * 1024
"""Larger pieces are written at once, so that a connection that does not take them pauses their source before
the next read. A round reads each connection once, so it collects at most this much for each.
"""

_log = logging.getLogger("llamasup.proxy")


class Transport(Protocol):
    def write(self, data: bytes) -> None: ...
    def is_closing(self) -> bool: ...
    def abort(self) -> None: ...


class Outbox:
    """Takes all bytes that may be written late. The bytes of one transport stay in order.

    Call ``flush`` before anything else is done with the writing side of a transport: a close, an end of file,
    a write past the outbox. ``call_soon`` is that of the event loop.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self.collects = False
        self._collected: list[tuple[Transport, bytes]] = []
        self._writes = 0  # at once, or those of the counted rounds
        self._rounds = 0

    def put(self, transport: Transport, data: bytes) -> None:
        """Write ``data``, now or at the end of the round."""
        if self.collects:
            if len(data) <= LATE_BYTES:
                if not self._collected:
                    self._call_soon(self._round_over)
                self._collected.append((transport, data))
                return
            self.flush()
        transport.write(data)
        self._writes += 1
        if self._writes == TRY_EVERY and not self.collects:
            self.collects = True
            self._writes = 0

    def flush(self) -> None:
        """Make the collected writes now."""
        if not self._collected:
            return
        collected, self._collected = self._collected, []
        self._writes += len(collected)
        for transport, data in collected:
            if not transport.is_closing():  # the connection has broken during this round
                try:
                    transport.write(data)
                except Exception:  # the other connections get their bytes
                    _log.exception("llamasup failed to write to a connection")
                    transport.abort()

    def _round_over(self) -> None:
        self.flush()
        self._rounds += 1
        if self._rounds == ROUNDS:
            self.collects = self._writes >= ROUNDS * WRITES_PER_ROUND
            self._rounds = self._writes = 0
