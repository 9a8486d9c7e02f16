"""Starts a Ray cluster of several nodes, deploys a fleet, and runs a front and clients."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.patience import PATIENCE_S, eventually
from tests.ports import free_port

__all__ = ["MODEL", "Outcome", "Rig", "llama_servers_below"]

MODEL = "tiny"

_CONFIG = """\
runtime: {runtime}
listen: 127.0.0.1:{front}
defaults: {{ctx_size: {ctx}, parallel: 2, threads: 1}}
models:
  tiny: {{path: tiny.gguf, aliases: [gpt-tiny]}}
fleet:
  ray: {ray}
  key_file: fleet.key
  directory: http://127.0.0.1:{serve}
  max_replicas: {replicas}
  upscale_after: 1s
  downscale_after: 4s
  idle_after: {idle}s
  models:
    tiny: {{cpus: 1, gpus: 0, memory: 100MiB}}
"""


class Outcome:
    """What the clients of a load saw."""

    def __init__(self) -> None:
        self.complete = 0
        self.cut: list[str] = []  # streams that began and ended with an error event
        self.refused: list[str] = []

    async def served(self, more: int) -> None:
        """Wait for so many more complete answers, or a refused request."""
        wanted = self.complete + more
        while self.complete < wanted and not self.refused:  # noqa: ASYNC110 - the clients only count
            await asyncio.sleep(0.05)


class Rig:
    """One CPU on each Ray node, so that each node has room for one replica."""

    def __init__(self, folder: Path, runtime: str, *, replicas: int = 2) -> None:
        self._replicas = replicas
        self.folder = folder
        self.config = folder / "config.yaml"
        self._runtime = runtime
        self._serve_port, self.front_port = free_port(), free_port()
        self._front: subprocess.Popen[bytes] | None = None

    # --- life -------------------------------------------------------------------------------------------

    def __enter__(self) -> Rig:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        memory = {"object_store_memory": 80_000_000}
        # The head's state survives its restart (Ray 2.60 has Redis and RocksDB for it).
        system = {"gcs_storage": "rocksdb", "gcs_storage_path": str(self.folder / "gcs")}
        (self.folder / "gcs").mkdir()
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": system, **memory},
        )
        self.nodes = [self.cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, namespace="serve")
        serve.start(http_options={"host": "127.0.0.1", "port": self._serve_port})
        self.write()
        self.deploy()
        self.start_front()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray
        from ray import serve

        if self._front is not None:
            self._front.terminate()
            self._front.wait(PATIENCE_S)
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()

    def write(self, *, ctx: int = 512, idle_s: int = 3) -> None:
        text = _CONFIG.format(
            runtime=self._runtime,
            front=self.front_port,
            serve=self._serve_port,
            ray=self.cluster.address,
            ctx=ctx,
            replicas=self._replicas,
            idle=idle_s,
        )
        self.config.write_text(text)

    def deploy(self) -> None:
        from llamasup.fleet import deploy

        deploy.deploy(self.config)

    def start_front(self) -> None:
        ready = self.folder / "ready"
        command = [sys.executable, "-m", "llamasup", "serve", "--config", str(self.config)]
        log = (self.folder / "front.log").open("wb")
        self._front = subprocess.Popen(
            [*command, "--ready-file", str(ready), "--log-level", "warning"], stdout=log, stderr=log
        )
        eventually(ready.exists, "the front", every_s=0.05)

    # --- observations -----------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        from llamasup.fleet import deploy

        return deploy.status(self.config)

    def nodes_of_front(self) -> list[Mapping[str, Any]]:
        command = [sys.executable, "-m", "llamasup", "status", "--json", "--pid", str(self.front_pid)]
        shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return list(shown["nodes"])

    @property
    def serve_url(self) -> str:
        return f"http://127.0.0.1:{self._serve_port}"

    @property
    def front_pid(self) -> int:
        assert self._front is not None
        return self._front.pid

    def running(self) -> int:
        return int(self.status()["models"][0]["replicas"].get("RUNNING", 0))

    async def until(self, holds: Any, what: str) -> None:
        """Ask again until it holds; ``holds`` runs in a thread, because Ray's functions block."""
        deadline_s = time.monotonic() + 2 * PATIENCE_S
        while not await asyncio.to_thread(holds):
            assert time.monotonic() < deadline_s, (
                f"{what} did not come: {await asyncio.to_thread(self.status)}"
            )
            await asyncio.sleep(0.2)

    def client(self) -> Any:
        import openai

        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.front_port}/v1",
            api_key="any",
            max_retries=0,
            timeout=PATIENCE_S * 2,
        )

    async def load(self, outcome: Outcome, ends: asyncio.Event, *, tokens: int = 60) -> None:
        """One client that streams answers one after another until ``ends``."""
        async with self.client() as client:
            while not ends.is_set():
                await self.ask(client, outcome, tokens)
                await asyncio.sleep(0.02)

    async def ask(self, client: Any, outcome: Outcome, tokens: int = 20) -> None:
        import openai

        chunks = 0
        try:
            stream = await client.chat.completions.create(
                model=MODEL,
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

    # --- violence ---------------------------------------------------------------------------------------

    def kill_node(self, node: Any) -> None:
        """SIGKILL to all processes of a Ray node, as a machine that loses its power."""
        raylet = next(info.process.pid for info in node.all_processes["raylet"])
        victims = [psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def node_of_replica(self) -> Any:
        """A Ray node with a replica: the one whose raylet has a llama-server below it."""
        for node in self.nodes:
            raylet = next(info.process.pid for info in node.all_processes["raylet"])
            if llama_servers_below(raylet):
                return node
        return None

    def restart_head(self) -> None:
        head = self.cluster.head_node
        head.kill_gcs_server()
        head.start_gcs_server()


def llama_servers_below(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "llama-server" in Path(child.exe()).name:
                found.append(child)
    return found
