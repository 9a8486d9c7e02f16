"""Measures a fleet on a real Ray cluster: a request and a chunk at a node, and at a front.

scripts/test_fleet makes the environment: .venv-fleet/bin/python scripts/bench_fleet.py [--write]

CPU time of processes, with the tiny model, whose answers cost llama-server almost nothing. All processes have
the cores of this machine in common, so compare rows of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup.fleet.certificates import authority  # noqa: E402
from llamasup.fleet.secret import node_key  # noqa: E402
from llamasup.testing.tiny import tiny_decoder  # noqa: E402
from scripts.pages import write_between  # noqa: E402
from tests.fleet.rig import Rig  # noqa: E402

DOC = ROOT / "docs" / "fleet.md"
MARKS = "<!-- measured: scripts/bench_fleet.py -->", "<!-- end of measured -->"
CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Way:
    """``processes``: those that do the work besides llama-server; ``of``: what they are."""

    name: str
    url: str
    key: str
    processes: Callable[[], dict[str, list[psutil.Process]]]
    ca: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    way: str
    part: str
    request_us: float
    chunk_us: float


async def ask(client: httpx.AsyncClient, tokens: int, stream: bool) -> int:
    """Returns the number of chunks."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": tokens,
        "stream": stream,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        content = b"".join([part async for part in answer.aiter_bytes()])
    if answer.status_code != 200:
        raise SystemExit(f"HTTP {answer.status_code}: {content[:300]!r}")
    return content.count(b"data: ")


async def drive(way: Way, requests: int, tokens: int, *, stream: bool) -> tuple[dict[str, float], int]:
    """The CPU seconds of each part, and the number of chunks."""
    verify: Any = ssl.create_default_context(cadata=way.ca) if way.ca else False
    limits = httpx.Limits(max_connections=CONNECTIONS)
    headers = {"authorization": f"Bearer {way.key}"}
    async with httpx.AsyncClient(
        base_url=way.url, verify=verify, headers=headers, timeout=120, limits=limits, trust_env=False
    ) as client:
        await ask(client, 1, stream)
        parts = way.processes()
        before = {name: sum(map(cpu_s, each)) for name, each in parts.items()}
        left, chunks = iter(range(requests)), 0

        async def worker() -> None:
            nonlocal chunks
            for _ in left:
                chunks += await ask(client, tokens, stream)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTIONS):
                tasks.create_task(worker())
        return {name: sum(map(cpu_s, each)) - before[name] for name, each in parts.items()}, chunks


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def costs(way: Way, requests: int, streams: int, tokens: int) -> list[Cost]:
    single, _ = await drive(way, requests, 1, stream=False)
    streamed, chunks = await drive(way, streams, tokens, stream=True)
    return [
        Cost(
            way.name,
            part,
            1e6 * single[part] / requests,
            1e6 * max(0.0, streamed[part] - streams * single[part] / requests) / chunks,
        )
        for part in single
    ]


def ray_processes(title: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if title in _title(process)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def node_llamasup(actor: psutil.Process) -> list[psutil.Process]:
    return [child for child in actor.children() if "llamasup" in " ".join(child.cmdline())]


async def zero_to_first_token(rig: Rig, times: int) -> list[float]:
    """Seconds of a request for a model without a replica, each after all replicas have ended."""
    seconds = []
    for _ in range(times):
        await rig.until(lambda: not rig.llama_servers(), "the end of all replicas")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{rig.front_port}", timeout=120) as client:
            began_s = time.monotonic()
            await ask(client, 1, True)
            seconds.append(time.monotonic() - began_s)
    return seconds


def table(found: Sequence[Cost], starts_s: Sequence[float]) -> str:
    lines = ["| requests | process | CPU per request | CPU per chunk |", "|---|---|---|---|"]
    lines += [f"| {c.way} | {c.part} | {c.request_us:,.0f} µs | {c.chunk_us:.1f} µs |" for c in found]
    shown = ", ".join(f"{seconds:.1f}" for seconds in starts_s)
    lines += ["", f"From no replica to the first token of a model that loads in 0.1 s: {shown} s."]
    return "\n".join(lines)


async def measure(rig: Rig, options: argparse.Namespace) -> str:
    starts_s = await zero_to_first_token(rig, options.starts)
    await asyncio.to_thread(rig.fresh, fleet={"max_replicas": 1, "idle_after": "10m"})
    front_url = f"http://127.0.0.1:{rig.front_port}"
    async with httpx.AsyncClient(base_url=front_url, timeout=120) as client:
        await ask(client, 1, False)
    node = (await asyncio.to_thread(rig.status))["nodes"][0]
    secret = (rig.folder / "fleet.key").read_text().strip()
    (actor,) = ray_processes("ray::ServeReplica:llamasup:model-tiny")
    front = [psutil.Process(rig.front.pid)]

    ways = (
        Way(
            "to one node",
            node["url"],
            node_key(secret),
            lambda: {"node": node_llamasup(actor)},
            authority(secret),
        ),
        Way("by a front", front_url, "any", lambda: {"front": front, "node": node_llamasup(actor)}),
    )
    found: list[Cost] = []
    for way in ways:
        found += await costs(way, options.requests, options.streams, options.tokens)
    return table(found, starts_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result into docs/fleet.md")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: pip install 'llamasup[fleet]'", file=sys.stderr)
        return 69
    runtime = os.environ.get("LLAMASUP_TEST_SERVER") or shutil.which("llama-server")
    if runtime is None:
        print("Set LLAMASUP_TEST_SERVER to a llama-server.", file=sys.stderr)
        return 69
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.gguf").write_bytes(tiny_decoder())
        with Rig(folder, runtime) as rig:
            text = asyncio.run(measure(rig, options))
    print(text)
    if options.write:
        write_between(DOC, MARKS, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
