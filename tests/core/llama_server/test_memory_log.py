"""Sizes from llama-server's own log: logs of b11434, and lines as other builds and devices write them."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.memory_log import ServerSizes, read_sizes
from tests.kit.paths import FIXTURES

LOGS = FIXTURES / "sizes"
MIB = 1 << 20


def mib(size_bytes: int) -> float:
    return round(size_bytes / MIB, 2)


def in_mib(sizes: ServerSizes) -> tuple[float, float, float]:
    return mib(sizes.weights_bytes), mib(sizes.kv_bytes), mib(sizes.compute_bytes)


def test_sizes_of_model_and_draft_model_add_up() -> None:
    sizes = read_sizes((LOGS / "draft.log").read_text().splitlines())
    assert in_mib(sizes) == (2 * 0.63, 2 * 2.00, 2 * 3.58)
    assert sizes.by_device == {"CPU": sizes.total_bytes}
    assert sizes.complete


def test_sizes_of_fit_attempts_do_not_count() -> None:
    """At -lv 5 it logs a whole load of which nothing is allocated; the end logs one size again."""
    log = (LOGS / "debug.log").read_text()
    assert log.count("compute buffer size =") == 2
    assert in_mib(read_sizes(log.splitlines())) == (0.63, 1.53, 13.01)


# llama.cpp's own lines as issues and pull requests quote them, oldest first.
OTHERS = {
    "2024, two GPUs (#6122)": (
        """
        llm_load_tensors:        CPU buffer size =  1640.62 MiB
        llm_load_tensors:      CUDA0 buffer size =  5434.38 MiB
        llm_load_tensors:      CUDA1 buffer size = 13989.53 MiB
        llama_new_context_with_model: n_ctx      = 4096
        llama_kv_cache_init:      CUDA0 KV buffer size =  1536.00 MiB
        llama_kv_cache_init:      CUDA1 KV buffer size =  3584.00 MiB
        llama_new_context_with_model: KV self size  = 5120.00 MiB, K (f16): 2560.00 MiB, V (f16): 2560.00 MiB
        llama_new_context_with_model:  CUDA_Host  output buffer size =     1.95 MiB
        llama_new_context_with_model:      CUDA0 compute buffer size =   672.01 MiB
        llama_new_context_with_model:      CUDA1 compute buffer size =   672.02 MiB
        """,
        (21064.53, 5120.00, 1345.98),
        {"CPU": 1642.57, "CUDA0": 7642.39, "CUDA1": 18245.55},
    ),
    "February 2025": (
        """
        load_tensors:   CPU_Mapped model buffer size =   644.14 MiB
        load_tensors:  MTL0_Mapped model buffer size = 14803.73 MiB
        llama_init_from_model: n_ctx         = 4096
        llama_kv_cache_init:       MTL0 KV buffer size =   144.00 MiB
        llama_init_from_model: KV self size  =  144.00 MiB, K (f16):   72.00 MiB, V (f16):   72.00 MiB
        llama_init_from_model:        CPU  output buffer size =     0.58 MiB
        llama_init_from_model:       MTL0 compute buffer size =   300.75 MiB
        llama_init_from_model:        CPU compute buffer size =    12.01 MiB
        """,
        (15447.87, 144.00, 313.34),
        {"CPU": 656.73, "MTL0": 15248.48},
    ),
    "April 2025": (
        """
        init: kv_size = 4096, offload = 1, type_k = 'f16', type_v = 'f16', n_layer = 28, can_shift = 1
        init:      ROCm0 KV buffer size =   448.00 MiB
        llama_context: KV self size  =  448.00 MiB, K (f16):  224.00 MiB, V (f16):  224.00 MiB
        llama_context:      ROCm0 compute buffer size =   298.75 MiB
        llama_context:  ROCm_Host compute buffer size =    10.01 MiB
        """,
        (0, 448.00, 308.76),
        {"CPU": 10.01, "ROCm0": 746.75},
    ),
    "the formats of b11434": (
        """
        0.00.012.611 I load_tensors:       Vulkan0 model buffer size =   100.00 MiB
        0.00.012.611 I load_tensors:    CPU_REPACK model buffer size =    10.00 MiB
        0.00.012.700 I llama_adapter_lora_init_impl:    Vulkan0 LoRA buffer size =     1.50 MiB
        0.00.012.885 I llama_context: n_ctx                 = 32768
        0.00.013.000 I llama_memory_recurrent:    Vulkan0 RS buffer size =     2.00 MiB
        0.00.013.000 I llama_dsv4_comp_state:    Vulkan0 DSV4 csa lid state buffer size =     4.00 MiB
        0.00.023.338 I sched_reserve:    Vulkan0 compute buffer size =    33.58 MiB
        0.00.023.338 I sched_reserve: Vulkan_Host compute buffer size =     2.58 MiB
        """,
        (111.50, 6.00, 36.16),
        {"CPU": 12.58, "Vulkan0": 141.08},
    ),
}


@pytest.mark.parametrize("build", OTHERS)
def test_lines_of_other_builds_and_devices_are_read(build: str) -> None:
    log, expected, by_device = OTHERS[build]
    sizes = read_sizes(log.splitlines())
    assert in_mib(sizes) == pytest.approx(expected, abs=0.01)
    assert {device: mib(size) for device, size in sizes.by_device.items()} == pytest.approx(
        by_device, abs=0.01
    )


def test_last_reservation_of_a_context_counts() -> None:
    """That for multi-token prediction does, beside the target's (b11434)."""
    log = (LOGS / "mtp.log").read_text()
    assert [log.count(f"{mib} MiB") for mib in ("compute buffer size =     3.40", "2.77")] == [1, 2]
    assert in_mib(read_sizes(log.splitlines())) == (1.03, 0.71, 3.40 + 2.77)


def test_projector_is_counted() -> None:
    sizes = read_sizes((LOGS / "projector.log").read_text().splitlines())
    assert in_mib(sizes) == (0.63 + 0.16, 1.00, 3.58 + 0.05)


def test_projector_is_counted_on_its_device() -> None:
    log = """
        clip_ctx: CLIP using CUDA0 backend
        load_hparams: model size:         854.99 MiB
        load_hparams: metadata size:      0.18 MiB
        alloc_compute_meta:      CUDA0 compute buffer size =   100.00 MiB
        alloc_compute_meta:        CPU compute buffer size =     4.00 MiB
        """
    sizes = read_sizes(log.splitlines())
    assert in_mib(sizes) == (854.99, 0, 104)
    assert {device: mib(size) for device, size in sizes.by_device.items()} == {"CPU": 4, "CUDA0": 954.99}
    assert mib(sizes.device_bytes) == 954.99


def test_log_without_sizes_is_incomplete() -> None:
    sizes = read_sizes(["0.00.030.184 I srv  llama_server: model loaded"])
    assert (sizes.total_bytes, dict(sizes.by_device), sizes.complete) == (0, {}, False)
