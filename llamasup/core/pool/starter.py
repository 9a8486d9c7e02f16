"""Plans the processes of a model, one for each replica (pure)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.attempts import Planner
from llamasup.core.planning.facts import Launch, with_name
from llamasup.core.planning.memory.shares import MemoryBudget
from llamasup.core.supervision.plan_protocol import AnyPlanMaker, ChildPlan
from llamasup.core.supervision.runner import prober_of

if TYPE_CHECKING:
    from llamasup.core.llama_server.client import Prober


class PlannerFactory(Protocol):
    def __call__(
        self, name: str, number: int, folder: Path, prefix: str, share: Callable[[], MemoryBudget]
    ) -> AnyPlanMaker:
        """The planner of one replica. ``name``: of the model. ``folder``: the run folder, where its files
        begin with ``prefix``. ``share``: its part of the memory now.
        """
        ...


class Starter(Struct, frozen=True):
    """The options of the runners of a model.

    ``cwd``: of the processes (default: the run folder). ``awaits_memory``: see ``InstanceRunner``.
    """

    planner: PlannerFactory
    cwd: Path | None = None
    prober: Callable[[ChildPlan], Prober] = prober_of
    awaits_memory: bool = False


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
