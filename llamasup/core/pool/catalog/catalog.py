"""The models of a pool by their names.

``Catalog`` has many models, and applies a new registry to the pool. ``OnlyModel`` has the one of ``run`` and
``wrap``. Each is a ``Backend`` of the proxy: it resolves a name, and lists its models. A feature puts names
in front of them with a ``Backend`` of its own.
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import (
    ListedModel,
    ResolvedModel,
    ambiguous_model,
    resolved,
    unknown_model,
    unnamed_model,
)
from llamasup.core.models.registry import Registry, Unknown
from llamasup.core.models.spec import Changes, ModelSpec, changes
from llamasup.core.pool.catalog.collect import info_of, why_of
from llamasup.core.pool.catalog.v1_models import entry_of, node_model_of
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.settings.model import Engine
from llamasup.core.supervision.not_serving import STOPPING
from llamasup.errors import LlamasupError, ModelUnknown

OnDemandFactory = Callable[[str], ModelSpec | None]
_MAX_ON_DEMAND = 100  # names of models that requests create, if downloads on demand are allowed


class PoolRoute(Struct, frozen=True):
    """A ``ModelRoute`` to a model of the pool."""

    model: ResolvedModel
    served: ReplicaSet
    managed: ManagedModel
    is_default: bool = False

    def listed(self, *, for_node: bool = False) -> ListedModel:
        render = node_model_of if for_node else entry_of
        return ListedModel(
            self.model, lambda model: render(info_of(self.managed, is_default=self.is_default), model)
        )


class Catalog:
    """The ``Backend`` of many models. Call all methods in the thread of the event loop.

    ``create`` makes the spec of an unknown name that can be downloaded on demand.
    """

    def __init__(self, registry: Registry, pool: Pool, create: OnDemandFactory | None = None) -> None:
        self.pool = pool
        self.node = secrets.token_hex(8)
        """The id of this node for other nodes."""
        self._factory = create
        self._on_demand: dict[str, None] = {}  # ids in the order of creation
        self._before_removal: Registry | None = None
        self.registry = Registry({}, {}, None)
        self._by_name: dict[str, ManagedModel] = {}  # by exact name
        self._routes: dict[str, PoolRoute] = {}  # by id
        self._engines: tuple[tuple[str, Engine], ...] = ()
        self._unready: HttpError | None = _STARTING
        pool.on_sized = self._sized
        self.apply(registry)

    # --- Backend ----------------------------------------------------------------------------------------
    lists_models = True

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> PoolRoute | HttpError:
        managed = self._by_name.get(model) if model is not None else self._default
        if managed is None:
            managed = self.find(model, create=create)
            if managed is None:
                return self._why_unknown(model)
        return self._routes[managed.spec.id]

    def readiness(self) -> HttpError | None:
        return STOPPING if self.pool.stopping else self._unready

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        """For clients the default model comes first: llama-server's web interface takes the first."""
        shown = (managed.spec for managed in self.managed_models() if not managed.spec.unlisted)
        routes = [self._routes[spec.id] for spec in shown]
        if not for_node:
            routes.sort(key=lambda route: not route.is_default)
        return (route.listed(for_node=for_node) for route in routes)

    def owners_of(self, path: str) -> tuple[str, ...]:
        """The ids of the models of other programs that serve this path."""
        return tuple(id_ for id_, engine in self._engines if engine.answers(path))

    def why(self, name: str) -> Mapping[str, Any]:
        return why_of(self.known(name), self.pool)

    def refuse(self, what: str, name: str) -> None:
        """All its models can be changed here."""

    def managed_models(self) -> Iterator[ManagedModel]:
        """In the order of the registry."""
        return (self.pool.managed_models[id_] for id_ in (*self.registry.specs, *self._on_demand))

    # --- names ------------------------------------------------------------------------------------------

    def model_named(self, name: str) -> ResolvedModel | None:
        """The model with this name in any spelling, without a search for similar names."""
        managed = self._by_name.get(name)
        spec = self.registry.resolve(name) if managed is None else managed.spec
        route = None if spec is None else self._routes.get(spec.id)
        return None if route is None else route.model

    def is_exact(self, model: str) -> bool:
        """Whether it is the name of a model in exactly this spelling."""
        return model in self._by_name

    def find(self, model: str | None, *, create: bool = False) -> ManagedModel | None:
        """The model of this name in any spelling; None: the default model. ``create``: a new model if the
        name can be downloaded.
        """
        if model is None:
            return self._default
        if (managed := self._by_name.get(model)) is not None:
            return managed
        found = self.registry.find(model)
        if not isinstance(found, Unknown):
            return self.pool.managed_models.get(found.id)
        return self._create_on_demand(model) if create and found.refused is None else None

    def _create_on_demand(self, name: str) -> ManagedModel | None:
        spec = None if self._factory is None or self._before_removal is not None else self._factory(name)
        return self._add_on_demand(spec) if spec is not None and self._make_room_for_one() else None

    def can_create(self, name: str) -> ModelSpec | None:
        """The spec that a request for this unknown name would create; None if it would get an error."""
        refused = self._unknown(name).refused is not None
        return None if self._factory is None or refused else self._factory(name)

    def _add_on_demand(self, spec: ModelSpec) -> ManagedModel:
        self._on_demand[spec.id] = None
        managed = self.pool.add(spec)
        self._by_name |= dict.fromkeys(spec.names, managed)
        self._routes[spec.id] = self._route(managed)
        return managed

    def _sized(self, managed: ManagedModel) -> None:
        """Merge two models on demand if their downloads are one file."""
        if managed.spec.id not in self._on_demand:
            return
        found = managed.found
        for id_ in self._on_demand:
            other = self.pool.managed_models[id_]
            if other is not managed and other.sized is not None and found.is_file_of(other.found):
                self._remove_model(managed, other)
                spec = replace(other.spec, aliases=(*other.spec.aliases, *managed.spec.names))
                self.pool.update_spec(other, spec)
                self._by_name |= dict.fromkeys(spec.names, other)
                self._routes[id_] = self._route(other)
                return

    @contextmanager
    def removal(self) -> Iterator[None]:
        """While files are removed, requests create no models: one could load such a file."""
        self._before_removal = self.registry
        try:
            yield
        finally:
            self._before_removal = None

    def withdraw(self, ids: Collection[str]) -> Callable[[bool], None]:
        """Serve these models no longer: requests for them are refused.

        The result serves them again; with True, without those on demand, whose files are gone.
        """
        before = self.registry
        on_demand = [self.pool.managed_models[id_].spec for id_ in self._on_demand if id_ in ids]
        for spec in on_demand:
            self._remove_model(self.pool.managed_models[spec.id])
        self.apply(before.without(ids))

        def serve(gone: bool) -> None:
            self.apply(before)
            for spec in () if gone else on_demand:
                self._add_on_demand(spec)

        return serve

    def _remove_model(self, managed: ManagedModel, successor: ManagedModel | None = None) -> None:
        """Remove a model on demand with all its names."""
        for name in managed.spec.names:
            self._by_name.pop(name, None)
        del self._on_demand[managed.spec.id], self._routes[managed.spec.id]
        self.pool.remove(managed, successor)

    def known(self, model: str, *, create: bool = False) -> ManagedModel:
        """Find the model, or raise ModelUnknown with similar names."""
        managed = self.find(model, create=create)
        if managed is None:
            self.refuse_ambiguous(model)
            error = self._refusal(model)
            remedy = error.remedy if self._unknown(model).near else "llamasup ps --all lists the models."
            raise ModelUnknown(f"{error.message}.", remedy=remedy)
        return managed

    def refuse_ambiguous(self, model: str) -> None:
        """Raises ModelUnknown for a name of several files."""
        refused = self._unknown(model).refused
        if refused is not None:
            raise ModelUnknown(f"{refused.message}.", remedy=refused.remedy)

    @property
    def _default(self) -> ManagedModel | None:
        default = self.registry.default
        return None if default is None else self.pool.managed_models.get(default)

    def _refusal(self, model: str | None) -> HttpError:
        if model is None:
            return unnamed_model(tuple(id_ for id_, spec in self.registry.specs.items() if not spec.problem))
        unknown = self._unknown(model)
        refusal = unknown_model if unknown.refused is None else ambiguous_model
        return refusal(model, unknown.near)

    def _unknown(self, model: str) -> Unknown:
        found = self.registry.find(model)
        return found if isinstance(found, Unknown) else Unknown(model)

    def _why_unknown(self, model: str | None) -> HttpError:
        before = self._before_removal
        if before is not None and model is not None and (before.resolve(model) or self.can_create(model)):
            return _REMOVING
        return self._refusal(model)

    def _route(self, managed: ManagedModel) -> PoolRoute:
        spec = managed.spec
        return PoolRoute(resolved(spec), managed.served, managed, spec.id == self.registry.default)

    # --- from start to change ---------------------------------------------------------------------------

    async def preload(self) -> Mapping[str, LlamasupError]:
        """Load the models with ``preload``; the catalog is ready then. Returns the errors by id."""
        preloaded = [managed for managed in self.pool.managed_models.values() if managed.spec.stay.preload]
        failed: dict[str, LlamasupError] = {}

        async def load(managed: ManagedModel) -> None:
            try:
                await self.pool.load(managed, "preload")
            except LlamasupError as error:
                failed[managed.spec.id] = error

        async with asyncio.TaskGroup() as tasks:
            for managed in preloaded:
                tasks.create_task(load(managed), name=f"{managed.spec.id}/preload")
        self._unready = None
        return failed

    def _make_room_for_one(self) -> bool:
        """Remove the oldest unused model on demand if there are too many: most likely it does not exist."""
        if sum(len(self.pool.managed_models[id_].spec.names) for id_ in self._on_demand) < _MAX_ON_DEMAND:
            return True
        for id_ in self._on_demand:
            managed = self.pool.managed_models[id_]
            if managed.phase in {Phase.ABSENT, Phase.FAILED} and not (managed.wanted or managed.sizing):
                self._remove_model(managed)
                return True
        return False

    def changes_to(self, registry: Registry) -> Changes:
        """The changes that ``apply`` would make."""
        before = {managed.spec.id: managed for managed in self.managed_models()}
        return changes(
            {id_: _as_listed(managed.spec) for id_, managed in before.items()},
            self._specs_with(registry),
            running={id_: managed.found for id_, managed in before.items() if managed.holds_memory},
            resolve=registry.resolve,
        )

    def _still_on_demand(self, registry: Registry) -> dict[str, None]:
        """A downloaded model on demand may be in the registry now."""
        return {id_: None for id_ in self._on_demand if registry.resolve(id_) is None}

    def _specs_with(self, registry: Registry) -> Mapping[str, ModelSpec]:
        on_demand = self._still_on_demand(registry)
        kept = {id_: _as_listed(self.pool.managed_models[id_].spec) for id_ in on_demand}
        return {**registry.specs, **kept}

    def apply(self, registry: Registry) -> Changes:
        """Serve these models from now on. Unchanged models are not touched (S16), and a renamed one keeps its
        queue and its processes.
        """
        pool, managed_models = self.pool, self.pool.managed_models
        before = {managed.spec.id: managed for managed in self.managed_models()}
        after, found = self._specs_with(registry), self.changes_to(registry)
        self._on_demand = self._still_on_demand(registry)
        renamed = dict(found.renamed)
        carried: list[str] = []
        for id_, new in renamed.items():
            if new not in managed_models:
                carried.append(new)
                pool.rename(before.pop(id_), new)
        for id_ in found.added:
            if id_ not in carried:
                pool.add(after[id_])
        for id_ in found.removed:
            if id_ in before:
                successor = renamed.get(id_)
                pool.remove(before[id_], None if successor is None else managed_models[successor])
        for id_ in (*found.retouched, *found.changed, *carried):
            managed, spec = managed_models[id_], after[id_]
            if any(map(spec.keeps_processes_of, (managed.spec, managed.found))):
                pool.update_spec(managed, spec)
            else:
                pool.roll_out(managed, spec)
        self.registry = registry
        specs = registry.specs.values()
        self._engines = tuple((spec.id, spec.engine) for spec in specs if spec.engine is not None)
        # Names of the registry take precedence over those on demand.
        ids = (*self._on_demand, *registry.specs)
        self._by_name = {name: managed_models[id_] for id_ in ids for name in managed_models[id_].spec.names}
        self._routes = {managed.spec.id: self._route(managed) for managed in self.managed_models()}
        return found


