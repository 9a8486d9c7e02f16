"""What is free on the devices of a runtime, now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from llamasup.errors import BrokenRuntime
from llamasup.llama_server.inspect import Runtime, list_devices
from llamasup.system.hardware.devices import Device, with_nvml_memory
from llamasup.system.hardware.nvml import ask_nvml

__all__ = ["await_freed", "devices_now"]

_FREED_TIMEOUT_S = 5.0
_FREED_POLL_S = 0.1
_MAX_PART = 0.5  # of an estimate that there has to be of it: what was allocated is mostly less


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


def await_freed(
    runtime: Runtime, environ: Mapping[str, str], before: Sequence[Device], needs: Mapping[str, int]
) -> bool:
    """Wait until what a process held, by device, is free there again; ``before`` is from while it ran.

    Blocks for 5 s at most; False: it is not seen to be free by then, or nobody can tell.
    """
    held = {
        each.name: each.free_bytes + int(needs[each.name] * _MAX_PART)
        for each in before
        if each.name in needs
    }

    def is_free() -> bool:
        with contextlib.suppress(BrokenRuntime):
            now = {each.name: each.free_bytes for each in devices_now(runtime, environ)}
            return all(now.get(name, 0) >= wanted for name, wanted in held.items())
        return False

    from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

    asking: Retrying = Retrying(
        stop=stop_after_delay(_FREED_TIMEOUT_S),
        wait=wait_fixed(_FREED_POLL_S),
        retry=retry_if_result(lambda free: not free),
    )
    try:
        return bool(asking(is_free))
    except RetryError:
        return False
