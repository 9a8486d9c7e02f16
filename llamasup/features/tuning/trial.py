"""A llama-server that is measured: started from a plan, given real requests, ended.

It is a child like the llama-server of ``run`` (``system/process/spawn.py``): it dies with llamasup, and the
guardian of the run folder kills what it leaves behind. A child that crashes, hangs or does not fit is a
``TrialFailed``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpcore
import msgspec

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import UnixAddress
from llamasup.core.http.network import AsyncioBackend
from llamasup.core.llama_server.answers import NoAnswer, Text, Tokens
from llamasup.core.llama_server.client import Prober
from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.core.llama_server.warmup import response_problem, warm_up_request
from llamasup.core.planning.measured.paired import prose
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.system.hardware.probe import load_usage, oom_kills
from llamasup.core.system.process.output_pump import LogPump
from llamasup.core.system.process.spawn import Child, spawn
from llamasup.errors import text_of
from llamasup.features.tuning.workload import (
    Answered,
    Block,
    Distribution,
    Lengths,
    Measurement,
    Probe,
    as_measured,
    probe_body,
    prompt_tokens,
    read_distributions,
)

T = TypeVar("T")

_BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
_END_S = 10.0
_EXIT_S = 1.0
_PUMP_S = 1.0
_SEED = 1
_LAST_EVENT = b'"stop":true'
_USER = "a trial"  # of RPC workers


class TrialFailed(Exception):
    """The server of a configuration did not start, or ended, or did not answer. The text says why."""


class TrialTimedOut(TrialFailed):
    """The server did not answer within the limit."""


class Trial:
    """A running server. Owned by the session, which ends it."""

    def __init__(self, plan: LaunchPlan, child: Child, pump: LogPump, *, oom_kills_before: int) -> None:
        self.plan = plan
        self.start_s = 0.0
        self._used_workers = plan.workers
        USED.add(self._used_workers, _USER)
        self._child = child
        self._log = pump
        self._oom_kills_before = oom_kills_before
        socket_path = plan.address.path if isinstance(plan.address, UnixAddress) else None
        self._pool = httpcore.AsyncConnectionPool(
            uds=socket_path,
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=AsyncioBackend(),
        )
        self._headers = [("Content-Type", "application/json")]
        if plan.api_key is not None:
            self._headers.append(("Authorization", f"Bearer {plan.api_key}"))
        self._texts: dict[int, list[int]] = {}
        self._documents: dict[int, str] = {}
        self._ready = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Trial: process {self._child.pid}>"

    async def become_ready(self, timeout_s: float) -> None:
        """Wait for the first token. Raises TrialFailed."""
        began_s = time.monotonic()
        request = warm_up_request(self.plan.model_class)

        async def probe() -> None:
            async with Prober(self.plan.address, self.plan.api_key) as prober:
                await prober.until_healthy(self._ready, lambda: None)
                problem = response_problem(request, *await prober.send(request))
            if problem is not None:
                raise TrialFailed(problem)

        await self._guarded(probe(), timeout_s)
        self.start_s = time.monotonic() - began_s

    async def measure(self, block: Block, timeout_s: float) -> Measurement:
        """Send the requests of ``block`` and take the times. Raises TrialFailed."""
        free = asyncio.Semaphore(block.clients)

        async def client(number: int, lengths: Lengths) -> Answered:
            async with free:
                return await self._ask(number, lengths)

        async def all_clients() -> tuple[list[Answered], float]:
            await self._write_prompts(block)
            began_s = time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(client(*pair)) for pair in enumerate(block.requests)]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks], time.monotonic() - began_s

        answers, seconds = await self._guarded(all_clients(), timeout_s)
        usage = load_usage(self._child.pid)
        memory_bytes = 0 if usage is None else usage.rss_bytes
        return as_measured(answers, seconds, memory_bytes)

    async def distributions(self, probes: Sequence[Probe], timeout_s: float) -> list[Distribution]:
        """Measure the probabilities of the tokens after fixed prompts. Raises TrialFailed."""

        async def ask_all() -> list[Distribution]:
            found: list[Distribution] = []
            for number, probe in enumerate(probes):
                prompt = await self._prompt(number, probe.length) * probe.repeats
                answer = await self._post("/completion", probe_body(prompt, probe.answer), dict[str, Any])
                found.append(read_distributions(answer))
            return found

        return await self._guarded(ask_all(), timeout_s)

    def kill(self) -> None:
        """Kill the process to free the CPUs and the memory at once. ``end`` is still necessary."""
        self._child.kill_group()

    async def end(self) -> None:
        """End the process, at the latest with SIGKILL, and remove what it leaves behind."""
        self._child.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await self._child.wait()
        except TimeoutError:
            pass
        finally:
            self._child.kill_group()
            await asyncio.shield(self._clean_up())

    async def _clean_up(self) -> None:
        await self._child.wait()
        await asyncio.to_thread(self._child.end_descendants)
        await self._log.aclose(_PUMP_S)
        await self._pool.aclose()
        USED.remove(self._used_workers, _USER)
        self._used_workers = ()
        _remove_socket(self.plan)

    # --- requests

    async def _ask(self, number: int, lengths: Lengths) -> Answered:
        body: Mapping[str, Any]
        match self.plan.model_class:
            case ModelClass.ENCODER:
                path = "/embedding"
                body = {"content": await self._prompt(number, lengths.prompt)}
            case ModelClass.RERANKER:
                path, body = "/v1/rerank", {"query": "harbour", "documents": [self._documents[number]]}
            case ModelClass.DECISION:
                smallest = warm_up_request(ModelClass.DECISION)
                path, body = smallest.path, {**smallest.body, "state": self._documents[number]}
            case _:
                prompt = await self._prompt(number, lengths.prompt)
                path, body = "/completion", _completion(prompt, number, lengths)
        began_s = time.monotonic()
        first_s: float | None = None
        received = bytearray()
        async with self._pool.stream(
            "POST", self.plan.address.url + path, headers=self._headers, content=msgspec.json.encode(body)
        ) as response:
            async for chunk in response.aiter_stream():
                if first_s is None:
                    first_s = time.monotonic() - began_s
                received += chunk
        if response.status != 200:
            quoted = bytes(received[:200]).decode("utf-8", "replace")
            raise TrialFailed(f"{path} answered {response.status}: {quoted}")
        if path == "/completion" and _LAST_EVENT not in received:
            raise TrialFailed("its answer is incomplete")
        total_s = time.monotonic() - began_s
        return Answered(first_s or total_s, total_s, lengths.answer)

    async def _write_prompts(self, block: Block) -> None:
        """Make the prompts before the clock runs.

        Rerankers and decision models take texts. Half of the tokens are left for the query, and for cutting
        words apart.
        """
        for number, lengths in enumerate(block.requests):
            tokens = await self._prompt(number, lengths.prompt)
            takes_text = self.plan.model_class in (ModelClass.RERANKER, ModelClass.DECISION)
            if takes_text and number not in self._documents:
                body = {"tokens": tokens[: max(1, lengths.prompt // 2)]}
                self._documents[number] = (await self._post("/detokenize", body, Text)).content

    async def _prompt(self, number: int, length: int) -> list[int]:
        """The prompt ``number`` of this many tokens."""
        if len(self._texts.get(number, ())) < length:
            content = prose(number, length)  # a word has at least one token
            self._texts[number] = (await self._post("/tokenize", {"content": content}, Tokens)).tokens
        return prompt_tokens(self._texts[number], length)

    async def _post(self, path: str, body: Mapping[str, object], answer_type: type[T]) -> T:
        content = msgspec.json.encode(body)
        response = await self._pool.request(
            "POST", self.plan.address.url + path, headers=self._headers, content=content
        )
        if response.status != 200:
            raise TrialFailed(f"{path} answered {response.status}")
        try:
            return msgspec.json.decode(response.content, type=answer_type)
        except msgspec.DecodeError as error:
            raise TrialFailed(f"{path} gave an answer that is not understood: {error}") from None

    # --- failures

    async def _guarded(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of ``work``, unless the server ends, fails, or takes longer. Raises TrialFailed."""

        async def settled() -> T | TrialFailed:
            try:
                return await work
            except (TrialFailed, NoAnswer, *_BROKEN) as error:
                return TrialFailed(text_of(error))

        async with asyncio.TaskGroup() as group:
            working = group.create_task(settled())
            ending = group.create_task(self._child.wait())
            await asyncio.wait((working, ending), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.result(), TrialFailed):
                # The connection may break before the exit is seen, which tells the reason.
                await asyncio.wait((ending,), timeout=_EXIT_S)
            has_ended = ending.done()
            working.cancel()
            ending.cancel()
        if working.cancelled():
            if has_ended:
                raise TrialFailed(self._why_ended())
            raise TrialTimedOut(f"no answer within {timeout_s:.0f} s")
        result = working.result()
        if isinstance(result, TrialFailed):
            raise TrialFailed(self._why_ended()) if has_ended else result
        return result

    def _why_ended(self) -> str:
        exit_ = self._child.exit
        assert exit_ is not None
        oom_killed = oom_kills() > self._oom_kills_before
        return diagnose(
            exit_, self._log.tail(), phase="starting", requested=False, oom_killed=oom_killed
        ).message


def spawn_trial(plan: LaunchPlan, folder: Path) -> Trial:
    """Start the server of ``plan``. Raises BrokenRuntime."""
    before = oom_kills()
    child = spawn(_quiet(plan.argv), env=plan.env, cwd=folder, run_folder=folder, nice=plan.nice)
    return Trial(plan, child, LogPump(child.output_fd, name="tune/log"), oom_kills_before=before)


def _remove_socket(plan: LaunchPlan) -> None:
    if isinstance(plan.address, UnixAddress):
        Path(plan.address.path).unlink(missing_ok=True)


def _completion(prompt: list[int], number: int, lengths: Lengths) -> Mapping[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": lengths.answer,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "seed": _SEED + number,
    }


def _quiet(argv: Sequence[str]) -> list[str]:
    """Return the plan without the verbose log of a first load, which would slow down only plans that were
    never loaded.
    """
    words = list(argv)
    if "--verbosity" in words:
        at = words.index("--verbosity")
        del words[at : at + 2]
    return words
