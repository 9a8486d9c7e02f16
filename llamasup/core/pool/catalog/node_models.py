"""The models of a pool as another node sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

from msgspec.structs import replace

from llamasup.core.models.access import ResolvedModel
from llamasup.core.pool.catalog.listing import ListedModel, ModelListing
from llamasup.core.pool.catalog.model_view import unload_in_s
from llamasup.core.pool.catalog.node_listing import NodeModel, encode_listing
from llamasup.core.pool.catalog.status import state_of_managed
from llamasup.core.pool.model import ManagedModel
from llamasup.core.queueing.unavailable import Unavailable


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
    why = serving if isinstance(serving, Unavailable) else None
    endpoints = () if isinstance(serving, Unavailable) else serving
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
