"""``run`` and ``wrap`` as what can be controlled: one model, that may be unloaded while its address stays."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llamasup.control.interface import shown
from llamasup.errors import Conflict, ModelUnknown, Stopping
from llamasup.models.diff import Changes
from llamasup.observability.metrics import InstanceGauges
from llamasup.pool.catalog.single import Supervisor
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import RestartRequested, StartRequested, State, StopRequested

__all__ = ["OneModel", "ServiceOwner", "shut_down"]


class ServiceOwner(Protocol):
    """Whose model it is: told of what is asked for before it is done."""

    @property
    def stops_asked(self) -> int: ...

    def ask_stop(self) -> None:
        """Stop kindly; asked again, stop now."""
        ...

    def control_asks(self, what: str, model: str = "") -> None:
        """``what``: ``load``, ``unload``, ``restart``, ``reload`` or ``stop``."""
        ...


def shut_down(owner: ServiceOwner, *, now: bool) -> None:
    """As ``Controlled.shutdown`` has it."""
    if owner.stops_asked and not now:
        return
    owner.control_asks("stop")
    if now and not owner.stops_asked:
        owner.ask_stop()  # a second one means at once
    owner.ask_stop()


class OneModel:
    """Implements ``Controlled``. ``log_path``: where its llama-server's output is kept."""

    def __init__(self, owner: ServiceOwner, supervisor: Supervisor, bus: Bus, log_path: Path | None) -> None:
        (self._runner,) = supervisor.runners
        self._owner = owner
        self._supervisor = supervisor
        self._bus = bus
        self._log_path = log_path

    @property
    def bus(self) -> Bus:
        return self._bus

    def status(self) -> Mapping[str, Any]:
        return self._supervisor.status()

    def gauges(self) -> Sequence[InstanceGauges]:
        return self._supervisor.gauges()

    async def scrape(self) -> Mapping[str, str]:
        return await self._supervisor.scrape()

    async def load(self, model: str) -> None:
        runner = self._find(model)
        self._refuse_if_stopping()
        if runner.instance.state is State.READY:
            return
        self._owner.control_asks("load", runner.model)
        await runner.submit(StartRequested())
        await self._served(runner)

    async def unload(self, model: str) -> None:
        runner = self._find(model)
        self._refuse_if_stopping()
        if runner.instance.state is State.STOPPED:
            return
        self._owner.control_asks("unload", runner.model)
        await runner.submit(StopRequested())
        if (await runner.reached(State.STOPPED, State.READY)).state is State.READY:
            raise Conflict(f"{runner.model} was loaded again meanwhile.")

    async def restart(self, model: str) -> None:
        await self._begin_anew(self._find(model), "restart")

    async def reload(self) -> Mapping[str, Any]:
        """There is no configuration: the model begins anew, with its file as it is now. An unloaded one
        stays so.
        """
        runner = self._runner
        self._refuse_if_stopping()
        changed = runner.instance.state is not State.STOPPED
        if changed:
            await self._begin_anew(runner, "reload")
        model = (runner.model,)
        return shown(Changes(changed=model) if changed else Changes(unchanged=model))

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    def log_path(self, model: str) -> Path | None:
        self._find(model)
        return self._log_path

    # ---

    def _find(self, model: str) -> InstanceRunner:
        runner = self._runner
        names = (runner.model, *runner.aliases)
        if model in names:
            return runner
        near = difflib.get_close_matches(model, names, n=1)
        raise ModelUnknown(
            f"No model {model[:200]!r} is served here.",
            remedy=f"The nearest is {near[0]!r}." if near else f"Served here: {', '.join(names)}.",
        )

    def _refuse_if_stopping(self) -> None:
        if self._owner.stops_asked:
            raise Stopping("llamasup is stopping.", remedy="Start it again.")

    async def _begin_anew(self, runner: InstanceRunner, what: str) -> None:
        self._refuse_if_stopping()
        self._owner.control_asks(what, runner.model)
        await runner.submit(RestartRequested())
        await self._served(runner)

    async def _served(self, runner: InstanceRunner) -> None:
        """Raises what keeps it from that."""
        last = await runner.reached(State.READY, State.FAILED, State.STOPPED)
        if last.state is State.READY:
            return
        if last.state is State.FAILED:
            raise failure_of(last)
        self._refuse_if_stopping()
        raise Conflict(f"{runner.model} was unloaded meanwhile.", remedy="Load it again.")
