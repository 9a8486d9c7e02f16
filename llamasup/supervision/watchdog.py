"""Watches one generation that serves: looks as often and as closely as ``core.liveness`` asks for."""

from __future__ import annotations

import asyncio

from llamasup.llama_server.client import Prober
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.health import Health, Proof
from llamasup.llama_server.warmup import WarmUpRequest
from llamasup.queueing.endpoint import Endpoint
from llamasup.supervision.liveness import LivenessPolicy, Look, Need, Order, Traffic, Vigil, judge, needs
from llamasup.system.hardware.usage import cpu_usage

__all__ = ["watch"]


async def watch(
    prober: Prober,
    endpoint: Endpoint,
    pid: int,
    proof_request: WarmUpRequest,
    policy: LivenessPolicy,
    *,
    warm_up_s: float,
) -> Diagnosis | None:
    """Look until the server has to be condemned: why. None when the endpoint is closed meanwhile.

    ``warm_up_s`` is what its first token took, the first that is known of its pace.
    """
    now_s = asyncio.get_running_loop().time
    vigil = Vigil(now_s(), longest_pause_s=warm_up_s)
    async with asyncio.TaskGroup() as tasks:
        proving: asyncio.Task[Proof] | None = None
        try:
            while True:
                await asyncio.sleep(policy.interval_s)
                if endpoint.closed:
                    return None
                need = needs(vigil, traffic_of(endpoint), policy)
                look = await _look(prober, endpoint, pid, need, proving, policy.health_timeout_s)
                vigil, order = judge(vigil, look, policy)
                match order:
                    case Diagnosis():
                        return order
                    case Order.PROVE:
                        proving = tasks.create_task(prober.prove(proof_request))
                    case Order.DROP_PROOF if proving is not None:
                        proving.cancel()
                    case _:
                        pass
        finally:
            if proving is not None:
                proving.cancel()


def traffic_of(endpoint: Endpoint) -> Traffic:
    return Traffic(endpoint.at_work, endpoint.bytes_relayed, endpoint.produced, endpoint.failures)


async def _look(
    prober: Prober,
    endpoint: Endpoint,
    pid: int,
    need: Need,
    proving: asyncio.Task[Proof] | None,
    timeout_s: float,
) -> Look:
    health = await prober.health(timeout_s) if need.health else None
    work = await prober.work(timeout_s) if need.work and health is not Health.SILENT else None
    doubtful = need.work or health is Health.SILENT
    spent = await asyncio.to_thread(cpu_usage, pid) if doubtful else None
    return Look(
        asyncio.get_running_loop().time(),
        traffic_of(endpoint),
        health=health,
        work=work,
        cpu_usage=spent,
        proof=proving.result() if proving is not None and _came_to_an_end(proving) else None,
    )


def _came_to_an_end(proving: asyncio.Task[Proof]) -> bool:
    return proving.done() and not proving.cancelled()
