"""The ``status`` object of a model (docs/design.md), loaded or not, and the metrics of its server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamasup._version import __version__
from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.http.address import Address
from llamasup.core.observability.counters import InstanceGauges
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.pool.shown_state import nearest, state_of
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import State

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober
    from llamasup.core.pool.model import ManagedModel


def status_of(address: Address, up_s: float, models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The ``status`` object (docs/design.md); ``up_s``: the uptime."""
    return {
        "version": __version__,
        "pid": os.getpid(),
        "url": address.url,
        "uptime_s": round(up_s, 3),
        "models": list(models),
    }


def state_of_managed(managed: ManagedModel) -> str:
    waits_for = ""
    if managed.wanted:
        why = managed.served.unavailable_reason
        waits_for = "download" if why is not None and why.cause == "downloading" else "memory"
    return state_of(
        managed.phase,
        (runner.instance.state for runner in managed.runners),
        waits_for=waits_for,
        broken=bool(managed.spec.problem),
    )


def wait_before_load(managed: ManagedModel, now_s: float) -> LoadProgress | None:
    """The wait of a requested model before its processes start; None if they have started.

    ``now_s``: monotonic.
    """
    if not managed.wanted or any(runner.load is not None for runner in managed.runners) or managed.serves:
        return None
    since_s = min(
        managed.served.queue.oldest_s, managed.load_waiters_since_s if managed.load_waiters else now_s
    )
    why = managed.served.unavailable_reason
    if why is not None and why.cause == "downloading":
        return LoadProgress(None, why.eta_s, now_s - since_s, why.message)
    state = state_of_managed(managed)
    reason = "it waits until other models free memory" if state == "waiting" else None
    return None if reason is None else LoadProgress(None, None, now_s - since_s, reason)


def model_status(
    model: str,
    aliases: Iterable[str],
    runners: Sequence[InstanceRunner],
    *,
    queued: int,
    facts: ModelFacts | None = None,
    state: str | None = None,
    until: str | None = None,
    pinned: bool = False,
    awaits: LoadProgress | None = None,
) -> Mapping[str, Any]:
    """The ``status`` object of one model.

    ``runners``: empty if it is not loaded. ``facts``: of its file, if known. ``state`` overrides that of
    the processes; ``until``: the time of its unload, in ISO 8601. ``awaits``: its wait before the load.

    The caller fills in ``vram_bytes``, because the driver is slow.
    """
    from llamasup.core.system.hardware.probe import load_usage

    runners = sorted(runners, key=lambda runner: nearest(runner.instance.state))
    first = runners[0] if runners else None
    plan = None if first is None else first.plan
    last = None if first is None else first.instance.last
    seen = [load_usage(runner.pid) for runner in runners if runner.pid is not None]
    rss = [usage.rss_bytes for usage in seen if usage is not None]
    slots = [runner.plan.parallel for runner in runners if runner.plan is not None]
    model_class = plan.model_class if plan is not None else None if facts is None else facts.model_class
    load = awaits if first is None or awaits is not None else first.load
    status = {
        "id": model,
        "aliases": list(aliases),
        "state": state or (State.STOPPED if first is None else first.instance.state).value,
        "generation": 0 if first is None else first.instance.generation,
        "pid": None if first is None else first.pid,
        "restarts": _sum(runners, lambda runner: runner.instance.restarts),
        "in_flight": _sum(runners, lambda runner: runner.in_flight),
        "queued": queued,
        "slots": sum(count or 0 for count in slots) or None,
        "slots_busy": _sum(runners, lambda runner: runner.busy),
        "ctx_size": None if plan is None else plan.ctx_size,
        "load": None if load is None else load.as_json(),
        "memory": {"ram_bytes": sum(rss) if rss else None, "vram_bytes": None},
        "size_bytes": None if facts is None else facts.file_bytes,
        "class": None if model_class is None else model_class.value,
        "device": None if plan is None or first is None or first.pid is None else plan.device,
        "until": until,
        "pinned": pinned,
        "last_exit": None
        if first is None or last is None
        else {
            "code": first.last_exit.code if first.last_exit else None,
            "signal": first.last_exit.signal if first.last_exit else None,
            "cause": last.cause,
            "remedy": last.remedy,
        },
        "events": [] if first is None else first.history.as_json(),
    }
    if len(runners) > 1:
        status["replicas"] = [
            {
                "state": runner.instance.state.value,
                "generation": runner.instance.generation,
                "pid": runner.pid,
                "restarts": runner.instance.restarts,
                "in_flight": runner.in_flight,
                "device": None if runner.plan is None else runner.plan.device,
            }
            for runner in runners
        ]
    return status


def held_bytes_of(managed: ManagedModel) -> int:
    """The memory that the plans of its processes predict, without the prompt cache, which begins empty."""
    plans = [runner.plan for runner in managed.all_runners if runner.pid is not None]
    return sum(plan.memory.without_prompt_cache.total_bytes for plan in plans if isinstance(plan, LaunchPlan))


def _sum(runners: Iterable[InstanceRunner], of: Callable[[InstanceRunner], int]) -> int:
    return sum(map(of, runners))


def gauges_of(runners: Iterable[InstanceRunner]) -> Sequence[InstanceGauges]:
    """One for each process; replicas share a queue."""
    return [
        InstanceGauges(runner.model, runner.instance.state, runner.in_flight, queued=len(runner.queue))
        for runner in runners
    ]


async def scrape(runners: Iterable[InstanceRunner]) -> Mapping[str, str]:
    """The metrics of each serving child by model (of the first replica), read from all at the same time."""
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
