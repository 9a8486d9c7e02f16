"""Decides when the bytes for a connection are written: at once, or at the end of the loop's round (pure).

A write wakes the process that reads, if that process sleeps. In a virtual machine this costs 8 µs, a quarter
of a request. While one round of the loop handles many events, the client and llama-server handle each write
long before the next one, and sleep again. So a busy proxy collects the writes of a round, and makes them one
after another: the first one wakes the reader, which is still awake for the others.

Collecting costs a callback for each round, so it pays only if a round has several writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["BUSY_PER_S", "LOOK_EVERY", "ROUNDS", "WRITES_PER_ROUND", "Outbox"]

LOOK_EVERY: Final = 64
"""Writes between two looks at the clock."""
BUSY_PER_S: Final = 12_000.0
"""Writes per second from which rounds with several writes are likely: half of what one core can do."""
ROUNDS: Final = 32
"""Rounds after which the outbox counts the writes that it has collected."""
WRITES_PER_ROUND: Final = 4
"""With fewer writes in a round, on average, writes are made at once again: they wait, and save little."""


class Transport(Protocol):
    def write(self, data: bytes) -> None: ...
    def is_closing(self) -> bool: ...


class Outbox:
    """Takes all bytes that may be written late. The bytes of one transport stay in order.

    Call ``flush`` before anything else is done with the writing side of a transport: a close, an end of file,
    a write past the outbox. ``call_soon`` and ``clock`` are those of the event loop.
    """

    __slots__ = ("_call_soon", "_clock", "_collected", "_looked_at_s", "_rounds", "_writes", "collects")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float]) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self.collects = False
        self._collected: list[tuple[Transport, bytes]] = []
        self._writes = 0  # since the last look, or while collecting since the last count
        self._rounds = 0
        self._looked_at_s = 0.0

    def put(self, transport: Transport, data: bytes) -> None:
        """Write ``data``, now or at the end of the round."""
        if self.collects:
            if not self._collected:
                self._call_soon(self._round_over)
            self._collected.append((transport, data))
            return
        transport.write(data)
        self._writes += 1
        if self._writes == LOOK_EVERY:
            self._look()

    def flush(self) -> None:
        """Make the collected writes now."""
        if self._collected:
            collected, self._collected = self._collected, []
            for transport, data in collected:
                if not transport.is_closing():  # its peer has closed it during this round
                    transport.write(data)

    def _round_over(self) -> None:
        self._writes += len(self._collected)
        self._rounds += 1
        self.flush()
        if self._rounds == ROUNDS:
            self.collects = self._writes >= ROUNDS * WRITES_PER_ROUND
            self._rounds = self._writes = 0

    def _look(self) -> None:
        now_s = self._clock()
        self.collects = (now_s - self._looked_at_s) * BUSY_PER_S < LOOK_EVERY
        self._looked_at_s = now_s
        self._rounds = self._writes = 0
