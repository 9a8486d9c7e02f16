"""Protocols: what the proxy needs of the models. The catalogs of the pool implement them.

The proxy resolves the name of a model once for a request, to a ``ModelRoute``, and then asks only the route.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeGuard

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, Work
from llamasup.core.models.access import ListedModel, ResolvedModel
from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.queueing.wait_estimate import ServedLoad
from llamasup.core.settings.model import Repairs


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

    def load(self) -> ServedLoad:
        """Return how busy they are."""
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

    def listed(self) -> ListedModel:
        """The model in ``/v1/models``."""
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
    """The catalog: the models, by the names in requests.

    A backend may put names in front of those of another backend: virtual models, and models of other nodes.
    """

    @property
    def node(self) -> str:
        """The id of this node for other nodes."""
        ...

    @property
    def lists_models(self) -> bool:
        """False: llama-server's own answer to ``/v1/models`` is forwarded."""
        ...

    def resolve(
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> ModelRoute | HttpError:
        """The route to ``model`` (None: the request names none), or the reason why there is no such model.

        ``create``: the name may become a new model, which is downloaded on demand. ``local``: only to the
        llama-servers of this node, and not by a name of a virtual model, because another node has forwarded
        the request.
        """
        ...

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        """List the models. ``for_node``: only those of this node, with their load, for another node."""
        ...

    def readiness(self) -> HttpError | None:
        """None if requests would be served now, else why not."""
        ...
