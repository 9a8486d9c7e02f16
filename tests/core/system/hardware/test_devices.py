"""Parsing ``--list-devices``, and matching NVML's GPUs with CUDA's devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamasup.core.system.hardware.devices import (
    Device,
    NvmlGpu,
    is_amd_card,
    parse_devices,
    problem_in,
    with_nvml_memory,
)
from tests.kit.paths import FIXTURES

FIXTURES = FIXTURES / "devices"
MIB = 1 << 20


def only(line: str, log: str = "") -> Device:
    (device,) = parse_devices(f"Available devices:\n  {line}\n", log)
    return device


def test_a_build_without_accelerator_has_no_devices() -> None:
    assert parse_devices((FIXTURES / "none.txt").read_text()) == ()


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ("", ""),
        ("ggml_vulkan: No devices found.\n", ""),
        (
            "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n"
            "0.00.012.345 I system_info: n_threads = 2\n",
            "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
        ),
        (
            "0.00.001.001 E load_backend: failed to load /opt/libggml-hip.so: libamdhip64.so.6: cannot open\n"
            "0.00.002.002 E ggml_cuda_init: failed to initialize CUDA: unknown error\n",
            "ggml_cuda_init: failed to initialize CUDA: unknown error",
        ),
        ("error: " + "x" * 5000, "error: " + "x" * 193),
    ],
)
def test_last_error_line_explains_missing_devices(log: str, problem: str) -> None:
    assert problem_in(log) == problem


def test_devices_are_read_with_their_memory() -> None:
    text = (
        "ggml_cuda_init: found 1 CUDA devices:\n"
        "  Device 0: NVIDIA GeForce RTX 4090, compute capability 8.9, VMM: yes\n"
        "Available devices:\n"
        "  CUDA0: NVIDIA GeForce RTX 4090 (24080 MiB, 23671 MiB free)\r\n"
        "  Vulkan0: AMD Radeon RX 7900 XTX (RADV NAVI31) (24560 MiB, 24000 MiB free)\n"
        "  RPC[127.0.0.1:50052]: RPC[127.0.0.1:50052] (1024 MiB, 512 MiB free)\n"
    )
    assert parse_devices(text) == (
        Device("CUDA0", "NVIDIA GeForce RTX 4090", 24080 * MIB, 23671 * MIB),
        Device("Vulkan0", "AMD Radeon RX 7900 XTX (RADV NAVI31)", 24560 * MIB, 24000 * MIB),
        Device("RPC[127.0.0.1:50052]", "RPC[127.0.0.1:50052]", 1024 * MIB, 512 * MIB),
    )


def test_device_without_memory_is_omitted() -> None:
    text = (
        "Available devices:\n"
        "  MTL0: Apple M4 Max (98304 MiB, 98303 MiB free)\n"
        "  BLAS: Accelerate (0 MiB, 0 MiB free)\n"
    )
    assert [device.name for device in parse_devices(text)] == ["MTL0"]
    assert parse_devices("Available devices:\n  BLAS: OpenBLAS (0 MiB, 0 MiB free)\n") == ()


_FRAGMENTS = st.sampled_from(
    ["CUDA0", ": ", "a GPU", " (", "12", " MiB, ", "3", " MiB free)", "\r\n", "\n  ", "٣"]
)


@given(st.lists(_FRAGMENTS, max_size=40).map("".join), st.text())
def test_no_text_at_all_makes_the_reader_raise(listed: str, log: str) -> None:
    assert all(device.total_bytes > 0 for device in parse_devices(listed, log))


# --- whose memory it is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "Metal: Apple M4 Max (98304 MiB, 98303 MiB free)",
        "MTL0: Apple M2 Ultra (165150 MiB, 158091 MiB free)",
        "CUDA0: NVIDIA GB10 (124610 MiB, 115000 MiB free)",
        "CUDA0: Orin (62841 MiB, 50000 MiB free)",
        "Vulkan0: AMD Radeon Graphics (RADV RENOIR) (8192 MiB, 8000 MiB free)",
        "Vulkan0: AMD Radeon(TM) 8060S Graphics (31129 MiB, 31000 MiB free)",
        "Vulkan0: AMD Radeon 780M Graphics (RADV PHOENIX) (16000 MiB, 15000 MiB free)",
        "Vulkan0: Intel(R) UHD Graphics 620 (KBL GT2) (15849 MiB, 15000 MiB free)",
        "Vulkan0: Intel(R) Arc(tm) Graphics (MTL) (15849 MiB, 15000 MiB free)",
        "SYCL0: Intel(R) Arc(TM) 130V GPU (16GB) (15849 MiB, 15000 MiB free)",
        "Vulkan0: llvmpipe (LLVM 19.1.1, 256 bits) (15849 MiB, 15000 MiB free)",
    ],
)
def test_a_processors_own_graphics_share_the_hosts_memory(line: str) -> None:
    assert only(line).shares_host_memory


@pytest.mark.parametrize(
    "line",
    [
        "CUDA0: NVIDIA H200 (143156 MiB, 142623 MiB free)",
        "ROCm0: AMD Instinct MI300X (196592 MiB, 196000 MiB free)",
        "ROCm0: AMD Radeon Graphics (32752 MiB, 32000 MiB free)",  # an MI60 without amdgpu.ids
        "Vulkan0: Intel(R) Arc(TM) A770 Graphics (16225 MiB, 16000 MiB free)",
        "Vulkan1: AMD Radeon VII (RADV VEGA20) (16368 MiB, 16000 MiB free)",
    ],
)
def test_a_card_has_memory_of_its_own(line: str) -> None:
    assert not only(line).shares_host_memory


@pytest.mark.parametrize(
    ("line", "log", "shared"),
    [
        (
            "Vulkan1: Some GPU (8192 MiB, 8000 MiB free)",
            "ggml_vulkan: 0 = Card (drv) | uma: 0 | fp16: 1\n"
            "ggml_vulkan: 1 = Some GPU (drv) | uma: 1 | fp16: 1\n",
            True,
        ),
        (
            "Vulkan0: AMD Radeon(TM) 890M Graphics (8192 MiB, 8000 MiB free)",
            "Vulkan0: AMD Radeon(TM) 890M Graphics (AMD proprietary driver) | uma: 0 | fp16: 1\n",
            False,
        ),
        (
            "ROCm0: AMD Radeon Graphics (122880 MiB, 116587 MiB free)",
            "  Device 0: AMD Radeon Graphics, gfx1151 (0x1151), VMM: no, Wave Size: 32\n",
            True,
        ),
        (
            "ROCm1: AMD Radeon Graphics (32752 MiB, 32000 MiB free)",
            "  Device 0: AMD Radeon Graphics, gfx1036 (0x1036)\n"
            "  Device 1: AMD Radeon Graphics, gfx906 (0x906)\n",
            False,
        ),
        (
            "MTL0: AMD Radeon Pro 5500M (8176 MiB, 8000 MiB free)",
            "ggml_metal_device_init: has unified memory    = false\n",
            False,
        ),
        ("MTL0: Apple M4 (12000 MiB, 12000 MiB free)", "ggml_metal_init: hasUnifiedMemory = true\n", True),
    ],
)
def test_log_of_the_backend_overrides_the_name(line: str, log: str, shared: bool) -> None:
    assert only(line, log).shares_host_memory is shared


@pytest.mark.parametrize(
    ("version", "is_card"),
    [
        (0, False),  # a processor
        (90012, False),  # gfx90c, Renoir
        (110501, False),  # gfx1151, Strix Halo
        (90006, True),  # gfx906, MI50
        (90010, True),  # gfx90a, MI250
        (90402, True),  # gfx942, MI300X
        (110000, True),  # gfx1100, RX 7900
        (120001, True),  # gfx1201, RX 9070
    ],
)
def test_card_and_integrated_graphics_differ_by_chip(version: int, is_card: bool) -> None:
    properties = f"cpu_cores_count 0\nsimd_count 28\ngfx_target_version {version}\nvendor_id 4098\n"
    assert is_amd_card(properties) is is_card


def test_a_kernel_that_does_not_name_the_chip_shows_no_card() -> None:
    assert not is_amd_card("cpu_cores_count 16\nsimd_count 0\n")
    assert not is_amd_card("")


# --- NVML ----------------------------------------------------------------------------------------

TITAN = "NVIDIA TITAN RTX"
H200 = "NVIDIA H200"


def cuda(*names: str) -> tuple[Device, ...]:
    return tuple(Device(f"CUDA{number}", name, 24000 * MIB, 23000 * MIB) for number, name in enumerate(names))


def gpus(*names: str) -> tuple[NvmlGpu, ...]:
    """In the order of the bus; number n has n GiB free."""
    return tuple(
        NvmlGpu(
            f"GPU-{number}{number}32f937-d72c-4106-c12f-20bd9faed9f6",
            f"00000000:{number + 1:02X}:00.0",
            name,
            24576 * MIB,
            number * 1024 * MIB,
        )
        for number, name in enumerate(names)
    )


def free_gib(devices: Sequence[Device] | None) -> list[int] | None:
    return None if devices is None else [device.free_bytes // (1024 * MIB) for device in devices]


def test_one_gpu_is_the_one() -> None:
    (device,) = cuda(H200)
    (gpu,) = gpus(H200)
    gpu = replace(gpu, free_bytes=5 * MIB)
    assert with_nvml_memory([device], [gpu], {}) == (replace(device, free_bytes=5 * MIB),)


def test_free_memory_is_at_most_cudas_total() -> None:
    (device,) = cuda(H200)
    (gpu,) = gpus(H200)
    fresh = with_nvml_memory([device], [replace(gpu, free_bytes=gpu.total_bytes)], {})
    assert fresh == (replace(device, free_bytes=device.total_bytes),)


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": " 1 , 2 "}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "2,7,0"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-0032f937"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11,GPU-nowhere,GPU-00"}, [1]),
    ],
)
def test_equal_gpus_are_in_the_order_of_the_bus_and_as_chosen(
    environ: dict[str, str], numbers: list[int]
) -> None:
    found = list(reversed(gpus(H200, H200, H200)))
    assert free_gib(with_nvml_memory(cuda(*[H200] * len(numbers)), found, environ)) == numbers


def test_ambiguous_uuid_prefix_matches_no_gpu() -> None:
    found = gpus(H200, H200)
    alike = [replace(gpu, uuid=gpu.uuid.replace("11", "00")) for gpu in found]
    assert with_nvml_memory(cuda(H200), alike, {"CUDA_VISIBLE_DEVICES": "GPU-00"}) is None


def test_different_gpus_are_matched_by_name() -> None:
    """CUDA puts the fastest first, wherever it is plugged in."""
    assert free_gib(with_nvml_memory(cuda(H200, TITAN), gpus(TITAN, H200), {})) == [1, 0]


def test_different_gpus_in_bus_order_are_matched_by_number() -> None:
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}
    assert free_gib(with_nvml_memory(cuda(TITAN, TITAN), gpus(TITAN, H200, TITAN), environ)) == [2, 0]


@pytest.mark.parametrize(
    ("devices", "found", "environ"),
    [
        # One of two equal ones: which, is CUDA's secret.
        (cuda(TITAN), gpus(TITAN, H200, TITAN), {"CUDA_VISIBLE_DEVICES": "0"}),
        (cuda(H200), gpus(H200, H200), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-0032f937/1/0"}),
        (cuda(H200), gpus(H200, H200), {"CUDA_VISIBLE_DEVICES": "GPU-00,1"}),
        (cuda(H200), gpus(H200, H200), {}),
        (cuda(H200), (), {}),
        (cuda(TITAN), gpus(H200), {}),
        ((*cuda(H200), Device("Vulkan0", H200, 24000 * MIB, 0)), gpus(H200, H200), {}),
        (cuda("NVIDIA GB10"), (replace(gpus("NVIDIA GB10")[0], total_bytes=None, free_bytes=None),), {}),
        (cuda("NVIDIA GB10"), (replace(gpus("NVIDIA GB10")[0], free_bytes=None),), {}),
        (cuda(H200), (replace(gpus(H200)[0], total_bytes=141 * 1024 * MIB),), {}),
        ((replace(cuda(H200)[0], description="another name"),), gpus(H200), {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
    ids=[
        *("one-of-two-equal", "mig", "mixed", "more-than-cuda", "nvml-sees-none", "other-name"),
        *("another-backend", "unified", "no-free", "a-slice", "name-differs"),
    ],
)
def test_unknown_order_is_not_guessed(
    devices: tuple[Device, ...], found: tuple[NvmlGpu, ...], environ: dict[str, str]
) -> None:
    assert with_nvml_memory(devices, found, environ) is None
