"""The workload of ``run`` and ``wrap``: a pool of one model, which is loaded at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from llamasup.core.control.interface import ServiceOwner
from llamasup.core.control.only_model_target import OnlyModelTarget
from llamasup.core.control.pool_target import can_restart_in_place
from llamasup.core.http.address import Address
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.spec import KeepResult, ModelSpec, Stay
from llamasup.core.pool.catalog.only_model import OnlyModel
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.processes import Runners
from llamasup.core.proxy.backend import ModelList
from llamasup.core.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.core.supervision.not_serving import failure_of
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, RestartRequested, State
from llamasup.core.system.process.log_tail import LogFiles
from llamasup.errors import LlamasupError
from llamasup.service.options import ServiceSpec


class _Given:
    """The ``Sizer`` of a model that shares no memory."""

    def __init__(self, service: ServiceSpec) -> None:
        self._service = service

    async def size(self, spec: ModelSpec, listener: Listener) -> SizedModel:
        service = self._service
        return SizedModel(spec, service.launch, {}, spec, service.starter)


class HostedModel:
    """A ``Workload``. ``log_passed_on`` gets llama-server's output, in its own thread."""

    def __init__(
        self,
        service: ServiceSpec,
        policy: Policy,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        *,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._service = service
        self._logs = LogFiles()
        runners = Runners(bus, folder, log_path=self._logs.path_of, log_passed_on=log_passed_on)
        self._pool = Pool(PoolOptions({}, policy), runners, bus, sizer=_Given(service))
        source = "" if service.launch is None else str(service.launch.model_path)
        spec = ModelSpec(service.name, source, service.aliases, stay=Stay(by_command=True))
        self.backend = OnlyModel(spec, self._pool)
        self.control_target = OnlyModelTarget(owner, self.backend, address, self._logs.path_of)
        self._stopping = False
        self._changed = asyncio.Event()
        bus.listen(self._on_event)

    @property
    def runner(self) -> InstanceRunner | None:
        """None until its first start."""
        return next(iter(self.backend.managed.runners), None)

    # --- Workload ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            await self._pool.run()
        finally:
            self._logs.close()

    def start(self) -> None:
        self._pool.begin_load(self.backend.managed, "start").add_done_callback(_ignore_error)

    async def begun(self) -> None:
        await self._until(lambda: self._stopping or self._state is not State.STOPPED)

    async def ready(self) -> tuple[str, ...] | None:
        await self._until(lambda: self._state is State.READY or self._is_over)
        return (self._service.name,) if self._state is State.READY else None

    def described(self) -> ModelList:
        return self.backend.described()

    def keep(self, model: str, ttl_s: float | None, own: int) -> KeepResult:
        return "fixed"  # only commands unload it

    def still_ready(self) -> bool:
        return self._state is State.READY

    async def ended(self) -> LlamasupError | None:
        await self._until(lambda: self._is_over)
        runner = self.runner
        if runner is None or runner.instance.state is not State.FAILED:
            return None
        return failure_of(runner.instance, self._exit_code_of_child(runner), log=runner.log_path)

    def ask_stop(self, *, now: bool) -> None:
        self._stopping = True
        self._pool.ask_stop(now=now)
        self._changed.set()

    # --- requests of the service ------------------------------------------------------------------------

    def ask_reload(self) -> None:
        """Restart the server after its requests in flight; load a model that is not loaded."""
        managed = self.backend.managed
        if can_restart_in_place(managed):
            self._pool.note_restart(managed)
            for runner in managed.runners:
                runner.post(RestartRequested())
        else:
            self.start()

    # --- private

    @property
    def _state(self) -> State:
        runner = self.runner
        return State.STOPPED if runner is None else runner.instance.state

    @property
    def _is_over(self) -> bool:
        """A stopped server without a stop request is unloaded: it can be loaded again."""
        runner = self.runner
        settled = runner is None or runner.instance.is_settled
        return settled and (self._stopping or self._state is State.FAILED)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for a state of the server or a stop request."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _on_event(self, event: PublishedEvent) -> None:
        if isinstance(event, StateChanged):
            self._changed.set()

    def _exit_code_of_child(self, runner: InstanceRunner) -> int | None:
        """Return the exit code as a shell shows it; None if llamasup does not pass it on."""
        exit_ = runner.last_exit if self._service.passes_exit_code else None
        if exit_ is None:
            return None
        return exit_.code if exit_.signal is None else 128 + getattr(signal, exit_.signal, 0)


def _ignore_error(loading: asyncio.Future[None]) -> None:
    """``ended`` returns it."""
    if not loading.cancelled():
        loading.exception()
