"""The proxy's backend and the status of a llamasup with one model (``run`` and ``wrap``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from llamasup.gguf.facts import ModelFacts
from llamasup.http.address import Address
from llamasup.models.access import ResolvedModel
from llamasup.observability.counters import InstanceGauges
from llamasup.pool.catalog.route import ModelRoute
from llamasup.pool.catalog.status import gauges_of, model_status, scrape, status_of
from llamasup.pool.replicas.replica_set import ReplicaSet
from llamasup.queueing.unavailable import Unavailable
from llamasup.supervision.runner import InstanceRunner

__all__ = ["Supervisor"]


class Supervisor:
    """``names``: its own, then aliases. ``address``: the proxy's. ``facts``: of its file, if known."""

    def __init__(
        self,
        names: tuple[str, ...],
        served: ReplicaSet,
        address: Address,
        facts: ModelFacts | None = None,
    ) -> None:
        self._served = served
        self._facts = facts
        self._route = ModelRoute(ResolvedModel(names), served)
        self._address = address
        self._started_s = monotonic()

    # --- Backend ----------------------------------------------------------------------------------------
    def resolve(self, model: str | None, *, create: bool = False) -> ModelRoute:
        return self._route  # it serves any name in a request, like llama-server

    def readiness(self) -> Unavailable | None:
        state = self._served.serving()
        return state if isinstance(state, Unavailable) else None

    def listing(self) -> None:
        """None: llama-server answers /v1/models."""

    # --- for the control API ----------------------------------------------------------------------------
    @property
    def runners(self) -> tuple[InstanceRunner, ...]:
        return self._served.runners

    def status(self) -> Mapping[str, Any]:
        name, *aliases = self._route.model.names
        served = self._served
        model = model_status(name, aliases, served.runners, queued=len(served.queue), facts=self._facts)
        return status_of(self._address, monotonic() - self._started_s, [model])

    def gauges(self) -> Sequence[InstanceGauges]:
        return gauges_of(self.runners)

    async def scrape(self) -> Mapping[str, str]:
        return await scrape(self.runners)
