"""One model, and all that there is: what the proxy leases from, what status tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llamasup import __version__
from llamasup.core.address import Address
from llamasup.core.instance import State
from llamasup.core.model_facts import ModelFacts
from llamasup.core.meant_model import MeantModel
from llamasup.effects.probe import Prober
from llamasup.runtime.endpoint import Lease, Unavailable
from llamasup.runtime.instance import InstanceRunner
from llamasup.runtime.metrics import InstanceGauges
from llamasup.runtime.model_status import model_status
from llamasup.runtime.served import ServedModel
from llamasup.runtime.waiting import WaitingRoom

__all__ = ["Supervisor"]


class Supervisor:
    """``address`` is where requests for ``served`` come in; ``facts`` are those of its file, if known."""

    def __init__(
        self, served: ServedModel, address: Address, pid: int, facts: ModelFacts | None = None
    ) -> None:
        self._served = served
        self._facts = facts
        self._meant = MeantModel(served.spec.names)
        self._address = address
        self._pid = pid
        self._started_s = asyncio.get_running_loop().time()

    # --- Backend: what the proxy asks -------------------------------------------------------------------

    def lease(self, model: str | None, *, infers: bool = False, body: bytes = b"") -> Lease | Unavailable:
        # It serves whatever name a request gives, as llama-server itself does.
        return self._served.lease(infers=infers, body=body)

    def room(self, model: str | None) -> WaitingRoom:
        return self._served.room

    def readiness(self) -> Unavailable | None:
        state = self._served.serving()
        return state if isinstance(state, Unavailable) else None

    def meant(self, model: str | None) -> MeantModel:
        return self._meant

    def listing(self) -> None:
        """llama-server lists the one that it has."""

    # --- what control shows -----------------------------------------------------------------------------

    @property
    def runners(self) -> tuple[InstanceRunner, ...]:
        return self._served.runners

    def status(self) -> Mapping[str, Any]:
        """The ``status`` object of the contract (docs/design.md)."""
        served = self._served
        uptime_s = asyncio.get_running_loop().time() - self._started_s
        return {
            "version": __version__,
            "pid": self._pid,
            "url": self._address.url,
            "uptime_s": round(uptime_s, 3),
            "models": [
                model_status(
                    served.spec.id,
                    served.spec.aliases,
                    served.runners,
                    queued=len(served.room),
                    facts=self._facts,
                )
            ],
        }

    def gauges(self) -> Sequence[InstanceGauges]:
        return [
            InstanceGauges(runner.model, runner.instance.state, runner.in_flight, queued=len(runner.room))
            for runner in self.runners
        ]

    async def scrape(self) -> Mapping[str, str]:
        """Every serving child's own Prometheus text, by model. Asked only when somebody asks us.

        All at once: one that does not answer costs the time that a prober waits, however many there are.
        """
        texts: dict[str, str] = {}

        async def ask(model: str, prober: Prober) -> None:
            async with prober:
                if (text := await prober.metrics()) is not None:
                    texts[model] = text

        async with asyncio.TaskGroup() as tasks:
            for runner in self.runners:
                if runner.instance.state is State.READY and (prober := runner.prober()) is not None:
                    tasks.create_task(ask(runner.model, prober), name=f"{runner.model}/scrape")
        return {runner.model: texts[runner.model] for runner in self.runners if runner.model in texts}
