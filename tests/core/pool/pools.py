"""A pool of models over real children of the fake server, and requests that take its leases."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.names import NameIndex
from llamasup.core.models.registry import Registry
from llamasup.core.models.spec import ModelSpec, Stay
from llamasup.core.pool import estimate
from llamasup.core.pool.catalog.catalog import Catalog
from llamasup.core.pool.estimate import Fetch, SizedModel, estimate_model
from llamasup.core.pool.eviction_policy import Phase, ResidencyPolicy
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.options import PoolOptions
from llamasup.core.pool.pool import Pool
from llamasup.core.pool.processes import Runners
from llamasup.core.queueing.endpoint import Lease
from llamasup.core.queueing.request_queue import QueueEntry
from llamasup.core.settings.model import ModelSettings, Settings
from llamasup.core.supervision.events import Bus, ModelUnloading, PublishedEvent, StateChanged
from llamasup.core.supervision.states import Policy, State
from tests.kit.async_tests import async_test
from tests.kit.fake_server import install
from tests.kit.patience import PATIENCE_S

__all__ = [
    "PATIENCE_S",
    "HeldSizing",
    "PoolRequest",
    "Pooled",
    "async_test",
    "file_of",
    "pooled",
    "registry_of",
    "server",
    "spec_of",
]


class HeldSizing:
    """Delays the sizing of models until ``go_on``. ``begun`` waits until a sizing has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._really = estimate.__dict__["estimate_model"]
        self._begun, self._go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(estimate, "estimate_model", self._size_up)

    def _size_up(self, *arguments: Any) -> SizedModel:
        self._begun.set()
        self._go_on.wait(PATIENCE_S)
        found = self._really(*arguments)
        assert isinstance(found, SizedModel)
        return found

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait, PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.set()


def server(folder: Path, faults: Mapping[str, Iterable[str]] | None = None) -> Path:
    """A llama-server with faults, by a part of its command line."""
    usual = install(folder / "usual-server")
    programs = {
        part: install(folder / f"server-{number}", *options)
        for number, (part, options) in enumerate((faults or {}).items())
    }
    cases = [
        f'*{shlex.quote(part)}*) exec {shlex.quote(str(program))} "$@" ;;'
        for part, program in programs.items()
    ]
    path = folder / "llama-server"
    path.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac", f'exec "{usual}" "$@"', ""]))
    path.chmod(0o755)
    return path


def file_of(folder: Path, name: str, model: Path) -> Path:
    path = folder / f"{name}.gguf"
    shutil.copy(model, path)
    return path


def spec_of(path: Path, *, stay: Stay | None = None, ctx_size: int = 512, **options: object) -> ModelSpec:
    """The spec of this file, as the registry makes it."""
    status = path.stat()
    name = path.stem
    return ModelSpec(
        name,
        str(path),
        settings=Settings(alias=name, ctx_size=ctx_size, parallel=1),
        options=ModelSettings(**options),  # type: ignore[arg-type]
        stay=Stay() if stay is None else stay,
        replicas=int(options.get("replicas") or 1),  # type: ignore[call-overload]
        identity=((str(path), status.st_size, status.st_mtime_ns),),
    )


def registry_of(*specs: ModelSpec) -> Registry:
    names = {name: spec.id for spec in specs for name in spec.names}
    return Registry({spec.id: spec for spec in specs}, names, None, _index=NameIndex(names))


class PoolRequest:
    """One request: it queues if necessary, and keeps its lease or its rejection."""

    def __init__(self, catalog: Catalog, model: str) -> None:
        self.body = b""
        self.lease: Lease | None = None
        self.why: HttpError | None = None
        self._over = asyncio.Event()
        self.entry = QueueEntry(self, asyncio.get_running_loop().time(), 0)
        route = catalog.resolve(model, create=True)
        found = route if isinstance(route, HttpError) else route.served.lease(infers=True)
        if not isinstance(route, HttpError) and isinstance(found, HttpError) and found.queueable:
            found = route.served.queue.enter(self.entry) or found
        if isinstance(found, Lease):
            self.served(found)
        elif not self.entry.waits:
            self.refused(found)

    def served(self, lease: Lease) -> None:
        self.lease = lease
        self._over.set()

    def refused(self, why: HttpError) -> None:
        self.why = why
        self._over.set()

    @property
    def waits(self) -> bool:
        return not self._over.is_set()

    async def answer(self) -> Lease | HttpError:
        async with asyncio.timeout(PATIENCE_S):
            await self._over.wait()
        found = self.lease or self.why
        assert found is not None
        return found

    async def served_by(self) -> int:
        """The number of the generation that serves the request."""
        found = await self.answer()
        assert isinstance(found, Lease), found
        return found.endpoint.generation

    async def refusal(self) -> HttpError:
        found = await self.answer()
        assert isinstance(found, HttpError), found
        return found

    def finish(self) -> None:
        assert self.lease is not None
        self.lease.release()


