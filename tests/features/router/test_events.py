"""The events of llama.cpp's router, from those of llamasup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from llamasup.core.pool.shown_state import ShownState
from llamasup.features.router.events import RouterEvents, status_of


def listed(state: str) -> Mapping[str, Any]:
    return {"id": "m", "status": {"value": "loaded"}, "meta": {"n_ctx": 512}, "llamasup": {"state": state}}


def state(name: str, current: str = "") -> tuple[Mapping[str, Any], str]:
    """An event of a process, and the state of the model meanwhile."""
    return {"event": "state", "model": "m", "state": name}, current or name


def of(kind: str, current: str, **fields: Any) -> tuple[Mapping[str, Any], str]:
    return {"event": kind, "model": "m", **fields}, current


def change(status: str, **data: Any) -> Mapping[str, Any]:
    return {"model": "m", "event": "status_change", "data": {"status": status, **data}}


def progress(value: float) -> Mapping[str, Any]:
    return change("loading", progress={"stages": ["text_model"], "current": "text_model", "value": value})


BEGUN = [{"model": "m", "event": "model_status", "data": {"status": "loading"}}, progress(0.0)]
INFO = {key: value for key, value in listed("ready").items() if key != "status"}
LOADED = [progress(1.0), change("loaded", info=INFO)]
EXIT = of("exit", "backoff", code=7)
FAILED = of("failed", "failed")
DONE = of("download", "downloading", done_bytes=5, total_bytes=10)
CASES: Mapping[str, tuple[list[tuple[Mapping[str, Any], str]], list[Mapping[str, Any]]]] = {
    "a load": ([state("starting"), state("loading"), state("warming"), state("ready")], [*BEGUN, *LOADED]),
    "a load that ends before its first event is read": ([state("starting", "ready")], [*BEGUN, *LOADED]),
    "the state at the start of the stream": ([state("ready")], [change("loaded", info=INFO)]),
    "a model that is not loaded": ([state("stopped"), state("failed"), state("broken")], []),
    "the progress of a load": (
        [state("loading"), of("progress", "loading", percent=43.21), of("progress", "loading", percent=None)],
        [*BEGUN, progress(0.432), progress(0.0)],
    ),
    "late progress": ([of("progress", "ready", percent=100.0)], [change("loaded", info=INFO)]),
    "an unload": (
        [state("ready"), state("draining"), state("stopping"), state("stopped")],
        [change("loaded", info=INFO), change("unloaded", exit_code=0)],
    ),
    "a crash": ([state("loading"), EXIT, state("starting"), state("ready")], [*BEGUN, *LOADED]),
    "a failure with a code": (
        [state("loading"), EXIT, state("failed"), FAILED, FAILED],
        [*BEGUN, change("unloaded", exit_code=7)],
    ),
    "a signal": (
        [state("loading"), of("exit", "backoff", code=None), state("failed")],
        [*BEGUN, change("unloaded", exit_code=1)],
    ),
    "a failure before the start": ([FAILED, FAILED], [change("unloaded", exit_code=1)]),
    "a second load after a failure": (
        [FAILED, state("loading"), FAILED],
        [change("unloaded", exit_code=1), *BEGUN, change("unloaded", exit_code=1)],
    ),
    "one of two processes stops": (
        [state("ready"), state("stopping", "ready")],
        [change("loaded", info=INFO)],
    ),
    "a download": (
        [DONE, state("loading")],
        [
            {"model": "m", "event": "model_status", "data": {"status": "downloading"}},
            {
                "model": "m",
                "event": "download_progress",
                "data": {"progress": {"m": {"done": 5, "total": 10}}},
            },
            change("loading"),
            progress(0.0),
        ],
    ),
    "a removed model": (
        [state("ready"), ({"event": "models", "removed": ["m"]}, ""), state("stopped", "")],
        [
            change("loaded", info=INFO),
            {"model": "m", "event": "model_remove"},
            {"model": "*", "event": "models_reload"},
        ],
    ),
    "an event of llamasup itself": (
        [({"event": "failed", "model": None}, ""), ({"event": "stopped"}, "")],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_events_are_those_of_a_router(case: str) -> None:
    seen, expected = CASES[case]
    current = ""
    events = RouterEvents(lambda model: listed(current) if current else None)
    found = []
    for event, current in seen:  # noqa: B007 - the lambda reads it
        found += list(events.translated(event))
    assert found == expected


def test_each_state_has_a_status_of_the_router() -> None:
    assert {status_of(state) for state in ShownState} == {"loaded", "loading", "downloading", "unloaded"}
