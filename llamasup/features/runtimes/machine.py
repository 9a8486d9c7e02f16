"""Looks at this machine for the choice of a build: system, processor and GPU drivers."""

from __future__ import annotations

import contextlib
import ctypes.util
import platform
import sys
from pathlib import Path

from llamasup.features.runtimes.assets import Machine

_SYSTEMS = {"linux": "ubuntu", "win32": "win", "darwin": "macos"}
_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_RENDER_NODES = Path("/dev/dri")


def this_machine() -> Machine:
    """Return the facts about this machine. Loads the driver's library for GPUs of NVIDIA; never raises."""
    return Machine(
        system=_SYSTEMS.get(sys.platform, ""),
        arch=_ARCHITECTURES.get(platform.machine().lower(), ""),
        cuda=_newest_cuda(),
        rocm=Path("/dev/kfd").exists() and ctypes.util.find_library("amdhip64") is not None,
        vulkan=_has_vulkan(),
    )


def _newest_cuda() -> tuple[int, int] | None:
    """Ask the driver, whose library needs no package of Python."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL(library)
        if driver.cuInit(0) == 0 and driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000, version.value % 1000 // 10
    return None


def _has_vulkan() -> bool:
    """Whether there are a loader and a GPU: a loader alone may only know a driver that uses the CPU."""
    has_gpu = any(_RENDER_NODES.glob("renderD*")) or Path("/dev/nvidiactl").exists()
    is_windows, name = _SYSTEMS.get(sys.platform) == "win", "vulkan"
    if is_windows:
        name = "vulkan-1"  # it comes with the driver of a GPU
    return (is_windows or has_gpu) and ctypes.util.find_library(name) is not None
