"""The load history on disk."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from llamasup.core.llama_server.plan_limits import PlanLimits
from llamasup.core.planning.measured.load_history import FailedPlan, LoadHistory, Measurement, Served
from llamasup.core.planning.measured.load_times import LoadTimes
from llamasup.core.planning.measured.stores import (
    add_times_of_runtime,
    load_history,
    save_history,
    times_of_runtime,
)
from llamasup.core.system.storage.folders import state_folder

MEASUREMENT = Measurement("llama-server 1", "a plan", 1.25, 0.5, 1 << 20, 1 << 30, 0)
OOM = FailedPlan(
    "llama-server 1", "a request", PlanLimits(parallel=2), "out_of_memory_host", True, "2026-11-20", 1 << 33
)
KNOWN = LoadHistory((MEASUREMENT,), (OOM,))


@pytest.fixture
def stored(tiny_model: Path) -> Path:
    """The history file of the tiny model."""
    save_history(tiny_model, KNOWN)
    (path,) = (state_folder() / "experience").iterdir()
    return path


def test_history_is_loaded_only_for_its_own_file(tiny_model: Path, stored: Path, tmp_path: Path) -> None:
    assert load_history(tiny_model) == KNOWN
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model.read_bytes())
    assert load_history(other) == LoadHistory()


def test_served_plans_are_loaded(tiny_model: Path) -> None:
    known = LoadHistory(served=(Served("llama-server 1", "a plan"),))
    save_history(tiny_model, known)
    assert load_history(tiny_model) == known


def test_served_plan_of_an_older_version_has_no_date(tiny_model: Path) -> None:
    save_history(tiny_model, LoadHistory(served=(Served("llama-server 1", "a plan", "2026-11-01"),)))
    (path,) = (state_folder() / "experience").iterdir()
    content = path.read_bytes()
    older = content.replace(b',"date":"2026-11-01"', b"")
    assert older != content
    path.write_bytes(older)
    assert load_history(tiny_model) == LoadHistory(served=(Served("llama-server 1", "a plan"),))


def test_link_has_the_history_of_its_target(tiny_model: Path, stored: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_model)
    assert load_history(link) == KNOWN


def test_replaced_model_file_has_no_history(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    save_history(model, KNOWN)
    assert load_history(model) == KNOWN
    model.write_bytes(b"three")
    assert load_history(model) == LoadHistory()


def test_history_is_in_the_state_folder_and_private(stored: Path) -> None:
    assert stored.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert stored.stat().st_mode & 0o077 == 0
    assert stored.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff\x00" * 50,
        lambda content: b"[" * 100_000,
        lambda content: content.replace(b'"lessons":[{', b'"lessons":[7,{'),
        lambda content: content.replace(b'"parallel":2', b'"parallel":"two"'),
        lambda content: content.replace(b'"kv":1.25', b'"kv":null'),
        lambda content: content.replace(b'"parallel":2', b'"parallel":0').replace(b"1.25", b"1e300"),
        lambda content: content.replace(b'"revision":"', b'"revision":"0'),
    ],
)
def test_damaged_history_is_empty_and_is_replaced(damage: object, tiny_model: Path, stored: Path) -> None:
    content = stored.read_bytes()
    damaged = damage(content)  # type: ignore[operator]
    assert damaged != content
    stored.write_bytes(damaged)
    assert load_history(tiny_model) == LoadHistory()
    save_history(tiny_model, KNOWN)
    assert load_history(tiny_model) == KNOWN


def test_history_of_an_older_revision_is_ignored(tiny_model: Path, stored: Path) -> None:
    entry = msgspec.json.decode(stored.read_bytes())
    entry["value"] = {"lessons": [], "setback": None}
    entry["revision"] = "1"
    stored.write_bytes(msgspec.json.encode(entry))
    assert load_history(tiny_model) == LoadHistory()


def test_failed_plan_without_a_count_counts_as_seen_once(tiny_model: Path, stored: Path) -> None:
    entry = msgspec.json.decode(stored.read_bytes())
    del (
        entry["value"]["served"],
        entry["value"]["setbacks"][0]["seen"],
        entry["value"]["setbacks"][0]["failed"],
    )
    stored.write_bytes(msgspec.json.encode(entry))
    assert load_history(tiny_model) == LoadHistory((MEASUREMENT,), (OOM,))


def test_unusable_state_folder_does_not_raise(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    save_history(tiny_model, KNOWN)
    assert load_history(tiny_model) == LoadHistory()


def test_missing_model_has_no_history(tmp_path: Path) -> None:
    save_history(tmp_path / "gone.gguf", KNOWN)
    assert load_history(tmp_path / "gone.gguf") == LoadHistory()


def test_loads_of_all_files_are_kept_by_runtime(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.touch()
    assert times_of_runtime(program) == ()
    times = LoadTimes("llama-server 1", "a plan", 0.5, 4.0, 1.0, 2.0, weights_bytes=1000)
    add_times_of_runtime(program, times)
    add_times_of_runtime(program, msgspec.structs.replace(times, weights_bytes=2000, warm_up_s=-1.0))
    assert times_of_runtime(program) == (msgspec.structs.replace(times, key="1000"),)  # the other is damaged
    assert times_of_runtime(tmp_path / "missing") == ()
