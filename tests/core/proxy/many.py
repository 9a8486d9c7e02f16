"""A backend with several models, each with its own child, whose part the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import resolved, unknown_model, unnamed_model
from llamasup.core.models.names import NameIndex
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.model_listing import ListedModel, ModelListing
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.repairs import NO_REPAIRS
from tests.core.proxy.rig import PATIENCE_S, Rig, Wire

__all__ = ["ManyModels", "Model"]


class Model:
    """``unavailable``: why it does not serve now; None if it serves."""

    def __init__(self, spec: ModelSpec, socket_path: Path) -> None:
        self.spec = spec
        self.model = resolved(spec)
        self.endpoint = Endpoint(spec.id, 1, UnixAddress(str(socket_path)))
        self.unavailable: HttpError | None = None
        self.waits = 0  # requests that began to wait for the model
        self.queue = RequestQueue(
            lambda: self.unavailable or (self.endpoint,), timeout_s=PATIENCE_S, on_wanted=self._want
        )
        self.listener = Rig.listen(str(socket_path))

    @property
    def served(self) -> Self:
        return self

    repairs = NO_REPAIRS

    def lease(self, *, infers: bool = False, body: bytes = b"") -> Lease | HttpError:
        return self.unavailable or self.endpoint.lease_if_free(infers=infers)

    def _want(self) -> None:
        self.waits += 1

    def loaded(self) -> None:
        self.unavailable = None
        self.queue.changed()


class ManyModels:
    """Replaces the backend of the rig. Must be made in the loop of the proxy."""

    def __init__(self, folder: Path, specs: Sequence[ModelSpec], default: str | None = None) -> None:
        self.models = {spec.id: Model(spec, folder / f"{number}.sock") for number, spec in enumerate(specs)}
        self.default = default
        self.created: list[str | None] = []  # names that a request may download
        self._index = NameIndex({name: spec.id for spec in specs for name in spec.names})

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Model | HttpError:
        found = self._find(model)
        if isinstance(found, Model):
            return found
        if create:
            self.created.append(model)
        return unnamed_model(tuple(self.models)) if model is None else unknown_model(model, found)

    def readiness(self) -> HttpError | None:
        return None

    def listing(self) -> ModelListing:
        def look(model: str) -> ListedModel:
            known = self.models[model]
            phase = Phase.ABSENT if known.unavailable else Phase.RESIDENT
            return ListedModel(known.spec, known.model, phase)

        return ModelListing(self.models, look, self.default)

    def node_listing(self, allowed: object = None) -> bytes:
        raise AssertionError

    def accept(self, model: str, rig: Rig) -> Wire:
        """The proxy's next connection to this model's child."""
        return rig.keep(Wire(self.models[model].listener.accept()[0]))

    def close(self) -> None:
        for model in self.models.values():
            model.listener.close()

    def _find(self, model: str | None) -> Model | tuple[str, ...]:
        if model is None:
            return () if self.default is None else self.models[self.default]
        found = self._index.find(model)
        return self.models.get(found, ()) if isinstance(found, str) else found