_REMOVING = HttpError(503, "Files of a model are being removed", cause="removing", retry_after_s=1.0)
_STARTING = HttpError(503, "Models are being loaded", cause="loading", retry_after_s=1.0)


def _as_listed(spec: ModelSpec) -> ModelSpec:
    """The spec as a registry makes it, without the build, which the pool adds."""
    return replace(spec, runtime="", unproven=False)


class OnlyModel(Catalog):
    """Serves the model of ``spec`` under any name in a request, like llama-server."""

    lists_models = False  # llama-server answers /v1/models

    def __init__(self, spec: ModelSpec, pool: Pool) -> None:
        super().__init__(Registry({spec.id: spec}, dict.fromkeys(spec.names, spec.id), spec.id), pool)
        self.managed = pool.managed_models[spec.id]
        self._only = PoolRoute(resolved(spec), self.managed.served, self.managed)

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> PoolRoute:
        return self._only

    def readiness(self) -> HttpError | None:
        state = self.managed.served.serving()
        return state if isinstance(state, HttpError) else None

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        yield self._only.listed(for_node=for_node)

    def known(self, model: str, *, create: bool = False) -> ManagedModel:
        """Return the model, if ``model`` is one of its names. Raises ModelUnknown."""
        names = self.managed.spec.names
        if model in names:
            return self.managed
        near = difflib.get_close_matches(model, names, n=1)
        raise ModelUnknown(
            f"No model {model[:200]!r} is served here.",
            remedy=f"The nearest is {near[0]!r}." if near else f"Served here: {', '.join(names)}.",
        )
