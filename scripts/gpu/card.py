"""The GPU of this machine: its memory as NVML reports it, and a program that takes some of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from llamasup.core.system.hardware.nvml import ask_nvml, vram_by_process

__all__ = ["energy_j", "free_bytes", "holding", "total_bytes", "used_by", "used_bytes", "wait_until"]

_CONTEXT_BYTES = 600 << 20  # the CUDA context of the program that holds memory, on an H100
_HOLD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    error = getattr(cuda, name)(*arguments)
    if error:
        sys.exit(f"{name} failed with CUDA error {error}")
context, size = ctypes.c_void_p(), int(sys.argv[1])
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
for part in (size // 2, size - size // 2):
    call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(part))
print("held", flush=True)
sys.stdin.read()
"""


def total_bytes() -> int:
    """Return the bytes of the first GPU; 0 without one."""
    gpus = ask_nvml().gpus
    return gpus[0].total_bytes or 0 if gpus else 0


def free_bytes() -> int:
    gpus = ask_nvml().gpus
    return gpus[0].free_bytes or 0 if gpus else 0


def used_bytes() -> int:
    return total_bytes() - free_bytes()


def used_by(pid: int) -> int:
    """The GPU memory of a process; 0 where the driver does not tell, as in some containers."""
    used: Mapping[int, int] = vram_by_process()
    return used.get(pid, 0)


def energy_j() -> float:
    """The energy that the first GPU has used since the driver was loaded; 0 without such a counter."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1e3
    except Exception:  # no package, no driver, or a GPU without the counter
        return 0.0


@contextmanager
def holding(*, leave_bytes: int) -> Iterator[int]:
    """Another program that allocates all GPU memory except ``leave_bytes``. Yields the bytes that it took."""
    size = free_bytes() - leave_bytes - _CONTEXT_BYTES
    if size <= 0:
        yield 0
        return
    command = [sys.executable, "-c", _HOLD, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"held\n":
                raise RuntimeError(f"no program could take {size:,} bytes of the GPU")
            yield size
        finally:
            process.stdin.close()
            process.wait(30)


def wait_until(condition: Callable[[], bool], limit_s: float) -> float | None:
    """The seconds until ``condition`` is true; None if it is still false after ``limit_s``."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - began_s
