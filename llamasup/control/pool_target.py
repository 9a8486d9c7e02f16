"""The control target of a pool: models, each of which can be loaded, unloaded and restarted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from llamasup.control.interface import ServiceOwner, refuse_if_stopping, shown, shut_down
from llamasup.errors import Conflict
from llamasup.http.address import Address
from llamasup.models.diff import Changes
from llamasup.observability.counters import InstanceGauges
from llamasup.pool.catalog.model_view import unload_in_s, why_of
from llamasup.pool.catalog.status import (
    gauges_of,
    model_status,
    scrape,
    state_of_managed,
    status_of,
    wait_before_load,
)
from llamasup.pool.driver import is_ready_or_settled
from llamasup.pool.eviction_policy import Phase
from llamasup.pool.model import ManagedModel
from llamasup.pool.model_states import ModelState
from llamasup.pool.pool import Pool
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import RestartRequested, StartRequested, State

__all__ = ["ConfiguredTarget", "Models", "PoolTarget", "can_restart_in_place"]


class Models(Protocol):
    """The models of a pool by their names: a ``Catalog`` or ``OnlyModel``."""

    @property
    def pool(self) -> Pool: ...
    def managed_models(self) -> Iterator[ManagedModel]: ...
    def known(self, model: str, *, create: bool = False) -> ManagedModel:
        """Raises ModelUnknown."""
        ...


class PoolTarget:
    """A ``ControlTarget`` without ``reload``."""

    def __init__(
        self,
        owner: ServiceOwner,
        models: Models,
        address: Address,
        log_path: Callable[[str], Path | None],
    ) -> None:
        self._owner = owner
        self._models = models
        self._address = address
        self._log_path = log_path
        self._started_s = monotonic()

    @property
    def bus(self) -> Bus:
        return self._models.pool.bus

    # --- state

    def status(self) -> Mapping[str, Any]:
        models = map(_status, self._models.managed_models())
        status = status_of(self._address, monotonic() - self._started_s, models)
        return {**status, "budget": dict(self._models.pool.options.budget)}

    def gauges(self) -> Sequence[InstanceGauges]:
        """Of the models that were loaded at least once: a thousand others would be noise."""
        return gauges_of(self._runners())

    async def scrape(self) -> Mapping[str, str]:
        return await scrape(self._runners())

    def _runners(self) -> Iterator[InstanceRunner]:
        return (runner for model in self._models.managed_models() for runner in model.runners)

    def log_path(self, model: str) -> Path | None:
        managed = self._models.known(model)
        # A renamed model keeps writing to its first log file.
        return managed.runners[0].log_path if managed.runners else self._log_path(managed.spec.id)

    def why(self, model: str) -> Mapping[str, Any]:
        return why_of(self._models.known(model), self._models.pool)

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        return [decision.as_json() for decision in self._models.pool.decisions.last(limit)]

    # --- changes

    async def load(self, model: str) -> None:
        await self._models.pool.load(self._accept("load", model))

    async def unload(self, model: str) -> None:
        await self._models.pool.unload(self._accept("unload", model))

    async def restart(self, model: str) -> None:
        """Restart the replicas one after the other, so that one always serves. A model that is not loaded, or
        that is being unloaded or replaced, is loaded.
        """
        await self._restart(self._accept("restart", model))

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    async def _restart(self, managed: ManagedModel) -> None:
        if not can_restart_in_place(managed):
            await self._models.pool.load(managed)
            return
        self._models.pool.note_restart(managed)
        for runner in tuple(managed.runners):
            if not can_restart_in_place(managed):
                raise _unloaded(managed.spec.id)
            await self._serve(runner, RestartRequested())

    async def _serve(self, runner: InstanceRunner, event: RestartRequested | StartRequested) -> None:
        """Wait until the replica serves after ``event``."""
        await runner.submit(event)
        after = await runner.until(is_ready_or_settled)
        if after.state is State.FAILED:
            raise failure_of(after)
        if after.state is State.STOPPED:
            refuse_if_stopping(self._owner)
            raise _unloaded(runner.model)

    def _accept(self, what: str, model: str) -> ManagedModel:
        managed = self._models.known(model, create=what == "load")
        refuse_if_stopping(self._owner)
        self._owner.control_asks(what, managed.spec.id)
        return managed


class ConfiguredTarget(PoolTarget):
    """``reload`` reads the configuration again; it raises ConfigInvalid."""

    def __init__(
        self,
        owner: ServiceOwner,
        models: Models,
        address: Address,
        log_path: Callable[[str], Path | None],
        reload: Callable[[], Awaitable[Changes]],
    ) -> None:
        super().__init__(owner, models, address, log_path)
        self._reload = reload

    async def reload(self) -> Mapping[str, Any]:
        refuse_if_stopping(self._owner)
        self._owner.control_asks("reload")
        return shown(await self._reload())


def _unloaded(model: str) -> Conflict:
    return Conflict(
        f"{model!r} was unloaded while it restarted.",
        remedy=f"Run `llamasup load {model}` to serve it again.",
    )


def can_restart_in_place(managed: ManagedModel) -> bool:
    """Whether the model has a server, or will have one, that keeps its memory."""
    stays = managed.phase in {Phase.RESIDENT, Phase.LOADING} and managed.state is not ModelState.ROLLING_OUT
    return stays and any(not runner.instance.is_settled for runner in managed.runners)


def _status(managed: ManagedModel) -> Mapping[str, Any]:
    spec = managed.spec
    problem = spec.problem or ("" if managed.error is None else managed.error.message)
    status = model_status(
        spec.id,
        spec.aliases,
        managed.runners,
        queued=len(managed.served.queue),
        facts=managed.facts,
        state=None if spec.stay.by_command else state_of_managed(managed),
        awaits=None if spec.stay.by_command else wait_before_load(managed, monotonic()),
        until=_until(managed),
        pinned=spec.stay.pin,
    )
    needs = None if managed.sized is None else dict(managed.sized.needs) or None
    remedy = "" if managed.error is None else managed.error.remedy
    return {**status, "needs_bytes": needs, "problem": problem or None, "remedy": remedy or None}


def _until(managed: ManagedModel) -> str | None:
    """When the model will be unloaded if no request arrives before; None if unknown."""
    left_s = unload_in_s(managed, monotonic())
    if left_s is None:
        return None
    return (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat(timespec="seconds")
