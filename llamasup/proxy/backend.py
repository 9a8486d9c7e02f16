"""What the proxy needs of the models behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llamasup.models.access import ResolvedModel
from llamasup.queueing.endpoint import Lease, Unavailable
from llamasup.queueing.wait_queue import RequestQueue

__all__ = ["Backend", "ModelList"]


class ModelList(Protocol):
    """The answers to ``/v1/models``, as JSON."""

    def all(self, allowed: Callable[[ResolvedModel], bool] | None = None) -> bytes:
        """Every model, or only those that are ``allowed``."""
        ...

    def one(self, model: str) -> bytes:
        """The model with this id."""
        ...


class Backend(Protocol):
    """What the proxy asks of the runtime. Synchronous: it is on the path of every request."""

    def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        """A lease on a ready generation of ``model`` (None: the request named none), or why not.

        ``infers``: the request is work for the model itself, of which there may be only so much at a time.
        ``body``, as far as it is here: read only where there is a choice between several of its processes.
        """
        ...

    def room(self, model: str | None) -> RequestQueue:
        """Where the requests for ``model`` wait. Only for a model that ``lease`` knows."""
        ...

    def readiness(self) -> Unavailable | None:
        """None while requests would be served now."""
        ...

    def meant(self, model: str | None) -> ResolvedModel | None:
        """The model that ``lease`` knows by this name; None: there is none."""
        ...

    def listing(self) -> ModelList | None:
        """What ``/v1/models`` tells; None: llama-server's own answer is passed on."""
        ...
