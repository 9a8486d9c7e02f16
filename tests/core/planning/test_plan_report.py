"""Reports of a plan: what it reduces, and the refusal of a plan that does not fit, with its remedy."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from llamasup.core.llama_server.plan_limits import Change, PlanLimits, Reduction
from llamasup.core.planning.ladder import admit
from llamasup.core.planning.memory.estimate import memory_rows
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.planning.plan_report import reductions, refusal
from llamasup.core.settings.model import Settings
from llamasup.core.system.text import memory_text
from llamasup.errors import DoesNotFit
from tests.core.planning.plans import (
    GIB,
    GPU,
    LONG,
    NEW,
    SMALL_GPU,
    capabilities,
    ladder,
    machine,
    needed_bytes,
    planned,
)


def refused(preferred: LaunchPlan, fitting: LaunchPlan, **rest: Any) -> DoesNotFit:
    return refusal("example-8b", preferred, fitting, **rest)


def test_refusal_names_needed_and_free_memory_and_exits_with_71() -> None:
    wanted = planned(
        *(NEW, LONG, machine(memory_available_bytes=6 * GIB)), ctx_size=65536, parallel=2, kv_type="f16"
    )
    error = refused(wanted, wanted)
    assert error.exit_code == 71
    assert memory_text(wanted.memory.host_bytes) in error.message
    assert f"{memory_text(6 * GIB)} are free" in error.message
    assert "2 × 65536 tokens of context, KV cache f16" in error.message
    assert error.remedy.startswith("The smallest plan does not fit either: 2 × 65536 tokens")
    assert "--no-memory-check" in error.remedy


def test_table_has_every_part_the_sum_and_the_free_memory() -> None:
    wanted = planned(hardware=machine(memory_available_bytes=GIB))
    rows = dict(memory_rows(wanted.memory))
    assert set(rows) == {part.name for part in wanted.memory.parts} | {"needed", "free"}
    assert rows["needed"] == memory_text(wanted.memory.total_bytes)
    assert rows["free"] == memory_text(GIB)
    details = refused(wanted, wanted).details
    assert len(details) == len(rows)
    for line, (name, amount) in zip(details, rows.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(amount)


def test_the_table_of_a_machine_with_devices_tells_the_two_memories_apart() -> None:
    memory = planned(capabilities(NEW, GPU)).memory
    rows = dict(memory_rows(memory))
    assert rows["free"] == f"{memory_text(28 * GIB)} host, {memory_text(22 * GIB)} device"
    assert (
        rows["needed"] == f"{memory_text(memory.host_bytes)} host, {memory_text(memory.device_bytes)} device"
    )


def test_on_two_memories_the_one_that_is_too_small_is_named() -> None:
    known = capabilities(NEW, SMALL_GPU)
    on_device = planned(known, gpu_layers="all")
    assert (
        f"{memory_text(on_device.memory.device_bytes)} on the device" in refused(on_device, on_device).message
    )
    assert f"{memory_text(4 * GIB)} are free" in refused(on_device, on_device).message
    on_host = planned(known, hardware=machine(memory_available_bytes=GIB), gpu_layers=1)
    assert f"{memory_text(on_host.memory.host_bytes)} of host memory" in refused(on_host, on_host).message


def test_host_and_device_count_together_if_the_user_placed_tensors() -> None:
    free = machine(memory_available_bytes=GIB)
    wanted = planned(capabilities(NEW, SMALL_GPU), hardware=free, gpu_layers="all", extra=("--cpu-moe",))
    assert (
        f"of host and device together, and {memory_text(5 * GIB)} are free" in refused(wanted, wanted).message
    )


ASKED: list[dict[str, Any]] = [
    {"ctx_size": 65536},
    {"ctx_size": 65536, "parallel": 1},
    {"ctx_size": 32768, "parallel": 8, "kv_type": "f16"},
    {"parallel": 64},
]


@pytest.mark.parametrize("asked", ASKED)
def test_options_of_the_remedy_do_fit(asked: dict[str, Any]) -> None:
    smaller = planned(ctx_size=4096, parallel=1)
    free = machine(memory_available_bytes=needed_bytes(smaller))
    preferred = planned(hardware=free, **asked)
    assert not preferred.memory.fits
    error = refused(preferred, planned(hardware=free, ctx_size=4096, parallel=1))
    said = error.remedy.removeprefix("Fits: ").partition(". Or")[0]
    words = shlex.split(said)
    options = dict(zip(words[::2], words[1::2], strict=True))
    names = {"--parallel": "parallel", "--ctx-size": "ctx_size", "--kv-type": "kv_type"}
    followed = asked | {
        names[option]: int(given) if given.isdecimal() else given for option, given in options.items()
    }
    assert admit(ladder(hardware=free, **followed), PlanLimits()).plan.memory.fits


def test_remedy_names_only_the_settings_that_change() -> None:
    free = machine(memory_available_bytes=8 * GIB)
    preferred = planned(facts=LONG, hardware=free, ctx_size=65536, parallel=2)
    fitting = planned(hardware=free, ctx_size=8192, parallel=2)
    assert refused(preferred, fitting).remedy.startswith("Fits: --ctx-size 8192. Or free memory")
    known = capabilities(NEW, SMALL_GPU)
    on_device = planned(known, gpu_layers="all")
    assert refused(on_device, planned(known)).remedy.startswith("Fits: --gpu-layers auto. ")
    fewer = planned(known, gpu_layers=3, kv_type="q8_0")
    assert refused(on_device, fewer).remedy.startswith("Fits: --gpu-layers 3. ")


def test_remedy_for_a_config_uses_its_keys() -> None:
    preferred = planned(facts=LONG, ctx_size=32768, parallel=4)
    fitting = planned(ctx_size=8192, parallel=1)
    remedy = refused(preferred, fitting, by_config=True).remedy
    assert remedy.startswith("Fits: parallel: 1, ctx_size: 8192. Or allow more (memory). check_memory: false")
    huge = planned(hardware=machine(memory_available_bytes=GIB))
    remedy = refused(huge, huge, by_config=True, extra=("--cache-ram", "10")).remedy
    assert "Allow more (memory), reduce the values in extra, or use a smaller" in remedy
    assert "--no-memory-check" not in remedy


def test_remedy_does_not_name_a_cache_of_two_types() -> None:
    free = machine(memory_available_bytes=9 * GIB)
    mixed = planned(hardware=free, ctx_size=2048, extra=("-ctk", "q8_0", "-ctv", "f16"))
    assert "--kv-type" not in refused(planned(facts=LONG, hardware=free, ctx_size=65536), mixed).remedy


def test_remedy_names_a_users_prompt_cache_that_is_too_large() -> None:
    free = machine(memory_available_bytes=10 * GIB)
    wanted = planned(hardware=free, extra=("--cache-ram", "8192"))
    assert not wanted.memory.fits
    said = refused(wanted, wanted, extra=("--cache-ram", "8192")).remedy
    (most_mib,) = re.findall(r"Fits: --cache-ram (\d+) or less", said)
    assert planned(hardware=free, extra=("--cache-ram", most_mib)).memory.fits
    assert not planned(hardware=free, extra=("--cache-ram", str(int(most_mib) + 1))).memory.fits
    unlimited = planned(hardware=free, extra=("--cache-ram", "-1"))
    assert unlimited.memory.fits
    assert unlimited.memory.prompt_cache_bytes == 0


def test_remedy_names_users_arguments_that_are_too_large() -> None:
    wanted = planned(hardware=machine(memory_available_bytes=6 * GIB), extra=("-c", "131072"))
    assert "reduce the values after --" in refused(wanted, wanted, extra=("-c", "131072")).remedy


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [(0, "0 B"), (300 << 20, "300 MiB"), (5 << 30, "5.0 GiB"), (28 * GIB, "28 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_have_readable_units(size_bytes: int, said: str) -> None:
    assert memory_text(size_bytes) == said


def test_plan_without_limits_has_nothing_smaller() -> None:
    made = planned()
    assert reductions(made, made, Settings()) == ()


def test_limited_plan_names_what_is_smaller_and_why() -> None:
    candidate = ladder()
    preferred, made = candidate(PlanLimits()), candidate(PlanLimits(parallel=1, why="memory is short"))
    change = Change("--parallel", str(preferred.parallel), "1")
    assert reductions(preferred, made, Settings()) == (Reduction(change, "memory is short"),)


def test_context_above_that_of_the_model_is_named() -> None:
    settings = Settings(ctx_size=1 << 20, parallel=1)
    made = planned(settings=settings)
    (found,) = reductions(made, made, settings)
    assert found.change == Change("--ctx-size", str(1 << 20), str(made.ctx_size))
    assert found.fixed
    assert f"trained for {made.ctx_size:,} tokens" in found.why
