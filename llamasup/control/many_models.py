"""``serve`` as what can be controlled: many models, of which each may be loaded, unloaded and begin anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from llamasup.control.interface import shown
from llamasup.control.one_model import ServiceOwner, shut_down
from llamasup.errors import Conflict, Stopping
from llamasup.http.address import Address
from llamasup.models.diff import Changes
from llamasup.observability.metrics import InstanceGauges
from llamasup.pool.catalog.catalog import Catalog
from llamasup.pool.catalog.status import gauges_of, model_status, scrape, state_of_managed, status_of
from llamasup.pool.model import ManagedModel
from llamasup.pool.policy import Phase
from llamasup.pool.unload import is_ready_or_settled
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import RestartRequested, State

__all__ = ["ManyModels"]


class ManyModels:
    """Implements ``Controlled``. ``reload`` reads the configuration again; it raises ConfigInvalid."""

    def __init__(
        self,
        owner: ServiceOwner,
        catalog: Catalog,
        address: Address,
        log_path: Callable[[str], Path | None],
        reload: Callable[[], Awaitable[Changes]],
    ) -> None:
        self._owner = owner
        self._catalog = catalog
        self._address = address
        self._log_path = log_path
        self._reload = reload
        self._started_s = monotonic()

    @property
    def bus(self) -> Bus:
        return self._catalog.pool.bus

    # --- what it shows

    def status(self) -> Mapping[str, Any]:
        models = map(_status, self._catalog.managed_models())
        status = status_of(self._address, monotonic() - self._started_s, models)
        return {**status, "budget": dict(self._catalog.pool.options.budget)}

    def gauges(self) -> Sequence[InstanceGauges]:
        """Of the models that were ever wanted: a thousand others would be noise."""
        return gauges_of(runner for each in self._catalog.managed_models() for runner in each.runners)

    async def scrape(self) -> Mapping[str, str]:
        return await scrape(runner for each in self._catalog.managed_models() for runner in each.runners)

    def log_path(self, model: str) -> Path | None:
        managed = self._catalog.known(model)
        # Under another name it writes on where it began.
        return managed.runners[0].log_path if managed.runners else self._log_path(managed.spec.id)

    # --- what it does

    async def load(self, model: str) -> None:
        managed = self._asked("load", model)
        await self._catalog.pool.load(managed)

    async def unload(self, model: str) -> None:
        managed = self._asked("unload", model)
        await self._catalog.pool.unload(managed)

    async def restart(self, model: str) -> None:
        """Replicas one after the other, so that one is always there. What is not loaded is loaded, and what
        goes or is changed comes as it is to be.
        """
        managed = self._asked("restart", model)
        if not _may_begin_anew(managed):
            await self._catalog.pool.load(managed)
            return
        for runner in tuple(managed.runners):
            await self._restart(runner)

    async def reload(self) -> Mapping[str, Any]:
        self._refuse_if_stopping()
        self._owner.control_asks("reload")
        return shown(await self._reload())

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    async def _restart(self, runner: InstanceRunner) -> None:
        await runner.submit(RestartRequested())
        after = await runner.until(is_ready_or_settled)
        if after.state is State.FAILED:
            raise failure_of(after)
        if after.state is State.STOPPED:
            self._refuse_if_stopping()
            raise Conflict(f"{runner.model} was unloaded meanwhile.", remedy="Load it if it is to be served.")

    def _asked(self, what: str, model: str) -> ManagedModel:
        managed = self._catalog.known(model, create=what == "load")
        self._refuse_if_stopping()
        self._owner.control_asks(what, managed.spec.id)
        return managed

    def _refuse_if_stopping(self) -> None:
        if self._owner.stops_asked:
            raise Stopping("llamasup is stopping.", remedy="Start it again.")


def _may_begin_anew(managed: ManagedModel) -> bool:
    """Whether a server of it is there, or will be by itself, and is to stay in the memory that it has."""
    stays = managed.phase in {Phase.RESIDENT, Phase.LOADING} and not managed.swapping
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
        state=state_of_managed(managed),
        until=_until(managed),
        pinned=spec.stay.pin,
    )
    needs = None if managed.sized is None else dict(managed.sized.needs)
    remedy = "" if managed.error is None else managed.error.remedy
    return {**status, "needs_bytes": needs, "problem": problem or None, "remedy": remedy or None}


def _until(managed: ManagedModel) -> str | None:
    """When it is unloaded if nobody asks for it before; None: nobody can say."""
    ttl_s = managed.spec.stay.ttl_s
    if ttl_s == float("inf") or managed.spec.stay.pin or not managed.serves or managed.served.in_flight:
        return None
    left_s = max(managed.resident_since_s, managed.served.idle_since_s) + ttl_s - monotonic()
    return (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat(timespec="seconds")
