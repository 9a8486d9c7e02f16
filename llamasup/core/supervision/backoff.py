"""The delay before the next start of a server that crashed, and when restarts stop (S2, S3)."""

from __future__ import annotations

from msgspec import Struct

HALF_OPEN_S = 300.0
"""Interval of the single starts after a crash loop, for services that run unattended (S3)."""


class RestartPolicy(Struct, frozen=True):
    """All times in seconds."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    jitter: float = 0.2
    """Relative variation of a delay in both directions, so that several servers do not restart in step."""
    window_s: float = 600.0
    """Older crashes do not count."""
    most_crashes: int = 5
    """More than this many crashes within the window are a crash loop."""
    half_open_s: float | None = None
    """After a crash loop, one start is tried at this interval; None: never."""


def recent_crashes(
    crashes: tuple[tuple[float, int], ...], now_s: float, policy: RestartPolicy
) -> tuple[tuple[float, int], ...]:
    """The ``crashes`` (times in seconds and generations, oldest first) that still count at ``now_s``."""
    return tuple(crash for crash in crashes if now_s - crash[0] < policy.window_s)


def restart_delay_s(crashes: int, *, was_ready: bool, roll: float, policy: RestartPolicy) -> float:
    """The delay before the restart that follows the ``crashes``-th recent crash (1 for the first).

    After the first crash of a server that had been ready the delay is 0: the cause is most likely a single
    bad request, and clients are waiting. ``roll`` is uniform in [0, 1).
    """
    exponent = crashes - 2 if was_ready else crashes - 1
    if exponent < 0:
        return 0.0
    # The exponent is bounded so that a huge crash count cannot overflow.
    delay_s = min(policy.first_delay_s * 2.0 ** min(exponent, 32), policy.longest_delay_s)
    return delay_s * (1.0 + policy.jitter * (2.0 * roll - 1.0))
