"""The interface between a runner and a planner. There are two planners: for a model and for ``wrap``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from llamasup.gguf.facts import ModelClass
from llamasup.http.address import Address
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.draft_log import Drafted
from llamasup.llama_server.plan_limits import Adjustment, Reduction
from llamasup.llama_server.slots.policy import KeptSlots
from llamasup.planning.measured.load_times import LoadFacts, LoadTimes

__all__ = ["AnyPlanMaker", "ChildPlan", "PlanMaker"]


class ChildPlan(Protocol):
    """How to start, reach and probe one child: ``planning.plan.LaunchPlan`` or ``WrappedPlan``."""

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
        """None: unknown."""
        ...

    @property
    def ctx_size(self) -> int | None: ...
    @property
    def slots(self) -> KeptSlots | None:
        """Where the slots are saved; None: nowhere."""
        ...

    @property
    def nice(self) -> int | None:
        """The nice value of the process; None: that of llamasup."""
        ...

    @property
    def ignores_sigpipe(self) -> bool:
        """Whether the process is started with SIGPIPE ignored."""
        ...

    @property
    def device(self) -> str | None:
        """The device that it computes on, as in ``LaunchPlan.device``."""
        ...

    @property
    def reduced(self) -> tuple[Reduction, ...]:
        """What is smaller than preferred, or than the user asked for."""
        ...

    @property
    def workers(self) -> tuple[str, ...]:
        """The RPC workers that it uses."""
        ...

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """(message, remedy), for the user at the start."""
        ...


P = TypeVar("P", bound=ChildPlan)


class PlanMaker(Protocol[P]):
    """Makes the plans of one model and records their loads."""

    def plan(self, generation: int) -> P:
        """Runs in a thread. Raises LlamasupError."""
        ...

    def step_down(self, made: P, diagnosis: Diagnosis) -> Adjustment | None: ...

    def load_facts(self, made: P) -> LoadFacts: ...

    def served(
        self,
        made: P,
        log: Sequence[str],
        *,
        resident_bytes: int | None,
        generated: bool,
        times: LoadTimes | None = None,
    ) -> None:
        """Runs in a thread. ``times``: of its load, without its runtime and key."""
        ...

    def name_lost(self, made: P, diagnosis: Diagnosis) -> Diagnosis:
        """Runs in a thread, after the unexpected end of a child with RPC workers."""
        ...

    def drafted(self, made: P, drafted: Drafted) -> None:
        """Runs in a thread, at the end of the child."""
        ...


AnyPlanMaker = PlanMaker[Any]
"""The runner passes plans back to the planner that made them, and does not look into the rest."""
