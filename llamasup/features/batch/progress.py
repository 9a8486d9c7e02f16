"""The counts of a running batch, and why it waits (pure)."""

from __future__ import annotations

from msgspec import Struct


class Progress(Struct):
    """The live counts of a run. ``put_back``: requests that were ended for other clients; ``events_lost``:
    the events of their streams until then, about a token each. ``began_s``: monotonic. ``waiting``: why no
    line runs now; empty if lines run.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    put_back: int = 0
    events_lost: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_completion: int = 0
    ended_here: int = 0
    began_s: float = 0.0
    state: str = "running"
    waiting: str = ""

    @property
    def left(self) -> int:
        return self.total - self.done - self.failed

    def rates(self, now_s: float) -> tuple[float, float | None]:
        """Return the tokens of answers per second, and the seconds that are left. None means unknown."""
        taken_s = max(now_s - self.began_s, 0.001)
        left_s = taken_s * self.left / self.ended_here if self.ended_here else None
        return self.tokens_completion / taken_s, left_s
