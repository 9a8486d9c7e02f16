"""Measures batches on a real llama-server: crashes, other clients, speed, shared prompts, memory.

    python -m scripts.bench batch [--runtime PATH] [--model PATH] [crash|beside|speed|prefix|memory]…

``--lines`` and ``--kills`` set the size. The results are in docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from llamasup.features.batch.client import Answer, BatchClient
from llamasup.features.batch.engine import EngineOptions
from llamasup.features.batch.job import job_of, prepare
from tests.extended.real.batch_chaos import BatchUnderTest, answers_of, write_lines
from tests.kit.tiny import tiny_decoder

SLOTS = 4


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "llamasup", *words]


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    words = command(
        "run", str(model), "--sidecar", "--parallel", str(SLOTS), "--log-level", "warning", *options
    )
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        process.stdout.close()
        yield event["url"]
        process.stdin.close()


def run_batch(source: Path, output: Path, url: str, *options: str) -> Mapping[str, Any]:
    words = command("batch", "run", str(source), "-o", str(output), "--url", url, "--json", *options)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    last: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def write(path: Path, bodies: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w") as file:
        for number, body in enumerate(bodies):
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


async def closed_loop(
    url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> tuple[float, int, int]:
    """Seconds, tokens of answers, and prompt tokens that were computed."""
    left = iter(bodies)
    tokens = computed = 0
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def loop() -> None:
            nonlocal tokens, computed
            for body in left:
                usage = (await client.post("/v1/completions", json=body)).json()["usage"]
                tokens += usage["completion_tokens"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                computed += usage["prompt_tokens"] - cached

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(loop())
    return time.monotonic() - began_s, tokens, computed


def crash(folder: Path, model: Path, runtime: str, lines: int, compared: int, kills: int, seed: int) -> None:
    """All lines with kills, and ``compared`` of them, chosen at random, in an undisturbed run."""
    source, sample = folder / "in.jsonl", folder / "sample.jsonl"
    write_lines(source, lines)
    chance = random.Random(seed)
    all_lines = source.read_text().splitlines(keepends=True)
    sample.write_text("".join(chance.sample(all_lines, min(compared, lines))))
    with served(model, "--runtime", runtime) as url:
        began_s = time.monotonic()
        run_batch(sample, folder / "undisturbed.jsonl", url)
        undisturbed_s = time.monotonic() - began_s
    expected = answers_of(folder / "undisturbed.jsonl")
    pause_s = undisturbed_s * lines / len(expected) / kills
    began_s = time.monotonic()
    with BatchUnderTest(folder, model, runtime, source, folder / "out.jsonl").started() as batch:
        while batch.kills.total() < kills and not batch.is_over:
            time.sleep(chance.uniform(0.2 * pause_s, pause_s))
            batch.kill_one(chance)
        code = batch.end()
    got = answers_of(folder / "out.jsonl")  # it raises for a doubled line
    different = sum(got.get(id_) != text for id_, text in expected.items())
    print(
        f"crash: {lines} lines, kills {dict(batch.kills)}, seed {seed}: exit code {code},"
        f" lost {lines - len(got)}, doubled 0, different {different} of {len(expected)};"
        f" {lines / (time.monotonic() - began_s):.0f} lines/s,"
        f" {len(expected) / undisturbed_s:.0f} undisturbed"
    )


def beside(folder: Path, model: Path, runtime: str, rounds: int) -> None:
    """Other clients ask at random times and in bursts, in turns with and without a batch."""
    bodies = [{"prompt": f"Once {n}", "max_tokens": 400, "ignore_eos": True} for n in range(10_000)]
    write(folder / "beside.jsonl", bodies)
    chance = random.Random(7)
    with served(model, "--runtime", runtime, "--ctx-size", "8192") as url:
        for name in ("random", "bursts"):
            took: dict[bool, list[float]] = {False: [], True: []}
            lines = put_back = 0
            for _ in range(rounds):
                at_random = [chance.expovariate(1.0) for _ in range(60)]
                pauses = at_random if name == "random" else [4, 0.3, 0.3] * 4
                for with_batch in chance.sample((False, True), 2):
                    time.sleep(3)
                    if not with_batch:
                        took[False] += first_tokens(url, pauses)
                        continue
                    with running_batch(folder, url) as events:
                        took[True] += first_tokens(url, pauses)
                    lines += events[-1]["done"] - events[0]["done"]
                    put_back += events[-1]["put_back"]
            print_first_tokens(f"beside, {name}", took)
            print(f"beside, {name}: {lines} lines of the batch, {put_back} put back")


def first_tokens(url: str, pauses: Sequence[float]) -> list[float]:
    """Seconds of requests, one after each pause."""
    took: list[float] = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for pause_s in pauses:
            time.sleep(pause_s)
            asked_s = time.monotonic()
            body = {"prompt": "A short question " * 20 + str(asked_s), "max_tokens": 16, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                chunks = answer.iter_raw()
                next(chunks)
                took.append(time.monotonic() - asked_s)
                for _ in chunks:
                    pass
    return took


@contextmanager
def running_batch(folder: Path, url: str) -> Iterator[list[Mapping[str, Any]]]:
    """A batch that has sent lines. Afterwards: its events of progress."""
    words = command("batch", "run", str(folder / "beside.jsonl"), "-o", str(folder / "b.out"), "--url", url)
    events: list[Mapping[str, Any]] = []
    with subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, text=True) as batch:
        assert batch.stdout is not None
        for line in batch.stdout:
            event = json.loads(line)
            if event["event"] == "progress":
                events.append(event)
                if event["done"] > events[0]["done"]:
                    break
        yield events
        batch.terminate()
        events += [event for event in map(json.loads, batch.stdout) if event["event"] == "progress"]


def print_first_tokens(what: str, took: Mapping[bool, Sequence[float]]) -> None:
    figures = {}
    for with_batch, times in took.items():
        figures[with_batch] = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        name = "beside a batch" if with_batch else "without"
        p50_ms, p95_ms = (1e3 * figure for figure in figures[with_batch])
        print(f"{what}: {name}: {len(times)} requests, p50 {p50_ms:.1f} ms, p95 {p95_ms:.1f} ms")
    p50, p95 = (with_it / without for without, with_it in zip(figures[False], figures[True], strict=True))
    print(f"{what}: first token {p50:.2f} times in the median, p95 {p95:.2f} times")


def speed(folder: Path, model: Path, runtime: str, lines: int, rounds: int) -> None:
    """A batch and a closed loop, in turns. No other client uses the server of the batch.

    Without a prompt cache in memory: of this small model it holds thousands of prompts, and llama-server
    (b11434) compares and logs all of them at each request.
    """
    bodies = [{"prompt": f"Once {n}", "max_tokens": 64, "ignore_eos": True} for n in range(lines)]
    write(folder / "speed.jsonl", bodies)

    def of_loop(url: str, concurrency: int) -> float:
        took_s, tokens, _ = asyncio.run(closed_loop(url, bodies, concurrency))
        return tokens / took_s

    options = ("--runtime", runtime, "--", "--cache-ram", "0")
    with served(model, *options) as url, served(model, *options) as url_of_batch:
        for one in (url, url_of_batch):
            asyncio.run(closed_loop(one, bodies[:50], SLOTS))
        time.sleep(3)  # the lane of the batches is open
        tried = {concurrency: of_loop(url, concurrency) for concurrency in (SLOTS, SLOTS + 2, 2 * SLOTS)}
        best = max(tried, key=lambda concurrency: tried[concurrency])
        shares = []
        for run in range(rounds):
            loop = of_loop(url, best) if run % 2 else None
            last = run_batch(folder / "speed.jsonl", folder / f"speed{run}.out", url_of_batch)
            shares.append(last["tokens_per_s"] / (loop or of_loop(url, best)))
        print(
            f"speed: a batch has {statistics.median(shares):.2f} of the tokens/s of a closed loop of {best}"
            f" (median of {rounds}; {min(shares):.2f} to {max(shares):.2f})"
        )


def prefix(folder: Path, model: Path, runtime: str, lines: int) -> None:
    """Eight system prompts of about a thousand tokens, in turns."""
    systems = [
        f"You are number {n}. " + " ".join(f"rule {n * 1000 + i}" for i in range(140)) for n in range(8)
    ]
    bodies = [
        {"prompt": f"{systems[n % 8]} Question {n}: why?", "max_tokens": 2, "temperature": 0}
        for n in range(lines)
    ]
    write(folder / "prefix.jsonl", bodies)
    with served(model, "--runtime", runtime, "--ctx-size", "8192", "--", "--cache-ram", "0") as url:
        _, _, without = asyncio.run(closed_loop(url, bodies, SLOTS))
    with served(model, "--runtime", runtime, "--ctx-size", "8192", "--", "--cache-ram", "0") as url:
        last = run_batch(folder / "prefix.jsonl", folder / "prefix.out", url)
    with_order = last["tokens_prompt"] - last["tokens_cached"]
    print(
        f"prefix: {lines} lines, {last['tokens_prompt'] / lines:.0f} tokens each: {without} computed in the"
        f" order of the file, {with_order} in the order of the batch: {without / with_order:.1f} times fewer"
    )


class InstantClient(BatchClient):
    """Has the answer at once: what remains is the work of the run itself."""

    def __init__(self) -> None:
        pass

    async def send(self, url: str, body: bytes, *, stream: bool = False) -> Answer:
        return Answer(200, b'{"choices": [{"text": "a story of a fox"}], "usage": {"completion_tokens": 8}}')


def memory(folder: Path, sizes: Sequence[int]) -> None:
    """The peak memory of a process that reads and checks the input, and runs all lines."""
    for size in sizes:
        source = folder / f"memory{size}.jsonl"
        write_lines(source, size)
        child = os.fork()
        if not child:
            began_s = time.monotonic()
            with prepare(job_of(source, folder / f"memory{size}.out")) as prepared:
                read_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                counts = asyncio.run(prepared.run(InstantClient(), EngineOptions()).run())
            assert counts.done == size
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"memory: {size} lines: {read_mib:.0f} MiB after reading, {peak_mib:.0f} MiB at the end,"
                f" {time.monotonic() - began_s:.1f} s",
                flush=True,
            )
            os._exit(0)
        os.waitpid(child, 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", default=["crash", "beside", "speed", "prefix", "memory"])
    parser.add_argument("--runtime", default="llama-server")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--compared", type=int, default=100_000, help="lines of an undisturbed run")
    parser.add_argument("--rounds", type=int, default=7, help="of beside and speed")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))


def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        model = given.model or folder / "tiny.gguf"
        if given.model is None:
            model.write_bytes(tiny_decoder())
        if "memory" in given.what:
            memory(folder, [size for size in (1_000, 100_000, 1_000_000) if size <= 10 * given.lines])
        if "crash" in given.what:
            crash(folder, model, given.runtime, given.lines, given.compared, given.kills, given.seed)
        if "beside" in given.what:
            beside(folder, model, given.runtime, given.rounds)
        if "speed" in given.what:
            speed(folder, model, given.runtime, min(given.lines, 2_000), given.rounds)
        if "prefix" in given.what:
            prefix(folder, model, given.runtime, min(given.lines, 200))
