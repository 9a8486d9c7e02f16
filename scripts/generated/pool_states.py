"""The diagram of the states of a model of the pool, from its steps.

It is computed: every step is applied to every reachable model, with two specs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool import model_steps as steps
from llamasup.core.pool import rollout_steps
from llamasup.core.pool.model_states import (
    Model,
    ModelState,
    Place,
    Processes,
    ProcessesStatus,
    RolloutEnd,
    RolloutStep,
)
from llamasup.core.pool.model_steps import Step
from llamasup.errors import LlamasupError

ERROR = LlamasupError("It failed.")
ANSWER = HttpError(503, "It failed.")
SPECS = (ModelSpec("a", "one.gguf"), ModelSpec("a", "two.gguf"))

PLACES: tuple[Place, ...] = (
    *(ModelState.ABSENT, ModelState.SIZING, ModelState.LOADING, ModelState.RESIDENT, ModelState.CORDONED),
    *(step for step in RolloutStep if step not in {RolloutStep.SIZING, RolloutStep.WAITING}),
    *(ModelState.UNLOADING, ModelState.FAILED, ModelState.REMOVED),
)
ENDS = {ModelState.ABSENT, ModelState.UNLOADING, ModelState.FAILED}
FAILURES = {"disprove", "failed", "unload"}
"""Steps that lead to ``ENDS`` from almost every state."""
UNPROVEN = replace(SPECS[0], runtime="new", unproven=True)


class Plan(Struct, frozen=True):
    """An ``Estimate``."""

    spec: ModelSpec
    needs: Mapping[str, int] = MappingProxyType({"ram": 1})

    def is_of(self, spec: ModelSpec, /) -> bool:
        return (spec.source, spec.runtime) == (self.spec.source, self.spec.runtime)


def steps_at(model: Model, specs: Sequence[ModelSpec]) -> Iterator[Step]:
    """Every step that the model can take: facts only about the sizing and the processes that it has."""
    yield from (steps.want, steps.unwant, steps.retry, steps.change_budget, steps.unload)
    yield partial(steps.remove, answer=ANSWER, error=ERROR)
    yield from (partial(steps.stop, answer=ANSWER, error=ERROR, now=now) for now in (False, True))
    yield from (partial(kind, spec=spec) for kind in (steps.change_spec, steps.update_spec) for spec in specs)
    yield from (steps.load, partial(steps.refuse, error=ERROR), partial(steps.cordon, for_id="b"))
    yield from (steps.uncordon, *(partial(rollout_steps.swap, fits=fits) for fits in (True, False)))
    if model.sizing is not None:
        ticket = model.sizing.ticket
        for found in (Plan(model.spec), ERROR):
            yield partial(steps.take_size, ticket=ticket, found=found)
        yield partial(steps.note_download, ticket=ticket, answer=ANSWER)
    for id_ in (processes.id for processes in model.processes):
        yield from (partial(rollout_steps.observe, seen=seen) for seen in reports_of(id_))
        yield from (partial(steps.measure, id_=id_), partial(rollout_steps.prove, id_=id_))
        yield partial(rollout_steps.disprove, id_=id_, error=ERROR)


def reports_of(id_: int) -> Iterator[Processes]:
    yield from (Processes(id_), Processes(id_, ProcessesStatus.STOPPED))
    yield from (Processes(id_, ProcessesStatus.SERVING, complete) for complete in (True, False))
    for settled in (True, False):
        yield Processes(id_, ProcessesStatus.FAILED, error=ERROR, answer=ANSWER, settled=settled)


def name_of_step(step: Step) -> str:
    """The name of its function. A report has the name of its status."""
    if not isinstance(step, partial):
        return step.__name__
    return str(step.keywords["seen"].status) if "seen" in step.keywords else str(step.func.__name__)


def alike(model: Model) -> Model:
    """``model`` with small numbers, and without what does not affect later steps."""
    for_id = model.for_id if model.state is ModelState.CORDONED else ""
    model = replace(model, made=3, for_id=for_id, reason="", rollout_end=RolloutEnd())
    if model.sizing is not None:
        model = replace(model, sizing=replace(model.sizing, ticket=3))
    if model.current is not None:
        model = replace(model, current=Processes(1, model.current.status, model.current.complete))
    if model.old is not None:
        model = replace(model, old=Processes(2, model.old.status))
    return model


def reachable(specs: Sequence[ModelSpec] = SPECS) -> Iterator[tuple[Model, Step, Model]]:
    """Every transition of every model that is reachable with these specs."""
    seen: set[str] = set()
    todo = [alike(Model(specs[0]))]
    while todo:
        here = todo.pop()
        for step in steps_at(here, specs):
            there = step(here)
            yield here, step, there
            if there is not here and (known := state_of(alike(there))) not in seen:
                seen.add(known)
                todo.append(alike(there))


def state_of(model: Model) -> str:
    """All fields, as a key."""
    return repr([getattr(model, name) for name in model.__struct_fields__])


def edges() -> dict[tuple[Place, Place], set[str]]:
    found: dict[tuple[Place, Place], set[str]] = {}
    for here, step, there in reachable((*SPECS, UNPROVEN)):
        if here.place is not there.place:
            found.setdefault((here.place, there.place), set()).add(name_of_step(step))
    return found


def name_of(place: Place) -> str:
    """A step of a rollout has the name of a state, such as ``stopping``, with a prefix."""
    return place.value if isinstance(place, ModelState) else f"swap_{place.value}"


def diagram() -> str:
    lines = ["stateDiagram-v2", "    [*] --> absent"]
    lines += ["    state rolling_out {"]
    lines += [f"        {name_of(place)}" for place in PLACES if not isinstance(place, ModelState)]
    lines += ["    }"]
    drawn = edges()
    for before, after in sorted(drawn, key=lambda edge: (PLACES.index(edge[0]), PLACES.index(edge[1]))):
        names = drawn[before, after] - (FAILURES if after in ENDS else set()) - {"remove", "stop"}
        if names:
            lines.append(f"    {name_of(before)} --> {name_of(after)}: {', '.join(sorted(names))}")
    return "\n".join([*lines, ""])
