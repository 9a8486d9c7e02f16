"""Models that are too large for the limits of the process: llamasup refuses them, or makes them fit.

The limits are real: the address space (``ulimit -v``) and a memory cgroup.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.driver import Llamasup, llamasup, run_to_end
from tests.extended.real.memory_group import in_group, memory_group
from tests.kit.models import write_large_decoder

MIB = 1 << 20


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB of weights, and 48 KB of q8_0 KV cache for each token: 1.6 GB at 4 × 8192 tokens."""
    path = tmp_path_factory.mktemp("fat") / "fat.gguf"
    return write_large_decoder(path, 300_000_000, head_count_kv=16, quantization="F16")


@pytest.fixture
def own_address_space(runtime: str, tiny_model: Path) -> int:
    """Bytes of address space that this runtime takes for a tiny model."""
    with llamasup(tiny_model, "--runtime", runtime) as running:
        running.wait_for("ready")
        taken = max(peak_address_space(child) for child in running.children())
        assert running.stop() == 0
    return taken


def peak_address_space(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmPeak")]
    return int(line.split()[1]) * 1024


def limited_to(size_bytes: int) -> Mapping[str, Any]:
    """Options of Popen that limit the address space of the child and of its children."""
    return {"preexec_fn": partial(resource.setrlimit, resource.RLIMIT_AS, (size_bytes, size_bytes))}


def slots(running: Llamasup) -> int:
    total: int = httpx.get(f"{running.url}/props").json()["total_slots"]
    return total


def answers(running: Llamasup) -> bool:
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens > 0


@pytest.mark.one_runtime
def test_plan_that_cannot_fit_is_refused_with_the_largest_setting_that_does(
    runtime: str, large_model: Path, own_address_space: int
) -> None:
    limit = limited_to(own_address_space + 2000 * MIB)
    options = ("--runtime", runtime, "--ctx-size", "32768", "--parallel", "4")
    refused = run_to_end("run", str(large_model), "--port", "0", "--events", "jsonl", *options, **limit)

    assert refused.returncode == 71
    assert '"starting"' not in refused.stdout
    for part in ("does not fit", "weights", "KV cache", "compute buffers", "needed", "free"):
        assert part in refused.stderr
    # The setting that the message suggests must start.
    words = refused.stderr.split("Fits: ")[1].split(". Or")[0].split()
    with llamasup(large_model, "--runtime", runtime, *words, **limit) as running:
        assert answers(running)
        assert slots(running) == int(words[words.index("--parallel") + 1])
        assert running.stop() == 0


@pytest.mark.one_runtime
def test_plan_without_user_settings_is_reduced_until_it_fits(
    runtime: str, large_model: Path, own_address_space: int
) -> None:
    limit = limited_to(own_address_space + 1200 * MIB)
    shown = json.loads(run_to_end("plan", str(large_model), "--runtime", runtime, "--json", **limit).stdout)
    assert [alternative["fits"] for alternative in shown["alternatives"]][-1]
    assert not shown["alternatives"][0]["fits"]
    with llamasup(large_model, "--runtime", runtime, **limit) as running:
        assert answers(running)
        assert slots(running) < 4
        assert not [event for event in running.events if event["event"] == "exit"]
        assert running.stop() == 0


def test_fallback_steps_find_a_working_plan_without_the_memory_check(
    runtime: str, large_model: Path, own_address_space: int
) -> None:
    limit = limited_to(own_address_space + 1200 * MIB)
    with llamasup(large_model, "--runtime", runtime, "--no-memory-check", **limit) as running:
        assert answers(running)
        steps = [event["adjustment"] for event in running.events if event["event"] == "exit"]
        assert 1 <= len(steps) <= 3
        assert steps[0]["changes"][0]["setting"] == "--parallel"
        assert slots(running) == int(steps[0]["changes"][0]["after"])
        assert running.stop() == 0


# --- memory cgroups ------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_group() as made:
        if made is None:
            pytest.skip("no memory cgroup can be made here")
        yield made


@pytest.mark.one_runtime
def test_memory_cgroup_limits_plans_as_machine_memory_does(
    runtime: str, large_model: Path, group: Path
) -> None:
    prefix = in_group(group, 1000 * MIB)
    options = ("--ctx-size", "32768", "--parallel", "4", "--runtime", runtime)
    refused = run_to_end("run", str(large_model), "--port", "0", *options, prefix=prefix)
    assert refused.returncode == 71
    assert "does not fit" in refused.stderr


def test_smaller_plan_starts_after_the_kernel_oom_killer(
    runtime: str, large_model: Path, group: Path
) -> None:
    prefix = in_group(group, 1000 * MIB)
    with llamasup(large_model, "--runtime", runtime, "--no-memory-check", prefix=prefix) as running:
        assert answers(running)
        exits = [event for event in running.events if event["event"] == "exit"]
        assert {event["cause"] for event in exits} == {"out_of_memory_host"}
        assert "SIGKILL" in {event["signal"] for event in exits}
        assert running.stop() == 0
