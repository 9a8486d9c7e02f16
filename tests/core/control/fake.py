"""A control target without any process, which records the requests, and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

import httpx
from msgspec.structs import replace

from llamasup.core.control.app import ControlServer
from llamasup.core.control.interface import ConfigAccess, Fetch, MakeConsole, UsageReport
from llamasup.core.control.routes import Application
from llamasup.core.http.errors import error_from
from llamasup.core.http.heads import HttpError
from llamasup.core.hub.remote_file import Listener, Progress
from llamasup.core.observability.counters import InstanceGauges, Metrics, NodeGauges
from llamasup.core.observability.last_hour import LastHour
from llamasup.core.observability.own_log import OwnLog
from llamasup.core.proxy.live.requests import LiveRequests
from llamasup.core.proxy.live.state import InFlight
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.core.supervision.states import State
from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.features import attached
from tests.core.proxy.live.samples import REQUEST
from tests.kit.patience import PATIENCE_S

__all__ = ["PATIENCE_S", "AsyncControlClient", "FakeConnection", "FakeControlTarget", "controlled", "served"]


class WatchedBus(Bus):
    """``listeners``: how many there are."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.listeners = 0
        self._changed = changed

    def listen(self, listener: Callable[[PublishedEvent], None]) -> None:
        super().listen(listener)
        self.listeners += 1
        self._changed()

    def unsubscribe(self, listener: Callable[[PublishedEvent], None]) -> None:
        super().unsubscribe(listener)
        self.listeners -= 1
        self._changed()


class FakeConnection:
    """A connection with one request in flight, until it is cancelled."""

    def __init__(self, request_id: str) -> None:
        self.error: HttpError | None = None
        self._request = replace(REQUEST, id=request_id)

    def live(self, now: float) -> InFlight | None:
        return InFlight(self._request) if self.error is None else None

    def held_slots(self) -> None:
        """It has no slot."""

    def waits_since(self) -> float:
        return 0.0

    def interrupt(self, error: HttpError, outcome: str) -> None:
        self.error = error


