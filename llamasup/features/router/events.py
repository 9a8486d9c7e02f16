"""Turns the events of llamasup into those of llama.cpp's router (pure).

The events are as in the builds b10068 and b10434, and in the source of October 2026: the first event of a
load is ``model_status``, the others are ``status_change``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from llamasup.core.pool.shown_state import ShownState

LOADED: Final = "loaded"
LOADING: Final = "loading"
UNLOADED: Final = "unloaded"

_STATUS: Final[Mapping[str, str]] = {
    ShownState.READY: LOADED,
    ShownState.DRAINING: LOADED,
    ShownState.WARMING: LOADING,
    ShownState.LOADING: LOADING,
    ShownState.STARTING: LOADING,
    ShownState.WAITING: LOADING,
    ShownState.BACKOFF: LOADING,
    ShownState.DOWNLOADING: "downloading",
}
_IN_FAILURE: Final = frozenset({ShownState.FAILED, ShownState.BROKEN})
_NO_CODE: Final = 1
"""The exit code of a failure without one, such as a signal or too little memory."""

Listed = Mapping[str, Any]
"""A model in ``/v1/models``."""


def status_of(state: str) -> str:
    """Return the status of a model in this ``ShownState``."""
    return _STATUS.get(state, UNLOADED)


class RouterEvents:
    """Makes the events of one stream. ``listed`` returns a model as it is now, and None if it is unknown.

    The current state of a model decides, because each of its processes has events.
    """

    def __init__(self, listed: Callable[[str], Listed | None]) -> None:
        self._listed = listed
        self._last: dict[str, str] = {}
        self._exits: dict[str, int] = {}
        self._failed: set[str] = set()

    def translated(self, event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Make the router's events of one event of the contract (docs/design.md)."""
        kind, model = event["event"], event.get("model")
        if kind == "models":
            for removed in event["removed"]:
                self._last.pop(removed, None)
                yield {"model": removed, "event": "model_remove"}
            yield {"model": "*", "event": "models_reload"}
        if not model or (listed := self._listed(model)) is None:
            return
        if kind == "exit":
            self._exits[model] = event["code"] or _NO_CODE
        elif kind == "state" and status_of(event["state"]) == LOADING:
            yield from self._changed(model, event["state"], listed)
        yield from self._changed(model, listed["llamasup"]["state"], listed)
        if kind == "failed" and model not in self._failed:
            yield self._ended(model, failed=True)
        elif kind == "progress" and self._last.get(model) == LOADING:
            yield _progress(model, round((event["percent"] or 0.0) / 100, 3))
        elif kind == "download":
            files = {model: {"done": event["done_bytes"], "total": event["total_bytes"]}}
            yield _event(model, "download_progress", {"progress": files})

    def _changed(self, model: str, state: str, listed: Listed) -> Iterator[Mapping[str, Any]]:
        last, status = self._last.get(model, UNLOADED), status_of(state)
        if status == last:
            return
        self._last[model] = status
        if status == UNLOADED:
            yield self._ended(model, failed=state in _IN_FAILURE)
            return
        self._failed.discard(model)
        if status == LOADED:
            if last == LOADING:
                yield _progress(model, 1.0)
            info = {key: value for key, value in listed.items() if key != "status"}
            yield _event(model, "status_change", {"status": status, "info": info})
            return
        yield _event(model, "model_status" if last == UNLOADED else "status_change", {"status": status})
        if status == LOADING:
            yield _progress(model, 0.0)

    def _ended(self, model: str, *, failed: bool) -> Mapping[str, Any]:
        code = self._exits.pop(model, _NO_CODE)
        if failed:
            self._failed.add(model)
        return _event(model, "status_change", {"status": UNLOADED, "exit_code": code if failed else 0})


def _progress(model: str, value: float) -> Mapping[str, Any]:
    """``value``: 0 to 1. llamasup knows only the whole load, so there is one stage."""
    progress = {"stages": ["text_model"], "current": "text_model", "value": value}
    return _event(model, "status_change", {"status": LOADING, "progress": progress})


def _event(model: str, event: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"model": model, "event": event, "data": data}
