"""Two real processes of one model behind the proxy: conversations find their cache, kills lose no answer."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import httpx
import psutil
import pytest

from llamasup.core.observability.counters import RequestRecord
from llamasup.core.planning.facts import prepare
from llamasup.core.planning.planner import Planner
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.proxy import Proxy, ProxyConfig, bind
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Instance, Policy, StartRequested, State, StopRequested
from tests.core.proxy.test_replicas import Backend
from tests.extended.real.test_configs import serve
from tests.kit.patience import PATIENCE_S

pytestmark = pytest.mark.one_runtime


@dataclass(frozen=True, slots=True)
class Pair:
    served: ReplicaSet
    runners: tuple[InstanceRunner, ...]
    client: httpx.AsyncClient
    records: list[RequestRecord]

    def busy(self) -> list[int]:
        return [0 if runner.endpoint is None else runner.endpoint.busy for runner in self.runners]

    def answered(self) -> list[int]:
        return [0 if runner.endpoint is None else runner.endpoint.answered for runner in self.runners]


@asynccontextmanager
async def pair_of(model: Path, runtime: str, *, slots: int, ctx_size: int) -> AsyncIterator[Pair]:
    """Two processes of ``model`` with ``slots`` slots of ``ctx_size`` tokens each, and a client of both."""
    # If each process had a thread for every core, they would mostly wait for each other (docs/replicas.md).
    settings = Settings(parallel=slots, ctx_size=ctx_size, threads=1)
    launch = prepare(str(model), settings, runtime=runtime, environ=os.environ)
    served = ReplicaSet(policy=Policy())
    records: list[RequestRecord] = []
    with tempfile.TemporaryDirectory(prefix="lls-") as folder:  # short, because it holds sockets
        runners = []
        for number in ("1", "2"):
            work_folder = Path(folder) / number
            work_folder.mkdir(mode=0o700)
            runner = InstanceRunner(
                launch.model_id,
                Planner(launch, work_folder),
                policy=Policy(),
                bus=Bus(),
                queue=served.queue,
                work_folder=work_folder,
                log_path=None,
            )
            served.add(runner)
            runners.append(runner)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(runner.run()) for runner in runners]
            for runner in runners:
                runner.post(StartRequested())
            front = bind("127.0.0.1", 0)
            port = front[0].getsockname()[1]
            proxy = Proxy(Backend(served), ProxyConfig(route_by_model=False), on_finished=records.append)
            await proxy.start(front)
            try:
                for runner in runners:
                    await runner.reached(State.READY)
                limits = httpx.Limits(max_connections=64)
                async with httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits
                ) as client:
                    yield Pair(served, tuple(runners), client, records)
                for runner in runners:
                    runner.post(StopRequested())
                for runner in runners:
                    await runner.reached(State.STOPPED)
            finally:
                await proxy.aclose()
                for task in running:
                    task.cancel()


def story(about: str) -> str:
    return " ".join(f"{about} number {number} went up the hill and came down again." for number in range(12))


async def turn(pair: Pair, messages: list[dict[str, str]]) -> int:
    """Request the next answer and add it to the conversation. Returns the number of cached prompt tokens."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1}
    response = await pair.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answered = response.json()
    messages.append({"role": "assistant", "content": answered["choices"][0]["message"]["content"]})
    return int(answered["timings"]["cache_n"])


def prompt_tokens(records: Sequence[RequestRecord]) -> list[int]:
    return [record.tokens_prompt or 0 for record in records]


def test_conversations_find_their_cache_while_the_load_spreads(runtime: str, tiny_model: Path) -> None:
    async def test() -> None:
        async with pair_of(tiny_model, runtime, slots=2, ctx_size=4096) as pair:
            conversations = [
                [{"role": "user", "content": story(about)}]
                for about in ("Lama", "Alpaka", "Guanako", "Vikunja")
            ]
            first = [await turn(pair, messages) for messages in conversations]
            length = prompt_tokens(pair.records)
            assert pair.answered() == [2, 2]
            for number in range(3):
                for messages in conversations:
                    messages.append({"role": "user", "content": f"And then, {number}?"})
                # All at the same time, in a different order each time.
                order = conversations[number:] + conversations[:number]
                cached = await asyncio.gather(*(turn(pair, messages) for messages in order))
                found = dict(zip((conversations.index(messages) for messages in order), cached, strict=True))
                print(f"{runtime}: turn {number + 2}: cached {found} of first prompts of {length} tokens")
                assert all(found[which] >= 0.9 * length[which] for which in range(4)), (first, found, length)
            assert pair.answered() == [8, 8]

    asyncio.run(test())


def test_conversation_finds_little_cache_in_the_other_process(runtime: str, tiny_model: Path) -> None:
    """The benefit of affinity: without it, every second turn would find no cache."""

    async def test() -> None:
        async with pair_of(tiny_model, runtime, slots=2, ctx_size=4096) as pair:
            messages = [{"role": "user", "content": story("Lama")}]
            await turn(pair, messages)
            home, other = sorted(pair.runners, key=lambda runner: -_answered(runner))
            assert (_answered(home), _answered(other)) == (1, 0)
            messages.append({"role": "user", "content": "And then?"})
            pair.served.remove(home)
            assert await turn(pair, list(messages)) < 0.1 * prompt_tokens(pair.records)[0]
            pair.served.add(home)

    asyncio.run(test())


