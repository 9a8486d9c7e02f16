"""Collects what is known of a model of the pool. All that shows a model gets it from here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from llamasup.core.http.heads import HttpError
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.shown_state import ShownState, nearest, state_of, state_of_processes
from llamasup.core.pool.why.state_reasons import explain
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.runner import InstanceRunner


def info_of(managed: ManagedModel, *, is_default: bool = False) -> ModelInfo:
    """Collect what is known of a model now."""
    now_s = monotonic()
    spec, served, error = managed.spec, managed.served, managed.error
    runners = sorted(managed.runners, key=lambda runner: nearest(runner.instance.state))
    old = (runner for runner in managed.all_runners if runner not in runners)
    states = [runner.instance.state for runner in runners]
    why, serving = served.unavailable_reason, served.serving()
    download = why if why is not None and why.cause == "downloading" else None
    waits_for = "" if not managed.wanted else "memory" if download is None else "download"
    if spec.stay.by_command:  # as its process has it
        state = state_of_processes(states)
    else:
        state = state_of(managed.phase, states, waits_for=waits_for, broken=bool(spec.problem))
    plans = [runner.plan for runner in runners if runner.plan is not None]
    endpoints = () if isinstance(serving, HttpError) else serving
    sized, waits = managed.sized, managed.waits
    restart_s = runners[0].instance.next_start_s if runners else None
    return ModelInfo(
        spec,
        state,
        managed.phase,
        is_default,
        managed.facts,
        sees=sized is not None and sized.sees,
        processes=tuple(map(process_of, runners)),
        old_processes=tuple(map(process_of, old)),
        unavailable=serving if isinstance(serving, HttpError) else None,
        permits=sum(endpoint.slots for endpoint in endpoints),
        busy=sum(endpoint.taken for endpoint in endpoints),
        in_flight=served.in_flight,
        queued=len(served.queue),
        slots=sum(plan.parallel or 0 for plan in plans) or None,
        max_concurrent=sum(runner.policy.max_concurrent or 0 for runner in runners) or None,
        reduced=plans[0].reduced if plans else (),
        needs=managed.needs,
        sized_needs={} if sized is None else sized.needs,
        problem=spec.problem or ("" if error is None else error.message),
        remedy=spec.remedy or ("" if error is None else error.remedy),
        wait=_wait_before_load(managed, state, download, now_s) if waits_for else None,
        waits=waits,
        overdue_in_s=None if waits is None or waits.overdue_at_s <= now_s else waits.overdue_at_s - now_s,
        download="" if download is None else download.message,
        retry_in_s=None if error is None else max(0.0, managed.retry_at_s - now_s),
        restart_in_s=None if restart_s is None else max(0.0, restart_s - now_s),
        unload_in_s=_unload_in_s(managed, now_s),
    )


def process_of(runner: InstanceRunner) -> ProcessInfo:
    instance = runner.instance
    return ProcessInfo(
        instance.state,
        instance.generation,
        runner.pid,
        runner.plan,
        runner.load,
        instance.restarts,
        runner.in_flight,
        runner.busy,
        instance.last,
        runner.last_exit,
        tuple(runner.history.records),
    )


def _wait_before_load(
    managed: ManagedModel, state: ShownState, download: HttpError | None, now_s: float
) -> LoadProgress | None:
    """The wait of a requested model before its processes start; None if they have started."""
    is_begun = managed.serves or any(runner.load is not None for runner in managed.runners)
    if is_begun or (download is None and state is not ShownState.WAITING):
        return None
    waiters_since_s = managed.load_waiters_since_s if managed.load_waiters else now_s
    waited_s = now_s - min(managed.served.queue.oldest_s, waiters_since_s)
    if download is not None:
        return LoadProgress(None, download.eta_s, waited_s, download.message)
    return LoadProgress(None, None, waited_s, "it waits until other models free memory")


def _unload_in_s(managed: ManagedModel, now_s: float) -> float | None:
    """The time until the model is unloaded if no request arrives before; None if unknown."""
    ttl_s = managed.ttl_s
    if ttl_s == float("inf") or managed.spec.stay.pin or not managed.serves or managed.served.in_flight:
        return None
    return max(managed.resident_since_s, managed.served.idle_since_s) + ttl_s - now_s


def why_of(managed: ManagedModel, pool: Pool) -> Mapping[str, Any]:
    """The answer of ``GET models/{id}/why`` (docs/control.md)."""
    info = info_of(managed)
    decisions = pool.decisions.of(info.id)
    explanation = explain(info, decisions, datetime.now(UTC))
    return {
        "model": info.id,
        "state": info.state.value,
        "sentences": list(explanation.sentences),
        "change": list(explanation.change),
        "decisions": [decision.as_json() for decision in decisions],
    }
