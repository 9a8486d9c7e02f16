"""Something that can be controlled without any process: what is asked of it is written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llamasup.control.app import ControlServer
from llamasup.control.client import AsyncControlClient, Place
from llamasup.errors import LlamasupError, ModelUnknown
from llamasup.observability.metrics import InstanceGauges, Metrics
from llamasup.supervision.events import Bus, PublishedEvent, StateChanged
from llamasup.supervision.states import State
from tests.patience import PATIENCE_S

__all__ = ["PATIENCE_S", "FakeControlled", "controlled", "served"]


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


class FakeControlled:
    """Two models. ``error`` is raised by whatever is asked for; with ``gate`` cleared it takes its time."""

    def __init__(self, log: Path | None = None) -> None:
        self._changed = asyncio.Event()
        self.bus = WatchedBus(self._changed.set)
        self.asked: list[tuple[str, str]] = []
        self.error: LlamasupError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.log = log
        self.names = {"tiny": ("small",), "org/repo:q8_0": ()}

    def status(self) -> Mapping[str, Any]:
        return {
            "version": "1",
            "pid": 4242,
            "url": "http://127.0.0.1:8080",
            "uptime_s": 1.0,
            "models": [self._model(name, aliases) for name, aliases in self.names.items()],
        }

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

    async def reload(self) -> Mapping[str, Any]:
        await self._do("reload", "")
        return {"added": ["new"], "removed": [], "changed": [], "unchanged": list(self.names)}

    def shutdown(self, *, now: bool = False) -> None:
        self.asked.append(("shutdown", "now" if now else ""))

    def log_path(self, model: str) -> Path | None:
        self._find(model)
        return self.log

    def happens(self, generation: int) -> None:
        """Something is told on the bus."""
        self.bus.publish(StateChanged("tiny", State.READY, generation))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that changes with who listens, or with what is asked."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _do(self, what: str, model: str) -> None:
        if what != "reload":
            self._find(model)
        self.asked.append((what, model))
        self._changed.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.asked.append((f"{what} given up", model))
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
async def served(fake: FakeControlled, folder: Path) -> AsyncIterator[tuple[ControlServer, str]]:
    """The real application on its socket."""
    path = folder / "control.sock"
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        server = ControlServer(path, fake, Metrics())
        server.start(tasks)
        try:
            yield server, str(path)
        finally:
            await server.aclose()


@asynccontextmanager
async def controlled(fake: FakeControlled, folder: Path) -> AsyncIterator[AsyncControlClient]:
    """The same, with a client of it."""
    async with served(fake, folder) as (_, path), AsyncControlClient(Place(socket=path)) as client:
        yield client
