"""The diagram of the states of an instance, from the transition table.

It is computed: every event is applied to every reachable state, for servers with and without a warm-up, with
and without kept slots, and with and without another try after a crash loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment, PlanLimits
from llamasup.core.supervision import states
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.state_machine import TABLE, advance
from llamasup.core.supervision.states import Event, Instance, Policy, State

CRASH = Diagnosis("killed", "", "", (), deterministic=False, exit_code=75)
VERDICTS = (
    CRASH,
    replace(CRASH, deterministic=True),
    replace(CRASH, adjustment=Adjustment(1, 3, (), PlanLimits())),
)
POLICIES = tuple(
    Policy(warm_up=warm_up, restart=RestartPolicy(half_open_s=half_open_s))
    for warm_up in (True, False)
    for half_open_s in (None, 300.0)
)
ASKED = (states.StartRequested, states.StopRequested, states.KillRequested, states.RestartRequested)
WITH_VERDICT = (
    states.SpawnFailed,
    states.WarmupFailed,
    states.StartupFailureLogged,
    states.LivenessFailed,
    states.Exited,
)


def events_at(instance: Instance) -> Iterator[Event]:
    for kind in TABLE[instance.state]:
        if kind in ASKED:
            yield kind()
        elif kind is states.TimerFired:
            yield states.TimerFired(instance.timer_id)
        elif kind is states.Spawned:
            yield from (states.Spawned(instance.generation, 1, keeps_slots=keeps) for keeps in (False, True))
        elif kind in WITH_VERDICT:
            yield from (kind(instance.generation, verdict) for verdict in VERDICTS)
        else:
            yield kind(instance.generation)


def alike(instance: Instance) -> Instance:
    """``instance`` without the fields that do not affect later transitions."""
    # Further ones make no difference, and their generations make none.
    crashes = tuple((at_s, 1) for at_s, _ in instance.crashes[: RestartPolicy().most_crashes + 1])
    return replace(instance, generation=1, timer_id=1, restarts=0, last=None, crashes=crashes)


def edges() -> dict[tuple[State, State], set[str]]:
    found: dict[tuple[State, State], set[str]] = {}
    for policy in POLICIES:
        seen, todo = {alike(Instance())}, [Instance()]
        while todo:
            here = todo.pop()
            for event in events_at(here):
                there, _ = advance(here, event, policy, now_s=0.0, roll=0.5)
                if there.state is not here.state:
                    found.setdefault((here.state, there.state), set()).add(type(event).__name__)
                if alike(there) not in seen:
                    seen.add(alike(there))
                    todo.append(there)
    return found


def diagram() -> str:
    order = list(State)
    lines = ["stateDiagram-v2", "    [*] --> stopped"]
    for (before, after), names in sorted(
        edges().items(), key=lambda edge: (order.index(edge[0][0]), order.index(edge[0][1]))
    ):
        lines.append(f"    {before} --> {after}: {', '.join(sorted(names))}")
    return "\n".join([*lines, ""])
