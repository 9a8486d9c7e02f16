"""One model behind one address: what ``run`` and ``wrap`` serve."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from llamasup.control.one_model import OneModel, ServiceOwner
from llamasup.errors import LlamasupError
from llamasup.http.address import Address
from llamasup.pool.catalog.single import Supervisor
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.service.options import ServiceSpec
from llamasup.supervision.events import Bus
from llamasup.supervision.failure import failure_of
from llamasup.supervision.runner import STOPPING, InstanceRunner
from llamasup.supervision.states import Instance, KillRequested, Policy, StartRequested, State, StopRequested
from llamasup.system.process.log_tail import LogFiles

__all__ = ["HostedModel"]


class HostedModel:
    """A ``Hosted``. ``log_passed_on`` gets llama-server's output, in a thread of its own."""

    def __init__(
        self,
        job: ServiceSpec,
        policy: Policy,
        owner: ServiceOwner,
        bus: Bus,
        folder: Path,
        address: Address,
        *,
        log_passed_on: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self._job = job
        self._stopping = False
        self._served = served = ReplicaSet(policy=policy)
        self._logs = LogFiles()
        log_path = self._logs.path_of(job.name)
        self.runner = InstanceRunner(
            job.name,
            job.planner(folder),
            aliases=job.aliases,
            policy=policy,
            bus=bus,
            queue=served.room,
            work_folder=folder,
            log_path=log_path,
            cwd=job.cwd,
            prober=job.prober,
            log_passed_on=log_passed_on,
        )
        served.add(self.runner)
        self.backend = Supervisor((job.name, *job.aliases), served, address, job.facts)
        self.controlled = OneModel(owner, self.backend, bus, log_path)

    async def run(self) -> None:
        try:
            await self.runner.run()
        finally:
            self._served.shut(STOPPING)
            self._logs.close()

    def ask_stop(self, *, now: bool) -> None:
        self._stopping = True
        self.runner.post(KillRequested() if now else StopRequested())

    def start(self) -> None:
        self.runner.post(StartRequested())

    async def begun(self) -> None:
        await self.runner.reached(State.STARTING)

    async def ready(self) -> tuple[str, ...] | None:
        last = await self.runner.until(self._is_ready_or_over)
        return (self._job.name,) if last.state is State.READY else None

    def still_ready(self) -> bool:
        return self.runner.instance.state is State.READY

    async def ended(self) -> LlamasupError | None:
        last = await self.runner.until(self._is_over)
        return failure_of(last, self._exit_code_of_child()) if last.state is State.FAILED else None

    def _is_over(self, instance: Instance) -> bool:
        """One that is stopped, and nobody has asked us to stop, is unloaded: it may be loaded again."""
        return instance.is_settled and (instance.state is State.FAILED or self._stopping)

    def _is_ready_or_over(self, instance: Instance) -> bool:
        return instance.state is State.READY or self._is_over(instance)

    def _exit_code_of_child(self) -> int | None:
        """As a shell would have seen it; None where it does not decide how we end."""
        exit_ = self.runner.last_exit if self._job.passes_exit_code else None
        if exit_ is None or exit_.signal is None:
            return None if exit_ is None else exit_.code
        return 128 + getattr(signal, exit_.signal, 0)
