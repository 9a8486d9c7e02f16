"""One model, and all that there is: what the proxy leases from, what status tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llamasup import __version__
from llamasup.core.address import Address
from llamasup.core.meant_model import MeantModel
from llamasup.core.model_facts import ModelFacts
from llamasup.runtime.endpoint import Lease, Unavailable
from llamasup.runtime.instance import InstanceRunner
from llamasup.runtime.metrics import InstanceGauges
from llamasup.runtime.model_status import model_status
from llamasup.runtime.scraping import scrape
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
        return await scrape(self.runners)