class Pooled:
    """A running pool, its models by name, and its events."""

    def __init__(self, pool: Pool, catalog: Catalog, needs_bytes: int) -> None:
        self.pool = pool
        self.catalog = catalog
        self.needs_bytes = needs_bytes
        self.notices: list[PublishedEvent] = []
        self._news = asyncio.Event()
        pool.bus.listen(self._hear)

    def _hear(self, notice: PublishedEvent) -> None:
        self.notices.append(notice)
        self._news.set()

    def __getitem__(self, name: str) -> ManagedModel:
        managed = self.catalog.find(name)
        assert managed is not None
        return managed

    def ask(self, model: str) -> PoolRequest:
        return PoolRequest(self.catalog, model)

    async def load(self, model: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.pool.load(self[model])

    async def unload(self, model: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.pool.unload(self[model])

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for ``holds``. Polls too, because some changes have no event."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self._news.wait()

    async def reconciled(self) -> None:
        """Let the pool decide again and begin to apply its decisions."""
        self.pool.reconcile_soon()
        for _ in range(5):
            await asyncio.sleep(0)

    async def until_phase(self, model: str, phase: Phase) -> None:
        managed = self[model]
        await self.until(lambda: managed.phase is phase)

    def pids(self, *models: str) -> dict[str, int | None]:
        return {name: self[name].runners[0].pid for name in models}

    def loads(self, model: str) -> int:
        """The number of times that the model became ready."""
        return sum(
            isinstance(event, StateChanged) and event.model == model and event.state is State.READY
            for event in self.notices
        )

    def unloads(self) -> list[tuple[str, str, str]]:
        """(unloaded model, reason, model that needs its memory) of each unload."""
        found = [event for event in self.notices if isinstance(event, ModelUnloading)]
        return [(event.model, event.reason, event.for_model) for event in found]

    def apply(self, *specs: ModelSpec) -> None:
        self.catalog.apply(registry_of(*specs))


@asynccontextmanager
async def pooled(
    folder: Path,
    *specs: ModelSpec,
    runtime: Path | None = None,
    capacity: float = 100,
    policy: Policy | None = None,
    residency: ResidencyPolicy | None = None,
    fetch: Fetch | None = None,
    budget: Mapping[str, int] | None = None,
) -> AsyncIterator[Pooled]:
    """Run a pool. ``capacity``: the number of models of the first one's size that fit into memory."""
    path = server(folder) if runtime is None else runtime
    environ = dict(os.environ)
    here = next((spec for spec in specs if not spec.is_remote), None)
    needs = (
        1 << 30 if here is None else estimate_model(here, {"ram": 1 << 50}, str(path), environ).needs["ram"]
    )
    bus = Bus()
    run_folder = folder / "run"
    run_folder.mkdir(mode=0o700, exist_ok=True)
    options = PoolOptions(
        budget=budget or {"ram": int(needs * capacity)},
        policy=policy or Policy(drain_timeout_s=5.0),
        residency=residency or ResidencyPolicy(time_slice_s=0.2),
        runtime=str(path),
        environ=environ,
    )
    pool = Pool(options, Runners(bus, run_folder, log_path=lambda model: None), bus, fetch)
    pooled_models = Pooled(pool, Catalog(registry_of(*specs), pool), needs)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pool.run(), name="pool")
        await pool.running.wait()
        try:
            yield pooled_models
        finally:
            pool.ask_stop(now=True)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await pool.ended()
            finally:
                running.cancel()


def with_context(spec: ModelSpec, ctx_size: int) -> ModelSpec:
    """The same model with another context, which needs another process."""
    return replace(spec, settings=structs.replace(spec.settings, ctx_size=ctx_size))
