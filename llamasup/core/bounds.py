"""Upper bounds on what a plan chooses by itself, and the step from one plan to a smaller one.

What the user set by hand is never bounded (S5).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Adjustment", "Bounds", "Change"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """``None`` bounds nothing. ``why`` is the clause that explains whatever these bounds make smaller."""

    parallel: int | None = None
    ctx_size: int | None = None  # tokens per request
    kv_type: str | None = None
    flash_attn_off: bool = False
    gpu_layers: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs from one plan to the next; values as a person reads them."""

    setting: str  # as llamasup's own option: "--parallel"
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.setting} {self.after} instead of {self.before}"


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A step down the ladder: what the next start will do differently."""

    step: int
    most_steps: int
    changes: tuple[Change, ...]
    bounds: Bounds

    def __str__(self) -> str:
        changes = ", ".join(str(change) for change in self.changes)
        return f"{changes} (step {self.step} of {self.most_steps})"
