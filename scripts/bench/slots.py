"""The benefit of kept slots: the second turn of a conversation after its model was unloaded and loaded again.

Each round sends a first turn of a given length and then the second turn, restarts the server, and sends the
second turn again. Rounds with and without kept slots alternate, so that both see the same machine. The time
is from the start of the server to the first token that a waiting client sees. The model has random weights,
which take the same time as trained ones. Medians over the rounds.

    python -m scripts.bench slots [--runtime embedded] [--tokens 256,1024,4096] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from llamasup.core.http.httpx_client import httpx
from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.proxy.listeners.bind import bind
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus
from llamasup.service.hosting import Service
from llamasup.service.options import RunOptions
from scripts.menu import publish
from tests.kit.models import write_large_decoder

PAGE = "performance.md"
MIB = 1 << 20
FIRST_WORD = 300  # in the generated vocabulary, after bytes and special tokens
LAST_WORD = 500


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds. ``known``: tokens of the second turn that the second server did not have to compute."""

    unswapped_s: float
    swapped_s: float
    known: int


class Running:
    def __init__(self, service: Service, client: httpx.AsyncClient) -> None:
        self.service = service
        self._client = client

    async def first_token(self, prompt: list[int]) -> tuple[float, int, list[int]]:
        """Returns the seconds to the first token, the number of cached tokens, and the generated tokens."""
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_tokens": True}
        began_s, first_s, known = perf_counter(), 0.0, 0
        generated: list[int] = []
        async with self._client.stream("POST", "/completion", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                first_s = first_s or perf_counter() - began_s
                event = json.loads(line.removeprefix("data: "))
                generated += event.get("tokens") or []
                known = event.get("timings", {}).get("cache_n", known)
        return first_s, known, generated


@asynccontextmanager
async def served(model: Path, options: argparse.Namespace, *, keep: bool) -> AsyncIterator[Running]:
    """A running service. Requests may be sent before it is ready: they queue."""
    sockets = tuple(bind("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    settings = Settings(keep_slots=keep, parallel=1, ctx_size=max(options.tokens) + 512)
    service = Service(
        RunOptions(str(model), settings=settings, runtime=options.runtime, sockets=sockets), Bus()
    )
    async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(base_url=url, timeout=None) as client:
        run = tasks.create_task(service.run())
        yield Running(service, client)
        service.ask_stop()
        await run


async def measure(model: Path, slots: Path, tokens: int, options: argparse.Namespace, *, keep: bool) -> Round:
    prompt = random.choices(range(FIRST_WORD, LAST_WORD), k=tokens)
    async with served(model, options, keep=keep) as running:
        _, _, generated = await running.first_token(prompt)
        second = [*prompt, *generated, *prompt[:16]]
        unswapped_s, _, _ = await running.first_token(second)
    async with served(model, options, keep=keep) as running:
        swapped_s, known, _ = await running.first_token(second)
    shutil.rmtree(slots, ignore_errors=True)
    return Round(unswapped_s, swapped_s, known)


async def all_rounds(model: Path, slots: Path, options: argparse.Namespace) -> str:
    rows = [
        "| First turn, tokens | unswapped, ms | swapped, ms | with kept slots, ms | ratio |",
        "|---:|---:|---:|---:|---:|",
    ]
    for tokens in options.tokens:
        without: list[Round] = []
        kept: list[Round] = []
        for number in range(options.rounds + 1):
            pair = [await measure(model, slots, tokens, options, keep=keep) for keep in (False, True)]
            if number:  # the first round fills the caches of files and facts
                without.append(pair[0])
                kept.append(pair[1])
        swapped, again = (
            median(round_.swapped_s for round_ in without),
            median(round_.swapped_s for round_ in kept),
        )
        numbers = (
            median(round_.unswapped_s for round_ in (*without, *kept)) * 1e3,
            swapped * 1e3,
            again * 1e3,
            swapped / again,
        )
        assert all(round_.known < 32 for round_ in without)
        assert all(round_.known >= tokens for round_ in kept)
        cells = (f"{value:,.1f}" if place == 3 else f"{value:,.0f}" for place, value in enumerate(numbers))
        rows.append(f"| {tokens:,} | {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr)
    return "\n".join(rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime")
    parser.add_argument(
        "--tokens", type=lambda text: [int(word) for word in text.split(",")], default="256,1024,4096"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model-mib", type=int, default=100)


def main(options: argparse.Namespace) -> None:
    runtime = find_runtime(options.runtime, os.environ)
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {runtime.kind} {runtime.capabilities.version}"
    with tempfile.TemporaryDirectory() as folder:
        for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            os.environ[variable] = f"{folder}/{variable}"
            Path(folder, variable).mkdir(mode=0o700)
        model = write_large_decoder(Path(folder, "large.gguf"), options.model_mib * MIB)
        slots = Path(folder, "XDG_CACHE_HOME", "llamasup", "slots")
        table = asyncio.run(all_rounds(model, slots, options))
        size = model.stat().st_size / MIB
    text = f"A llama of {size:.0f} MiB (q8_0) on {machine}; medians of {options.rounds} rounds.\n\n{table}"
    publish(options, text)
