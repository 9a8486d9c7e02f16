"""The interface between a runner and a planner. There are four planners: for a model, for ``wrap``, for
another program (features/command) and for an RPC worker. The last three choose no sizes, and share
``FixedPlan`` and ``FixedPlanner``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from llamasup.core.gguf.facts import ModelClass
from llamasup.core.http.address import Address, TcpAddress
from llamasup.core.llama_server.argv_builder import Reason
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.log_lines import Drafted
from llamasup.core.llama_server.plan_limits import Adjustment, Reduction
from llamasup.core.llama_server.slots.policy import KeptSlots
from llamasup.core.llama_server.warmup import WarmUpRequest
from llamasup.core.planning.measured.load_times import LoadFacts, LoadTimes


class ChildPlan(Protocol):
    """The plan of one child says how to start, reach and probe it: a ``LaunchPlan`` or a ``FixedPlan``."""

    @property
    def argv(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def address(self) -> Address: ...
    @property
    def api_key(self) -> str | None:
        """The child's own key, which the proxy sends. None: it needs none, or clients send theirs."""
        ...

    @property
    def model_class(self) -> ModelClass: ...
    @property
    def checked(self) -> bool:
        """Whether the plan was checked against free memory; then llama-server's own fit warning counts."""
        ...

    @property
    def parallel(self) -> int | None:
        """The number of slots; None: unknown."""
        ...

    @property
    def ctx_size(self) -> int | None: ...
    @property
    def shared_ctx_size(self) -> int:
        """The tokens of one context that all slots share; 0: each slot has its own, or that is unknown."""
        ...

    @property
    def slots(self) -> KeptSlots | None:
        """The folder for saved slots; None: slots are not saved."""
        ...

    @property
    def nice(self) -> int | None:
        """The nice value of the process. None: the nice value of llamasup."""
        ...

    @property
    def ignores_sigpipe(self) -> bool:
        """Whether the process is started with SIGPIPE ignored. Otherwise rpc-server exits when it answers a
        client that has disconnected (b11434).
        """
        ...

    @property
    def device(self) -> str | None:
        """The device that it computes on, as in ``LaunchPlan.device``."""
        ...

    @property
    def reduced(self) -> tuple[Reduction, ...]:
        """The values that are smaller than preferred, or than the user asked for."""
        ...

    @property
    def workers(self) -> tuple[str, ...]:
        """The RPC workers that it uses."""
        ...

    @property
    def build(self) -> str:
        """The version of the program; empty: unknown."""
        ...

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """(message, remedy), for the user at the start."""
        ...


class PlanMaker(Protocol):
    """Makes the plans of one model and records their loads. The plans that it gets are its own."""

    def plan(self, generation: int) -> Any:
        """Runs in a thread. Raises LlamasupError."""
        ...

    def step_down(self, made: Any, diagnosis: Diagnosis) -> Adjustment | None: ...

    def load_facts(self, made: Any) -> LoadFacts: ...

    def served(
        self,
        made: Any,
        log: Sequence[str],
        *,
        resident_bytes: int | None,
        generated: bool,
        times: LoadTimes | None = None,
    ) -> None:
        """Runs in a thread. ``times``: of its load, without its runtime and key."""
        ...

    def name_lost(self, made: Any, diagnosis: Diagnosis) -> Diagnosis:
        """Runs in a thread, after the unexpected end of a child with RPC workers."""
        ...

    def drafted(self, made: Any, drafted: Drafted) -> None:
        """Runs in a thread, at the end of the child."""
        ...


class FixedPlan(Struct, frozen=True):
    """A ``ChildPlan`` whose sizes llamasup does not choose."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: Address
    api_key: str | None = None
    model_class: ModelClass = ModelClass.DECODER
    checked: bool = False
    parallel: int | None = None
    ctx_size: int | None = None
    shared_ctx_size: int = 0
    slots: KeptSlots | None = None
    nice: int | None = None
    ignores_sigpipe: bool = False
    device: str | None = None
    reduced: tuple[Reduction, ...] = ()
    workers: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()
    build: str = ""


class EnginePlan(FixedPlan, frozen=True, kw_only=True):
    """The plan of one process of another program (``settings.model.Engine``), with a log of its own.

    ``warm_up``: the request that proves a start; None: no request does. ``stop`` runs the command that stops
    the program, and returns why that failed, or nothing; it blocks. None: SIGTERM stops the program.
    """

    warm_up: WarmUpRequest | None = None
    stop: Callable[[], str] | None = None


class WorkerPlan(FixedPlan, frozen=True, kw_only=True):
    """The plan of one generation of an RPC worker. ``limit_bytes``: as in ``WorkerLine``."""

    address: TcpAddress
    limit_bytes: int | None
    reasons: tuple[Reason, ...]
    ignores_sigpipe: bool = True  # rpc-server would end if a client disconnects early (b11434)


class FixedPlanner:
    """A ``PlanMaker`` without ``plan``, whose plans have no smaller ones. It keeps only the last times."""

    _times: LoadTimes | None = None

    def step_down(self, made: Any, diagnosis: Diagnosis) -> Adjustment | None:
        return None

    def load_facts(self, made: Any) -> LoadFacts:
        return LoadFacts(earlier=self._times)

    def served(
        self,
        made: Any,
        log: Sequence[str],
        *,
        resident_bytes: int | None,
        generated: bool,
        times: LoadTimes | None = None,
    ) -> None:
        """Keep the times: there is nothing to plan."""
        self._times = times or self._times

    def name_lost(self, made: Any, diagnosis: Diagnosis) -> Diagnosis:
        """Unchanged: the workers of a given command line are not known."""
        return diagnosis

    def drafted(self, made: Any, drafted: Drafted) -> None:
        """Keeps nothing."""
