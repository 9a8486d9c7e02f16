"""The JSON object of ``llamasup plan --json`` (docs/design.md), without secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasup.core.planning.measured.draft_acceptance import DraftCounts
from llamasup.core.planning.measured.tuned import Measured
from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Profile
from llamasup.core.system.process.environment import RuntimeKind
from llamasup.errors import LlamasupError


def plan_as_json(
    plan: LaunchPlan,
    *,
    model: str,
    path: str,
    kind: RuntimeKind,
    version: str,
    profile: Profile | None,
    alternatives: Sequence[LaunchPlan],
    refused: LlamasupError | None,
) -> dict[str, Any]:
    """Make the JSON object of a plan.

    ``alternatives`` are the plans considered, the preferred one first. ``refused`` is the error of ``run``.
    """
    return {
        "model": model,
        "runtime": {"path": path, "kind": kind, "version": version},
        "argv": list(plan.argv),
        "env": plan.env_shown,
        "env_reasons": dict(plan.env_reasons),
        "reasons": [
            {"flag": why.flag, "value": why.value, "reason": why.reason, "passed": why.passed}
            for why in plan.reasons
        ],
        "memory": _memory_as_json(plan.memory),
        "profile": profile,
        "measured": None if plan.measured is None else _measured_as_json(plan.measured),
        "drafts": _counts_as_json(plan.draft_counts),
        "slots": plan.parallel,
        "ctx_size": plan.ctx_size,  # of one request, as in the status
        "alternatives": [_alternative_as_json(alternative) for alternative in alternatives],
        "remedy": None if refused is None else refused.remedy,
    }


def _counts_as_json(counts: DraftCounts | None) -> dict[str, int] | None:
    return None if counts is None else {"proposed": counts.proposed, "accepted": counts.accepted}


def _measured_as_json(measured: Measured) -> dict[str, Any]:
    return {"taken": measured.changes.as_json, "reason": measured.why}


def _memory_as_json(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "compute_bytes": memory.compute_bytes,
        "prompt_cache_bytes": memory.prompt_cache_bytes,
        "total_bytes": memory.total_bytes,
        "available_bytes": memory.available_bytes,
        "fits": memory.fits,
        "measured": memory.measured,
        "host": {"needed_bytes": memory.host_bytes, "available_bytes": memory.free.host_bytes},
        "devices": {"needed_bytes": memory.device_bytes, "available_bytes": memory.free.device_bytes},
        "parts": [
            {"name": part.name, "host_bytes": part.host_bytes, "device_bytes": part.device_bytes}
            for part in memory.parts
        ],
    }


def _alternative_as_json(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "parallel": plan.parallel,
        "ctx_size": plan.ctx_size_of_slot,
        "kv_type": plan.kv_type,
        "gpu_layers": plan.gpu_layers,
        "total_bytes": plan.memory.total_bytes,
        "fits": plan.memory.fits,
    }
