"""Reasons for the tests of ``why``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment, Change, PlanLimits, Reduction
from llamasup.core.pool.cheapest_set import COUNT, Candidate, Resource
from llamasup.core.pool.eviction_policy import Action, Cordon, Grounds, Load, Uncordon
from llamasup.core.pool.why.recording import Decision, LoadedBy, of_action

GIB = 1 << 30
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
RAM: Resource = ("memory", "ram")
BIG = Candidate("big", {RAM: 4 * GIB}, (0, 0, 1.0))

LACKS_MEMORY = Grounds({RAM: 5 * GIB, COUNT: 1}, {RAM: 2 * GIB, COUNT: 3}, {RAM: 3 * GIB}, (BIG,), 105.0)
"""The model needs 5 GiB, 2 GiB are free, and ``big`` has to be unloaded for it."""

KILLED = Diagnosis("killed", "llama-server was killed (SIGKILL).", "Check dmesg.", (), False, 75)
SMALLER = Adjustment(1, 3, (Change("--parallel", "4", "2"),), PlanLimits(parallel=2))
TWO_SLOTS = Reduction(Change("--parallel", "4", "2"), "the larger plan does not fit in memory")


def loaded(time: datetime, model: str, by: LoadedBy) -> Decision:
    return _decision(Load(model), time, by)


def closed(time: datetime, model: str, for_id: str, grounds: Grounds | None) -> Decision:
    return _decision(Cordon(model, for_id), time, grounds={} if grounds is None else {for_id: grounds})


def opened(time: datetime, model: str) -> Decision:
    return _decision(Uncordon(model), time)


def _decision(
    action: Action, time: datetime, by: LoadedBy = "request", grounds: Mapping[str, Grounds] | None = None
) -> Decision:
    decision = of_action(action, time, by, grounds or {})
    assert decision is not None
    return decision
