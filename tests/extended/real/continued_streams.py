"""Kills a real llama-server in the middle of streams, and compares what the client gets with whole ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llamasup.core.proxy.listeners.bind import bind
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.states import State
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions
from tests.extended.real.cycles import AT_ONCE
from tests.kit.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamasup.core.supervision.runner import InstanceRunner

__all__ = ["QUESTION", "REQUESTS", "Outcomes", "kill_in_streams", "proof_of_start"]

# The next server reads in one step what the first one computed token by token.
# That changes the last digits, so another word can win a tie. With this question, the demo model is nowhere
# undecided: each of 90 tokens is at least 1.06 times as likely as the second best.
QUESTION = "Tell me a story about a rabbit"
_TELL = [{"role": "user", "content": QUESTION}]
_PROMPT = "Once there lived a small rabbit. Her name was Clover. Clover lived in"
_SAME: Mapping[str, Any] = {"temperature": 0, "stream": True}
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _TELL,
        "max_tokens": 90,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": _PROMPT, "max_tokens": 90, "stream_options": {"include_usage": True}},
    "/completion": {"prompt": _PROMPT, "n_predict": 90},
    "/v1/messages": {"model": "demo", "messages": _TELL, "max_tokens": 90},
    "/v1/responses": {"model": "demo", "input": QUESTION, "max_output_tokens": 90},
}
_LATEST_KILL = 60  # events
# Which differ between two equal requests to one server: what is cached, and times.
_IDENTITY = re.compile(r'"(id|id_slot|created|created_at|item_id)":("[^"]*"|-?\d+)')
_CACHE = re.compile(
    r'"(cached_tokens|cache_read_input_tokens|input_tokens|tokens_cached)":\d+|"timings":\{[^}]*\}'
)
_COMMENT = re.compile(r"^:.*\n\n", re.MULTILINE)
_CONTINUED = "the next one continued it"
# Of an answer whose text was complete, but not its last events, such as that of its usage.
_ENDED = re.compile(
    r"^(?P<sent>.*?)(?:event: error\n)?data: [^\n]*\(not continued: the answer was complete but", re.S
)


@dataclass
class Outcomes:
    """How the streams ended.

    ``finished``: the whole answer had arrived before the kill. ``ended``: its text had arrived, and an error
    event was its end. ``pauses_s``: of the continued streams.
    """

    continued: int = 0
    finished: int = 0
    ended: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    @property
    def pauses_ms(self) -> tuple[float, float]:
        """The median and the longest."""
        pauses = self.pauses_s or [0.0]
        return statistics.median(pauses) * 1e3, max(pauses) * 1e3

    def __str__(self) -> str:
        before = f"{self.finished} finished before, {self.ended} but for the end"
        return f"{self.continued} continued, {before}, {len(self.wrong)} wrong"


async def kill_in_streams(
    runtime: str,
    model: str,
    kills: int,
    seed: int,
    *,
    requests: Mapping[str, Mapping[str, Any]] = REQUESTS,
    interval_s: float = 0.0,
) -> dict[str, Outcomes]:
    """By path. Each kill is at a random event of a stream. ``interval_s``: the least time between kills."""
    chance = random.Random(seed)
    found = {path: Outcomes() for path in requests}
    async with _running(runtime, model) as (port, runner):
        whole = {path: _comparable((await _ask(port, path, body))[0]) for path, body in requests.items()}
        for number in range(kills):
            path = list(requests)[number % len(requests)]
            next_at = asyncio.get_running_loop().time() + interval_s
            await _until_ready(runner)
            pid = runner.pid
            assert pid is not None
            kill_at = chance.randint(1, _LATEST_KILL)
            answer, pause_s = await _ask(port, path, requests[path], pid=pid, kill_at=kill_at)
            outcomes = found[path]
            end = _ENDED.match(answer)
            if end is not None and whole[path].startswith(_comparable(end["sent"])):
                outcomes.ended += 1
            elif _comparable(answer) != whole[path]:
                outcomes.wrong.append(_difference(kill_at, _comparable(answer), whole[path]))
            elif _CONTINUED in answer:
                outcomes.continued += 1
                outcomes.pauses_s.append(pause_s)
            else:
                outcomes.finished += 1
            await runner.until(lambda _, pid=pid: runner.pid != pid)  # type: ignore[misc]
            await asyncio.sleep(next_at - asyncio.get_running_loop().time())
    return found


async def proof_of_start(runtime: str, model: str, extra: tuple[str, ...]) -> bool | None:
    """What llamasup knows of the messages that llama-server continues, with these options."""
    async with _running(runtime, model, extra) as (_port, runner):
        endpoint = runner.endpoint
        assert endpoint is not None
        return endpoint.repeats_begun_message


@asynccontextmanager
async def _running(
    runtime: str, model: str, extra: tuple[str, ...] = ()
) -> AsyncIterator[tuple[int, InstanceRunner]]:
    """llamasup in this process, because no option turns off the wait between restarts."""
    sockets = tuple(bind("127.0.0.1", 0))
    options = RunOptions(
        model,
        Settings(parallel=1, threads=1, kv_type="f16", extra=extra),
        runtime=runtime,
        sockets=sockets,
        restart=AT_ONCE,
        continue_streams=True,
    )
    bus, starting = Bus(), asyncio.Event()
    bus.listen(lambda _: starting.set())
    service = Service(options, bus)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(service.run())
        async with asyncio.timeout(PATIENCE_S):
            await starting.wait()
        runner = service.runner
        assert runner is not None
        try:
            await _until_ready(runner)
            yield sockets[0].getsockname()[1], runner
        finally:
            service.ask_stop()


async def _until_ready(runner: InstanceRunner) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await runner.until(lambda now: now.state is State.READY)


async def _ask(
    port: int, path: str, request: Mapping[str, Any], *, pid: int = 0, kill_at: int = 0
) -> tuple[str, float]:
    """The events of the answer, and the longest pause after the kill."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**request, **_SAME}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer, events, killed_s, pause_s = b"", 0, 0.0, 0.0
    async with asyncio.timeout(PATIENCE_S):
        while read := await reader.read(65536):
            now_s = time.monotonic()
            if killed_s:
                pause_s, killed_s = max(pause_s, now_s - killed_s), now_s
            answer += read
            events += read.count(b"data: ")
            if pid and not killed_s and events >= kill_at:
                os.kill(pid, signal.SIGKILL)
                killed_s = now_s
    writer.close()
    await writer.wait_closed()
    _head, _, rest = answer.partition(b"\r\n\r\n")
    payload = re.sub(rb"\r\n(?:[0-9a-f]+\r\n)?", b"", b"\r\n" + rest)
    return payload.decode(), pause_s


def _comparable(answer: str) -> str:
    return _COMMENT.sub("", _CACHE.sub('"":0', _IDENTITY.sub(r'"\1":0', answer)))


def _difference(kill_at: int, answer: str, whole: str) -> str:
    pairs = zip(answer, whole, strict=False)
    at = next((number for number, (one, other) in enumerate(pairs) if one != other), len(whole))
    return f"killed at event {kill_at}: {answer[at - 200 : at + 300]!r} in place of {whole[at : at + 300]!r}"
