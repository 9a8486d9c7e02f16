from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llamasup.cli.output.status_table import models_table, summary

LOADED: dict[str, Any] = {
    "id": "qwen",
    "state": "ready",
    "size_bytes": 4_700_000_000,
    "device": "CUDA0",
    "ctx_size": 8192,
    "slots": 4,
    "slots_busy": 1,
    "in_flight": 2,
    "queued": 0,
    "memory": {"ram_bytes": 1 << 30, "vram_bytes": None},
    "until": None,
    "pinned": False,
    "restarts": 0,
    "last_exit": None,
}


def cells(**changes: Any) -> dict[str, str]:
    headings, row = (
        [cell for cell in line.split("  ") if cell]
        for line in models_table([{**LOADED, **changes}]).splitlines()
    )
    return {name.strip(): cell.strip() for name, cell in zip(headings, row, strict=True)}


@pytest.mark.parametrize(
    ("load", "state"),
    [
        (None, "loading"),
        ({"percent": None, "eta_s": None}, "loading"),
        ({"percent": 43.2, "eta_s": 12.3}, "loading 43 %, 12 s"),
        ({"percent": None, "eta_s": 125.0}, "loading 2 min 5 s"),
    ],
)
def test_loading_model_shows_its_progress(load: dict[str, Any] | None, state: str) -> None:
    assert cells(state="loading", load=load)["STATE"] == state


def test_loaded_model_shows_all_columns() -> None:
    assert cells() == {
        "NAME": "qwen",
        "STATE": "ready",
        "SIZE": "4.4 GiB",
        "DEVICE": "CUDA0",
        "CONTEXT": "8192",
        "SLOTS": "1/4",
        "MEMORY": "1.0 GiB",
        "UNTIL": "-",
        "RESTARTS": "0",
    }


@pytest.mark.parametrize(
    ("changes", "column", "shown"),
    [
        ({"memory": {"ram_bytes": 1 << 30, "vram_bytes": 5 << 30}}, "MEMORY", "1.0 GiB + 5.0 GiB VRAM"),
        ({"memory": {"ram_bytes": None, "vram_bytes": None}}, "MEMORY", "-"),
        ({"queued": 3}, "SLOTS", "1/4 +3"),
        ({"slots": None}, "SLOTS", "1"),
        ({"slots": None, "slots_busy": 0}, "SLOTS", "-"),
        ({"pinned": True}, "UNTIL", "pinned"),
        ({"size_bytes": None, "device": None}, "SIZE", "-"),
        ({"id": "a\x1b[2Jb"}, "NAME", "a\\x1b[2Jb"),
    ],
)
def test_special_values_are_shown(changes: dict[str, Any], column: str, shown: str) -> None:
    assert cells(**changes)[column] == shown


def test_time_until_unload_is_counted_down() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=90.5)
    assert cells(until=soon.isoformat())["UNTIL"] in ("in 1 min 30 s", "in 1 min 29 s")
    assert cells(until="2020-01-01T00:00:00+00:00")["UNTIL"] == "in 0 ms"


def test_models_of_older_llamasup_are_shown() -> None:
    assert "old   ready" in models_table([{"id": "old", "state": "ready", "in_flight": 1, "slots": 2}])


def test_failed_model_shows_last_exit_and_remedy() -> None:
    last = {"code": None, "signal": "SIGSEGV", "cause": "crashed", "remedy": "Update it."}
    status = {"version": "1", "pid": 7, "url": "http://127.0.0.1:8080", "uptime_s": 61.0}
    text = summary(status, [{**LOADED, "state": "failed", "last_exit": last}, LOADED])
    assert text.startswith("llamasup 1 (process 7) at http://127.0.0.1:8080, up 1 min 1 s\n")
    assert text.endswith("qwen: crashed (SIGSEGV)\n  → Update it.")
    assert "crashed" not in summary(status, [{**LOADED, "last_exit": last}])  # it serves again
    assert summary(status, []).count("\n") == 0


def test_broken_model_shows_problem_and_remedy() -> None:
    status = {"version": "1", "pid": 7, "url": "http://127.0.0.1:8080", "uptime_s": 61.0}
    broken = {"id": "half", "state": "broken", "problem": "half.gguf: truncated", "last_exit": None}
    assert summary(status, [broken]).endswith("\nhalf: half.gguf: truncated")
    assert summary(status, [{**broken, "remedy": "Get it."}]).endswith("truncated\n  → Get it.")
    assert "truncated" not in summary(status, [{**broken, "state": "ready"}])


def test_narrow_terminal_drops_least_important_columns() -> None:
    lines = models_table([LOADED], 60).splitlines()
    assert lines[0].split() == ["NAME", "STATE", "CONTEXT", "SLOTS", "MEMORY", "UNTIL", "RESTARTS"]
    assert max(map(len, lines)) <= 60
    assert models_table([LOADED], 5).splitlines()[0].split() == ["NAME", "STATE"]
    assert models_table([LOADED], 200) == models_table([LOADED])


def test_long_name_is_shortened_before_columns_are_dropped() -> None:
    long = {**LOADED, "id": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"}
    lines = models_table([long, LOADED], 80).splitlines()
    assert lines[0].split() == ["NAME", "STATE", "CONTEXT", "SLOTS", "MEMORY", "UNTIL", "RESTARTS"]
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("bartowski/Met…-GGUF:Q4_K_M")
    assert long["id"] in models_table([long, LOADED], 200)


def test_models_of_other_nodes_have_the_name_of_their_node() -> None:
    remote = {"id": "tale", "state": "ready", "slots": 2, "slots_busy": 1, "node": "desk"}
    lines = models_table([LOADED, remote]).splitlines()
    assert lines[0].split()[:3] == ["NAME", "NODE", "STATE"]
    assert lines[1].split()[:3] == ["qwen", "-", "ready"]
    assert lines[2].split()[:3] == ["tale", "desk", "ready"]
    assert "1/2" in lines[2]
    assert "NODE" not in models_table([LOADED])


def test_status_says_why_a_node_gets_no_requests() -> None:
    status = {
        "nodes": [
            {"name": "desk", "url": "http://desk", "reason": "nothing listens there", "remedy": "start it"},
            {"name": "door", "url": "http://door", "reason": "it answers 500", "remedy": None},
            {"name": "shelf", "url": "http://shelf", "reason": None, "remedy": None},
        ]
    }
    assert summary(status, []).splitlines()[1:] == [
        "node desk (http://desk): nothing listens there",
        "  → start it",
        "node door (http://door): it answers 500",
    ]
