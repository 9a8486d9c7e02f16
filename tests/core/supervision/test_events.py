"""The JSON of each event: the public contract (docs/design.md, Events)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from llamasup.core.http.address import TcpAddress, UnixAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.plan_limits import Adjustment, Change, PlanLimits
from llamasup.core.models.spec import Changes
from llamasup.core.supervision.events import (
    Bus,
    ConfigRejected,
    Downloading,
    LoadFailed,
    LoadProgressed,
    ModelsChanged,
    ModelUnloading,
    PublishedEvent,
    Ready,
    ServerExited,
    ServerWarned,
    StateChanged,
    Stopped,
    as_json,
)
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import State
from llamasup.core.system.process.child import Exit
from llamasup.errors import ConfigInvalid, DoesNotFit, UsageInvalid
from tests.kit.paths import ROOT

CRASH = Diagnosis("killed", "it was killed", "look at the log", (), deterministic=False, exit_code=75)
STEP = Adjustment(1, 3, (Change("--parallel", "4", "2"),), PlanLimits(parallel=2))
EXITED = {
    "event": "exit",
    "model": "a",
    "cause": "killed",
    "message": "it was killed",
    "remedy": "look at the log",
    "restart_in_s": 0.5,
    "generation": 2,
}
STEP_JSON = {"step": 1, "most_steps": 3, "changes": [{"setting": "--parallel", "before": "4", "after": "2"}]}
CHANGES = ("added", "removed", "changed", "retouched", "unchanged", "settings", "next_start", "renamed")
NO_CHANGES: dict[str, list[str]] = {name: [] for name in CHANGES}
EVENTS: tuple[tuple[PublishedEvent, dict[str, Any]], ...] = (
    (StateChanged("a", State.READY, 2), {"event": "state", "model": "a", "state": "ready", "generation": 2}),
    (ServerExited("a", 2, Exit(None, "SIGKILL"), CRASH, 0.5), {**EXITED, "code": None, "signal": "SIGKILL"}),
    (
        ServerExited("a", 2, None, replace(CRASH, adjustment=STEP), 0.5),
        {**EXITED, "code": None, "signal": None, "adjustment": STEP_JSON},
    ),
    (
        ServerWarned("a", 2, "no draft", "drop it"),
        {"event": "warning", "model": "a", "generation": 2, "message": "no draft", "remedy": "drop it"},
    ),
    (
        LoadProgressed("a", 2, LoadProgress(43.2, 12.5, 8.0004, "the disk is slow")),
        {
            "event": "progress",
            "model": "a",
            "generation": 2,
            "percent": 43.2,
            "eta_s": 12.5,
            "elapsed_s": 8.0,
            "reason": "the disk is slow",
        },
    ),
    (ModelUnloading("a", "ttl"), {"event": "unload", "model": "a", "reason": "ttl"}),
    (ModelUnloading("a", "memory", "b"), {"event": "unload", "model": "a", "reason": "memory", "for": "b"}),
    (
        LoadFailed("a", DoesNotFit("too large", remedy="Use less.")),
        {
            "event": "failed",
            "model": "a",
            "cause": "does_not_fit",
            "message": "too large",
            "remedy": "Use less.",
            "exit_code": 71,
        },
    ),
    (
        LoadFailed(None, UsageInvalid("no such option")),
        {
            "event": "failed",
            "model": None,
            "cause": "usage",
            "message": "no such option",
            "remedy": "",
            "exit_code": 2,
        },
    ),
    (
        Downloading("a", 5, None, 2),
        {"event": "download", "model": "a", "done_bytes": 5, "total_bytes": None, "bytes_per_s": 2},
    ),
    (ModelsChanged(Changes(added=("b",)), ("a", "b")), {"event": "models", **NO_CHANGES, "added": ["b"]}),
    (
        ConfigRejected(ConfigInvalid("no such key", remedy="Remove it.")),
        {"event": "config", "ok": False, "message": "no such key", "remedy": "Remove it.", "details": []},
    ),
    (
        Ready(TcpAddress("127.0.0.1", 8080), 7, ("a",)),
        {
            "event": "ready",
            "url": "http://127.0.0.1:8080",
            "host": "127.0.0.1",
            "port": 8080,
            "pid": 7,
            "models": ["a"],
        },
    ),
    (
        Ready(UnixAddress("/run/a.sock"), 7, ()),
        {
            "event": "ready",
            "url": UnixAddress("/run/a.sock").url,
            "host": "/run/a.sock",
            "port": None,
            "pid": 7,
            "models": [],
        },
    ),
    (
        Ready(UnixAddress("/run/a.sock"), 7, (), TcpAddress("127.0.0.1", 11434)),
        {
            "event": "ready",
            "url": UnixAddress("/run/a.sock").url,
            "host": "/run/a.sock",
            "port": None,
            "pid": 7,
            "models": [],
            "ollama": "http://127.0.0.1:11434",
        },
    ),
    (Stopped(), {"event": "stopped"}),
)


@pytest.mark.parametrize(("event", "fields"), EVENTS)
def test_event_has_these_fields(event: PublishedEvent, fields: dict[str, Any]) -> None:
    assert as_json(event) == {"protocol": 1, **fields}


def test_every_kind_of_event_is_tested() -> None:
    assert {type(event) for event, _ in EVENTS} == set(get_args(PublishedEvent))


def test_listener_gets_every_event_until_unsubscribed() -> None:
    bus, first, second = Bus(), list[PublishedEvent](), list[PublishedEvent]()
    bus.listen(first.append)
    bus.listen(listener := second.append)
    bus.publish(Stopped())
    bus.unsubscribe(listener)
    bus.publish(Stopped())
    assert (first, second) == ([Stopped(), Stopped()], [Stopped()])


def test_contract_has_a_line_with_the_fields_of_each_event() -> None:
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    section = page.partition("### Events")[2].partition("\n### ")[0]
    lines, _, notes = section.partition("\n- ")
    rows = {line.split('"')[3]: line for line in lines.splitlines() if line.startswith('    {"event"')}
    for event, _ in EVENTS:
        shown = as_json(event)
        for field in shown:
            assert f'"{field}"' in rows[shown["event"]] or f"`{field}`" in notes or f'"{field}"' in notes