def _is_next_of(generation: int) -> Callable[[Instance], bool]:
    return lambda instance: instance.generation > generation and instance.state is State.READY


def _answered(runner: InstanceRunner) -> int:
    assert runner.endpoint is not None
    return runner.endpoint.answered


def test_kill_of_one_replica_under_eight_clients_loses_no_answer(runtime: str, tiny_model: Path) -> None:
    clients = 8

    async def test() -> None:
        async with pair_of(tiny_model, runtime, slots=4, ctx_size=1024) as pair:
            victim = pair.runners[0]
            outcomes: Counter[str] = Counter()
            answered: Counter[int] = Counter()  # answers of each client
            killed = asyncio.Event()

            async def repeat_requests(name: int) -> None:
                while not killed.is_set() or not answered[name]:
                    number = answered[name]
                    text = f"visitor {name} asks for {number} and for nothing else at all"
                    body = {
                        "messages": [{"role": "user", "content": f"Say it, {name}."}],
                        "grammar": f'root ::= "{text}"',
                        "max_tokens": 6 * len(text) + 10,
                    }
                    response = await pair.client.post("/v1/chat/completions", json=body)
                    said = response.json()["choices"][0]["message"]["content"] if response.is_success else ""
                    outcomes["right" if said == text else f"{response.status_code} {response.text}"] += 1
                    answered[name] += 1

            async def killer() -> None:
                before = dict.fromkeys(range(clients), 0)
                for generation in count(1):
                    # Kill only when the requests of the previous kill are answered: llamasup sends no request
                    # a third time (S10).
                    while pair.busy()[0] < 2 or any(  # noqa: ASYNC110 - there is no event for it
                        answered[name] == number for name, number in before.items()
                    ):
                        await asyncio.sleep(0.001)
                    before = {name: answered[name] for name in before}
                    pid = victim.pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    await victim.until(_is_next_of(generation))
                    # If all answers had arrived before the kill, it has moved no request: kill again.
                    if generation >= 2 and sum(record.replayed for record in pair.records) >= 2:
                        break
                killed.set()

            async with asyncio.TaskGroup() as tasks:
                for name in range(clients):
                    tasks.create_task(repeat_requests(name))
                tasks.create_task(killer())
            replayed = sum(record.replayed for record in pair.records)
            await victim.reached(State.READY)
            for late in count(1):
                if pair.answered()[0]:  # the killed replica works again
                    break
                async with asyncio.TaskGroup() as tasks:
                    for name in range(clients):
                        tasks.create_task(repeat_requests(late * clients + name))
            print(f"{runtime}: {outcomes}, {replayed} of them sent again, {pair.answered()} at the end")
            assert set(outcomes) == {"right"}
            assert replayed >= 2
            assert victim.instance.restarts >= 2

    asyncio.run(test())


# --- the whole program


CONFIG = """\
listen: 127.0.0.1:0
runtime: {runtime}
models:
  tiny: {{path: {model}, replicas: 2, parallel: 2, ctx_size: 2048, preload: true}}
"""


def threads_of(words: Sequence[str]) -> int:
    return int(words[words.index("--threads") + 1])


def test_serve_divides_the_cores_and_a_killed_replica_costs_no_answer(
    runtime: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(runtime=runtime, model=tiny_model))
    with (
        serve(config, dict(os.environ), "--events", "jsonl") as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(8) as clients,
    ):
        # A model is ready when one replica is. Killed before it was ready, a replica restarts with a delay.
        running.wait_for("state", times=2, model="tiny", state="ready")
        children = [child for child in running.children() if "--threads" in child.cmdline()]
        assert len(children) == 2
        cores = psutil.cpu_count() or 1
        assert sum(threads_of(child.cmdline()) for child in children) <= max(2, cores)

        answered: SimpleQueue[int] = SimpleQueue()

        def send_requests(name: int) -> list[bool]:
            right = []
            for number in range(15):
                text = f"visitor {name} asks for {number}"
                messages = [{"role": "user", "content": f"Say it, {name}."}]
                body = {"model": "tiny", "messages": messages, "grammar": f'root ::= "{text}"'}
                answer = client.post("/v1/chat/completions", json=body)
                right.append(answer.is_success and answer.json()["choices"][0]["message"]["content"] == text)
                answered.put(name)
            return right

        results = [clients.submit(send_requests, name) for name in range(8)]
        while answered.qsize() < 20:  # during the requests
            time.sleep(0.001)
        children[0].kill()
        assert [result.result() for result in results] == [[True] * 15] * 8
        exited = running.wait_for("exit", model="tiny")
        assert (exited["signal"], exited["restart_in_s"]) == ("SIGKILL", 0.0)
        running.wait_for("state", model="tiny", state="ready", generation=2)