class FakeControlTarget:
    """Two models. Each request raises ``error``, and waits while ``gate`` is cleared."""

    def __init__(self, log: Path | None = None) -> None:
        self._changed = asyncio.Event()
        self.bus = WatchedBus(self._changed.set)
        self.requests: list[tuple[str, str]] = []
        self.error: LlamasupError | None = None
        self.config_access: ConfigAccess | None = None
        self.last_hour = LastHour(monotonic())
        self.own_log = OwnLog()
        self.gate = asyncio.Event()
        self.gate.set()
        self.log = log
        self.usage: UsageReport | None = None
        self.connections: list[FakeConnection] = []
        self.names = {"tiny": ("small",), "org/repo:q8_0": ()}

    def status(self) -> Mapping[str, Any]:
        return {
            "version": "1",
            "pid": 4242,
            "url": "http://127.0.0.1:8080",
            "uptime_s": 1.0,
            "models": [self._model(name, aliases) for name, aliases in self.names.items()],
        }

    def why(self, model: str) -> Mapping[str, Any]:
        self._find(model)
        return {
            "model": model,
            "state": "ready",
            "sentences": [f"{model} is loaded."],
            "change": [],
            "decisions": [],
        }

    def listed(self, model: str) -> Mapping[str, Any]:
        self._find(model)
        return {"id": model, "aliases": self.names[model], "llamasup": {"state": "ready"}}

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        decision = {"time": "2026-01-01T00:00:00.000+00:00", "model": "tiny", "kind": "load", "text": "…"}
        return [decision, decision][:limit]

    def node_gauges(self) -> NodeGauges | None:
        return None

    def gauges(self) -> Sequence[InstanceGauges]:
        return [InstanceGauges(name, State.READY, 0, 0) for name in self.names]

    async def scrape(self) -> Mapping[str, str]:
        return {}

    async def load(self, model: str) -> None:
        await self._do("load", model)

    async def unload(self, model: str) -> None:
        await self._do("unload", model)

    async def restart(self, model: str) -> None:
        await self._do("restart", model)

    def pull(self, model: str) -> Fetch:
        self._find(model)

        async def fetch(listener: Listener) -> None:
            listener(Progress(5, 10, 1))
            await self._do("pull", model)

        return fetch

    async def remove(self, model: str) -> Mapping[str, Any]:
        self._find(model)
        await self._do("rm", model)
        return {"removed": [f"/models/{model}.gguf"], "freed_bytes": 10}

    async def reload(self) -> Mapping[str, Any]:
        await self._do("reload", "")
        return {"added": ["new"], "removed": [], "changed": [], "unchanged": list(self.names)}

    def upgrade_status(self) -> Mapping[str, Any]:
        return {"state": "none", "runtime": None}

    async def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        await self._do("preview" if dry_run else "upgrade", runtime)
        return {"state": "none" if dry_run else "watching", "runtime": {"path": runtime, "version": "b2"}}

    def shutdown(self, *, now: bool = False) -> None:
        self.requests.append(("shutdown", "now" if now else ""))

    def log_path(self, model: str) -> Path | None:
        self._find(model)
        return self.log

    def routes(self) -> Sequence[Any]:
        """The paths of features."""
        return [route for make in attached("routes") for route in make(self, self)]

    async def memory(self) -> Mapping[str, Any]:
        return {"devices": [{"name": "ram"}]}

    @property
    def config(self) -> ConfigAccess | None:
        return self.config_access

    def held_bytes(self) -> int:
        return 7

    async def plan(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        self._find(model)
        return {"model": model, "settings": settings, "evicts": []}

    async def query_slots(self, endpoint: Endpoint) -> None:
        """No server shows its slots."""

    def happens(self, generation: int) -> None:
        """Publish an event on the bus."""
        self.bus.publish(StateChanged("tiny", State.READY, generation))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the listeners or the requests."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _do(self, what: str, model: str) -> None:
        if what not in {"reload", "upgrade", "preview"}:
            self._find(model)
        self.requests.append((what, model))
        self._changed.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.requests.append((f"{what} given up", model))
            self._changed.set()
            raise
        if self.error is not None:
            raise self.error

    def _find(self, model: str) -> None:
        if not any(model == name or model in aliases for name, aliases in self.names.items()):
            raise ModelUnknown(f"No model {model!r} is served here.", remedy="The nearest is 'tiny'.")

    def _model(self, name: str, aliases: tuple[str, ...]) -> Mapping[str, Any]:
        return {
            "id": name,
            "aliases": list(aliases),
            "state": "ready",
            "generation": 1,
            "pid": 7 if name == "tiny" else None,
            "in_flight": 1,
            "memory": {"ram_bytes": 1, "vram_bytes": None},
        }


@asynccontextmanager
async def served(
    fake: FakeControlTarget, folder: Path, make_console: MakeConsole | None = None
) -> AsyncIterator[tuple[ControlServer, str]]:
    """The real application on its socket."""
    path = folder / "control.sock"
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        requests = LiveRequests(fake.connections, fake.query_slots)
        server = ControlServer(
            path,
            lambda tasks: Application(
                fake,
                Metrics(),
                requests,
                fake.last_hour,
                tasks,
                make_console,
                own_log=fake.own_log,
                more_routes=fake.routes,
            ),
        )
        server.start(tasks)
        try:
            yield server, str(path)
        finally:
            await server.aclose()


class AsyncControlClient:
    """A client whose requests a test can cancel."""

    def __init__(self, socket: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=socket)
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost/llamasup/v1", timeout=PATIENCE_S
        )

    async def __aenter__(self) -> AsyncControlClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def status(self) -> Mapping[str, Any]:
        return await self._request("GET", "/status")

    async def load(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._request("POST", f"{_path(model)}/load", wait=wait)

    async def unload(self, model: str) -> Mapping[str, Any]:
        return await self._request("POST", f"{_path(model)}/unload")

    async def restart(self, model: str, *, wait: bool = True) -> Mapping[str, Any]:
        return await self._request("POST", f"{_path(model)}/restart", wait=wait)

    async def reload(self) -> Mapping[str, Any]:
        return await self._request("POST", "/reload")

    async def upgrade(self, runtime: str = "") -> Mapping[str, Any]:
        """Without ``runtime``, the last one."""
        body = {"runtime": runtime} if runtime else None
        response = await self._http.request("POST" if runtime else "GET", "/upgrade", json=body)
        await _check(response)
        answer: Mapping[str, Any] = response.json()
        return answer

    async def shutdown(self, *, now: bool = False) -> Mapping[str, Any]:
        return await self._request("POST", "/shutdown", now=now)

    async def events(self) -> AsyncGenerator[Mapping[str, Any]]:
        async with self._http.stream("GET", "/events") as response:
            await _check(response)
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    async def log(self, model: str, **query: int) -> AsyncGenerator[bytes]:
        async with self._http.stream("GET", f"{_path(model)}/logs", params=_numbers(query)) as response:
            await _check(response)
            async for chunk in response.aiter_bytes():
                yield chunk

    async def _request(self, method: str, path: str, **query: bool) -> Mapping[str, Any]:
        response = await self._http.request(method, path, params=_numbers(query))
        await _check(response)
        answer: Mapping[str, Any] = response.json()
        return answer


def _numbers(query: Mapping[str, int]) -> dict[str, int]:
    return {name: int(value) for name, value in query.items()}


async def _check(response: httpx.Response) -> None:
    if not response.is_success:
        raise error_from(response.status_code, json.loads(await response.aread()))


def _path(model: str) -> str:
    return f"/models/{quote(model, safe='').replace('.', '%2E')}"


@asynccontextmanager
async def controlled(fake: FakeControlTarget, folder: Path) -> AsyncIterator[AsyncControlClient]:
    """The same, with a client of it."""
    async with served(fake, folder) as (_, path), AsyncControlClient(path) as client:
        yield client
