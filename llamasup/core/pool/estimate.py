"""Sizes a model: downloads it if it is missing, and estimates its memory with a plan for it alone.

The result says how its processes are started, one for each replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.hub.remote_file import Listener
from llamasup.core.models.folder import look_at
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.facts import Launch, prepare, read_given, sibling_projector, with_name
from llamasup.core.planning.ladder import Admission
from llamasup.core.planning.memory.shares import MemoryBudget, needs_of
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.planner import Planner
from llamasup.core.supervision.plan_protocol import ChildPlan, PlanMaker
from llamasup.core.supervision.runner import prober_of
from llamasup.core.supervision.states import LLAMA_SERVER
from llamasup.errors import LlamasupError, ModelInvalid

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober
    from llamasup.core.pool.options import PoolOptions

Fetch = Callable[[str, Listener], Awaitable[Path]]
"""(reference, progress listener) → the file. Raises a LlamasupError if the download fails."""

_log = logging.getLogger(__name__)
_NOWHERE = Path("/nonexistent")


class PlannerFactory(Protocol):
    def __call__(
        self, name: str, number: int, folder: Path, prefix: str, share: Callable[[], MemoryBudget]
    ) -> PlanMaker:
        """The planner of one replica. ``name``: of the model. ``folder``: the run folder, where its files
        begin with ``prefix``. ``share``: its part of the memory now.
        """
        ...


class Starter(Struct, frozen=True):
    """The options of the runners of a model.

    ``cwd``: of the processes (default: the run folder). ``awaits_memory``, ``program``: see
    ``InstanceRunner``.
    """

    planner: PlannerFactory
    cwd: Path | None = None
    prober: Callable[[ChildPlan], Prober] = prober_of
    awaits_memory: bool = False
    program: str = LLAMA_SERVER


class SizedModel(Struct, frozen=True):
    """The facts about ``spec`` before its first start. ``launch``: None for a given command line. ``needs``:
    bytes by device, of all its replicas. ``found``: ``spec`` with the identity of its downloaded file.
    """

    spec: ModelSpec
    launch: Launch | None
    needs: Mapping[str, int]
    found: ModelSpec
    starter: Starter

    @property
    def facts(self) -> ModelFacts | None:
        return None if self.launch is None else self.launch.model

    @property
    def sees(self) -> bool:
        """It accepts images."""
        return self.launch is not None and self.launch.sees

    def is_of(self, spec: ModelSpec) -> bool:
        """Whether processes started from this match ``spec``."""
        is_same = spec.started_as in (self.spec.started_as, self.found.started_as)
        return is_same and spec.runtime == self.spec.runtime


def estimate_model(
    spec: ModelSpec, budget: Mapping[str, int], runtime: str | None, environ: Mapping[str, str]
) -> SizedModel:
    """Read the model's header and plan it alone in ``budget``. Blocks for some milliseconds.

    Raises the errors of ``prepare`` and ``Planner.check``, such as DoesNotFit.
    """
    launch = prepare_listed(spec, runtime=runtime, environ=environ)
    needs: Counter[str] = Counter()
    for planner, admission, own in admissions(spec, launch, budget):
        if (refused := planner.refused(admission)) is not None:
            raise refused
        needs.update(own)
    return SizedModel(spec, launch, dict(needs), _as_found(spec, launch), planned(launch, spec))


def admissions(
    spec: ModelSpec, launch: Launch, budget: Mapping[str, int]
) -> Iterator[tuple[Planner, Admission[LaunchPlan], Mapping[str, int]]]:
    """Plan the model alone in ``budget``, once for the replicas that use the same devices.

    Yields the planner, its plan, and the needs of these replicas: bytes by device.
    """
    share = share_of(spec, budget, alone=True)
    replicas: dict[tuple[str, ...], list[int]] = {}  # their numbers by their devices
    for number in range(spec.replicas):
        replicas.setdefault(devices_of(spec, number), []).append(number)
    for numbers in replicas.values():
        planner = Planner(with_devices(launch, spec, numbers[0]), _NOWHERE, budget=lambda: share)
        admission = planner.admission()
        needs = needs_of(admission.plan.memory, planner.devices)
        yield planner, admission, {device: size * len(numbers) for device, size in needs.items()}


def planned(launch: Launch, spec: ModelSpec) -> Starter:
    """Plan each process in its share of the memory."""

    def planner(
        name: str, number: int, folder: Path, prefix: str, share: Callable[[], MemoryBudget]
    ) -> Planner:
        return Planner(with_name(with_devices(launch, spec, number), name), folder, prefix, share)

    return Starter(planner, awaits_memory=True)


def with_devices(launch: Launch, spec: ModelSpec, number: int) -> Launch:
    """The launch of one replica."""
    if spec.replicas == 1 or not spec.options.devices:
        return launch
    extra = (*launch.settings.extra, "--device", ",".join(devices_of(spec, number)))
    return replace(launch, settings=structs.replace(launch.settings, extra=extra))


def devices_of(spec: ModelSpec, number: int) -> tuple[str, ...]:
    """The devices of one replica: each of several replicas uses one device."""
    devices = spec.options.devices or ()
    return devices if spec.replicas == 1 or not devices else (devices[number % len(devices)],)


def _as_found(spec: ModelSpec, launch: Launch) -> ModelSpec:
    """The spec as a registry would make it now that its file is downloaded."""
    if spec.identity:
        return spec
    projector = None if launch.found is None else launch.found.projector
    paired = () if projector is None else (projector.path,)
    paths = (str(launch.model_path), *paired, *spec.options.files)
    states = (state for path in paths for state in look_at(Path(path)).files)
    return replace(spec, identity=tuple(dict.fromkeys(states)))


def share_of(spec: ModelSpec, budget: Mapping[str, int], *, alone: bool = False) -> MemoryBudget:
    """The part of ``budget`` (for all replicas) that one process may use."""
    return MemoryBudget(budget, alone=alone, replicas=spec.replicas, devices=spec.options.devices or ())


def prepare_listed(spec: ModelSpec, *, runtime: str | None, environ: Mapping[str, str]) -> Launch:
    """Prepare a launch with the projector that the registry chose, which lies in an allowed folder (X10). A
    model that was just downloaded has no registry entry yet.
    """
    pair = sibling_projector if spec.listed is None else lambda *_: spec.pairing
    return prepare(spec.source, spec.settings, runtime=runtime, environ=environ, pair=pair)


class Sizer(Protocol):
    async def size(self, spec: ModelSpec, listener: Listener) -> SizedModel:
        """Raises a LlamasupError if the model cannot be loaded. ``listener``: of a download."""
        ...


class ModelSizer:
    """Sizes models with estimates. ``fetch``: None if downloads are off. ``options`` returns the current
    options of the pool.
    """

    def __init__(self, fetch: Fetch | None, options: Callable[[], PoolOptions]) -> None:
        self._fetch = fetch
        self._options = options

    async def size(self, spec: ModelSpec, listener: Listener) -> SizedModel:
        """Raises the errors of ``fetch`` and ``estimate_model``. ``listener``: of a download."""
        try:
            return await self._size(spec, listener)
        except (LlamasupError, asyncio.CancelledError):
            raise
        except Exception as error:
            # Any file of a folder is read here: an unexpected error must not end the other models.
            _log.exception("model %r cannot be read", spec.id)
            raise LlamasupError(
                f"Model {spec.id!r} cannot be read because of a bug in llamasup ({type(error).__name__}).",
                remedy="Report it with the traceback from llamasup's log.",
            ) from error

    async def _size(self, spec: ModelSpec, listener: Listener) -> SizedModel:
        if spec.problem:
            if spec.source and not spec.is_remote:
                await asyncio.to_thread(read_given, spec.source)  # raises a more precise error
            raise ModelInvalid(spec.problem, remedy=spec.remedy)
        if spec.engine is not None:
            budget, environ = self._options().budget, self._options().environ
            found: SizedModel = await asyncio.to_thread(spec.engine.size, spec, budget, environ)
            return found
        local = spec
        if spec.is_remote and self._fetch is not None:
            local = replace(spec, source=str(await self._fetch(spec.source, listener)))
        options = self._options()
        sized = await asyncio.to_thread(
            estimate_model, local, options.budget, spec.runtime or options.runtime, options.environ
        )
        return replace(sized, spec=spec)
