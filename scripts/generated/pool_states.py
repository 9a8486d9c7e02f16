"""The diagram of the states of a model of the pool, from its table.

It is computed: every event is applied to every reachable model, with two specs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool import model_states as states
from llamasup.core.pool.model_states import Event, Model, ModelState, Processes
from llamasup.core.pool.model_table import TABLE, Place, advance_model, is_stale, place_of
from llamasup.errors import LlamasupError

ERROR = LlamasupError("It failed.")
ANSWER = HttpError(503, "It failed.")
SPECS = (ModelSpec("a", "one.gguf"), ModelSpec("a", "two.gguf"))
UNPROVEN = replace(SPECS[0], runtime="new", unproven=True)


class Plan(Struct, frozen=True):
    """An ``Estimate``."""

    spec: ModelSpec
    needs: Mapping[str, int] = MappingProxyType({"ram": 1})

    def is_of(self, spec: ModelSpec, /) -> bool:
        return (spec.source, spec.runtime) == (self.spec.source, self.spec.runtime)


def events_at(model: Model, specs: Sequence[ModelSpec]) -> Iterator[Event]:
    """Every event that the model can get: facts only about the sizing and the processes that it has."""
    yield from (states.Wanted(), states.Unwanted(), states.RetryRequested(), states.BudgetChanged())
    yield from (states.UnloadRequested(), states.RemoveRequested(ANSWER, ERROR))
    yield from (states.StopRequested(ANSWER, ERROR, now) for now in (False, True))
    yield from (kind(spec) for kind in (states.SpecChanged, states.SpecUpdated) for spec in specs)
    yield from (states.LoadGranted(), states.Refused(ERROR), states.Cordoned("b"), states.Uncordoned())
    yield from (states.SwapGranted(fits) for fits in (True, False))
    if model.sizing is not None:
        ticket = model.sizing.ticket
        yield from (states.Sized(ticket, Plan(model.spec)), states.SizingFailed(ticket, ERROR))
        yield states.DownloadProgressed(ticket, ANSWER)
    for processes in (model.current, model.old):
        if processes is not None:
            yield from events_of(processes)


def events_of(processes: Processes) -> Iterator[Event]:
    yield states.ProcessesStarting(processes.id)
    yield from (states.ProcessesServing(processes.id, complete) for complete in (True, False))
    yield from (states.ProcessesFailed(processes.id, ERROR, ANSWER, settled) for settled in (True, False))
    yield states.ProcessesReleased(processes.id)
    yield states.Measured(processes.id)
    yield from (states.Proven(processes.id), states.Disproven(processes.id, ERROR))


def alike(model: Model) -> Model:
    """``model`` with small numbers, which do not affect later transitions."""
    numbered = replace(model, made=3)
    if model.sizing is not None:
        numbered = replace(numbered, sizing=replace(model.sizing, ticket=3))
    if model.current is not None:
        numbered = replace(numbered, current=replace(model.current, id=1))
    if model.old is not None:
        numbered = replace(numbered, old=replace(model.old, id=2))
    return numbered


def reachable(specs: Sequence[ModelSpec] = SPECS) -> Iterator[tuple[Model, Event, Model]]:
    """Every transition of every model that is reachable with these specs."""
    seen: set[str] = set()
    todo = [alike(Model(specs[0]))]
    while todo:
        here = todo.pop()
        for event in events_at(here, specs):
            if is_stale(here, event):
                continue
            there, _ = advance_model(here, event)
            yield here, event, there
            if (known := state_of(alike(there))) not in seen:
                seen.add(known)
                todo.append(alike(there))


def state_of(model: Model) -> str:
    """All fields, as a key."""
    return repr([getattr(model, name) for name in model.__struct_fields__])


def edges() -> dict[tuple[Place, Place], set[str]]:
    found: dict[tuple[Place, Place], set[str]] = {}
    for here, event, there in reachable((*SPECS, UNPROVEN)):
        if place_of(here) is not place_of(there):
            found.setdefault((place_of(here), place_of(there)), set()).add(type(event).__name__)
    return found


def name_of(place: Place) -> str:
    """A step of a rollout has the name of a state, such as ``stopping``, with a prefix."""
    return place.value if isinstance(place, ModelState) else f"swap_{place.value}"


def diagram() -> str:
    order = list(TABLE)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> absent"]
    lines += ["    state rolling_out {"]
    lines += [f"        {name_of(place)}" for place in order if not isinstance(place, ModelState)]
    lines += ["    }"]
    drawn = edges()
    ends = (states.RemoveRequested.__name__, states.StopRequested.__name__)
    for before, after in sorted(drawn, key=lambda edge: (order.index(edge[0]), order.index(edge[1]))):
        names = drawn[before, after].difference(ends)
        if names:
            lines.append(f"    {name_of(before)} --> {name_of(after)}: {', '.join(sorted(names))}")
    return "\n".join([*lines, "```"])
