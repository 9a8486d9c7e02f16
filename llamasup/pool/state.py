"""The one word for how a model does, wherever it is shown: ``ps``, ``status``, ``/v1/models`` (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from llamasup.pool.policy import Phase
from llamasup.supervision.states import State

__all__ = ["AWAY", "nearest", "state_of"]

AWAY = frozenset({"stopped", "broken"})
"""Not loaded, and nobody has asked for it."""

# Of several replicas the one that is nearest to serving speaks for the model.
_NEAREST = (
    *(State.READY, State.WARMING, State.LOADING, State.STARTING, State.DRAINING, State.STOPPING),
    *(State.BACKOFF, State.FAILED, State.STOPPED),
)


def nearest(state: State) -> int:
    """Smaller: nearer to serving."""
    return _NEAREST.index(state)


def state_of(phase: Phase, processes: Iterable[State], *, waits_for: str = "", broken: bool = False) -> str:
    """``processes``: the states of its own. ``waits_for``: what somebody who asked for it waits for before
    its start, ``memory`` or ``download``; ``broken``: its file cannot be served.

    One of the words of ``State``, or ``waiting``, ``downloading``, ``broken``.
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
