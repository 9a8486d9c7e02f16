"""The control target of ``run`` and ``wrap``: one model, which can be unloaded while its address stays."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamasup.control.interface import ServiceOwner, refuse_if_stopping, shown, shut_down
from llamasup.errors import Conflict, ModelUnknown
from llamasup.models.diff import Changes
from llamasup.observability.counters import InstanceGauges
from llamasup.pool.catalog.single import Supervisor
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import InstanceRunner
from llamasup.supervision.states import RestartRequested, StartRequested, State, StopRequested

__all__ = ["SingleModelTarget"]


class SingleModelTarget:
    """Implements ``ControlTarget``. ``log_path`` is llama-server's log file, if there is one."""

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
        refuse_if_stopping(self._owner)
        if runner.instance.state is State.READY:
            return
        self._owner.control_asks("load", runner.model)
        await runner.submit(StartRequested())
        await self._served(runner)

    async def unload(self, model: str) -> None:
        runner = self._find(model)
        refuse_if_stopping(self._owner)
        if runner.instance.state is State.STOPPED:
            return
        self._owner.control_asks("unload", runner.model)
        await runner.submit(StopRequested())
        if (await runner.reached(State.STOPPED, State.READY)).state is State.READY:
            raise Conflict(f"{runner.model!r} was loaded again while it was unloading.")

    async def restart(self, model: str) -> None:
        await self._restart(self._find(model), "restart")

    async def reload(self) -> Mapping[str, Any]:
        """Restart the model with its current file, as there is no configuration. An unloaded model stays
        unloaded.
        """
        runner = self._runner
        refuse_if_stopping(self._owner)
        changed = runner.instance.state is not State.STOPPED
        if changed:
            await self._restart(runner, "reload")
        model = (runner.model,)
        return shown(Changes(changed=model) if changed else Changes(unchanged=model))

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    def log_path(self, model: str) -> Path | None:
        self._find(model)
        return self._log_path

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

    async def _restart(self, runner: InstanceRunner, what: str) -> None:
        refuse_if_stopping(self._owner)
        self._owner.control_asks(what, runner.model)
        await runner.submit(RestartRequested())
        await self._served(runner)

    async def _served(self, runner: InstanceRunner) -> None:
        """Wait until the model serves. Raises if it does not."""
        last = await runner.reached(State.READY, State.FAILED, State.STOPPED)
        if last.state is State.READY:
            return
        if last.state is State.FAILED:
            raise failure_of(last)
        refuse_if_stopping(self._owner)
        raise Conflict(
            f"{runner.model!r} was unloaded while it was loading.",
            remedy=f"Run `llamasup load {runner.model}` to serve it again.",
        )
