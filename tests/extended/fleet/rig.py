"""Starts a Ray cluster of several nodes, deploys a fleet, and runs a front and clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from llamasup.errors import FleetUnusable
from tests.extended.fleet.network import Network
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port

__all__ = ["MODEL", "NODES", "Outcome", "Rig", "actor_and_llamasup", "load_of"]

MODEL = "tiny"
NODES = 3


class Outcome:
    """What the clients of a load saw."""

    def __init__(self) -> None:
        self.complete = 0
        self.cut: list[str] = []  # streams that began and ended with an error event
        self.refused: list[str] = []

    @property
    def all_served(self) -> bool:
        return (self.cut, self.refused) == ([], []) and self.complete > 0

    async def served(self, more: int) -> None:
        """Wait for so many more complete answers, or a refused request."""
        enough = self.complete + more
        async with asyncio.timeout(2 * PATIENCE_S):
            while self.complete < enough and not self.refused:  # noqa: ASYNC110 - the clients only count
                await asyncio.sleep(0.05)


class Rig:
    """Each Ray node has room for as many replicas as ``cpus``. With a ``network``, each node but the head is
    in a namespace of it.
    """

    def __init__(self, folder: Path, runtime: str, network: Network | None = None, *, cpus: int = 1) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.runtime = runtime
        self.network = network
        self._cpus = cpus
        self.places: dict[Any, int] = {}
        """The namespace of each node, counted from 1."""
        self.serve_port, self.dashboard_port = free_port(), free_port()
        self._stack = ExitStack()
        # The kernel ends Ray's processes with the thread that started them, so it lives as long as the rig.
        # Ray starts a node only in the main thread.
        self._ray_thread = ThreadPoolExecutor(1)

    # --- life
    def __enter__(self) -> Rig:
        with ExitStack() as stack:
            stack.callback(self._ray_thread.shutdown)
            self._start_ray(stack)
            self.fresh()
            self.front_port, self.front = self.start_front(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start_ray(self, stack: ExitStack) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        # The head's state survives its restart (Ray 2.60 has Redis and RocksDB for it).
        system = {"gcs_storage": "rocksdb", "gcs_storage_path": str(self.folder / "gcs")}
        (self.folder / "gcs").mkdir()
        self.cluster = Cluster()
        stack.callback(self.cluster.shutdown)
        self.cluster.add_node(
            num_cpus=0,
            include_dashboard=True,  # `serve deploy` asks it
            dashboard_port=self.dashboard_port,
            _system_config=system,
            object_store_memory=80_000_000,
        )
        for _ in range(NODES):
            self.add_node()
        ray.init(address=self.cluster.address, log_to_driver=False, namespace="serve")
        stack.callback(ray.shutdown)
        stack.callback(_quietly, serve.shutdown)
        self.host = ray.util.get_node_ip_address()  # as other machines reach the head

    def add_node(self) -> None:
        place = min(set(range(1, NODES + 1)) - set(self.places.values()))
        with ExitStack() as stack:
            address = {}
            if self.network is not None:
                stack.enter_context(self.network.inside(place))
                address["node_ip_address"] = self.network.address(place)
            self.places[self._started_node(address)] = place

    def replace_nodes(self, environ: Mapping[str, str]) -> None:
        """Other nodes take the place of all but the head. ``environ``: as with ``ray start``. Call it in the
        main thread.
        """
        for node in self.nodes:
            del self.places[node]
            self.cluster.remove_node(node)
        before = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            for _ in range(NODES):
                self.add_node()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def _started_node(self, options: Mapping[str, Any]) -> Any:
        """Ray (2.60) waits 30 s for a node, which a very busy machine exceeds."""
        own, attempts = psutil.Process(), 3
        while True:
            before = set(own.children())
            try:
                return self.cluster.add_node(num_cpus=self._cpus, object_store_memory=80_000_000, **options)
            except Exception:
                for child in set(own.children()) - before:
                    child.kill()
                if not (attempts := attempts - 1):
                    raise

    @property
    def nodes(self) -> list[Any]:
        return list(self.places)

    def start_front(self, stack: ExitStack) -> tuple[int, subprocess.Popen[bytes]]:
        """Returns its port and its process, which ends with ``stack``."""
        port = free_port()
        ready = self.folder / f"ready-{port}"
        command = [
            sys.executable,
            "-m",
            "llamasup",
            "serve",
            "--config",
            str(self.config),
            "--port",
            str(port),
        ]
        with (self.folder / f"front-{port}.log").open("wb") as log:
            front = subprocess.Popen(
                [*command, "--ready-file", str(ready), "--log-level", "warning"], stdout=log, stderr=log
            )
        stack.callback(_end, front)
        eventually(ready.exists, "the front", every_s=0.05)
        return port, front

    @property
    def front_url(self) -> str:
        return f"http://127.0.0.1:{self.front_port}"

    # --- the config
    def write(
        self, models: Mapping[str, Any] | None = None, fleet: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        written = {
            "runtime": self.runtime,
            "listen": "127.0.0.1:0",
            "defaults": {"ctx_size": 512, "parallel": 2, "threads": 1},
            "models": models or {MODEL: {"path": "tiny.gguf", "aliases": ["gpt-tiny"]}},
            **more,
        }
        needs = {name: {"cpus": 1, "memory": "100MiB"} for name in written["models"]}
        written["fleet"] = {
            "ray": self.cluster.address,
            "key_file": "fleet.key",
            "directory": f"http://{self.host}:{self.serve_port}",
            "gpus": 0,
            "max_replicas": 2,
            "upscale_after": "1s",
            "downscale_after": "4s",
            "idle_after": "3s",
            "models": needs,
            **(fleet or {}),
        }
        self.config.write_text(json.dumps(written))

    def fresh(self, **more: Any) -> None:
        """Deploy this config, and wait until no replica of another one is left."""
        self.write(**more)
        self.deploy()
        fleet: Mapping[str, Any] = more.get("fleet") or {}
        least, may_sleep = int(fleet.get("min_replicas", 0)), fleet.get("when_idle") == "sleep"

        def has_settled() -> bool:
            servers = len(self.llama_servers())
            return servers <= least if may_sleep else servers == least

        eventually(has_settled, "the end of other replicas", every_s=0.1)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``llamasup fleet …``"""
        command, *rest = arguments
        line = [sys.executable, "-m", "llamasup", "fleet", command, str(self.config), *rest]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def deploy(self) -> Mapping[str, Any]:
        done = self.run("deploy", "--json")
        assert done.returncode == 0, done.stderr
        shown: Mapping[str, Any] = json.loads(done.stdout)
        return shown

    # --- observations
    def status(self) -> Mapping[str, Any]:
        from llamasup.fleet import deploy

        return deploy.status(self.config)

    def nodes_of_fleet(self) -> Sequence[Mapping[str, Any]]:
        return self.status()["nodes"] or ()

    def reports_at_serve(self) -> list[Mapping[str, Any]]:
        """What each replica reported last, as Serve tells it to its routers."""
        import ray
        from ray.serve._private.common import DeploymentID
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME
        from ray.serve._private.long_poll import LongPollNamespace

        from llamasup.fleet.serve_view import deployment_name

        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace="serve")
        key = (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(deployment_name(MODEL), "llamasup"))
        told = ray.get(controller.listen_for_change.remote({key: -1}))
        return [replica.routing_stats for replica in told[key].object_snapshot.running_replicas]

    def running(self) -> int:
        return int(self.status()["models"][0]["replicas"].get("running", 0))

    def llama_servers(self) -> list[psutil.Process]:
        """Of all Ray nodes."""
        return [found for node in self.nodes for found in _llama_servers_below(_raylet_of(node))]

    def ray_processes(self, title: str) -> list[psutil.Process]:
        """The actors of this cluster with a title, such as ``ray::ServeController``."""
        return [
            child
            for node in (self.cluster.head_node, *self.nodes)
            for child in psutil.Process(_raylet_of(node)).children(recursive=True)
            if _title(child).startswith(title)
        ]

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Ask again until it holds; ``holds`` runs in a thread, because Ray's functions block."""
        deadline_s = time.monotonic() + 2 * PATIENCE_S
        while True:
            with suppress(FleetUnusable):  # a part of Ray is starting again
                if await asyncio.to_thread(holds):
                    return
            assert time.monotonic() < deadline_s, (
                f"{what} did not come: {await asyncio.to_thread(self.status)}"
            )
            await asyncio.sleep(0.2)

    # --- clients
    def client(self, port: int | None = None, key: str = "any") -> Any:
        import openai

        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port or self.front_port}/v1",
            api_key=key,
            max_retries=0,
            timeout=PATIENCE_S * 2,
        )

    async def load(
        self, outcome: Outcome, ends: asyncio.Event, *, tokens: int = 60, port: int | None = None
    ) -> None:
        """One client that streams answers one after another until ``ends``."""
        async with self.client(port) as client:
            while not ends.is_set():
                await self.ask(client, outcome, tokens)
                await asyncio.sleep(0.02)

    async def ask(self, client: Any, outcome: Outcome, tokens: int = 20, model: str = MODEL) -> None:
        import openai

        chunks = 0
        try:
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Tell me a story"}],
                max_tokens=tokens,
                stream=True,
            )
            async for _ in stream:
                chunks += 1
        except openai.APIError as error:
            (outcome.cut if chunks else outcome.refused).append(f"{type(error).__name__}: {error}")
        else:
            outcome.complete += 1

    # --- what may happen to a cluster
    def kill_node(self, node: Any) -> None:
        """SIGKILL to all processes of a Ray node, as a machine that loses its power."""
        raylet = psutil.Process(_raylet_of(node))
        for victim in (raylet, *raylet.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        del self.places[node]
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_raylet(self, node: Any) -> None:
        """SIGKILL to the raylet alone. What it started has to end by itself, which it does when the raylet is
        no process any more: a zombie, which is what it would be under this process, is one.
        """
        raylet = next(info.process for info in node.all_processes["raylet"])
        raylet.kill()
        raylet.wait()
        del self.places[node]

    def node_with(self, server: psutil.Process) -> Any:
        """The Ray node of a llama-server."""
        above = {process.pid for process in server.parents()}
        return next(node for node in self.nodes if _raylet_of(node) in above)

    async def restart_head(self) -> None:
        def restart() -> None:
            head = self.cluster.head_node
            head.kill_gcs_server()
            head.start_gcs_server()

        await asyncio.wrap_future(self._ray_thread.submit(restart))


@asynccontextmanager
async def load_of(rig: Rig, clients: int, *ports: int) -> AsyncIterator[Outcome]:
    """Clients that stream one answer after another while the block runs."""
    outcome, ends = Outcome(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for port in ports or (rig.front_port,):
            for _ in range(clients):
                tasks.create_task(rig.load(outcome, ends, port=port))
        try:
            yield outcome
        finally:
            ends.set()


def _raylet_of(node: Any) -> int:
    """The process above all others of a Ray node."""
    pid: int = next(info.process.pid for info in node.all_processes["raylet"])
    return pid


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _llama_servers_below(pid: int) -> list[psutil.Process]:
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                # A real one, or the fake one in a Python.
                if "llama-server" in Path(words[0] if words else "").name or "tests.kit.fake_server" in words:
                    found.append(child)
    return found


def actor_and_llamasup(server: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """The Ray actor and the llamasup above a llama-server."""
    parents = server.parents()
    number = next(number for number, each in enumerate(parents) if "--sidecar" in each.cmdline())
    return parents[number + 1], parents[number]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _quietly(act: Callable[[], object]) -> None:
    with suppress(Exception):
        act()
