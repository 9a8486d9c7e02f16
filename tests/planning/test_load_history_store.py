"""What loads taught, kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from llamasup.llama_server.plan_limits import PlanLimits
from llamasup.planning.load_history import FailedPlan, LoadHistory, Measurement, Served
from llamasup.planning.load_history_store import load, save
from llamasup.system.storage.folders import state_folder

LESSON = Measurement("llama-server 1", "a plan", 1.25, 0.5, 1 << 20, 1 << 30, 0)
SETBACK = FailedPlan(
    "llama-server 1", "a wish", PlanLimits(parallel=2), "out_of_memory_host", True, "2026-11-20", 1 << 33
)
KNOWN = LoadHistory((LESSON,), (SETBACK,))


@pytest.fixture
def kept(tiny_model: Path) -> Path:
    """The file that holds what is known of the tiny model."""
    save(tiny_model, KNOWN)
    (path,) = (state_folder() / "experience").iterdir()
    return path


def test_what_was_recorded_is_recalled_for_that_file_alone(
    tiny_model: Path, kept: Path, tmp_path: Path
) -> None:
    assert load(tiny_model) == KNOWN
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model.read_bytes())
    assert load(other) == LoadHistory()


def test_which_plans_have_served_is_recalled(tiny_model: Path) -> None:
    known = LoadHistory(served=(Served("llama-server 1", "a plan"),))
    save(tiny_model, known)
    assert load(tiny_model) == known


def test_a_plan_that_an_older_version_saw_serving_is_recalled_without_a_date(tiny_model: Path) -> None:
    save(tiny_model, LoadHistory(served=(Served("llama-server 1", "a plan", "2026-11-01"),)))
    (path,) = (state_folder() / "experience").iterdir()
    content = path.read_bytes()
    older = content.replace(b',"date":"2026-11-01"', b"")
    assert older != content
    path.write_bytes(older)
    assert load(tiny_model) == LoadHistory(served=(Served("llama-server 1", "a plan"),))


def test_a_link_to_the_model_is_the_model(tiny_model: Path, kept: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_model)
    assert load(link) == KNOWN


def test_a_model_that_was_replaced_is_another_one(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    save(model, KNOWN)
    assert load(model) == KNOWN
    model.write_bytes(b"three")
    assert load(model) == LoadHistory()


def test_it_is_in_the_state_folder_and_nobody_elses_to_read(kept: Path) -> None:
    assert kept.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.parent.stat().st_mode & 0o077 == 0


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
def test_a_damaged_file_is_as_none_and_is_written_anew(damage: object, tiny_model: Path, kept: Path) -> None:
    content = kept.read_bytes()
    damaged = damage(content)  # type: ignore[operator]
    assert damaged != content
    kept.write_bytes(damaged)
    assert load(tiny_model) == LoadHistory()
    save(tiny_model, KNOWN)
    assert load(tiny_model) == KNOWN


def test_what_an_older_llamasup_kept_is_not_misread(tiny_model: Path, kept: Path) -> None:
    entry = msgspec.json.decode(kept.read_bytes())
    entry["value"] = {"lessons": [], "setback": None}
    entry["revision"] = "1"
    kept.write_bytes(msgspec.json.encode(entry))
    assert load(tiny_model) == LoadHistory()


def test_an_entry_from_before_setbacks_were_counted_is_read_as_seen_once(
    tiny_model: Path, kept: Path
) -> None:
    entry = msgspec.json.decode(kept.read_bytes())
    del (
        entry["value"]["served"],
        entry["value"]["setbacks"][0]["seen"],
        entry["value"]["setbacks"][0]["failed"],
    )
    kept.write_bytes(msgspec.json.encode(entry))
    assert load(tiny_model) == LoadHistory((LESSON,), (SETBACK,))


def test_without_a_place_to_keep_it_nothing_is_kept_and_nothing_breaks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    save(tiny_model, KNOWN)
    assert load(tiny_model) == LoadHistory()


def test_a_model_that_is_gone_has_taught_nothing(tmp_path: Path) -> None:
    save(tmp_path / "gone.gguf", KNOWN)
    assert load(tmp_path / "gone.gguf") == LoadHistory()
