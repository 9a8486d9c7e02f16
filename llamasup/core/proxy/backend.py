"""Protocols: what the proxy needs of the models. The catalogs of the pool implement them.

The proxy resolves the name of a model once for a request, to a ``ModelRoute``, and then asks only the route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, Work
from llamasup.core.models.access import ResolvedModel
from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.repairs import Repairs


class ModelList(Protocol):
    """The answers to ``/v1/models``, as JSON."""

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        """All models, or only those that are ``allowed``."""
        ...

    def one(self, model: str) -> bytes:
        """The model with this id."""
        ...


class ServedModel(Protocol):
    """The processes of one model. Synchronous, because every request needs it."""

    @property
    def queue(self) -> RequestQueue:
        """The queue of the requests for the model."""
        ...

    @property
    def repairs(self) -> Repairs:
        """The repairs of requests and answers; ``NO_REPAIRS`` itself if there are none."""
        ...

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        """A lease on a ready generation, or why there is none.

        ``infers``: the request runs the model, and so needs a permit. ``body``: the received part of the
        body, which is read only to choose between several replicas.
        """
        ...


class ModelRoute(Protocol):
    """The destination of the requests for one model."""

    @property
    def model(self) -> ResolvedModel:
        """Its names and its purpose."""
        ...

    @property
    def served(self) -> ServedModel:
        """Its processes."""
        ...


class VirtualRoute(ModelRoute, Protocol):
    """The route from a name that the config makes one for another model."""

    @property
    def target(self) -> str:
        """The id of the model that gets the request."""
        ...

    def for_work(self, work: Work | None) -> ModelRoute:
        """The route to a model that can do this work; the route to any of them if none can."""
        ...

    def rewrite(self, body: bytes, route: Route) -> bytes | HttpError:
        """The body for the model, or why the request cannot go to it. ``route``: of the request."""
        ...


def is_virtual(route: ModelRoute) -> TypeGuard[VirtualRoute]:
    """False for most requests, which are forwarded byte for byte."""
    return route.model.is_virtual


class Backend(Protocol):
    """The models, by the names in requests."""

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError:
        """The route to ``model`` (None: the request names none), or the reason why there is no such model.

        ``create``: the name may become a new model, which is downloaded on demand. ``local``: only to the
        llama-servers of this node, and not by a name of a virtual model, because another node has forwarded
        the request.
        """
        ...

    def readiness(self) -> HttpError | None:
        """None if requests would be served now, else why not."""
        ...

    def listing(self) -> ModelList | None:
        """The content of ``/v1/models``; None: forward llama-server's own answer."""
        ...

    def node_listing(self, seen: Callable[[ResolvedModel], ResolvedModel | None] | None = None) -> bytes:
        """The content of ``/v1/models`` for another node: the models of this node, with their load.

        ``seen`` returns a model with the names that the node may know; None: the node must not see it.
        """
        ...
