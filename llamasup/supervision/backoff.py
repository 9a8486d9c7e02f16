"""How long to wait before the next start, and when to stop trying (S2, S3)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HALF_OPEN_S", "RestartPolicy", "recent_crashes", "restart_delay_s"]

HALF_OPEN_S = 300.0
"""Between two tries of a service that is to live long (S3)."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """All times in seconds."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    jitter: float = 0.2
    """Share by which a delay varies either way, so that several servers do not restart in step."""
    window_s: float = 600.0
    """Crashes older than this are forgotten: ten minutes of health start the count anew."""
    most_crashes: int = 5
    """More than this many crashes within the window are a crash loop."""
    half_open_s: float | None = None
    """After a crash loop one start is tried at this interval (``HALF_OPEN_S``); None: never."""


def recent_crashes(crashes: tuple[float, ...], now_s: float, policy: RestartPolicy) -> tuple[float, ...]:
    """Those of ``crashes`` (times in seconds, oldest first) that still count at ``now_s``."""
    return tuple(at_s for at_s in crashes if now_s - at_s < policy.window_s)


def restart_delay_s(crashes: int, *, was_ready: bool, roll: float, policy: RestartPolicy) -> float:
    """The delay before the restart that follows the ``crashes``-th recent crash (1 for the first).

    The first crash of a server that had been ready is answered at once: it is most likely a single
    bad request, and people are waiting. ``roll`` is uniform in [0, 1).
    """
    exponent = crashes - 2 if was_ready else crashes - 1
    if exponent < 0:
        return 0.0
    # The exponent is bounded so that a huge crash count cannot overflow.
    delay_s = min(policy.first_delay_s * 2.0 ** min(exponent, 32), policy.longest_delay_s)
    return delay_s * (1.0 + policy.jitter * (2.0 * roll - 1.0))
