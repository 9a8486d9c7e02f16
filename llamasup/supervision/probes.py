"""What is asked of a child while it lives: whether it is ready, works, and hangs; what its slots hold.

Each is a task of its generation (``Generation.start``) that ends with the child at the latest. What it finds
it tells as an event. How long a start or a save may take, and what follows from an answer, it never decides.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from llamasup.http.httpx_import import httpx
from llamasup.llama_server.warmup import explain_failure, not_answered, warm_up_request, what_is_missing
from llamasup.supervision import states as core
from llamasup.supervision.generation import PUMP_TIMEOUT_S, Generation
from llamasup.supervision.watchdog import watch

__all__ = [
    "ask_window",
    "check_liveness",
    "learn",
    "probe",
    "restore_slots",
    "save_slots",
    "warm_up",
    "watch_progress",
]

_PROGRESS_INTERVAL_S: Final = 1.0


# --- its start


async def probe(generation: Generation) -> None:
    """Ask until it says that it is ready."""
    said = False

    def on_loading() -> None:
        nonlocal said
        if not said:
            said = True
            generation.post(core.Loading(generation.number))

    async with generation.prober() as prober:
        await prober.until_healthy(generation.log_ready, on_loading)
    generation.pump.unwatch()
    generation.post(core.Healthy(generation.number))


async def watch_progress(generation: Generation) -> None:
    """Tell of every second in which the start moved: log output, memory, bytes read (S6)."""
    before: tuple[int, ...] = ()
    while generation.context.phase() == "starting":
        await asyncio.sleep(_PROGRESS_INTERVAL_S)
        from llamasup.system.hardware.usage import memory_usage

        seen = memory_usage(generation.child.pid)
        now = (generation.pump.bytes_seen, *((seen.rss_bytes, seen.read_bytes) if seen else ()))
        if now != before:
            before = now
            generation.post(core.Progressed(generation.number))


async def warm_up(generation: Generation) -> None:
    """Have it produce a first token: a vector, a score, whatever it is for."""
    request = warm_up_request(generation.plan.model_class)
    began_s = asyncio.get_running_loop().time()
    status: int | None = None
    try:
        async with generation.prober() as prober:
            status, body = await prober.ask(request)
    except httpx.HTTPError as error:
        # Most likely it died of the request (#13085); then its exit says more than this.
        with suppress(TimeoutError):
            async with asyncio.timeout(PUMP_TIMEOUT_S):
                await generation.child.wait()
                return
        missing: str | None = not_answered(request, error)
    else:
        missing = what_is_missing(request, status, body)
        if status == 401 and not generation.context.policy().knows_all_keys:
            missing = None
            generation.warn(
                "llama-server asks for a key that llamasup does not know: no first token was tried."
            )
    if missing is None:
        generation.warm_up_s = asyncio.get_running_loop().time() - began_s
        generation.post(core.WarmupSucceeded(generation.number))
    else:
        diagnosis = explain_failure(missing, generation.pump.tail(), status=status)
        generation.post(core.WarmupFailed(generation.number, diagnosis))


# --- its slots


async def restore_slots(generation: Generation) -> None:
    from llamasup.supervision import slot_transfer

    number, context, kept = generation.number, generation.context, generation.plan.slots
    assert kept is not None
    async with generation.prober() as prober:
        usable, problem = await slot_transfer.restore_slots(
            prober, kept, most_bytes=context.policy().slots_disk_bytes, model=context.model
        )
    if problem is not None:
        then = "Those conversations are read anew." if usable else "It is started again without them."
        generation.warn(f"Saved slots could not be restored: {problem}. {then}")
    generation.post(core.SlotsRestored(number) if usable else core.SlotRestoreCorrupted(number))


async def save_slots(generation: Generation) -> None:
    from llamasup.supervision import slot_transfer

    context, kept = generation.context, generation.plan.slots
    assert kept is not None
    async with generation.prober() as prober:
        problem = await slot_transfer.save_slots(
            prober, kept, most_bytes=context.policy().slots_disk_bytes, model=context.model
        )
    if problem is not None:
        generation.warn(f"Not all slots could be saved: {problem}.")
    generation.post(core.SlotsSaved(generation.number))


# --- while it serves


async def check_liveness(generation: Generation) -> None:
    """Look after it (S7, S8)."""
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
        generation.post(core.LivenessFailed(generation.number, verdict))


async def ask_window(generation: Generation) -> None:
    """The server pads and divides what it was told: what a slot holds, it knows best."""
    async with generation.prober() as prober:
        generation.endpoint.window = await prober.window()


async def learn(generation: Generation) -> None:
    """Compare what the load took with what was planned, for the plans to come.

    One piece of work in a thread: a stop right after the start does not wait for it, nor does it undo it.
    """
    await asyncio.to_thread(_learn_now, generation)
    if generation.context.when_measured is not None:
        generation.context.when_measured()


def _learn_now(generation: Generation) -> None:
    from llamasup.system.hardware.usage import memory_usage

    seen = memory_usage(generation.child.pid)
    resident_bytes = None if seen is None else seen.rss_bytes
    generation.context.planner.served(
        generation.plan,
        generation.size_lines,
        resident_bytes=resident_bytes,
        generated=generation.warm_up_s > 0,
    )
