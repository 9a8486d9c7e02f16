"""The state of a model as ``ps``, ``status`` and ``/v1/models`` show it (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.supervision.states import State

AWAY = frozenset({"stopped", "broken"})
"""States of a model that is neither loaded nor requested."""

STATES = frozenset(State) | {"waiting", "downloading", "broken"}
"""The results of ``state_of``."""

# The replica nearest to serving decides the state of the model.
_NEAREST = (
    *(State.READY, State.WARMING, State.LOADING, State.STARTING, State.DRAINING, State.STOPPING),
    *(State.BACKOFF, State.FAILED, State.STOPPED),
)


def nearest(state: State) -> int:
    """A sort key: the smaller, the nearer to serving."""
    return _NEAREST.index(state)


def state_of(phase: Phase, processes: Iterable[State], *, waits_for: str = "", broken: bool = False) -> str:
    """A value of ``State``, or ``waiting``, ``downloading`` or ``broken``.

    ``waits_for``: what a requested model waits for before its start, ``memory`` or ``download``. ``broken``:
    its file cannot be served.
    """
    if phase is Phase.FAILED:
        return "broken" if broken else State.FAILED.value
    if phase is Phase.CORDONED:
        return State.DRAINING.value
    state = min(processes, key=nearest, default=State.STOPPED)
    if state not in {State.STOPPED, State.FAILED}:
        return state.value
    if phase is Phase.UNLOADING:
        return State.STOPPING.value
    if phase is Phase.LOADING:
        return State.STARTING.value
    if waits_for:
        return "downloading" if waits_for == "download" else "waiting"
    return "broken" if broken else State.STOPPED.value
