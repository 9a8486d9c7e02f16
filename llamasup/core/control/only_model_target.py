"""The control target of ``run`` and ``wrap``: one model, which can be unloaded while its address stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamasup.core.control.interface import ServiceOwner, refuse_if_stopping, shown
from llamasup.core.control.pool_target import PoolTarget, can_restart_in_place
from llamasup.core.http.address import Address
from llamasup.core.models.diff import Changes
from llamasup.core.pool.catalog.only_model import OnlyModel
from llamasup.core.pool.model import ManagedModel
from llamasup.core.supervision.states import StartRequested
from llamasup.errors import Conflict


class OnlyModelTarget(PoolTarget):
    """A request for a state that the model already has is not reported to the owner."""

    def __init__(
        self,
        owner: ServiceOwner,
        only: OnlyModel,
        address: Address,
        log_path: Callable[[str], Path | None],
    ) -> None:
        super().__init__(owner, only, address, log_path)
        self._only = only

    async def load(self, model: str) -> None:
        """Load the model. A crashed one starts at once."""
        managed = self._find(model)
        if managed.serves:
            return
        if not can_restart_in_place(managed):
            await super().load(model)
            return
        self._owner.control_asks("load", managed.spec.id)
        for runner in managed.runners:
            await self._serve(runner, StartRequested())

    async def unload(self, model: str) -> None:
        managed = self._find(model)
        if not (managed.holds_memory or managed.wanted):
            return
        await super().unload(model)
        if managed.wanted:
            raise Conflict(f"{managed.spec.id!r} was loaded again while it was unloading.")

    async def reload(self) -> Mapping[str, Any]:
        """Restart the model with its current file, as there is no configuration. An unloaded model stays
        unloaded.
        """
        managed = self._find(self._only.managed.spec.id)
        model = (managed.spec.id,)
        if not managed.holds_memory:
            return shown(Changes(unchanged=model))
        self._owner.control_asks("reload", *model)
        await self._restart(managed)
        return shown(Changes(changed=model))

    def _find(self, model: str) -> ManagedModel:
        managed = self._only.known(model)
        refuse_if_stopping(self._owner)
        return managed
