"""Measures a fleet on a real Ray cluster of this machine: the hop, replicas, starts, and the cache.

scripts/test_fleet makes the environment: .venv-fleet/bin/python -m scripts.bench fleet [--write]
One part alone takes a few minutes: … --only hop

All is measured in turn, in each round, and a figure is the median of the rounds: other work on the machine
disturbs all alike. All processes have the cores of this machine in common, so compare rows of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import select_running
from llamasup.fleet.certificates import authority
from llamasup.fleet.secret import node_key
from scripts.bench import fast_server
from scripts.menu import publish
from tests.extended.fleet.rig import MODEL, Rig, actor_and_llamasup
from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.kit.tiny import tiny_decoder

PAGE = "performance.md"
INGRESS_KEY = "sk-of-a-measurement"
REPLICAS = (1, 2, 4, 8)
SLOTS = 2
TOKEN_MS = 20  # of the paced llama-server
TALKS, TURNS = (4, 16), 6  # conversations at the same time: few, and more than there are slots
# With these, Ray starts as many Python processes as a node has CPUs, which import what a replica needs.
PRESTART = {
    "RAY_enable_worker_prestart": "1",
    "RAY_preload_python_modules": "ray.serve._private.replica,llamasup.fleet.application",
}
STARTS = (
    "one machine, `llamasup serve`",
    "a fleet",
    "a fleet, with processes that Ray started before",
    "a fleet, with `when_idle: sleep`",
)
CACHE_SLOTS, CACHE_MIB = 8, 64  # of one node, or of all together


# --- requests --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """An address for requests. ``processes``: whose CPU time counts, by what they are."""

    url: str
    key: str
    processes: Callable[[], dict[str, list[psutil.Process]]]
    ca: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    request_us: float
    chunk_us: float
    tokens_per_s: float


def client_of(url: str, *, key: str = "any", verify: Any = False) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        verify=verify,
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


async def ask(client: httpx.AsyncClient, tokens: int, stream: bool, words: str = "Hi") -> int:
    """Returns the number of chunks."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": tokens,
        "stream": stream,
        "ignore_eos": True,
    }
    content = json.dumps(body, separators=(",", ":"))  # without spaces, as fast_server.py reads it
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as answer:
        received = b"".join([part async for part in answer.aiter_bytes()])
    if answer.status_code != 200:
        raise SystemExit(f"HTTP {answer.status_code}: {received[:300]!r}")
    return received.count(b"data: ")


async def drive(
    way: Way, connections: int, requests: int, tokens: int, *, stream: bool
) -> tuple[dict[str, float], int, float]:
    """The CPU seconds of each part, the number of chunks, and the seconds that all took."""
    verify = ssl.create_default_context(cadata=way.ca) if way.ca else False
    async with client_of(way.url, key=way.key, verify=verify) as client:
        await ask(client, 1, stream)
        parts = way.processes()
        before = {name: sum(map(cpu_s, each)) for name, each in parts.items()}
        left, chunks, began_s = iter(range(requests)), 0, time.monotonic()

        async def worker(number: int) -> None:
            nonlocal chunks
            for _ in left:
                received = await ask(client, tokens, stream, f"I am client {number}.")
                chunks += received  # after the wait, in which other workers count

        async with asyncio.TaskGroup() as tasks:
            for number in range(connections):
                tasks.create_task(worker(number))
        used = {name: sum(map(cpu_s, each)) - before[name] for name, each in parts.items()}
        return used, chunks, time.monotonic() - began_s


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def costs(way: Way, connections: int, requests: int, streams: int, tokens: int) -> dict[str, Cost]:
    single, _, _ = await drive(way, connections, requests, 1, stream=False)
    streamed, chunks, took_s = await drive(way, connections, streams, tokens, stream=True)
    return {
        part: Cost(
            1e6 * single[part] / requests,
            1e6 * max(0.0, streamed[part] - streams * single[part] / requests) / chunks,
            chunks / took_s,
        )
        for part in single
    }


# --- the hop, with a real llama-server -----------------------------------------------------------------


