"""The facts about a model of the pool at one moment (pure).

``catalog/collect.py`` collects them. Everything that shows models uses it: ``/v1/models`` (also for other
nodes), ``status``, ``ps``, ``why``, the memory and the gauges.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Reduction
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.eviction_policy import Grounds, Phase
from llamasup.core.pool.shown_state import LISTED_STATUS, ListedStatus, ShownState
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.plan_protocol import ChildPlan
from llamasup.core.supervision.states import LLAMA_SERVER, Record, State
from llamasup.core.system.process.child import Exit


class ProcessInfo(Struct, frozen=True):
    """A process of a model. ``diagnosis`` and ``exit`` are those of the last unexpected exit."""

    state: State = State.STOPPED
    generation: int = 0
    pid: int | None = None
    plan: ChildPlan | None = None
    load: LoadProgress | None = None
    restarts: int = 0
    in_flight: int = 0
    busy: int = 0
    """The permits that requests hold."""
    diagnosis: Diagnosis | None = None
    exit: Exit | None = None
    events: tuple[Record, ...] = ()


class ModelInfo(Struct, frozen=True):
    """A model. Times are in seconds from now; None: not due, or not known."""

    spec: ModelSpec
    state: ShownState = ShownState.STOPPED
    phase: Phase = Phase.ABSENT
    is_default: bool = False
    facts: ModelFacts | None = None
    """The facts of its file; None until the file was read."""
    sees: bool = False
    """It accepts images."""
    processes: tuple[ProcessInfo, ...] = ()
    """The nearest to serving first."""
    old_processes: tuple[ProcessInfo, ...] = ()
    """They only finish their requests."""
    unavailable: HttpError | None = None
    """Why no process serves now."""
    permits: int = 0
    """The number of requests that the serving processes take at a time; ``busy`` is how many they have."""
    busy: int = 0
    in_flight: int = 0
    queued: int = 0
    slots: int | None = None
    max_concurrent: int | None = None
    """The requests that run at a time, where the user limits them."""
    reduced: tuple[Reduction, ...] = ()
    needs: Mapping[str, int] = {}
    """The bytes by device that the pool charges for it."""
    sized_needs: Mapping[str, int] = {}
    """The bytes by device of the last estimate."""
    problem: str = ""
    """Why it cannot be loaded, with ``remedy``."""
    remedy: str = ""
    wait: LoadProgress | None = None
    """The wait before its processes start."""
    waits: Grounds | None = None
    """Why the policy makes it wait."""
    overdue_in_s: float | None = None
    """Until busy models are unloaded for it."""
    download: str = ""
    """The progress of its download."""
    retry_in_s: float | None = None
    restart_in_s: float | None = None
    unload_in_s: float | None = None
    """Until it is unloaded if no request arrives before."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def program(self) -> str:
        """The name of the program that serves it."""
        return LLAMA_SERVER if self.spec.engine is None else self.spec.engine.program

    @property
    def plan(self) -> ChildPlan | None:
        """The plan of its process that is nearest to serving."""
        return self.processes[0].plan if self.processes else None

    @property
    def load(self) -> LoadProgress | None:
        """The progress of its load, or of the wait before it."""
        return self.wait or (self.processes[0].load if self.processes else None)

    @property
    def served_ctx_size(self) -> int | None:
        """The context of one request, while it serves."""
        return self.plan.ctx_size if self.phase is Phase.RESIDENT and self.plan is not None else None

    @property
    def listed_status(self) -> ListedStatus:
        return LISTED_STATUS[self.phase]

    @property
    def public_problem(self) -> str:
        """Why it cannot be loaded, for clients."""
        return self.spec.public_problem(self.problem) if self.problem else ""

    @property
    def all_processes(self) -> tuple[ProcessInfo, ...]:
        return (*self.processes, *self.old_processes)
