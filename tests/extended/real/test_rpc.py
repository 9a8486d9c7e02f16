"""One model over several processes: real rpc-servers, killed, stopped and behind a tunnel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamasup.core.http.address import TcpAddress
from llamasup.core.llama_server.inspect import find_runtime, run_runtime
from llamasup.core.llama_server.rpc import ask
from llamasup.core.llama_server.rpc.ask import ask_workers
from llamasup.core.llama_server.rpc.find import FoundWorker, find_rpc_server, worker_environment
from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.core.llama_server.rpc.workers import TunnelFiles
from llamasup.core.planning.facts import prepare
from llamasup.core.planning.measured.tuned import Changes
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import Bus, PublishedEvent, Ready, ServerExited, ServerWarned
from llamasup.core.supervision.liveness import LivenessPolicy
from llamasup.core.supervision.states import State
from llamasup.errors import RuntimeMissing, TuningFailed, UsageInvalid
from llamasup.features.tuning import comparison
from llamasup.features.tuning.candidates import Candidate
from llamasup.features.tuning.comparison import Comparison
from llamasup.features.tuning.trial import Trial, spawn_trial
from llamasup.features.tuning.workload import STATED_MIX
from llamasup.service.rpc_worker import RpcWorker, RpcWorkerOptions
from tests.conftest import REQUIRE_REAL
from tests.e2e.driver import started
from tests.e2e.service import PATIENCE_S, Serving, serving
from tests.kit.certificates import make_certificate
from tests.kit.models import write_large_decoder
from tests.kit.paths import ROOT
from tests.kit.patience import eventually
from tests.kit.ports import free_port

# Far above the delays of a busy machine, where a process may get no CPU time for seconds.
QUICK = LivenessPolicy(
    interval_s=0.25, health_timeout_s=5.0, stall_s=3.0, prefill_stall_s=3.0, token_timeout_s=5.0
)


@pytest.fixture(scope="module")
def rpc_server(llama_server: str) -> FoundWorker:
    """The rpc-server next to llama-server."""
    try:
        found = find_rpc_server(llama_server, os.environ)
        ask_workers(find_runtime(llama_server, os.environ), os.environ, ["127.0.0.1:1"], None)
    except (RuntimeMissing, UsageInvalid) as error:
        # scripts/llama-server builds one with RPC. Another llama-server, such as one on PATH, may have none.
        if REQUIRE_REAL and Path(llama_server).resolve().is_relative_to((ROOT / ".build").resolve()):
            pytest.fail(f"{error.message} scripts/llama-server source builds one with RPC.")
        pytest.skip(f"{error.message} (LLAMASUP_TEST_SERVER is {llama_server})")
    return found


@contextmanager
def bare_worker(
    found: FoundWorker, folder: Path, limit_bytes: int | None = None
) -> Iterator[tuple[str, int]]:
    """An rpc-server without llamasup: its address and its PID. ``limit_bytes``: of its address space."""
    limit = "unlimited" if limit_bytes is None else str(limit_bytes // 1024)
    port = free_port()
    env = worker_environment(os.environ, found.path, str(folder))
    process = subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            f'ulimit -v {limit}; exec "$@"',
            "sh",
            found.path,
            "--port",
            str(port),
            "--threads",
            "1",
        ],
        env={**env, "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: accepts(port))
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


class Working:
    """A running ``llamasup rpc-worker``, and its events."""

    def __init__(self, service: RpcWorker) -> None:
        self.service = service
        self.events: list[PublishedEvent] = []
        self._news = asyncio.Condition()

    @property
    def pid(self) -> int:
        assert self.service.runner is not None
        assert self.service.runner.pid is not None
        return self.service.runner.pid

    async def hear(self, event: PublishedEvent) -> None:
        async with self._news:
            self.events.append(event)
            self._news.notify_all()

    async def event(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                await self._news.wait()


@asynccontextmanager
async def working(found: FoundWorker, **options: Any) -> AsyncIterator[Working]:
    bus = Bus()
    service = RpcWorker(RpcWorkerOptions(runtime=found.path, **{"port": free_port(), **options}), bus)
    events: asyncio.Queue[PublishedEvent] = asyncio.Queue()
    bus.listen(events.put_nowait)
    worker = Working(service)

    async def pass_on() -> None:
        while True:
            await worker.hear(await events.get())

    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(service.run())
        passing = tasks.create_task(pass_on())
        try:
            await worker.event(Ready)
            yield worker
        finally:
            service.ask_stop()
            await asyncio.wait([run])
            passing.cancel()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def text_of(server: Serving) -> str:
    answer = await server.complete(n_predict=24, temperature=0, seed=1)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["content"])


def plan_of(server: Serving) -> LaunchPlan:
    plan = server.runner.plan
    assert isinstance(plan, LaunchPlan)
    return plan


def clients_of(pid: int) -> int:
    """The connections that an rpc-server has accepted."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process(pid).net_connections("tcp"))


