"""The memory of each device by model: what the plans predict and what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.memory.estimate import FreeMemory, MemoryEstimate, Part
from llamasup.core.pool.catalog.status import Measured, memory_view, predicted_on
from llamasup.core.pool.model_info import ModelInfo, ProcessInfo
from llamasup.core.pool.shown_state import ShownState
from llamasup.core.system.hardware.devices import Device
from tests.core.planning.plans import planned

RAM = Device("ram", "", 64, 32, shares_host_memory=True)
SMALL, LARGE = Device("CUDA0", "", 10, 4), Device("CUDA1", "", 30, -1)
PARTS = (
    Part("model", "weights", 8, 40),
    Part("context", "kv", 2, 20),
    Part("buffers", "compute", 1, 4),
    Part("process", "runtime", 3),
    Part("cached prompts", "prompt cache", 5),
)
PLAN = planned()
ON_CPU = MemoryEstimate(PARTS, FreeMemory(64))
ON_SMALL = MemoryEstimate(PARTS, FreeMemory(64, 10, 1, names=("CUDA0",)))
ON_BOTH = MemoryEstimate(PARTS, FreeMemory(64, 40, 2, names=("CUDA0", "CUDA1")))


def model(id_: str, *memory: MemoryEstimate | None, **more: Any) -> ModelInfo:
    """A model with a process for each estimate. Their IDs are 0, 1, …"""
    plans = (None if each is None else replace(PLAN, memory=each) for each in memory)
    processes = tuple(ProcessInfo(pid=pid, plan=plan) for pid, plan in enumerate(plans))
    return ModelInfo(ModelSpec(id_, "/m.gguf"), processes=processes, **{"state": ShownState.READY, **more})


def shown(*models: ModelInfo, **measured: Mapping[int, int]) -> dict[str, Any]:
    found = memory_view((RAM, SMALL, LARGE), {"ram": 50, "CUDA0": 9}, models, Measured(**measured))
    return {device["name"]: device for device in found}


def test_device_has_its_sizes_and_budget() -> None:
    devices = shown()
    assert devices["ram"] == {
        "name": "ram",
        "total_bytes": 64,
        "free_bytes": 32,
        "budget_bytes": 50,
        "models": [],
    }
    assert (devices["CUDA1"]["free_bytes"], devices["CUDA1"]["budget_bytes"]) == (None, None)


def test_plan_is_divided_between_ram_and_its_device() -> None:
    assert predicted_on("ram", ON_SMALL, (SMALL, LARGE)) == {
        "weights_bytes": 8,
        "kv_bytes": 2,
        "compute_bytes": 4,  # with llama-server's own memory
        "cache_bytes": 5,
    }
    assert predicted_on("CUDA0", ON_SMALL, (SMALL, LARGE)) == {
        "weights_bytes": 40,
        "kv_bytes": 20,
        "compute_bytes": 4,
        "cache_bytes": 0,
    }
    assert not any(predicted_on("CUDA1", ON_SMALL, (SMALL, LARGE)).values())


def test_several_devices_share_a_plan_by_their_sizes() -> None:
    small, large = (predicted_on(name, ON_BOTH, (SMALL, LARGE)) for name in ("CUDA0", "CUDA1"))
    assert (small["weights_bytes"], large["weights_bytes"]) == (10, 30)


def test_memory_of_a_device_without_its_own_counts_as_ram() -> None:
    on_host = MemoryEstimate(PARTS, FreeMemory(64, names=("Vulkan0",)))
    assert predicted_on("ram", on_host, ())["weights_bytes"] == 48


def test_model_is_shown_on_each_device_that_it_uses() -> None:
    devices = shown(model("a", ON_SMALL), rss_bytes={0: 15}, vram_bytes={0: 60})
    assert devices["ram"]["models"] == [
        {
            "id": "a",
            "state": "ready",
            "predicted": {
                "weights_bytes": 8,
                "kv_bytes": 2,
                "compute_bytes": 4,
                "cache_bytes": 5,
                "total_bytes": 19,
            },
            "measured_bytes": 15,
        }
    ]
    (on_gpu,) = devices["CUDA0"]["models"]
    assert (on_gpu["predicted"]["total_bytes"], on_gpu["measured_bytes"]) == (64, 60)
    assert devices["CUDA1"]["models"] == []


def test_replicas_are_added_up() -> None:
    devices = shown(model("a", ON_CPU, ON_CPU), rss_bytes={0: 90, 1: 70})
    (on_ram,) = devices["ram"]["models"]
    assert (on_ram["predicted"]["total_bytes"], on_ram["measured_bytes"]) == (166, 160)


def test_model_that_is_being_planned_shows_what_the_pool_charges() -> None:
    devices = shown(
        model("a", needs={"ram": 12}),
        model("b", None, needs={"ram": 3}),
    )
    totals = [
        (model["id"], model["predicted"]["total_bytes"], model["measured_bytes"])
        for model in devices["ram"]["models"]
    ]
    assert totals == [("a", 12, None), ("b", 3, None)]


@pytest.mark.parametrize("memory", [ON_BOTH, None])
def test_memory_on_one_of_several_gpus_is_not_guessed(memory: MemoryEstimate | None) -> None:
    """The driver reports a process's memory on all GPUs together."""
    devices = shown(model("a", memory, needs={"CUDA0": 5}), rss_bytes={0: 15}, vram_bytes={0: 60})
    (on_gpu,) = devices["CUDA0"]["models"]
    assert on_gpu["measured_bytes"] is None


def test_process_whose_memory_cannot_be_read_has_none() -> None:
    devices = shown(model("a", ON_CPU))
    (on_ram,) = devices["ram"]["models"]
    assert on_ram["measured_bytes"] is None
