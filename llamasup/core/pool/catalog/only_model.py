"""The only model of ``run`` and ``wrap``: the proxy's backend, which serves it under every name."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Iterator

from llamasup.core.models.access import ResolvedModel
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.model_listing import ModelListing
from llamasup.core.pool.catalog.model_view import listed_model, node_listing
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.replicas.replica_set import ModelRoute
from llamasup.core.queueing.unavailable import Unavailable
from llamasup.errors import ModelUnknown


class OnlyModel:
    """Adds the model of ``spec`` to ``pool``."""

    def __init__(self, spec: ModelSpec, pool: Pool) -> None:
        self.pool = pool
        self.node = secrets.token_hex(8)
        """The id of this node for other nodes."""
        self.managed = pool.add(spec)
        self._route = ModelRoute(ResolvedModel(spec.names), self.managed.served)

    # --- Backend ----------------------------------------------------------------------------------------
    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> ModelRoute:
        return self._route  # it serves any name in a request, like llama-server

    def readiness(self) -> Unavailable | None:
        state = self.managed.served.serving()
        return state if isinstance(state, Unavailable) else None

    def listing(self) -> None:
        """Returns None, because llama-server answers /v1/models."""

    def described(self) -> ModelListing:
        """The model as ``serve`` lists its models, for other APIs."""
        id_ = self.managed.spec.id
        return ModelListing((id_,), lambda _: listed_model(self.managed, self._route.model), id_)

    def node_listing(self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None = None) -> bytes:
        return node_listing(self.node, ((self.managed, self._route.model),), None, seen)

    # --- for the control API ----------------------------------------------------------------------------
    def managed_models(self) -> Iterator[ManagedModel]:
        yield self.managed

    def known(self, model: str, *, create: bool = False) -> ManagedModel:
        """The model, if ``model`` is one of its names. Raises ModelUnknown."""
        names = self.managed.spec.names
        if model in names:
            return self.managed
        near = difflib.get_close_matches(model, names, n=1)
        raise ModelUnknown(
            f"No model {model[:200]!r} is served here.",
            remedy=f"The nearest is {near[0]!r}." if near else f"Served here: {', '.join(names)}.",
        )