async def hop(rig: Rig, options: argparse.Namespace) -> str:
    keys = rig.folder / "keys"
    keys.touch(0o600)
    keys.write_text(INGRESS_KEY)
    rig.fresh(fleet={"min_replicas": 1, "max_replicas": 1, "ingress": True}, auth={"api_key_file": keys.name})
    await until_serving(rig, 1)
    node = (await asyncio.to_thread(rig.status))["nodes"][0]
    secret = (rig.folder / "fleet.key").read_text().strip()
    (server,) = rig.llama_servers()
    actor, llamasup = actor_and_llamasup(server)
    front = psutil.Process(rig.front.pid)
    serve = {
        "Serve's proxy": rig.ray_processes("ray::ProxyActor"),
        "ingress": rig.ray_processes("ray::ServeReplica:llamasup:ingress"),
        "replica": [actor],
        "node": [llamasup],
    }
    ways = {
        "to one node": Way(node["url"], node_key(secret), lambda: {"node": [llamasup]}, authority(secret)),
        "by a front": Way(rig.front_url, "any", lambda: {"front": [front], "node": [llamasup]}),
        "by Serve's address": Way(f"http://127.0.0.1:{rig.serve_port}", INGRESS_KEY, lambda: serve),
    }
    assert all(serve.values()), serve
    found: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, way in ways.items():
            for part, cost in (await costs(way, 4, options.requests, options.streams, 200)).items():
                found[name, part].append(cost)
    lines = ["| requests | process | CPU per request | CPU per chunk |", "|---|---|---|---|"]
    for (name, part), each in found.items():
        lines.append(
            f"| {name} | {part} | {middle(each, 'request_us'):,.0f} µs | {middle(each, 'chunk_us'):.1f} µs |"
        )
    return "\n".join(lines)


def middle(found: Sequence[Cost], of: str) -> float:
    return median(getattr(cost, of) for cost in found)


async def until_serving(rig: Rig, replicas: int) -> None:
    """Wait until the front knows so many nodes, and no others."""
    await rig.until(
        lambda: [node["state"] for node in nodes_at_front(rig)] == ["ready"] * replicas,
        f"{replicas} replicas",
    )


def nodes_at_front(rig: Rig) -> Sequence[Mapping[str, Any]]:
    transport = httpx.HTTPTransport(uds=select_running(discover(), rig.front.pid).socket)
    with httpx.Client(transport=transport, base_url="http://front") as control:
        nodes: Sequence[Mapping[str, Any]] = control.get("/llamasup/v1/status").json()["nodes"]
    return nodes


# --- replicas, with a paced llama-server ---------------------------------------------------------------


async def replicas(rig: Rig, options: argparse.Namespace) -> str:
    paced = fast_server.install(rig.folder / "paced", "--chunks", "100", "--interval-ms", str(TOKEN_MS))
    front = psutil.Process(rig.front.pid)
    way = Way(rig.front_url, "any", lambda: {"front": [front]})
    found: dict[int, list[Cost]] = defaultdict(list)
    for _ in range(options.rounds):
        for number in REPLICAS:
            rig.write(
                runtime=str(paced),
                defaults={"ctx_size": 512, "parallel": SLOTS, "threads": 1},
                fleet={"min_replicas": number, "max_replicas": number},
            )
            await asyncio.to_thread(rig.deploy)
            await until_serving(rig, number)
            clients = number * SLOTS
            cost = await costs(way, clients, options.requests, clients * 3, 100)
            found[number].append(cost["front"])
    lines = [
        "| replicas | streams | tokens/s | of the pace | front: CPU per request | front: CPU per chunk |",
        "|---|---|---|---|---|---|",
    ]
    for number, each in found.items():
        tokens_per_s = middle(each, "tokens_per_s")
        pace = number * SLOTS * 1000 / TOKEN_MS
        lines.append(
            f"| {number} | {number * SLOTS} | {tokens_per_s:,.0f} | {tokens_per_s / pace:.0%} | "
            f"{middle(each, 'request_us'):,.0f} µs | {middle(each, 'chunk_us'):.1f} µs |"
        )
    return "\n".join(lines)


# --- from no replica to the first token ----------------------------------------------------------------


async def first_token_s(url: str) -> float:
    async with client_of(url) as client:
        began_s = time.monotonic()
        await ask(client, 1, True)
        return time.monotonic() - began_s


async def fleet_start_s(rig: Rig) -> float:
    await rig.until(lambda: not rig.llama_servers(), "the end of all llama-servers")
    return await first_token_s(rig.front_url)


async def starts(rig: Rig, options: argparse.Namespace) -> str:
    """The replica that sleeps has loaded its model once before."""
    found: dict[str, list[float]] = {name: [] for name in STARTS}
    here, fleet, prestarted, sleeping = found.values()
    with ExitStack() as stack:
        url, unload = serve_alone(rig, stack)
        for when_idle, seconds in (("end", fleet), ("sleep", sleeping)):
            rig.fresh(fleet={"max_replicas": 1, "when_idle": when_idle})
            if when_idle == "sleep":
                await first_token_s(rig.front_url)
            for _ in range(options.starts):
                seconds.append(await fleet_start_s(rig))
                await asyncio.to_thread(unload)
                here.append(await first_token_s(url))
        rig.fresh(fleet={"max_replicas": 1})
        rig.replace_nodes(PRESTART)
        await first_token_s(rig.front_url)  # Serve has first to start its own parts again
        for _ in range(options.starts):
            await rig.until(lambda: rig.ray_processes("ray::IDLE"), "the processes that Ray starts before")
            prestarted.append(await fleet_start_s(rig))
    lines = ["| from no replica to the first token | median |", "|---|---|"]
    lines += [f"| {name} | {median(seconds):.2f} s |" for name, seconds in found.items()]
    return "\n".join(lines)


