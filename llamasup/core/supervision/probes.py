"""The requests that llamasup sends to a running child: readiness, warm-up, slot transfers and liveness.

Each is a task of its generation (``Generation.start``), ends with the child at the latest, and posts its
result as an event. The table decides on time limits and consequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.answers import Health, NoAnswer, TokenProbe
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.warmup import (
    WarmUpRequest,
    begun_message_requests,
    no_response,
    repeats_begun_message,
    response_problem,
    warm_up_request,
    warmup_diagnosis,
)
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.supervision import states
from llamasup.core.supervision.events import LoadProgressed
from llamasup.core.supervision.generation import PUMP_TIMEOUT_S, Generation
from llamasup.core.supervision.liveness import (
    Action,
    Checks,
    LivenessPolicy,
    LivenessState,
    Observation,
    Traffic,
    assess,
    required_checks,
)
from llamasup.core.supervision.plan_protocol import EnginePlan
from llamasup.core.system.hardware.probe import cpu_usage, family_bytes, load_usage

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober

_SAMPLE_INTERVAL_S: Final = 0.25
_FIRST_INTERVAL_S: Final = 0.05
_PROGRESS_INTERVAL_S: Final = 1.0
_PUBLISH_INTERVAL_S: Final = 0.5
_FIRST_PUBLISH_INTERVAL_S: Final = 0.1


# --- its start


async def probe(generation: Generation) -> None:
    """Probe ``/health`` until it answers 200."""
    posted = False

    def on_loading() -> None:
        nonlocal posted
        if not posted:
            posted = True
            generation.post(states.Loading(generation.number))

    async with generation.prober() as prober:
        await prober.until_healthy(generation.log_ready, on_loading)
    generation.watch_drafts()
    generation.post(states.Healthy(generation.number))


async def watch_progress(generation: Generation) -> None:
    """Post an event for each second with progress of the start: log output, memory, bytes read (S6).

    Publishes how far the load is, twice a second at most, but more often in its first second.
    """
    before: tuple[int, ...] = ()
    published: tuple[float | None, ...] = (None, None)
    now_s = asyncio.get_running_loop().time
    posted_s, published_s = now_s(), float("-inf")
    while True:
        elapsed_s = generation.load.progress.elapsed_s
        await asyncio.sleep(min(max(_FIRST_INTERVAL_S, elapsed_s / 4), _SAMPLE_INTERVAL_S))
        if generation.context.phase() != "starting":
            return  # no progress after the state `ready`
        seen = generation.load.sample()
        if now_s() - posted_s >= _PROGRESS_INTERVAL_S:
            posted_s = now_s()
            now = (generation.pump.bytes_seen, *(seen.loaded if seen else ()))
            if now != before:
                before = now
                generation.post(states.Progressed(generation.number))
        progress = generation.load.progress
        shown = (progress.percent, progress.eta_s)
        interval_s = min(max(_FIRST_PUBLISH_INTERVAL_S, progress.elapsed_s / 4), _PUBLISH_INTERVAL_S)
        if now_s() - published_s >= interval_s and shown != published:
            published, published_s = shown, now_s()
            context = generation.context
            context.bus.publish(LoadProgressed(context.model, generation.number, progress))


async def warm_up(generation: Generation) -> None:
    """Request a first token, embedding, score or decision."""
    plan = generation.plan
    given = plan.warm_up if isinstance(plan, EnginePlan) else None
    request = given or warm_up_request(plan.model_class)
    began_s = asyncio.get_running_loop().time()
    status: int | None = None
    try:
        async with generation.prober() as prober:
            status, body = await prober.send(request)
    except NoAnswer as error:
        # Most likely the request crashed the server (#13085); its exit then gives the better diagnosis.
        with suppress(TimeoutError):
            async with asyncio.timeout(PUMP_TIMEOUT_S):
                await generation.child.wait()
                return
        problem: str | None = no_response(request, error)
    else:
        problem = response_problem(request, status, body)
        if status == 401 and not generation.context.policy().knows_all_keys:
            problem = None
            generation.warn(
                "llama-server requires an API key that llamasup does not know: the warm-up was skipped.",
                "Clients must send that key. --no-warmup avoids this warning.",
            )
    if problem is None:
        generation.warm_up_s = asyncio.get_running_loop().time() - began_s
        await _learn_how_it_continues(generation)
        generation.post(states.WarmupSucceeded(generation.number))
    else:
        diagnosis = warmup_diagnosis(problem, generation.pump.tail(), status=status)
        generation.post(states.WarmupFailed(generation.number, generation.named(diagnosis, diagnosis.lines)))


async def _learn_how_it_continues(generation: Generation) -> None:
    """Whether this build, with its options and its template, continues begun messages, and how."""
    if not generation.context.policy().continue_streams:
        return
    if generation.plan.model_class not in (ModelClass.DECODER, ModelClass.ENCODER_DECODER):
        return
    with suppress(NoAnswer):
        async with generation.prober() as prober:
            bodies = [(await prober.send(request))[1] for request in begun_message_requests()]
        generation.endpoint.repeats_begun_message = repeats_begun_message(*bodies)


# --- its slots


async def restore_slots(generation: Generation) -> None:
    from llamasup.core.supervision import slot_transfer  # here, to keep the start short

    number, context, kept_slots = generation.number, generation.context, generation.plan.slots
    assert kept_slots is not None
    async with generation.prober() as prober:
        usable, problem = await slot_transfer.restore_slots(
            prober, kept_slots, most_bytes=context.policy().slots_disk_bytes, model=context.model
        )
    if problem is not None:
        if usable:
            effect = "The prompts of those conversations are computed again."
        else:
            effect = "llama-server is started again without them."
        generation.warn(f"Could not restore saved slots: {problem}. {effect}")
    generation.post(states.SlotsRestored(number) if usable else states.SlotRestoreCorrupted(number))


async def save_slots(generation: Generation) -> None:
    from llamasup.core.supervision import slot_transfer

    context, kept_slots = generation.context, generation.plan.slots
    assert kept_slots is not None
    async with generation.prober() as prober:
        problem = await slot_transfer.save_slots(
            prober, kept_slots, most_bytes=context.policy().slots_disk_bytes, model=context.model
        )
    if problem is not None:
        generation.warn(f"Could not save all slots: {problem}.")
    generation.post(states.SlotsSaved(generation.number))


# --- while it serves


async def check_liveness(generation: Generation) -> None:
    """Watch the child until it fails or ends (S7, S8)."""
    async with generation.prober() as prober:
        verdict = await watch(
            prober,
            generation.endpoint,
            generation.child.pid,
            warm_up_request(generation.plan.model_class),
            generation.context.policy().liveness,
            warm_up_s=generation.warm_up_s,
        )
    if verdict is not None:
        generation.post(states.LivenessFailed(generation.number, generation.named(verdict)))


async def query_context_window(generation: Generation) -> None:
    """Ask for the context of a slot: llama-server pads and divides the configured size."""
    async with generation.prober() as prober:
        generation.endpoint.window = await prober.context_window()


def record_load(generation: Generation) -> Coroutine[None, None, None]:
    """Compare the memory of this load with its plan, for later plans.

    The thread is asked for at once, not by the task: a stop right after the start neither waits for it nor
    undoes it.
    """
    recorded = asyncio.get_running_loop().run_in_executor(None, _record_load, generation)
    return _load_recorded(generation, recorded)


async def _load_recorded(generation: Generation, recorded: asyncio.Future[None]) -> None:
    await asyncio.shield(recorded)
    if generation.context.on_measured is not None:
        generation.context.on_measured()


def _record_load(generation: Generation) -> None:
    if isinstance(generation.plan, EnginePlan):
        resident_bytes = family_bytes(generation.child.pid)
    else:
        seen = load_usage(generation.child.pid)
        resident_bytes = None if seen is None else seen.rss_bytes
    generation.context.planner.served(
        generation.plan,
        generation.size_lines,
        resident_bytes=resident_bytes,
        generated=generation.warm_up_s > 0,
        times=generation.load.times,
    )


async def watch(
    prober: Prober,
    endpoint: Endpoint,
    pid: int,
    request: WarmUpRequest,
    policy: LivenessPolicy,
    *,
    warm_up_s: float,
) -> Diagnosis | None:
    """Check at intervals until the server fails; returns why, or None once the endpoint is closed.

    ``warm_up_s`` is the time of the first token, the first measurement of the server's speed.
    """
    now_s = asyncio.get_running_loop().time
    state = LivenessState(now_s(), longest_pause_s=warm_up_s)
    async with asyncio.TaskGroup() as tasks:
        probing: asyncio.Task[TokenProbe] | None = None
        try:
            while True:
                await asyncio.sleep(policy.interval_s)
                if endpoint.closed:
                    return None
                checks = required_checks(state, traffic_of(endpoint), policy)
                observed = await _observe(prober, endpoint, pid, checks, probing, policy.health_timeout_s)
                state, action = assess(state, observed, policy)
                match action:
                    case Diagnosis():
                        return action
                    case Action.PROBE:
                        probing = tasks.create_task(prober.probe_token(request))
                    case Action.CANCEL_PROBE if probing is not None:
                        probing.cancel()
                    case _:
                        pass
        finally:
            if probing is not None:
                probing.cancel()


def traffic_of(endpoint: Endpoint) -> Traffic:
    return Traffic(endpoint.at_work, endpoint.bytes_relayed, endpoint.produced, endpoint.failures)


async def _observe(
    prober: Prober,
    endpoint: Endpoint,
    pid: int,
    checks: Checks,
    probing: asyncio.Task[TokenProbe] | None,
    timeout_s: float,
) -> Observation:
    health = await prober.health(timeout_s) if checks.health else None
    progress = await prober.progress(timeout_s) if checks.progress and health is not Health.SILENT else None
    suspicious = checks.progress or health is Health.SILENT
    cpu = await asyncio.to_thread(cpu_usage, pid) if suspicious else None
    return Observation(
        asyncio.get_running_loop().time(),
        traffic_of(endpoint),
        health=health,
        progress=progress,
        cpu_usage=cpu,
        probe=probing.result() if probing is not None and _is_complete(probing) else None,
        may_block=prober.may_block,
    )


def _is_complete(probing: asyncio.Task[TokenProbe]) -> bool:
    return probing.done() and not probing.cancelled()
