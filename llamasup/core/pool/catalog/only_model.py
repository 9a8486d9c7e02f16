"""The catalogue of ``run`` and ``wrap``: one model, which has every name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel
from llamasup.core.models.registry import Registry
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.catalog.model_listing import ModelListing
from llamasup.core.pool.catalog.model_view import node_listing
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.replicas.replica_set import ModelRoute
from llamasup.errors import ModelUnknown


class OnlyModel(Catalog):
    """Serves the model of ``spec`` under any name in a request, like llama-server."""

    def __init__(self, spec: ModelSpec, pool: Pool) -> None:
        super().__init__(Registry({spec.id: spec}, dict.fromkeys(spec.names, spec.id), spec.id), pool)
        self.managed = pool.managed_models[spec.id]
        self._route = self._routes[spec.id]

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> ModelRoute:
        return self._route

    def readiness(self) -> HttpError | None:
        state = self.managed.served.serving()
        return state if isinstance(state, HttpError) else None

    def listing(self) -> None:  # type: ignore[override]
        """Returns None, because llama-server answers /v1/models."""

    def described(self) -> ModelListing:
        """Return the list for other APIs."""
        return super().listing()

    def node_listing(self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None = None) -> bytes:
        return node_listing(self.node, ((self.managed, self._route.model),), None, seen)

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
