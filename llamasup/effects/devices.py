"""What is free on the devices of a runtime, now."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.core.devices import Device, with_nvml_memory
from llamasup.effects.nvml import ask_nvml
from llamasup.effects.runtimes import Runtime, list_devices

__all__ = ["devices_now"]


def devices_now(runtime: Runtime, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices of ``runtime`` with what is free on them at this moment; none costs nothing.

    By NVML where it shows the same GPUs, else by asking the runtime again, which makes a context on each GPU
    for a moment. Raises BrokenRuntime where that does not answer.
    """
    known = runtime.capabilities.devices
    if not known:
        return ()
    if all(device.is_cuda and not device.shares_host_memory for device in known):
        fresh = with_nvml_memory(known, ask_nvml().gpus, environ)
        if fresh is not None:
            return fresh
    return list_devices(runtime, environ)
