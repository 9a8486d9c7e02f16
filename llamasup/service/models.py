"""The models behind one address: a pool, its names and its control target.

``HostedEntry`` has one model, for ``run`` and ``wrap``. ``configured_models.py`` has the models of ``serve``.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from llamasup.core.control.interface import ControlTarget, ServiceOwner
from llamasup.core.control.pool_target import OnlyModelTarget, can_restart_in_place
from llamasup.core.http.address import Address
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.registry import Registry
from llamasup.core.models.spec import KeepResult, ModelSpec, Stay
from llamasup.core.planning.facts import Launch
from llamasup.core.pool.catalog.catalog import Catalog, OnlyModel
from llamasup.core.pool.estimate import Fetch, SizedModel, Sizer, Starter
from llamasup.core.pool.model import policy_for
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.processes import Runners
from llamasup.core.proxy.backend import Backend
from llamasup.core.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.core.supervision.not_serving import failure_of
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, RestartRequested, State
from llamasup.core.system.process.log_tail import LogFiles
from llamasup.errors import LlamasupError

LogListener = Callable[[list[bytes]], None]
"""Gets the output of the llama-servers line by line, in their threads; must not wait or raise."""


class OnlyEntry(Struct, frozen=True):
    """The only model of a service. It shares no memory, so it is its own ``Sizer``."""

    name: str
    starter: Starter
    aliases: tuple[str, ...] = ()
    launch: Launch | None = None
    """None for a given command line."""
    passes_exit_code: bool = False
    """Exit with llama-server's exit code."""

    @property
    def spec(self) -> ModelSpec:
        source = "" if self.launch is None else str(self.launch.model_path)
        return ModelSpec(self.name, source, self.aliases, stay=Stay(by_command=True))

    async def size(self, spec: ModelSpec, listener: Listener) -> SizedModel:
        return SizedModel(spec, self.launch, {}, spec, self.starter)


class HostedModels(ABC):
    """Serves models from one pool. Made in the event loop of the service.

    ``on_log`` gets the output of all llama-servers, in their threads.
    """

    catalog: Catalog
    backend: Backend
    control_target: ControlTarget

    def __init__(
        self,
        options: PoolOptions,
        bus: Bus,
        folder: Path,
        on_log: LogListener | None,
        *,
        fetch: Fetch | None = None,
        sizer: Sizer | None = None,
    ) -> None:
        self._bus = bus
        self._logs = LogFiles()
        runners = Runners(bus, folder, log_path=self._logs.path_of, log_passed_on=on_log)
        self._pool = Pool(options, runners, bus, fetch, sizer=sizer)

    @property
    def registry(self) -> Registry:
        return self.catalog.registry

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes per device (and ``ram``) for all models together."""
        return self._pool.options.budget

    @property
    def has_other_nodes(self) -> bool:
        return False

    @property
    def in_flight(self) -> int:
        """The requests that the llama-servers work on."""
        return sum(model.served.in_flight for model in self.catalog.managed_models())

    @property
    def drain_timeout_s(self) -> float:
        """The longest of all models."""
        policy = self._pool.options.policy
        times = (policy_for(model.spec, policy).drain_timeout_s for model in self.catalog.managed_models())
        return max(times, default=policy.drain_timeout_s)

    def runners_of(self, model: str) -> Sequence[InstanceRunner]:
        """The model's processes; none for one that was never loaded, or is unknown."""
        managed = self._pool.managed_models.get(model)
        return () if managed is None else tuple(managed.runners)

    def keep(self, model: str, ttl_s: float | None, own: int) -> KeepResult:
        """Call ``Pool.keep`` for the model of this id. Returns ``fixed`` if it is not here."""
        managed = self._pool.managed_models.get(model)
        return "fixed" if managed is None else self._pool.keep(managed, ttl_s, own=own)

    async def run(self) -> None:
        """Own all tasks and processes until cancelled, and end them then."""
        try:
            await self._pool.run()
        finally:
            self._logs.close()

    def ask_stop(self, *, now: bool) -> None:
        """Stop gracefully, or at once."""
        self._pool.ask_stop(now=now)

    @abstractmethod
    async def begun(self) -> None:
        """Wait until requests can be accepted, and queued."""

    @abstractmethod
    async def ready(self) -> tuple[str, ...] | None:
        """Wait until the initial models serve. Returns the names; None if the service ends first."""

    def still_ready(self) -> bool:
        return True

    @abstractmethod
    async def ended(self) -> LlamasupError | None:
        """Wait until all has ended. Returns the error; None after a requested stop."""

    @abstractmethod
    def ask_reload(self) -> None:
        """Carry out SIGHUP."""


class HostedEntry(HostedModels):
    """The only model of ``run`` or ``wrap``. It is loaded at once; when it has failed, the service ends."""

    def __init__(
        self,
        entry: OnlyEntry,
        policy: Policy,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        on_log: LogListener | None = None,
    ) -> None:
        super().__init__(PoolOptions({}, policy), bus, folder, on_log, sizer=entry)
        self._entry = entry
        self._only = self.catalog = self.backend = OnlyModel(entry.spec, self._pool)
        self.control_target = OnlyModelTarget(owner, self._only, address, self._logs.path_of)
        self._stopping = False
        self._changed = asyncio.Event()
        bus.listen(self._on_event)

    @property
    def runner(self) -> InstanceRunner | None:
        """None until its first start."""
        return next(iter(self._only.managed.runners), None)

    async def begun(self) -> None:
        if not self._stopping:
            self._load()
        await self._until(lambda: self._stopping or self._state is not State.STOPPED)

    async def ready(self) -> tuple[str, ...] | None:
        await self._until(lambda: self.still_ready() or self._is_over)
        return (self._entry.name,) if self.still_ready() else None

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
        super().ask_stop(now=now)
        self._changed.set()

    def ask_reload(self) -> None:
        """Restart the server after its requests in flight; load a model that is not loaded."""
        managed = self._only.managed
        if can_restart_in_place(managed):
            self._pool.note_restart(managed)
            for runner in managed.runners:
                runner.post(RestartRequested())
        else:
            self._load()

    def _load(self) -> None:
        def ignore_error(loading: asyncio.Future[None]) -> None:
            if not loading.cancelled():
                loading.exception()  # ``ended`` returns it

        self._pool.begin_load(self._only.managed, "start").add_done_callback(ignore_error)

    @property
    def _state(self) -> State:
        return State.STOPPED if self.runner is None else self.runner.instance.state

    @property
    def _is_over(self) -> bool:
        """A stopped server without a stop request is unloaded: it can be loaded again."""
        settled = self.runner is None or self.runner.instance.is_settled
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
        exit_ = runner.last_exit if self._entry.passes_exit_code else None
        if exit_ is None:
            return None
        return exit_.code if exit_.signal is None else 128 + getattr(signal, exit_.signal, 0)
