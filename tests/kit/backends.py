"""What tests need of a ``Backend``: the parts that those of requests do not use, and its lists as read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import msgspec

from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, ResolvedModel
from llamasup.core.pool.catalog.v1_models import NodeModel, read_listing
from llamasup.core.proxy.backend import Backend
from llamasup.core.queueing.wait_estimate import ServedLoad


class Unlisted:
    """A backend, a route or its processes, which are in no list."""

    node = "me"
    lists_models = False

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        return iter(())

    def readiness(self) -> HttpError | None:
        return None

    def listed(self) -> ListedModel:
        raise AssertionError

    def load(self) -> ServedLoad:
        raise AssertionError


def entries_of(
    backend: Backend, allowed: Callable[[ResolvedModel], bool] = lambda model: True
) -> list[dict[str, Any]]:
    """The models in ``/v1/models``, as a client reads them."""
    shown = [listed.entry() for listed in backend.models() if allowed(listed.model)]
    return cast("list[dict[str, Any]]", msgspec.json.decode(msgspec.json.encode(shown)))


def entry_of(backend: Backend, name: str) -> dict[str, Any]:
    """``/v1/models/{id}``, as a client reads it."""
    route = backend.resolve(name)
    assert not isinstance(route, HttpError)
    return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(route.listed().entry())))


def node_answer(node: str, models: Iterable[object]) -> bytes:
    """``/v1/models`` for another node."""
    return msgspec.json.encode({"node": node, "models": list(models), "version": "1"})


def as_node_reads(backend: Backend) -> tuple[NodeModel, ...]:
    """The models in ``/v1/models`` for another node."""
    return read_listing(
        node_answer(backend.node, (each.entry() for each in backend.models(for_node=True)))
    ).models
