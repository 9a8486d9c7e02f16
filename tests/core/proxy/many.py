"""A backend with several models, each with its own child, whose part the test plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.models.access import ListedModel, resolved, unknown_model, unnamed_model
from llamasup.core.models.names import NameIndex
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.v1_models import entry_of
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.queueing.endpoint import Endpoint, Lease
from llamasup.core.queueing.request_queue import RequestQueue
from llamasup.core.settings.model import NO_REPAIRS
from tests.core.proxy.rig import PATIENCE_S, Rig, Wire
from tests.kit.backends import Unlisted

__all__ = ["ManyModels", "Model"]


class Model(Unlisted):
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

    def listed(self, *, is_default: bool = False) -> ListedModel:
        phase = Phase.ABSENT if self.unavailable else Phase.RESIDENT
        return ListedModel(
            self.model, partial(entry_of, ModelInfo(self.spec, phase=phase, is_default=is_default))
        )

    def _want(self) -> None:
        self.waits += 1

    def loaded(self) -> None:
        self.unavailable = None
        self.queue.changed()


class ManyModels(Unlisted):
    """Replaces the backend of the rig. Must be made in the loop of the proxy."""

    lists_models = True

    def __init__(self, folder: Path, specs: Sequence[ModelSpec], default: str | None = None) -> None:
        self.by_id = {spec.id: Model(spec, folder / f"{number}.sock") for number, spec in enumerate(specs)}
        self.default = default
        self.created: list[str | None] = []  # names that a request may download
        self._index = NameIndex({name: spec.id for spec in specs for name in spec.names})

    def resolve(self, model: str | None, *, create: bool = False, local: bool = False) -> Model | HttpError:
        found = self._find(model)
        if isinstance(found, Model):
            return found
        if create:
            self.created.append(model)
        return unnamed_model(tuple(self.by_id)) if model is None else unknown_model(model, found)

    def models(self, *, for_node: bool = False) -> Iterator[ListedModel]:
        ids = sorted(self.by_id, key=lambda id_: id_ != self.default)
        return (self.by_id[id_].listed(is_default=id_ == self.default) for id_ in ids)

    def accept(self, model: str, rig: Rig) -> Wire:
        """The proxy's next connection to this model's child."""
        return rig.keep(Wire(self.by_id[model].listener.accept()[0]))

    def close(self) -> None:
        for model in self.by_id.values():
            model.listener.close()

    def _find(self, model: str | None) -> Model | tuple[str, ...]:
        if model is None:
            return () if self.default is None else self.by_id[self.default]
        found = self._index.find(model)
        return self.by_id.get(found, ()) if isinstance(found, str) else found
