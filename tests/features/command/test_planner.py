"""The memory, the command line and the environment of a model with a command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.llama_server.warmup import WarmUpRequest, response_problem
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.shares import MemoryBudget
from llamasup.core.pool.estimate import SizedModel
from llamasup.core.settings.model import ModelSettings, Settings
from llamasup.core.supervision.plan_protocol import EnginePlan
from llamasup.errors import BrokenRuntime, DoesNotFit
from llamasup.features.command.planner import CommandEngine

GIB = 1 << 30
ENGINE = CommandEngine(
    program="python",
    routes=("/x",),
    command=(sys.executable, "{socket}", "{folder}", "{name}"),
    stop=(),
    health_path="/",
    healthy=range(200, 300),
    ram_bytes=None,
    vram_bytes=None,
    environment=("HF_HOME",),
    warm_up=None,
    folder="/",
)
SPEC = ModelSpec("org/voice", "", engine=ENGINE, settings=Settings(nice=5))
GPUS = {"ram": 8 * GIB, "CUDA0": 6 * GIB, "CUDA1": 4 * GIB}


def planner_of(sized: SizedModel, folder: Path, number: int = 0) -> Any:
    return sized.starter.planner("org/voice", number, folder, "1-", lambda: MemoryBudget({}))


@pytest.mark.parametrize(
    ("ram", "vram", "spec", "budget", "needs"),
    [
        (None, None, {}, GPUS, {}),
        (2, None, {}, GPUS, {"ram": 2}),
        (2, None, {"replicas": 3}, GPUS, {"ram": 6}),
        (1, 3, {}, GPUS, {"ram": 1, "CUDA0": 3}),
        (1, 3, {"options": ModelSettings(devices=("CUDA1",))}, GPUS, {"ram": 1, "CUDA1": 3}),
        (1, 3, {"replicas": 2, "options": ModelSettings(devices=("CUDA1", "CUDA0"))}, GPUS,
         {"ram": 2, "CUDA1": 3, "CUDA0": 3}),
        (1, 3, {}, {"ram": 8 * GIB}, {"ram": 4}),
        (1, 3, {"options": ModelSettings(devices=("none",))}, GPUS, {"ram": 4}),
    ],
)  # fmt: skip
def test_needs_are_those_of_the_config(
    ram: int | None, vram: int | None, spec: Any, budget: Mapping[str, int], needs: Mapping[str, int]
) -> None:
    sizes = (None if size is None else size * GIB for size in (ram, vram))
    engine = replace(ENGINE, **dict(zip(("ram_bytes", "vram_bytes"), sizes, strict=True)))
    found = engine.size(replace(SPEC, **spec), budget, {}).needs
    assert found == {memory: size * GIB for memory, size in needs.items()}


def test_program_that_is_larger_than_the_budget_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"needs 5.0 GiB of CUDA1, and all models together may have 4.0 GiB"):
        replace(ENGINE, vram_bytes=5 * GIB).size(
            replace(SPEC, options=ModelSettings(devices=("CUDA1",))), GPUS, {}
        )


def test_memory_of_an_earlier_load_is_used_and_its_lack_is_a_warning(tmp_path: Path) -> None:
    planner = planner_of(ENGINE.size(SPEC, GPUS, {}), tmp_path)
    plan = planner.plan(1)
    ((message, remedy),) = plan.warnings
    assert "The memory of 'org/voice' is not known" in message
    assert "memory: {ram: 2GiB}" in remedy
    assert planner.plan(2).warnings == ()  # said once
    planner.served(plan, (), resident_bytes=3 * GIB, generated=False)
    again = ENGINE.size(SPEC, GPUS, {})
    assert again.needs == {"ram": 3 * GIB}
    assert planner_of(again, tmp_path).plan(1).warnings == ()
    other = replace(ENGINE, command=(sys.executable, "{socket}"))
    assert other.size(SPEC, GPUS, {}).needs == {}


def test_plan_fills_the_placeholders_and_passes_few_variables(tmp_path: Path) -> None:
    environ = {
        "HF_HOME": "/hf",
        "HF_TOKEN": "x",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "AWS_SECRET": "x",
    }
    planner = planner_of(ENGINE.size(SPEC, GPUS, environ), tmp_path, number=1)
    first, second = planner.plan(1), planner.plan(2)
    assert isinstance(first, EnginePlan)
    folder = tmp_path / "1-command"
    assert first.argv == (sys.executable, f"{folder}/1.sock", str(folder), "org-voice-1")
    assert (second.argv[1], first.nice, first.stop) == (f"{folder}/2.sock", 5, None)
    assert first.env == {
        "HF_HOME": "/hf", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "GGML_NO_BACKTRACE": "1"
    }  # fmt: skip


def test_missing_program_is_an_error_of_the_plan(tmp_path: Path) -> None:
    gone = replace(ENGINE, command=("/no/such/engine", "{port}"))
    with pytest.raises(BrokenRuntime) as found:
        planner_of(gone.size(SPEC, GPUS, {}), tmp_path).plan(1)
    assert found.value.remedy == "Correct its `command` in the config."


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("", ""),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys; sys.exit('no such container')", "exit code 1 (no such container)"),
    ],
)
def test_stop_command_says_why_it_failed(script: str, problem: str, tmp_path: Path) -> None:
    engine = replace(ENGINE, stop=(sys.executable, "-S", "-c", script))
    plan = planner_of(engine.size(SPEC, GPUS, {}), tmp_path).plan(1)
    assert plan.stop() == problem


def test_stop_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    engine = replace(ENGINE, stop=("no-such-docker", "stop"))
    plan = planner_of(engine.size(SPEC, GPUS, {"PATH": "/nowhere"}), tmp_path).plan(1)
    assert plan.stop() == "no-such-docker: No such file or directory"


@pytest.mark.parametrize(("status", "works"), [(200, True), (204, True), (400, False), (500, False)])
def test_warm_up_succeeds_with_each_answer_that_is_no_error(status: int, works: bool) -> None:
    problem = response_problem(WarmUpRequest("/x", {}), status, b"\x89PNG")
    assert (problem is None) is works
