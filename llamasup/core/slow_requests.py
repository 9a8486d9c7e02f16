"""Which requests are slow, and how many of them are told: a slow day must not become a flood of lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SlowLog", "slow_after", "tell_slow"]

# A person who watches reads one line in 5 s; the first ten come at once, so that a burst is seen whole.
_BURST = 10.0
_PER_SECOND = 0.2


@dataclass(frozen=True, slots=True)
class SlowLog:
    """``allowed``: lines that may be told now; ``left_out``: slow requests since the last line told."""

    at_s: float
    allowed: float = _BURST
    left_out: int = 0


def slow_after(first_byte_s: float | None, duration_s: float) -> float:
    """How long the client had nothing: to the first byte, or to the end where none came.

    Not the whole of a stream: a long answer is not a slow one.
    """
    return duration_s if first_byte_s is None else first_byte_s


def tell_slow(log: SlowLog, now_s: float) -> tuple[SlowLog, bool]:
    """Whether the slow request of now is told; if so, ``log.left_out`` before it is how many were not."""
    allowed = min(_BURST, log.allowed + (now_s - log.at_s) * _PER_SECOND)
    if allowed < 1.0:
        return SlowLog(now_s, allowed, log.left_out + 1), False
    return SlowLog(now_s, allowed - 1.0, 0), True
