"""Views of the models of a pool at one moment: for ``why``, for ``/v1/models``, and for other nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.catalog.model_listing import ListedModel, ModelListing
from llamasup.core.pool.catalog.node_listing import NodeModel, encode_listing
from llamasup.core.pool.catalog.status import state_of_managed
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.shown_state import nearest
from llamasup.core.pool.why.state_reasons import ModelView, explain
from llamasup.core.supervision.states import State


def why_of(managed: ManagedModel, pool: Pool) -> Mapping[str, Any]:
    """The answer of ``GET models/{id}/why`` (docs/control.md)."""
    view = model_view(managed, monotonic())
    decisions = pool.decisions.of(view.id)
    explanation = explain(view, decisions, datetime.now(UTC))
    return {
        "model": view.id,
        "state": view.state,
        "sentences": list(explanation.sentences),
        "change": list(explanation.change),
        "decisions": [decision.as_json() for decision in decisions],
    }


def model_view(managed: ManagedModel, now_s: float) -> ModelView:
    """The model at ``now_s`` (monotonic)."""
    spec, served, waits = managed.spec, managed.served, managed.waits
    runner = min(managed.runners, key=lambda runner: nearest(runner.instance.state), default=None)
    state = state_of_managed(managed)
    if spec.stay.by_command:  # as its process has it
        state = (State.STOPPED if runner is None else runner.instance.state).value
    plans = [each.plan for each in managed.runners if each.plan is not None]
    slots = [plan.parallel for plan in plans if plan.parallel is not None]
    error, why = managed.error, served.unavailable_reason
    restart_s = None if runner is None else runner.instance.next_start_s
    return ModelView(
        spec.id,
        state,
        in_flight=served.in_flight,
        queued=len(served.queue),
        slots=sum(slots) if slots else None,
        max_concurrent=sum(runner.policy.max_concurrent or 0 for runner in managed.runners) or None,
        reduced=plans[0].reduced if plans else (),
        waits=waits,
        overdue_in_s=None if waits is None or waits.overdue_at_s <= now_s else waits.overdue_at_s - now_s,
        pinned=spec.stay.pin,
        by_command=spec.stay.by_command,
        problem=spec.problem or ("" if error is None else error.message),
        remedy=spec.remedy or ("" if error is None else error.remedy),
        download=why.message if why is not None and why.cause == "downloading" else "",
        retry_in_s=None if error is None else max(0.0, managed.retry_at_s - now_s),
        restart_in_s=None if restart_s is None else max(0.0, restart_s - now_s),
        unload_in_s=unload_in_s(managed, now_s),
    )


def unload_in_s(managed: ManagedModel, now_s: float) -> float | None:
    """The time until the model is unloaded if no request arrives before; None if unknown."""
    ttl_s = managed.ttl_s
    if ttl_s == float("inf") or managed.spec.stay.pin or not managed.serves or managed.served.in_flight:
        return None
    return max(managed.resident_since_s, managed.served.idle_since_s) + ttl_s - now_s


def listed_model(managed: ManagedModel, model: ResolvedModel) -> ListedModel:
    """The model for ``/v1/models``."""
    plan = next((runner.plan for runner in managed.runners if runner.plan is not None), None)
    spec = managed.spec
    if spec.listed is None and managed.facts is not None:
        spec = replace(spec, listed=managed.facts)
    return ListedModel(
        spec,
        model,
        managed.phase,
        state_of_managed(managed),
        None if plan is None or not managed.serves else plan.ctx_size,
        "" if managed.error is None else managed.error.message,
        sees=managed.sized is not None and managed.sized.sees,
        needs=managed.needs,
        unload_in_s=unload_in_s(managed, monotonic()),
    )


def node_listing(
    node: str,
    models: Iterable[tuple[ManagedModel, ResolvedModel]],
    default: str | None,
    seen: Callable[[ResolvedModel], ResolvedModel | None] | None,
) -> bytes:
    """Encode the models of this node, for ``Backend.node_listing``. ``node``: its id."""
    shown = ((managed, resolved if seen is None else seen(resolved)) for managed, resolved in models)
    return encode_listing(
        node, (_node_model(managed, model, default) for managed, model in shown if model is not None)
    )


def _node_model(managed: ManagedModel, resolved: ResolvedModel, default: str | None) -> NodeModel:
    listed, served = listed_model(managed, resolved), managed.served
    serving = served.serving()
    why = serving if isinstance(serving, HttpError) else None
    endpoints = () if isinstance(serving, HttpError) else serving
    problem = listed.problem or listed.spec.problem
    entry = ModelListing((resolved.id,), lambda _: listed, default).entry(resolved.id)
    return NodeModel(
        resolved.id,
        resolved.names[1:],
        listed.state,
        resolved.works,
        slots=sum(endpoint.slots for endpoint in endpoints),
        busy=sum(endpoint.taken for endpoint in endpoints),
        queued=len(served.queue),
        ctx_size=listed.ctx_size,
        percent=None if why is None else why.percent,
        eta_s=None if why is None else why.eta_s,
        problem=listed.spec.public_problem(problem) if problem else "",
        entry={**entry, "aliases": resolved.names[1:]},
    )
