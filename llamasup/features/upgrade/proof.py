"""Compares a new build with the running one: the plans of all models, and the requests of a proof.

``compare`` reads model files and starts both builds, so it blocks. ``prove`` sends the same requests to a
server of each build, and takes the figures: it reads the clock and the memory of the servers. ``verdict.py``
decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.llama_server.answers import NoAnswer, Text
from llamasup.core.llama_server.log_lines import shareable_lines
from llamasup.core.llama_server.warmup import WarmUpRequest
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.measured.paired import prose
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.estimate import SizedModel, estimate_model, share_of, with_devices
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.system.hardware.probe import family_bytes
from llamasup.errors import LlamasupError
from llamasup.features.upgrade.verdict import (
    PROMPTS,
    Accepted,
    Pair,
    PlanChange,
    Refused,
    Trial,
    flag_changes,
    next_step,
)

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober
    from llamasup.core.supervision.states import Instance


_ANSWER = 16  # tokens; a longer text makes differences between two good builds more likely
_WORDS = (12, 24, 48, 96)  # of the prompts, cut to the context
_USUAL_CTX_SIZE = 2048
_REQUEST_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 2.0  # how long a pair waits until the running server is without requests
_IDLE_POLL_S = 0.01
_ANSWER_BYTES = 2_000  # of a failed answer; an error of llama-server has less
_LINES = 8  # of the log of the failed server, as in a diagnosis
_CAUSE_S = 2.0  # until the end of a server is noticed, and its log read


class _Failed(Exception):
    """A server failed a request. ``answer``: the beginning of the body of its answer, if there is one."""

    def __init__(self, how: str, body: bytes = b"") -> None:
        super().__init__(how)
        self.answer = body[:_ANSWER_BYTES].decode("utf-8", "replace")


def _request(number: int, ctx_size: int | None, *, is_idle: bool) -> WarmUpRequest:
    """The prompts repeat, so that the memory of a good server stays as it is after the first ones.

    ``is_idle``: no slot is in use. It takes the slot that llama-server uses last (3, 2, 1, 0 at b11434), so
    most clients keep their cached prompts.
    """
    most = max(1, (ctx_size or _USUAL_CTX_SIZE) - 2 * _ANSWER)  # a token has one character at least
    prompt = prose(number % PROMPTS, _WORDS[number % len(_WORDS)])[:most]
    body: Mapping[str, Any] = {
        "prompt": prompt,
        "n_predict": _ANSWER,
        "temperature": 0.0,
        "cache_prompt": False,
        "ignore_eos": True,
        **({"id_slot": 0} if is_idle else {}),
    }
    return WarmUpRequest("/completion", body, "a text")


async def prove(
    new: InstanceRunner, old: InstanceRunner, on_trial: Callable[[Trial], None]
) -> Accepted | Refused:
    """Return the verdict about the build of ``new``. ``on_trial`` gets the figures after each request."""
    if (why := _other_plan(new, old)) is not None:
        return why
    trial, crashes = Trial(), new.instance.crashes
    async with AsyncExitStack() as stack:
        probers = [runner.prober() for runner in (new, old)]
        if probers[0] is None or probers[1] is None:
            return Refused("one of the two servers has ended", judged=False)
        new_prober, old_prober = [await stack.enter_async_context(each) for each in probers if each]
        while True:
            step = await asyncio.to_thread(next_step, trial)  # the bounds of many pairs take a while
            if isinstance(step, Accepted | Refused):
                return step
            if step == "compare":
                await _until_idle(old)
            ctx_size = None if old.plan is None else old.plan.ctx_size
            request = _request(trial.answered, ctx_size, is_idle=old.in_flight == 0)
            if step == "compare":
                trial = await _compared(trial, request, (new_prober, new), (old_prober, old))
            else:
                trial = await _asked(trial, request, (new_prober, new))
            if trial.broken:
                # No client has sent a request to this server.
                lines = tuple(shareable_lines(new.log_tail, _LINES))
                if (ended := await _end_of(new, crashes)) is not None:
                    last = ended.last
                    how = "ended" if last is None else f"ended ({last.message.rstrip('.')})"
                    lines = lines if last is None else last.lines
                    trial = replace(trial, broken=how)
                trial = replace(trial, lines=lines)
            on_trial(trial)


def _other_plan(new: InstanceRunner, old: InstanceRunner) -> Refused | None:
    """A build that serves with less cannot be compared, and would serve with less from now on."""
    if new.plan is None or old.plan is None:
        return None  # one of them has ended
    less = [[reduction.change for reduction in plan.reduced] for plan in (new.plan, old.plan)]
    if less[0] == less[1]:
        return None
    differing = [change for change in (*less[0], *less[1]) if (change in less[0]) is not (change in less[1])]
    flags = ", ".join(dict.fromkeys(change.setting for change in differing))
    return Refused(f"memory was too small for the same plan twice: {flags} differs", judged=False)


_Server = tuple["Prober", InstanceRunner]


async def _compared(trial: Trial, request: WarmUpRequest, new: _Server, old: _Server) -> Trial:
    """Let both builds answer, in an order drawn at random."""
    answered, alone = old[1].answered, old[1].in_flight == 0
    took: dict[InstanceRunner, tuple[str, float]] = {}
    for prober, runner in random.sample((new, old), 2):
        try:
            took[runner] = await _answer(prober, request)
        except _Failed as failed:
            if runner is new[1]:
                return replace(trial, broken=str(failed), answer=failed.answer)
            return replace(trial, interrupted=f"the server of the running build {failed} during the proof")
    alone = alone and old[1].in_flight == 0 and old[1].answered == answered
    (new_text, new_s), (old_text, old_s) = took[new[1]], took[old[1]]
    pair = Pair(old_text, new_text, old_s, new_s, alone)
    old_bytes = await _memory_bytes(old[1])
    return replace(await _measured(trial, new[1]), pairs=(*trial.pairs, pair), old_memory_bytes=old_bytes)


async def _asked(trial: Trial, request: WarmUpRequest, new: _Server) -> Trial:
    try:
        await _answer(new[0], request)
    except _Failed as failed:
        return replace(trial, broken=str(failed), answer=failed.answer)
    return await _measured(trial, new[1])


async def _measured(trial: Trial, new: InstanceRunner) -> Trial:
    return replace(trial, memory_bytes=(*trial.memory_bytes, await _memory_bytes(new)))


async def _memory_bytes(runner: InstanceRunner) -> int | None:
    return None if runner.pid is None else await asyncio.to_thread(family_bytes, runner.pid)


async def _until_idle(runner: InstanceRunner) -> None:
    """Wait for a moment without requests of clients. A busy server never has one."""
    until_s = monotonic() + _IDLE_TIMEOUT_S
    while runner.in_flight and monotonic() < until_s:  # noqa: ASYNC110 - an event would cost each request
        await asyncio.sleep(_IDLE_POLL_S)


async def _answer(prober: Prober, request: WarmUpRequest) -> tuple[str, float]:
    """The text, and the seconds it took. Raises _Failed."""
    began_s = monotonic()
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            status, body = await prober.send(request)
    except TimeoutError:
        raise _Failed(f"did not answer within {_REQUEST_TIMEOUT_S:g} s") from None
    except NoAnswer as error:
        raise _Failed(f"did not answer ({error})") from error
    took_s = monotonic() - began_s
    if status != 200:
        raise _Failed(f"answered with status {status}", body)
    try:
        return msgspec.json.decode(body, type=Text).content, took_s
    except msgspec.DecodeError:
        raise _Failed("answered without a text", body) from None


async def _end_of(new: InstanceRunner, crashes: tuple[tuple[float, int], ...]) -> Instance | None:
    """The server after its end; None if it runs. ``crashes``: those before the proof."""
    try:
        async with asyncio.timeout(_CAUSE_S):
            return await new.until(lambda instance: instance.crashes[-1:] > crashes[-1:])
    except TimeoutError:
        return None


# --- the plans of all models with both builds -----------------------------------------------------


_MEASURES = "--verbosity"  # the first start of each build measures its memory
_NOWHERE = Path("/nonexistent")


def compare(
    specs: Iterable[ModelSpec], budget: Mapping[str, int], environ: Mapping[str, str], old: str, new: str
) -> tuple[PlanChange, ...]:
    """Compare the plans of the models that have a file here, and a plan with the old build."""
    found = []
    for spec in specs:
        if not spec.source or spec.is_remote or spec.problem:
            continue
        try:
            before = estimate_model(spec, budget, old, environ)
        except LlamasupError:
            continue  # it cannot be loaded now, either
        generates = before.facts is not None and before.facts.model_class is ModelClass.DECODER
        try:
            after = estimate_model(spec, budget, new, environ)
            flags = flag_changes(_flags(before, budget), _flags(after, budget))
        except LlamasupError as error:
            found.append(PlanChange(spec.id, generates, needs_before=before.needs, problem=error))
        else:
            found.append(PlanChange(spec.id, generates, flags, before.needs, after.needs))
    return tuple(found)


def _flags(sized: SizedModel, budget: Mapping[str, int]) -> Mapping[str, str]:
    assert sized.launch is not None  # it is of a file
    share = share_of(sized.spec, budget, alone=True)
    planner = Planner(with_devices(sized.launch, sized.spec, 0), _NOWHERE, budget=lambda: share)
    reasons = planner.admission().plan.reasons
    return {
        reason.flag: reason.value or "" for reason in reasons if reason.passed and reason.flag != _MEASURES
    }