def test_model_over_two_workers_writes_the_same_text(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(tiny_model, runtime=llama_server) as alone:
            await alone.reaches(State.READY, 1)
            expected = await text_of(alone)
        with (
            bare_worker(rpc_server, tmp_path) as (first, a),
            bare_worker(rpc_server, tmp_path) as (second, b),
        ):
            settings = Settings(rpc=(first, second))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                assert plan_of(server).device == "RPC0,RPC1"
                assert (clients_of(a), clients_of(b)) == (1, 1)
                assert await text_of(server) == expected

    run(test)


def test_model_larger_than_the_limit_of_one_process_is_served_over_two(
    llama_server: str, rpc_server: FoundWorker, tmp_path: Path
) -> None:
    model = write_large_decoder(tmp_path / "large.gguf", 400_000_000, quantization="F16")
    # Address space: RLIMIT_AS, because not every machine lets its users make cgroups.
    limit = int(model.stat().st_size * 0.8)
    settings = Settings(gpu_layers="all", ctx_size=256, parallel=1)

    async def one(worker: str) -> None:
        async with serving(model, runtime=llama_server, settings=with_workers(settings, worker)) as server:
            exited = await server.exit_of(1)
            assert exited.diagnosis.cause == "out_of_memory_device", exited

    async def two(*workers: str) -> None:
        async with serving(model, runtime=llama_server, settings=with_workers(settings, *workers)) as server:
            await server.reaches(State.READY, 1)
            assert await text_of(server)

    with bare_worker(rpc_server, tmp_path, limit) as (first, _):
        run(lambda: one(first))
        with bare_worker(rpc_server, tmp_path, limit) as (second, _):
            run(lambda: two(first, second))


def with_workers(settings: Settings, *workers: str) -> Settings:
    from msgspec.structs import replace

    return replace(settings, rpc=workers)


def test_killed_worker_is_named_and_the_model_is_served_without_it(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path, tmp_path: Path
) -> None:
    async def test() -> None:
        with (
            bare_worker(rpc_server, tmp_path) as (first, _),
            bare_worker(rpc_server, tmp_path) as (second, pid),
        ):
            settings = Settings(rpc=(first, second))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                expected = await text_of(server)
                os.kill(pid, signal.SIGKILL)
                assert await text_of(server) == expected  # the request waits for the next generation
                exited = await server.exit_of(1)
                assert exited.diagnosis.cause == "rpc_worker_lost", exited
                assert f"lost the RPC worker {second}" in exited.diagnosis.message
                warned = await server.wait_for_event(ServerWarned)
                assert f"without the RPC worker {second}" in warned.message
                assert plan_of(server).workers == (first,)

    run(test)


def test_supervised_worker_comes_back_and_is_used_again(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path
) -> None:
    async def test() -> None:
        async with working(rpc_server) as worker:
            address = worker.service.address.authority
            settings = Settings(rpc=(address,))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                os.kill(worker.pid, signal.SIGKILL)
                assert (await worker.event(ServerExited)).diagnosis.cause == "killed"
                assert worker.service.runner is not None
                await worker.service.runner.reached(State.READY)
                assert (await server.complete()).status_code == 200
                exited = await server.exit_of(1)
                assert exited.diagnosis.cause == "rpc_worker_lost", exited
                assert plan_of(server).workers == (address,)

    run(test)


def test_stopped_worker_is_named_as_the_cause_of_the_hang(
    llama_server: str,
    rpc_server: FoundWorker,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ask, "START_TIMEOUT_S", 5.0)  # the stopped worker is asked three times

    async def test() -> None:
        with (
            bare_worker(rpc_server, tmp_path) as (first, _),
            bare_worker(rpc_server, tmp_path) as (second, pid),
        ):
            settings = Settings(rpc=(first, second))
            async with serving(tiny_model, runtime=llama_server, settings=settings, liveness=QUICK) as server:
                await server.reaches(State.READY, 1)
                os.kill(pid, signal.SIGSTOP)
                answer = await server.complete()
                exited = await server.exit_of(1)
                assert exited.diagnosis.cause == "rpc_worker_lost", exited
                assert f"lost the RPC worker {second} (no answer within" in exited.diagnosis.message
                assert answer.status_code == 200
                assert plan_of(server).workers == (first,)

    run(test)


def test_stopped_idle_worker_is_replaced_by_its_supervisor(rpc_server: FoundWorker) -> None:
    async def test() -> None:
        async with working(rpc_server, liveness=QUICK) as worker:
            first = worker.pid
            os.kill(first, signal.SIGSTOP)
            exited = await worker.event(ServerExited)
            assert exited.diagnosis.cause == "unresponsive"
            assert exited.diagnosis.message.startswith("rpc-server did not answer")
            assert worker.service.runner is not None
            await worker.service.runner.until(lambda now: now.state is State.READY and now.generation == 2)
            assert not psutil.pid_exists(first)

    run(test)


def test_worker_that_serves_is_not_disturbed_by_the_checks(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path
) -> None:
    async def test() -> None:
        async with working(rpc_server, liveness=QUICK) as worker:
            settings = Settings(rpc=(worker.service.address.authority,))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                runner = worker.service.runner
                assert runner is not None
                prober = runner.prober()
                assert prober is not None
                for _ in range(2 * QUICK.max_missed_checks):
                    assert (await prober.health(QUICK.health_timeout_s)).value == "ok"
                assert (await server.complete()).status_code == 200
                assert (runner.instance.generation, server.runner.instance.generation) == (1, 1)

    run(test)


def test_question_that_timed_out_does_not_end_a_supervised_worker(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path
) -> None:
    runtime = find_runtime(llama_server, os.environ)

    async def test() -> None:
        async with working(rpc_server) as worker:
            address = worker.service.address.authority
            settings = Settings(rpc=(address,))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                question = ("--rpc", address, "--list-devices")
                asked = await asyncio.to_thread(run_runtime, runtime, os.environ, [question] * 3, 1.0)
                assert all(answer.too_slow for answer in asked)
            # The worker now accepts three connections whose other ends are closed.
            (answer,) = await asyncio.to_thread(
                ask_workers, runtime, os.environ, [address], None, again=True, timeout_s=PATIENCE_S
            )
            assert answer.state == "ready", answer
            assert worker.service.runner is not None
            assert worker.service.runner.instance.generation == 1

    run(test)


def test_used_worker_is_not_asked(llama_server: str, rpc_server: FoundWorker, tiny_model: Path) -> None:
    runtime = find_runtime(llama_server, os.environ)

    async def test() -> None:
        async with working(rpc_server) as worker:
            address = worker.service.address.authority
            settings = Settings(rpc=(address,))
            async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
                await server.reaches(State.READY, 1)
                (answer,) = await asyncio.to_thread(
                    ask_workers, runtime, os.environ, [address], None, again=True, timeout_s=PATIENCE_S
                )
                model = server.runner.model
                assert answer.state == "busy"
                assert answer.problem == f"the model {model} of this llamasup uses it"
                assert answer.devices  # of its last answer
            assert USED.user_of(address) is None

    run(test)


def test_tuned_plans_are_measured_one_after_the_other_with_the_worker(
    llama_server: str,
    rpc_server: FoundWorker,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawned: list[LaunchPlan] = []

    def spawn(plan: LaunchPlan, folder: Path) -> Trial:
        assert USED.user_of(plan.workers[0]) is None
        spawned.append(plan)
        return spawn_trial(plan, folder)

    monkeypatch.setattr(comparison, "spawn_trial", spawn)
    same = Candidate("same", Changes((("--sse-ping-interval", "30"),)), "the default of llama-server")

    async def test(worker: str) -> None:
        launch = prepare(str(tiny_model), Settings(rpc=(worker,)), runtime=llama_server, environ=os.environ)
        compare = Comparison(launch, tmp_path, "latency", lambda: 600.0, allow_lossy=True)
        try:
            block = await compare.calibrated(STATED_MIX, 0.01)
            assert len(await compare.screen(same, 1, block)) == 1
            await compare.round(same, block)
        finally:
            await compare.close()
        assert {plan.workers for plan in spawned} == {(worker,)}
        assert sum("--sse-ping-interval" in plan.argv for plan in spawned) == 2

    with bare_worker(rpc_server, tmp_path) as (worker, _):
        run(lambda: test(worker))
    absent = f"127.0.0.1:{free_port()}"
    with pytest.raises(TuningFailed, match=f"needs the RPC worker {absent}"):
        run(lambda: test(absent))


# --- through a tunnel --------------------------------------------------------------------------------


def tunnel_files(ca: str, own: tuple[str, str]) -> TunnelFiles:
    return TunnelFiles(ca, *own)


def test_model_is_served_through_a_tunnel_and_another_certificate_is_refused(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path, tmp_path: Path
) -> None:
    worker_end, client_end, stranger = (
        make_certificate(tmp_path, name) for name in ("worker", "client", "stranger")
    )

    def settings(address: str, own: tuple[str, str], ca: str = worker_end[0]) -> Settings:
        return Settings(rpc=(f"tls://{address}",), rpc_ca=ca, rpc_cert=own[0], rpc_key=own[1])

    async def test() -> None:
        async with serving(tiny_model, runtime=llama_server) as alone:
            await alone.reaches(State.READY, 1)
            expected = await text_of(alone)
        tunnel = TcpAddress("127.0.0.1", free_port())
        files = tunnel_files(client_end[0], worker_end)
        async with working(rpc_server, tunnel=tunnel, files=files) as worker:
            address = tunnel.authority
            assert (await worker.event(Ready)).address.url == f"tls://{address}"
            async with serving(
                tiny_model, runtime=llama_server, settings=settings(address, client_end)
            ) as server:
                await server.reaches(State.READY, 1)
                assert plan_of(server).device == "RPC0"
                assert clients_of(worker.pid) == 1
                assert await text_of(server) == expected
            for refused in (
                settings(address, stranger),
                settings(address, client_end, ca=stranger[0]),
            ):
                async with serving(tiny_model, runtime=llama_server, settings=refused) as server:
                    await server.reaches(State.READY, 1)
                    warned = await server.wait_for_event(ServerWarned)
                    assert "accept this certificate" in warned.message or "is not accepted" in warned.message
                    assert plan_of(server).workers == ()
                    assert await text_of(server) == expected
            reported = await worker.event(ServerWarned)
            assert "through the tunnel failed: the connection of 127.0.0.1 was refused" in reported.message

    run(test)


def test_command_offers_a_worker_through_a_tunnel(
    llama_server: str, rpc_server: FoundWorker, tiny_model: Path, tmp_path: Path
) -> None:
    worker_end, client_end = (make_certificate(tmp_path, name) for name in ("worker", "client"))

    async def test(address: str) -> None:
        cert, key = client_end
        settings = Settings(rpc=(address,), rpc_ca=worker_end[0], rpc_cert=cert, rpc_key=key)
        async with serving(tiny_model, runtime=llama_server, settings=settings) as server:
            await server.reaches(State.READY, 1)
            assert plan_of(server).workers == (address,)
            assert await text_of(server)

    files = ("--cert", worker_end[0], "--key", worker_end[1], "--client-ca", client_end[0])
    words = ("--runtime", rpc_server.path, "--tunnel", "127.0.0.1:0", *files)
    with started("rpc-worker", *words) as worker:
        address = worker.url
        run(lambda: test(address))
        assert worker.stop() == 0
