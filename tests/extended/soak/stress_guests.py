"""Requests of a stress run that must cost the other clients nothing: of a greedy key, and poison requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import httpx

from tests.extended.soak.soak_clients import post
from tests.extended.soak.soak_wire import Answer, Wire
from tests.extended.soak.stress_config import MAX_QUEUED
from tests.extended.soak.stress_expectations import Expectations, JudgedAnswer, Verdict

__all__ = ["GREEDY_KEY", "greedy_burst", "poison"]

GREEDY_KEY = "greedy-key"
TRIES = 5  # of a greedy request that is refused
POISON_TOKENS = 1500  # it takes long enough to be found at work
_AT_WORK = ("prompt", "generating")


async def greedy_burst(port: int, path: str, body: Mapping[str, Any]) -> list[JudgedAnswer]:
    """More requests at once than the queue holds. Each one that is refused is sent again at once."""
    answers = await asyncio.gather(*(_insists(port, path, body) for _ in range(2 * MAX_QUEUED)))
    return [_judged(answer) for answer in answers]


async def _insists(port: int, path: str, body: Mapping[str, Any]) -> Answer:
    for _ in range(TRIES):
        async with Wire(port) as wire:
            await wire.send(post(path, body, key=GREEDY_KEY))
            answer = await wire.answer()
        if answer.status != 429:
            break
    return answer


def _judged(answer: Answer) -> JudgedAnswer:
    """Others share its fate at a kill or a change of the config, so its other refusals are not checked."""
    if answer.status == 200:
        return JudgedAnswer(Verdict.RIGHT)
    if answer.status == 429 and answer.error.get("cause") != "queue_full":
        return JudgedAnswer(Verdict.WRONG, f"a greedy request got {answer}")
    if answer.status in (404, 429, 503):
        return JudgedAnswer(Verdict.FULL)
    return JudgedAnswer(Verdict.WRONG, f"a greedy request got {answer}")


async def poison(
    http: httpx.AsyncClient, port: int, expectations: Expectations, model: str, number: int
) -> JudgedAnswer:
    """A request that makes its llama-server abort: each process that works on it gets SIGABRT."""
    id_ = f"poison-{number}"
    body = {"model": model, "prompt": id_, "n_predict": POISON_TOKENS, "ignore_eos": True, "temperature": 0}
    async with Wire(port) as wire, asyncio.TaskGroup() as tasks:
        await wire.send(post("/completion", body, headers=f"X-Request-Id: {id_}\r\n"))
        aborts = tasks.create_task(_abort(http, expectations, model, id_))
        answer = await wire.answer()
        aborts.cancel()
    if answer.error.get("cause") == "poison_request":
        return JudgedAnswer(Verdict.REFUSED)
    if answer.status in (200, 404, 502, 503):  # another fault or a change came first
        return JudgedAnswer(Verdict.ABANDONED)
    return JudgedAnswer(Verdict.WRONG, f"a poison request got {answer}")


async def _abort(http: httpx.AsyncClient, expectations: Expectations, model: str, id_: str) -> None:
    ended: set[int] = set()
    while True:
        requests = (await http.get("/llamasup/v1/requests")).json()["live"]
        works = [each for each in requests if each["id"] == id_ and each["phase"] in _AT_WORK]
        if works:
            models = (await http.get("/llamasup/v1/status")).json()["models"]
            pid = next((each["pid"] for each in models if each["id"] == model), None)
            if pid and pid not in ended:
                fault = expectations.fault_began(model, time.monotonic(), is_kill=False)
                ended.add(pid)
                with contextlib.suppress(ProcessLookupError):  # another fault has ended it
                    os.kill(pid, signal.SIGABRT)
                await asyncio.sleep(0.5)
                expectations.fault_ended(fault, time.monotonic())
        await asyncio.sleep(0.01)
