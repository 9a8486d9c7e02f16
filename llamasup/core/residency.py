"""Which models are loaded: who comes in, who goes for it, who waits (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Evict",
    "Load",
    "Phase",
    "Refuse",
    "ResidencyPolicy",
    "Resume",
    "Tenant",
    "Verdict",
    "WakeAt",
    "World",
    "Yield",
]

Places = Mapping[str, int]
"""Bytes by place: ``ram``, and each device by llama-server's name for it (``CUDA0``)."""


class Phase(StrEnum):
    """Where a model is. All but ABSENT and FAILED hold the memory that they need."""

    ABSENT = "absent"
    LOADING = "loading"  # or restarting after a crash
    RESIDENT = "resident"
    YIELDING = "yielding"  # takes no new request, so that it can go; those in flight finish
    LEAVING = "leaving"  # told to end; its memory is not free yet
    FAILED = "failed"  # cannot be loaded for now


@dataclass(frozen=True, slots=True)
class Tenant:
    """One model as the policy sees it. Times are monotonic seconds."""

    id: str
    needs: Places
    """Estimated, then measured; empty: not known yet."""
    phase: Phase = Phase.ABSENT
    pinned: bool = False
    groups: frozenset[str] = frozenset()
    ttl_s: float = float("inf")
    load_s: float = 1.0
    """What loading it again would cost."""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for it to be loaded (or for a place); a load that somebody asked for counts too."""
    waiting_since_s: float = float("inf")
    """Since when the one that has waited longest does."""
    used_s: float = 0.0
    """The end of its last request, or of its load: since when it is idle, if nothing is in flight."""
    resident_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """``turn_s``: how long a request waits for a model that is shut out by busy ones before these have to
    give way; and how long a model that has just been loaded may stay before it is made to.
    """

    turn_s: float = 5.0
    max_loaded: int | None = None


@dataclass(frozen=True, slots=True)
class World:
    now_s: float
    tenants: Mapping[str, Tenant]
    budget: Places
    policy: ResidencyPolicy = field(default_factory=ResidencyPolicy)


@dataclass(frozen=True, slots=True)
class Load:
    id: str


@dataclass(frozen=True, slots=True)
class Evict:
    """It is idle: end it. ``reason``: ``memory``, ``ttl``, ``group``, ``count``."""

    id: str
    reason: str
    for_id: str = ""


@dataclass(frozen=True, slots=True)
class Yield:
    """Take no new requests for it; end it when those in flight are over."""

    id: str
    for_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """It need not yield any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """It can never be loaded with this budget: those who wait for it are to be told."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Decide again then, if nothing has happened before."""

    at_s: float


Verdict = Load | Evict | Yield | Resume | Refuse | WakeAt
