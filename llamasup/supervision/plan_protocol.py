"""What a runner has to know of a plan, and of whoever makes plans: of a model, or of a given command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from llamasup.gguf.facts import ModelClass
from llamasup.http.address import Address
from llamasup.llama_server.diagnosis import Diagnosis
from llamasup.llama_server.plan_limits import Adjustment
from llamasup.llama_server.slots.policy import KeptSlots

__all__ = ["AnyPlanMaker", "ChildPlan", "PlanMaker"]


class ChildPlan(Protocol):
    """How one child is started, reached and tried. ``core.plan.LaunchPlan`` is one."""

    @property
    def argv(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def address(self) -> Address: ...
    @property
    def api_key(self) -> str | None:
        """The child's own, which the proxy sends; None where it needs none, or where clients send theirs."""
        ...

    @property
    def model_class(self) -> ModelClass: ...
    @property
    def checked(self) -> bool:
        """Whether the plan was made to fit the memory; the build's own warning about it counts then."""
        ...

    @property
    def parallel(self) -> int | None:
        """None: not known."""
        ...

    @property
    def ctx_size(self) -> int | None: ...
    @property
    def slots(self) -> KeptSlots | None:
        """What they hold is kept there; None: it ends with the child."""
        ...

    @property
    def device(self) -> str | None:
        """Where it computes, as ``core.plan.LaunchPlan.device``."""
        ...


P = TypeVar("P", bound=ChildPlan)


class PlanMaker(Protocol[P]):
    """Makes the plans of one model and learns from them: ``runtime.planner``, ``runtime.wrapped``."""

    def plan(self, generation: int) -> P:
        """Runs in a thread. Raises LlamasupError."""
        ...

    def step_down(self, made: P, diagnosis: Diagnosis) -> Adjustment | None: ...

    def served(self, made: P, log: Sequence[str], *, resident_bytes: int | None, generated: bool) -> None:
        """Runs in a thread."""
        ...


AnyPlanMaker = PlanMaker[Any]
"""Who runs plans hands them back to whom he has them from, and need not know what else is in them."""
