"""The state of a model in all that users see: ``ps``, ``status``, ``why``, lists and other nodes (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.supervision.states import State


class ShownState(StrEnum):
    """The state of a model: the state of its process, or why it has no process. The first is the nearest to
    serving.
    """

    READY = "ready"
    WARMING = "warming"
    LOADING = "loading"
    STARTING = "starting"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"
    WAITING = "waiting"
    """It is requested, and waits for memory."""
    DOWNLOADING = "downloading"
    """It is requested, and waits for its file."""
    BROKEN = "broken"
    """Its file cannot be served."""


AWAY: Final = frozenset({ShownState.STOPPED, ShownState.BROKEN})
"""The model is neither loaded nor requested."""
IN_TROUBLE: Final = frozenset({ShownState.FAILED, ShownState.BACKOFF, ShownState.BROKEN})
"""The model has a problem to show."""


class ListedStatus(StrEnum):
    """The state of a model in ``/v1/models``, in the words of llama.cpp's router."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"

    @classmethod
    def of(cls, *, serves: bool) -> ListedStatus:
        return cls.LOADED if serves else cls.UNLOADED


LISTED_STATUS: Final[Mapping[Phase, ListedStatus]] = {
    Phase.ABSENT: ListedStatus.UNLOADED,
    Phase.LOADING: ListedStatus.LOADING,
    Phase.RESIDENT: ListedStatus.LOADED,
    Phase.CORDONED: ListedStatus.LOADED,
    Phase.UNLOADING: ListedStatus.UNLOADED,  # requests wait for it
    Phase.FAILED: ListedStatus.UNLOADED,
}

_NEAREST: Final = tuple(ShownState)


def nearest(state: State) -> int:
    """A sort key: the smaller, the nearer to serving."""
    return _NEAREST.index(ShownState(state.value))


def state_of(
    phase: Phase, processes: Iterable[State], *, waits_for: str = "", broken: bool = False
) -> ShownState:
    """The state of a model. ``waits_for``: what a requested model waits for before its start, ``memory`` or
    ``download``. ``broken``: its file cannot be served.
    """
    if phase is Phase.FAILED:
        return ShownState.BROKEN if broken else ShownState.FAILED
    if phase is Phase.CORDONED:
        return ShownState.DRAINING
    state = state_of_processes(processes)
    if state not in {ShownState.STOPPED, ShownState.FAILED}:
        return state
    if phase is Phase.UNLOADING:
        return ShownState.STOPPING
    if phase is Phase.LOADING:
        return ShownState.STARTING
    if waits_for:
        return ShownState.DOWNLOADING if waits_for == "download" else ShownState.WAITING
    return ShownState.BROKEN if broken else ShownState.STOPPED


def state_of_processes(processes: Iterable[State]) -> ShownState:
    """The state of the process that is nearest to serving."""
    return ShownState(min(processes, key=nearest, default=State.STOPPED).value)