def serve_alone(rig: Rig, stack: ExitStack) -> tuple[str, Callable[[], object]]:
    """An ordinary ``llamasup serve`` with the same model; its URL, and what unloads the model."""
    port, ready, config = free_port(), rig.folder / "ready-alone", rig.folder / "alone.yaml"
    model = {"path": f"{MODEL}.gguf", "ctx_size": 512, "parallel": SLOTS, "threads": 1}
    config.write_text(json.dumps({"runtime": rig.runtime, "models": {MODEL: model}}))
    command = [sys.executable, "-m", "llamasup"]
    alone = subprocess.Popen(
        [
            *(*command, "serve", "--config", str(config), "--port", str(port)),
            *("--ready-file", str(ready), "--log-level", "warning"),
        ],
    )
    stack.callback(alone.wait)
    stack.callback(alone.terminate)
    eventually(ready.exists, "llamasup serve", every_s=0.05)
    unload = [*command, "unload", MODEL, "--pid", str(alone.pid)]
    return f"http://127.0.0.1:{port}", lambda: subprocess.run(unload, check=False, capture_output=True)


# --- the cache over nodes ------------------------------------------------------------------------------


async def cached_shares(rig: Rig, options: argparse.Namespace) -> str:
    """Conversations with three models: one node, and two and four nodes with as much cache together."""
    kinds = {"one": 1, "two": 2, "four": 4}
    models = {
        name: {
            "path": f"{MODEL}.gguf",
            "parallel": CACHE_SLOTS // number,
            "extra": ["--cache-ram", str(CACHE_MIB // number)],
        }
        for name, number in kinds.items()
    }
    needs = {
        name: {"cpus": 1, "memory": "100MiB", "min_replicas": number, "max_replicas": number}
        for name, number in kinds.items()
    }
    rig.write(models=models, defaults={"ctx_size": 4096, "threads": 1}, fleet={"models": needs})
    await asyncio.to_thread(rig.deploy)
    await until_serving(rig, sum(kinds.values()))
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        port, _ = rig.start_front(stack)  # the other front has the models of the configs before
        async with client_of(f"http://127.0.0.1:{port}") as client:
            for number in range(options.rounds):
                for talks in TALKS:
                    for name in kinds:
                        found[name, talks].append(await cached_share(client, name, talks, seed=number))
    few, many = TALKS
    lines = [
        f"| nodes | slots and prompt cache of each | cached, {few} conversations | {many} conversations |",
        "|---|---|---|---|",
    ]
    for name, number in kinds.items():
        each = f"{CACHE_SLOTS // number}, {CACHE_MIB // number} MiB"
        shares = " | ".join(f"{median(found[name, talks]):.1%}" for talks in TALKS)
        lines.append(f"| {number} | {each} | {shares} |")
    return "\n".join(lines)


async def cached_share(client: httpx.AsyncClient, model: str, talks: int, *, seed: int) -> float:
    """Plays conversations at the same time, whose turns come at random."""
    chance = random.Random(seed)
    prompt_tokens = cached_tokens = 0

    async def talk(number: int) -> None:
        nonlocal prompt_tokens, cached_tokens
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            words = " ".join(chance.choice(("people", "water", "house", "great")) for _ in range(60))
            messages.append({"role": "user", "content": f"{model} {talks} {seed} {number} {turn} {words}"})
            body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            found = answer.json()
            messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or ""})
            prompt_tokens += found["usage"]["prompt_tokens"]
            cached_tokens += found["usage"]["prompt_tokens_details"]["cached_tokens"]
            await asyncio.sleep(chance.uniform(0.5, 2.0))

    async with asyncio.TaskGroup() as tasks:
        for number in range(talks):
            tasks.create_task(talk(number))
    return cached_tokens / prompt_tokens


# --- all ---------------------------------------------------------------------------------------------------

PARTS = {"hop": hop, "replicas": replicas, "starts": starts, "cache": cached_shares}


async def measure(rig: Rig, options: argparse.Namespace) -> None:
    for name in options.parts:
        table = await PARTS[name](rig, options)
        publish(options, table, f"fleet-{name}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", dest="parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--starts", type=int, default=5)


def main(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: pip install 'llamasup[fleet]'", file=sys.stderr)
        return 69
    runtime = os.environ.get("LLAMASUP_TEST_SERVER") or shutil.which("llama-server")
    if runtime is None:
        print("Set LLAMASUP_TEST_SERVER to a llama-server.", file=sys.stderr)
        return 69
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile all sources of llamasup again
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"{MODEL}.gguf").write_bytes(tiny_decoder())
        with Rig(folder, runtime, cpus=4) as rig:
            asyncio.run(measure(rig, options))
    return 0
