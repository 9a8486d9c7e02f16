"""``serve`` as what can be controlled: many models, of which each may be loaded, unloaded and begin anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from llamasup.control.interface import shown
from llamasup.control.one_model import Owner, shut_down
from llamasup.errors import Conflict, Stopping
from llamasup.http.address import Address
from llamasup.models.diff import Changes
from llamasup.observability.metrics import InstanceGauges
from llamasup.pool.catalog.catalog import Catalog
from llamasup.pool.catalog.status import gauges_of, model_status, scrape, state_of_tenancy, status_of
from llamasup.pool.model import Tenancy
from llamasup.pool.policy import Phase
from llamasup.pool.unload import is_up_or_over
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import RestartAsked, State

__all__ = ["ManyModels"]


class ManyModels:
    """Implements ``Controlled``. ``reload`` reads the configuration again; it raises ConfigInvalid."""

    def __init__(
        self,
        owner: Owner,
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
        models = map(_status, self._catalog.tenancies())
        status = status_of(self._address, monotonic() - self._started_s, models)
        return {**status, "budget": dict(self._catalog.pool.options.budget)}

    def gauges(self) -> Sequence[InstanceGauges]:
        """Of the models that were ever wanted: a thousand others would be noise."""
        return gauges_of(runner for each in self._catalog.tenancies() for runner in each.runners)

    async def scrape(self) -> Mapping[str, str]:
        return await scrape(runner for each in self._catalog.tenancies() for runner in each.runners)

    def log_path(self, model: str) -> Path | None:
        tenancy = self._catalog.known(model)
        # Under another name it writes on where it began.
        return tenancy.runners[0].log_path if tenancy.runners else self._log_path(tenancy.spec.id)

    # --- what it does

    async def load(self, model: str) -> None:
        tenancy = self._asked("load", model)
        await self._catalog.pool.load(tenancy)

    async def unload(self, model: str) -> None:
        tenancy = self._asked("unload", model)
        await self._catalog.pool.unload(tenancy)

    async def restart(self, model: str) -> None:
        """Replicas one after the other, so that one is always there. What is not loaded is loaded, and what
        goes or is changed comes as it is to be.
        """
        tenancy = self._asked("restart", model)
        if not _may_begin_anew(tenancy):
            await self._catalog.pool.load(tenancy)
            return
        for runner in tuple(tenancy.runners):
            await self._restart(runner)

    async def reload(self) -> Mapping[str, Any]:
        self._refuse_if_stopping()
        self._owner.control_asks("reload")
        return shown(await self._reload())

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    async def _restart(self, runner: InstanceRunner) -> None:
        await runner.take(RestartAsked())
        after = await runner.until(is_up_or_over)
        if after.state is State.FAILED:
            raise failure_of(after)
        if after.state is State.STOPPED:
            self._refuse_if_stopping()
            raise Conflict(f"{runner.model} was unloaded meanwhile.", remedy="Load it if it is to be served.")

    def _asked(self, what: str, model: str) -> Tenancy:
        tenancy = self._catalog.known(model, invite=what == "load")
        self._refuse_if_stopping()
        self._owner.control_asks(what, tenancy.spec.id)
        return tenancy

    def _refuse_if_stopping(self) -> None:
        if self._owner.stops_asked:
            raise Stopping("llamasup is stopping.", remedy="Start it again.")


def _may_begin_anew(tenancy: Tenancy) -> bool:
    """Whether a server of it is there, or will be by itself, and is to stay in the memory that it has."""
    stays = tenancy.phase in {Phase.RESIDENT, Phase.LOADING} and not tenancy.changing
    return stays and any(not runner.instance.at_rest for runner in tenancy.runners)


def _status(tenancy: Tenancy) -> Mapping[str, Any]:
    spec = tenancy.spec
    problem = spec.problem or ("" if tenancy.error is None else tenancy.error.message)
    status = model_status(
        spec.id,
        spec.aliases,
        tenancy.runners,
        queued=len(tenancy.served.room),
        facts=tenancy.facts,
        state=state_of_tenancy(tenancy),
        until=_until(tenancy),
        pinned=spec.stay.pin,
    )
    needs = None if tenancy.sized is None else dict(tenancy.sized.needs)
    remedy = "" if tenancy.error is None else tenancy.error.remedy
    return {**status, "needs_bytes": needs, "problem": problem or None, "remedy": remedy or None}


def _until(tenancy: Tenancy) -> str | None:
    """When it is unloaded if nobody asks for it before; None: nobody can say."""
    ttl_s = tenancy.spec.stay.ttl_s
    if ttl_s == float("inf") or tenancy.spec.stay.pin or not tenancy.serves or tenancy.served.in_flight:
        return None
    left_s = max(tenancy.resident_since_s, tenancy.served.idle_since_s) + ttl_s - monotonic()
    return (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat(timespec="seconds")
