"""The control target of a pool: models, each of which can be loaded, unloaded and restarted.

``serve`` has a ``ConfiguredTarget``, ``run`` and ``wrap`` have an ``OnlyModelTarget``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from llamasup._version import __version__
from llamasup.core.control.interface import (
    ConfigAccess,
    ExplainedModels,
    Fetch,
    Nodes,
    ServiceOwner,
    Upgrades,
    refuse_if_stopping,
    shown,
    shut_down,
)
from llamasup.core.http.address import Address
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.access import resolved
from llamasup.core.models.spec import Changes, ModelSpec
from llamasup.core.observability.counters import InstanceGauges, NodeGauges
from llamasup.core.pool.catalog.collect import info_of
from llamasup.core.pool.catalog.status import gauges_of, held_bytes_of, model_status
from llamasup.core.pool.catalog.v1_models import entry_of
from llamasup.core.pool.driver import is_ready_or_settled
from llamasup.core.pool.eviction_policy import ModelSnapshot, Phase
from llamasup.core.pool.model import ManagedModel
from llamasup.core.pool.model_states import ModelState, is_proof_under_way
from llamasup.core.pool.pool import Pool
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.not_serving import failure_of
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import RestartRequested, StartRequested, State
from llamasup.core.system.text import printable
from llamasup.errors import Conflict

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober


class Models(ExplainedModels, Protocol):
    """The models of a pool by their names: a ``Catalog`` or ``OnlyModel``."""

    @property
    def pool(self) -> Pool: ...
    def managed_models(self) -> Iterator[ManagedModel]: ...
    def known(self, model: str, *, create: bool = False) -> ManagedModel:
        """Raises ModelUnknown."""
        ...


class ModelFiles(Protocol):
    """Downloads and removes models, as ``ControlTarget.pull`` and ``remove`` say."""

    def pull(self, name: str) -> Fetch: ...
    async def remove(self, managed: ManagedModel) -> Mapping[str, Any]: ...


class PoolTarget:
    """A ``ControlTarget`` without ``reload``."""

    def __init__(
        self,
        owner: ServiceOwner,
        models: Models,
        address: Address,
        log_path: Callable[[str], Path | None],
    ) -> None:
        self._owner = owner
        self._models = models
        self._address = address
        self._log_path = log_path
        self._started_s = monotonic()
        self.nodes: Nodes | None = None
        """The other nodes, if there are any."""
        self.catalog: ExplainedModels = models
        """The models of the pool, with those in front of them that are not in the pool."""

    @property
    def bus(self) -> Bus:
        return self._models.pool.bus

    # --- state

    def status(self) -> Mapping[str, Any]:
        now = datetime.now(UTC)
        infos = map(info_of, self._models.managed_models())
        return {
            "version": __version__,
            "pid": os.getpid(),
            "url": self._address.url,
            "uptime_s": round(monotonic() - self._started_s, 3),
            "models": [model_status(info, now, _rss_bytes_of) for info in infos],
            "budget": dict(self._models.pool.options.budget),
            "nodes": [] if self.nodes is None else list(self.nodes.status()),
        }

    def gauges(self) -> Sequence[InstanceGauges]:
        """Return the gauges of models that were loaded at least once: a thousand others would be noise."""
        loaded = (managed for managed in self._models.managed_models() if managed.runners)
        return [gauges for managed in loaded for gauges in gauges_of(info_of(managed))]

    def node_gauges(self) -> NodeGauges | None:
        return None if self.nodes is None else self.nodes.gauges()

    async def scrape(self) -> Mapping[str, str]:
        """Read all models at the same time, each from its first replica."""
        texts: dict[str, str] = {}

        async def read(model: str, prober: Prober) -> None:
            async with prober:
                if (text := await prober.metrics()) is not None:
                    texts[model] = text

        asked: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for managed in self._models.managed_models():
                serving = (each for each in managed.runners if each.instance.state is State.READY)
                prober = next(filter(None, (runner.prober() for runner in serving)), None)
                if prober is not None:
                    asked.append(managed.spec.id)
                    tasks.create_task(read(managed.spec.id, prober), name=f"{managed.spec.id}/scrape")
        return {model: texts[model] for model in asked if model in texts}

    async def memory(self) -> Mapping[str, Any]:
        from llamasup.core.pool.catalog.memory import memory_of  # here, to keep the start short

        return await memory_of(self._models.managed_models(), self._models.pool.options.budget)

    @property
    def config(self) -> ConfigAccess | None:
        return None

    def held_bytes(self) -> int:
        held = (managed for managed in self._models.managed_models() if managed.holds_memory)
        return sum(held_bytes_of(info_of(managed)) for managed in held)

    async def plan(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        # Here, to keep the start short: these read configs.
        from llamasup.core.control.what_if import asked_settings, plan_with
        from llamasup.core.pool.catalog.memory import memory_of
        from llamasup.core.pool.what_if import Consequences, needed_and_free

        asked = asked_settings(settings)
        managed, pool = self._known_or_at(model), self._models.pool
        spec = ModelSpec(PurePath(model).stem, model) if managed is None else managed.spec
        sized = None if managed is None or managed.is_outdated else managed.sized
        launch = None if sized is None else sized.launch
        if spec.engine is not None:
            raise spec.engine.unplanned(spec.id)
        if spec.stay.by_command and launch is None:
            raise Conflict(
                f"{spec.id!r} is a command line of its own, which llamasup does not plan.",
                remedy="Plans need `llamasup run` or `llamasup serve`.",
            )
        options = pool.options
        budget: Mapping[str, int]
        free: Mapping[str, int]
        if spec.stay.by_command:
            memory = await memory_of(self._models.managed_models(), {})
            free = budget = {device["name"]: _free_without_models(device) for device in memory["devices"]}
        else:
            budget, free = options.budget, pool.remaining_for(managed)
        # In a thread: files may have to be read.
        planned = await asyncio.to_thread(
            plan_with, spec, launch, asked, budget, options.runtime, options.environ
        )
        found = Consequences()
        if not spec.stay.by_command:
            snapshot = ModelSnapshot(model, {}) if managed is None else managed.snapshot()
            found = pool.consequences_of(snapshot, planned.needs)
        problem = None
        if planned.refused is not None:
            problem = {"message": planned.refused.message, "remedy": planned.refused.remedy}
        elif found.rejected:
            problem = {"message": f"It could never be loaded: {found.rejected}.", "remedy": ""}
        return {
            **planned.shown,
            "devices": needed_and_free(planned.needs, free),
            "evicts": list(found.evicts),
            "problem": problem,
        }

    def _known_or_at(self, model: str) -> ManagedModel | None:
        """The model of this name, or with this file. None for a file that the pool could serve."""
        if not Path(model).is_absolute():
            return self._models.known(model)
        shares_memory = True
        for managed in self._models.managed_models():
            if managed.spec.source == model:
                return managed
            shares_memory = shares_memory and not managed.spec.stay.by_command
        return None if shares_memory else self._models.known(model)

    def log_path(self, model: str) -> Path | None:
        managed = self._models.known(model)
        # A renamed model keeps writing to its first log file.
        return managed.runners[0].log_path if managed.runners else self._log_path(managed.spec.id)

    def why(self, model: str) -> Mapping[str, Any]:
        return self.catalog.why(model)

    def listed(self, model: str) -> Mapping[str, Any]:
        managed = self._models.known(model)
        return entry_of(info_of(managed), resolved(managed.spec))

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        return [decision.as_json() for decision in self._models.pool.decisions.last(limit)]

    # --- changes

    async def load(self, model: str) -> None:
        await self._models.pool.load(self._accept("load", model))

    async def unload(self, model: str) -> None:
        await self._models.pool.unload(self._accept("unload", model))

    async def restart(self, model: str) -> None:
        """Restart the replicas one after the other, so that one always serves. A model that is not loaded, or
        that is being unloaded or replaced, is loaded.
        """
        await self._restart(self._accept("restart", model))

    def pull(self, model: str) -> Fetch:
        self._models.known(model)
        return _nothing_to_do

    async def remove(self, model: str) -> Mapping[str, Any]:
        raise Conflict(
            "llamasup removes models only if it runs as `llamasup serve`.",
            remedy="Use `llamasup rm` on its machine.",
        )

    def upgrade_status(self) -> Mapping[str, Any]:
        raise _no_upgrade()

    async def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        raise _no_upgrade()

    def shutdown(self, *, now: bool = False) -> None:
        shut_down(self._owner, now=now)

    async def _restart(self, managed: ManagedModel) -> None:
        if not can_restart_in_place(managed):
            await self._models.pool.load(managed)
            return
        self._models.pool.note_restart(managed)
        for runner in tuple(managed.runners):
            if not can_restart_in_place(managed):
                raise _unloaded(managed.spec.id)
            await self._serve(runner, RestartRequested())

    async def _serve(self, runner: InstanceRunner, event: RestartRequested | StartRequested) -> None:
        """Wait until the replica serves after ``event``."""
        await runner.submit(event)
        after = await runner.until(is_ready_or_settled)
        if after.state is State.FAILED:
            raise failure_of(after)
        if after.state is State.STOPPED:
            refuse_if_stopping(self._owner)
            raise _unloaded(runner.model)

    def _accept(self, what: str, model: str) -> ManagedModel:
        self.catalog.refuse(what, model)
        managed = self._models.known(model, create=what == "load")
        refuse_if_stopping(self._owner)
        self._owner.control_asks(what, managed.spec.id)
        return managed


class ConfiguredTarget(PoolTarget):
    """``reload`` reads the configuration again; it raises ConfigInvalid. ``files`` downloads and removes."""

    def __init__(
        self,
        owner: ServiceOwner,
        models: Models,
        address: Address,
        log_path: Callable[[str], Path | None],
        reload: Callable[[], Awaitable[Changes]],
        files: ModelFiles,
    ) -> None:
        super().__init__(owner, models, address, log_path)
        self._reload = reload
        self._files = files
        self.make_config: Callable[[], ConfigAccess] | None = None
        """Makes ``config`` at its first use."""
        self._config: ConfigAccess | None = None
        self.make_upgrades: Callable[[], Upgrades | None] | None = None
        """Makes the owner of upgrades at its first use; None without the feature that upgrades."""
        self._upgrades: Upgrades | None = None

    @property
    def config(self) -> ConfigAccess | None:
        if self._config is None and self.make_config is not None:
            self._config = self.make_config()
        return self._config

    def upgrade_status(self) -> Mapping[str, Any]:
        return self.upgrades.status()

    async def upgrade(self, runtime: str, *, dry_run: bool = False) -> Mapping[str, Any]:
        refuse_if_stopping(self._owner)
        if dry_run:
            return await self.upgrades.preview(runtime)
        self._owner.control_asks("upgrade")
        return await self.upgrades.upgrade(runtime)

    async def follow_runtime(self, runtime: str) -> Mapping[str, Any]:
        """Upgrade to the build that a followed path points to (``runtime.watch``)."""
        refuse_if_stopping(self._owner)
        return await self.upgrades.upgrade(runtime)

    @property
    def upgrades(self) -> Upgrades:
        """Raises Conflict without the feature that upgrades."""
        if self._upgrades is None and self.make_upgrades is not None:
            self._upgrades = self.make_upgrades()
        if self._upgrades is None:
            raise _no_upgrade()
        return self._upgrades

    async def reload(self) -> Mapping[str, Any]:
        refuse_if_stopping(self._owner)
        self._owner.control_asks("reload")
        return shown(await self._reload())

    def pull(self, model: str) -> Fetch:
        self.catalog.refuse("pull", model)
        refuse_if_stopping(self._owner)
        fetch = self._files.pull(model)
        self._owner.control_asks("pull", printable(model))
        return fetch

    async def remove(self, model: str) -> Mapping[str, Any]:
        return await self._files.remove(self._accept("rm", model))


class OnlyModelTarget(PoolTarget):
    """The target of ``run`` and ``wrap``: one model, which can be unloaded while its address stays.

    A request for a state that the model already has is not reported to the owner.
    """

    async def load(self, model: str) -> None:
        """Load the model. A crashed one starts at once."""
        managed = self._find(model)
        if managed.serves:
            return
        if not can_restart_in_place(managed):
            await super().load(model)
            return
        self._owner.control_asks("load", managed.spec.id)
        for runner in managed.runners:
            await self._serve(runner, StartRequested())

    async def unload(self, model: str) -> None:
        managed = self._find(model)
        if not (managed.holds_memory or managed.wanted):
            return
        await super().unload(model)
        if managed.wanted:
            raise Conflict(f"{managed.spec.id!r} was loaded again while it was unloading.")

    async def reload(self) -> Mapping[str, Any]:
        """Restart the model with its current file, as there is no configuration. An unloaded model stays
        unloaded.
        """
        managed = next(iter(self._models.managed_models()))
        refuse_if_stopping(self._owner)
        model = (managed.spec.id,)
        if not managed.holds_memory:
            return shown(Changes(unchanged=model))
        self._owner.control_asks("reload", *model)
        await self._restart(managed)
        return shown(Changes(changed=model))

    def _find(self, model: str) -> ManagedModel:
        managed = self._models.known(model)
        refuse_if_stopping(self._owner)
        return managed


def _free_without_models(device: Mapping[str, Any]) -> int:
    """The free memory of a device (``memory``) without its models; all of it, if that is unknown."""
    if device["free_bytes"] is None:
        return int(device["total_bytes"])
    return int(device["free_bytes"]) + sum(model["measured_bytes"] or 0 for model in device["models"])


async def _nothing_to_do(_listener: Listener) -> None:
    """The only model is here."""


def _no_upgrade() -> Conflict:
    return Conflict(
        "Only `llamasup serve` changes its build of llama.cpp while it runs.",
        remedy="Start `llamasup run` or `wrap` again with the new build.",
    )


def _unloaded(model: str) -> Conflict:
    return Conflict(
        f"{model!r} was unloaded while it restarted.",
        remedy=f"Run `llamasup load {model}` to serve it again.",
    )


def can_restart_in_place(managed: ManagedModel) -> bool:
    """Whether the model has a server, or will have one, that keeps its memory."""
    is_replaced = managed.state is ModelState.ROLLING_OUT and not is_proof_under_way(managed.model)
    stays = managed.phase in {Phase.RESIDENT, Phase.LOADING} and not is_replaced
    return stays and any(not runner.instance.is_settled for runner in managed.runners)


def _rss_bytes_of(pid: int) -> int | None:
    from llamasup.core.system.hardware.probe import load_usage

    usage = load_usage(pid)
    return None if usage is None else usage.rss_bytes
