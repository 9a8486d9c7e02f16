"""The free memory on the devices of a runtime, now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from llamasup.core.llama_server.inspect import Runtime, list_devices
from llamasup.core.system.hardware.devices import Device, with_nvml_memory
from llamasup.core.system.hardware.nvml import ask_nvml
from llamasup.errors import BrokenRuntime

_FREED_TIMEOUT_S = 5.0
_FREED_POLL_S = 0.1
_MIN_FREED_SHARE = 0.5  # of the estimate, because most processes allocate less


def devices_now(runtime: Runtime, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices of ``runtime`` with their free memory at this moment.

    From NVML if it shows the same GPUs, else from the runtime, which creates a context on each GPU for a
    moment. Raises BrokenRuntime if the runtime does not answer.
    """
    known = runtime.capabilities.devices
    if not known:
        return ()
    if all(device.is_cuda and not device.shares_host_memory for device in known):
        fresh = with_nvml_memory(known, ask_nvml().gpus, environ)
        if fresh is not None:
            return fresh
    return list_devices(runtime, environ)


def await_freed(
    runtime: Runtime, environ: Mapping[str, str], before: Sequence[Device], needs: Mapping[str, int]
) -> bool:
    """Wait until the memory of an ended process is free again. ``before``: the devices while it ran.

    Blocks for at most 5 s. False: the devices do not report it as free by then, or do not answer.
    """
    expected_bytes = {
        device.name: device.free_bytes + int(needs[device.name] * _MIN_FREED_SHARE)
        for device in before
        if device.name in needs
    }

    def is_free() -> bool:
        with contextlib.suppress(BrokenRuntime):
            now = {device.name: device.free_bytes for device in devices_now(runtime, environ)}
            return all(now.get(name, 0) >= wanted for name, wanted in expected_bytes.items())
        return False

    from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

    retrying: Retrying = Retrying(
        stop=stop_after_delay(_FREED_TIMEOUT_S),
        wait=wait_fixed(_FREED_POLL_S),
        retry=retry_if_result(lambda free: not free),
    )
    try:
        return bool(retrying(is_free))
    except RetryError:
        return False
