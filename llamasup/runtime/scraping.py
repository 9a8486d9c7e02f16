"""What is told of servers to Prometheus: how they are, and what they say themselves when somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from llamasup.core.instance import State
from llamasup.effects.probe import Prober
from llamasup.runtime.instance import InstanceRunner
from llamasup.runtime.metrics import InstanceGauges

__all__ = ["gauges_of", "scrape"]


def gauges_of(runners: Iterable[InstanceRunner]) -> Sequence[InstanceGauges]:
    """One for each process; those of one model share its queue."""
    return [
        InstanceGauges(runner.model, runner.instance.state, runner.in_flight, queued=len(runner.room))
        for runner in runners
    ]


async def scrape(runners: Iterable[InstanceRunner]) -> Mapping[str, str]:
    """Every serving child's own text, by model; of replicas the first one's.

    All at once: one that does not answer costs the time that a prober waits, however many there are.
    """
    texts: dict[str, str] = {}

    async def ask(model: str, prober: Prober) -> None:
        async with prober:
            if (text := await prober.metrics()) is not None:
                texts[model] = text

    asked: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        for runner in runners:
            if (
                runner.model not in asked
                and runner.instance.state is State.READY
                and (prober := runner.prober()) is not None
            ):
                asked.append(runner.model)
                tasks.create_task(ask(runner.model, prober), name=f"{runner.model}/scrape")
    return {model: texts[model] for model in asked if model in texts}
