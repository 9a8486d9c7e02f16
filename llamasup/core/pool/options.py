"""The options of a pool."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from llamasup.core.pool.eviction_policy import ResidencyPolicy
from llamasup.core.supervision.states import Policy


class PoolOptions(Struct, frozen=True):
    """The options of a pool.

    ``budget``: bytes by device, for all models together. ``policy``: for models without their own.
    """

    budget: Mapping[str, int]
    policy: Policy = field(default_factory=Policy)
    residency: ResidencyPolicy = field(default_factory=ResidencyPolicy)
    runtime: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
