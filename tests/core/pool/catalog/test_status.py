"""The objects of the control API about models: status, gauges, and the memory that plans predict."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from llamasup.core.models.spec import ModelSpec
from llamasup.core.pool.catalog.status import gauges_of, held_bytes_of, model_status
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.states import State
from llamasup.core.system.process.child import Exit
from tests.core.planning.plans import model, planned
from tests.core.pool.why.samples import KILLED

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)
SPEC = ModelSpec("qwen", "/qwen.gguf", aliases=("q",))
PLAN = planned()
SERVES = ProcessInfo(State.READY, 2, 7, PLAN, restarts=1, in_flight=1, busy=1)
ENDED = ProcessInfo(State.BACKOFF, 3, load=LoadProgress(None, 2.0, 1.0), restarts=2, diagnosis=KILLED)


def status(info: ModelInfo, **rss_bytes: int) -> dict[str, Any]:
    return model_status(info, NOON, lambda pid: rss_bytes.get(f"p{pid}"))


def test_model_that_was_never_loaded_has_the_facts_of_its_file() -> None:
    found = status(ModelInfo(SPEC, facts=model()))
    assert (found["id"], found["aliases"], found["state"]) == ("qwen", ["q"], "stopped")
    assert (found["generation"], found["pid"], found["slots"], found["load"]) == (0, None, None, None)
    assert (found["size_bytes"], found["class"]) == (model().file_bytes, "decoder")
    assert (found["last_exit"], found["events"], found["device"]) == (None, [], None)
    assert "replicas" not in found
    unknown = status(ModelInfo(SPEC))
    assert (unknown["size_bytes"], unknown["class"], unknown["until"]) == (None, None, None)


def test_loaded_model_has_the_values_of_its_first_process() -> None:
    info = ModelInfo(SPEC, ShownState.READY, Phase.RESIDENT, processes=(SERVES, ENDED), unload_in_s=60.0)
    found = status(info, p7=5)
    assert (found["pid"], found["restarts"], found["in_flight"], found["slots_busy"]) == (7, 3, 1, 1)
    assert (found["ctx_size"], found["device"]) == (PLAN.ctx_size, PLAN.device)
    assert found["memory"] == {"ram_bytes": 5, "vram_bytes": None}
    assert found["until"] == "2026-11-27T12:01:00+00:00"
    assert [each["state"] for each in found["replicas"]] == ["ready", "backoff"]
    assert [each["device"] for each in found["replicas"]] == [PLAN.device, None]
    assert status(info)["memory"]["ram_bytes"] is None
    assert info.served_ctx_size == PLAN.ctx_size


@pytest.mark.parametrize(
    ("exit_", "code", "signal"),
    [(None, None, None), (Exit(3, None), 3, None), (Exit(None, "SIGKILL"), None, "SIGKILL")],
)
def test_crashed_model_has_its_last_exit(exit_: Exit | None, code: int | None, signal: str | None) -> None:
    crashed = ProcessInfo(State.BACKOFF, diagnosis=KILLED, exit=exit_, load=ENDED.load)
    found = status(ModelInfo(SPEC, ShownState.BACKOFF, processes=(crashed,)))
    assert (found["last_exit"]["code"], found["last_exit"]["signal"]) == (code, signal)
    assert (found["last_exit"]["cause"], found["load"]["eta_s"]) == (KILLED.cause, 2.0)


def test_wait_before_the_load_is_shown_before_that_of_a_process() -> None:
    waits = ModelInfo(SPEC, processes=(ENDED,), wait=LoadProgress(None, None, 4.0, "it waits"))
    assert status(waits)["load"]["reason"] == "it waits"


def test_each_process_has_gauges_and_a_predicted_memory() -> None:
    info = ModelInfo(SPEC, processes=(SERVES, ENDED), old_processes=(SERVES,), queued=2)
    assert [(each.model, each.state, each.queued) for each in gauges_of(info)] == [
        ("qwen", State.READY, 2),
        ("qwen", State.BACKOFF, 2),
    ]
    assert held_bytes_of(info) == 2 * PLAN.memory.without_prompt_cache.total_bytes
