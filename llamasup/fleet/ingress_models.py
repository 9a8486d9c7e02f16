"""Finds and lists the models of a fleet for clients that enter at Ray Serve (pure).

It also says why a model is not served now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llamasup.core.auth.api_key import ApiKey
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ResolvedModel, forbidden_model, may_use, unknown_model, unnamed_model
from llamasup.core.models.names import NameIndex
from llamasup.core.pool.catalog.model_listing import encode_list, encode_one
from llamasup.core.queueing.unavailable import Unavailable, generation_ended
from llamasup.features.peers.groups import ModelGroup, why_not_served
from llamasup.features.peers.membership import ExpectedModel
from llamasup.fleet.messages import ListedModel


class IngressModels:
    """The models by name. ``is_served`` tells whether a replica of the model with this id takes requests."""

    def __init__(self, listed: Iterable[ListedModel], is_served: Callable[[str], bool]) -> None:
        self._models = {model.id: ResolvedModel((model.id, *model.aliases)) for model in listed}
        self._index = NameIndex({name: model.id for model in self._models.values() for name in model.names})
        self._is_served = is_served

    def resolve(self, name: str | None, key: ApiKey | None) -> ResolvedModel | HttpError:
        """The model that a request names. A key learns nothing about models that it may not use."""
        limited = key if key is not None and key.models else None
        if name is None:
            return unnamed_model(tuple(self._models) if limited is None else limited.models)
        found = self._index.find(name)
        model = self._models[found] if isinstance(found, str) else None
        if limited is not None and (model is None or not may_use(limited, model)):
            return forbidden_model(limited, name)
        return unknown_model(name, tuple(found)) if model is None else model

    def all(self, key: ApiKey | None) -> bytes:
        """Answer ``/v1/models`` with the models that the key may use."""
        return encode_list(self._entry(model) for model in self._models.values() if may_use(key, model))

    def one(self, model: ResolvedModel) -> bytes:
        """Answer ``/v1/models/{id}``."""
        return encode_one(self._entry(model))

    def _entry(self, model: ResolvedModel) -> dict[str, Any]:
        status: Mapping[str, str] = {"value": "loaded" if self._is_served(model.id) else "unloaded"}
        return {
            "id": model.id,
            "object": "model",
            "created": 0,
            "owned_by": "llamasup",
            "aliases": model.names[1:],
            "tags": (),
            "status": status,
        }


def no_node(model: ResolvedModel, expected: Iterable[ExpectedModel]) -> Unavailable:
    """Say why no replica serves the model now. ``expected``: what the directory says of the models."""
    known = next((each for each in expected if each.id == model.id), ExpectedModel(model.id))
    return why_not_served(ModelGroup(model, {}, known), {})


def replica_ended(model: ResolvedModel) -> HttpError:
    """Make the error for an answer, or the rest of an answer, that does not come."""
    message = f"The replica of the model {model.id!r} has ended before its answer"
    return generation_ended(message, "node_absent", "try again").as_error()
