"""All checks of ``llamasup doctor``: facts in, results out.

A failed check names a problem and its remedy. A passed check may also have a remedy, as advice: an ordinary
laptop passes all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import asdict

from llamasup.core.llama_server.argv_builder import ignored_variables
from llamasup.core.system.extras import install_command
from llamasup.core.system.hardware.devices import Device, visible_gpus
from llamasup.core.system.text import memory_text, printable
from llamasup.errors import LlamasupError
from llamasup.features.doctor.facts import Check, Facts

# --- the machine: memory, processors, rights and limits -------------------------------------------

_MIB = 1 << 20
# The demo model runs in 40 MiB; the smallest models of use have some 300 MB.
_MIN_MEMORY = 512 * _MIB


def check_memory(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    found = f"{memory_text(machine.memory_available_bytes)} free of {memory_text(machine.memory_total_bytes)}"
    if machine.cgroup_memory_limit_bytes is not None:
        found += f", limited to {memory_text(machine.cgroup_memory_limit_bytes)} by cgroup"
    if machine.swap_total_bytes:
        found += (
            f"; swap {memory_text(machine.swap_free_bytes)} free of {memory_text(machine.swap_total_bytes)}"
        )
    if machine.memory_available_bytes >= _MIN_MEMORY:
        yield Check("memory", True, found)
    elif machine.cgroup_memory_limit_bytes == machine.memory_total_bytes:
        yield Check("memory", False, found, "Raise the limit (MemoryMax=, --memory), or free memory.")
    else:
        yield Check("memory", False, found, "Stop other programs: hardly any model fits into this memory.")


def check_locked_memory(facts: Facts) -> Iterator[Check]:
    if facts.hardware.platform != "linux":
        return
    limit = facts.hardware.memlock_limit_bytes
    if limit is None:
        yield Check("locked memory", True, "unlimited")
    else:
        yield Check(
            "locked memory",
            True,
            f"at most {memory_text(limit)}: other programs can push larger models out of memory",
            "To lift the limit: LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 in a container, or a "
            "memlock line in /etc/security/limits.conf.",
        )


def check_address_space(facts: Facts) -> Iterator[Check]:
    """Check the limit of mapped memory. llama-server maps the whole model file, 8 MiB and more for each
    thread, and for CUDA all memory of the GPUs.
    """
    machine = facts.hardware
    limit = machine.address_space_limit_bytes
    gpu_bytes = sum(device.total_bytes for device in facts.devices if not device.shares_host_memory)
    if limit is None:
        yield Check("address space", True, "unlimited")
    elif limit >= machine.memory_total_bytes + gpu_bytes:
        yield Check("address space", True, f"limited to {memory_text(limit)}")
    else:
        yield Check(
            "address space",
            False,
            f"limited to {memory_text(limit)}, less than the memory: models that fit fail to load",
            "Remove the limit: ulimit -v unlimited, or LimitAS=infinity in a unit. To limit memory, use a "
            "cgroup (MemoryMax=).",
        )


def check_cpu(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    found = f"{machine.physical_cores} cores, {machine.cpus_allowed} CPUs allowed"
    if machine.cpu_quota is None:
        yield Check("CPU", True, found)
        return
    found += f", limited to the time of {machine.cpu_quota:.3g} by cgroup"
    if machine.cpu_quota >= 1:
        yield Check("CPU", True, found)
    else:
        yield Check(
            "CPU",
            False,
            f"{found}: all processes pause for the rest of each period",
            "Raise the limit to one CPU at least (CPUQuota=100%, --cpus 1).",
        )


def check_numa(facts: Facts) -> Iterator[Check]:
    machine = facts.hardware
    if machine.numa_nodes == 1:
        return
    found = f"{machine.numa_nodes} nodes"
    remedy = (
        "Spread threads and weights over the nodes with -- --numa distribute (almost twice as fast in "
        "llama.cpp's #13850), with an empty page cache at the first start. Or use one node: "
        "numactl --cpunodebind=0 --membind=0."
    )
    if machine.numa_balancing:
        # ggml warns: "has been observed to impair performance" (b11434).
        found += ", and the kernel moves pages between them"
        remedy = f"Turn that off, since it slows llama.cpp down: sysctl kernel.numa_balancing=0. {remedy}"
    yield Check("NUMA", not machine.numa_balancing or bool(facts.devices), found, remedy)


def check_huge_pages(facts: Facts) -> Iterator[Check]:
    """Report the setting for information: none is known to hurt. It does not affect weights, which are mapped
    files, and llama.cpp was as fast with it as without (#22022).
    """
    if facts.hardware.huge_pages is not None:
        yield Check("transparent huge pages", True, facts.hardware.huge_pages)


def check_priority(facts: Facts) -> Iterator[Check]:
    if facts.hardware.may_raise_priority:
        yield Check("priority", True, "can be raised")
    elif facts.hardware.platform == "linux":
        yield Check(
            "priority",
            True,
            "cannot be raised: on a busy machine, other programs slow the model down",
            "To allow it: LimitNICE=-10 and LimitRTPRIO=80 in a unit, or the capability SYS_NICE.",
        )


# Each client needs a connection to llamasup and one from there to llama-server. Some 40 other files are open.
_OTHER_FILES = 40
_MIN_CLIENTS = 100
_MANY_CLIENTS = 1000


def check_open_files(facts: Facts) -> Iterator[Check]:
    limit = facts.hardware.open_files_limit
    if limit is None:
        yield Check("open files", True, "unlimited")
        return
    clients = max(0, limit - _OTHER_FILES) // 2
    found = f"at most {limit}: enough for about {clients} clients at a time"
    if clients >= _MANY_CLIENTS:
        yield Check("open files", True, found)
    else:
        remedy = "Raise the limit: ulimit -n 65536, or LimitNOFILE=65536 in a unit."
        yield Check("open files", clients >= _MIN_CLIENTS, found, remedy)


# --- the runtime, its devices, the model, and llama-server's own configuration ---------------------


def check_runtimes(facts: Facts) -> Iterator[Check]:
    for number, runtime in enumerate(facts.runtimes, start=1):
        name = "runtime" if number == 1 else f"runtime {number}"
        if isinstance(runtime.answer, LlamasupError):
            # A problem of a runtime that is not used is advice.
            yield Check(name, number > 1, runtime.answer.message, runtime.answer.remedy)
        else:
            found = f"{runtime.answer.version}, {runtime.kind}, {runtime.origin}: {runtime.path}"
            yield Check(name, True, found)


_OPTIONAL_FEATURES: Mapping[str, tuple[str, ...]] = {
    "flash attention": ("--flash-attn",),
    "quantized KV cache": ("--cache-type-k",),
    "fitting layers to the GPU": ("--fit",),
    "draft models": ("--model-draft", "--spec-draft-model"),
    "locking memory": ("--load-mode", "--mlock"),
    "metrics": ("--metrics",),
}


def check_capabilities(facts: Facts) -> Iterator[Check]:
    known = facts.runtimes[0].capabilities
    if known is None:
        return
    has = {name: known.knows(*flags) is not None for name, flags in _OPTIONAL_FEATURES.items()}
    has = {"Unix sockets": known.unix_sockets, **has}
    missing = ", ".join(name for name, is_present in has.items() if not is_present)
    found = ", ".join(name for name, is_present in has.items() if is_present) or "no optional features"
    if missing:
        yield Check("capabilities", True, f"{found}; not {missing}", "A newer llama-server has all of them.")
    else:
        yield Check("capabilities", True, found)


def check_ffmpeg(facts: Facts) -> Iterator[Check]:
    """Check for the two programs that llama-server needs for WebP images and videos (b11434).

    If one is missing, it answers 400 "Failed to load image or audio file".
    """
    known = facts.runtimes[0].capabilities
    if known is None or known.knows("--mmproj") is None or facts.hardware.has_ffmpeg is None:
        return
    if facts.hardware.has_ffmpeg:
        yield Check("ffmpeg", True, "ffmpeg and ffprobe are on PATH, for WebP images and videos")
    else:
        yield Check(
            "ffmpeg",
            True,
            "ffmpeg and ffprobe are not both on PATH: llama-server refuses WebP images and videos",
            "Install ffmpeg if clients send WebP images or videos.",
        )


def check_model(facts: Facts) -> Iterator[Check]:
    if (model := facts.model) is None:
        return
    if model.problem is None:
        yield Check("model", True, f"{model.name}: {model.found}")
    else:
        yield Check("model", False, model.problem.message, model.problem.remedy)


# --- devices -------------------------------------------------------------------------------------

_BUILDS = {"NVIDIA": "CUDA or Vulkan", "AMD": "ROCm or Vulkan"}
_DRIVER_TOOLS = {"NVIDIA": "nvidia-smi", "AMD": "rocminfo"}


def check_devices(facts: Facts) -> Iterator[Check]:
    known = facts.runtimes[0].capabilities
    if known is None:
        return
    message = f"; the build says: {known.device_problem}" if known.device_problem else ""
    if facts.devices:
        yield Check("devices", True, "; ".join(map(_device, facts.devices)))
        return
    unused = visible_gpus(facts.hardware.gpu_drivers, facts.environ)
    if not unused:
        yield Check("devices", True, f"none: the CPU computes{message}")
    else:
        vendor = unused[0]
        yield Check(
            "devices",
            False,
            f"none, although this machine has an {vendor} GPU with a driver: the CPU computes, many times "
            f"slower{message}",
            f"Install a llama-server built for {_BUILDS[vendor]}: llamasup runtime install; or give one with "
            f"--runtime. If this one is, its driver does not respond: check with {_DRIVER_TOOLS[vendor]}.",
        )


def _device(device: Device) -> str:
    shared = ", shared with the host" if device.shares_host_memory else ""
    sizes = f"{memory_text(device.free_bytes)} free of {memory_text(device.total_bytes)}"
    return f"{device.name} {device.description}, {sizes}{shared}"


# What NVML's errors mean for CUDA, which needs the same driver.
_NVML_BROKEN = {
    "NVMLError_LibRmVersionMismatch": "The driver was updated, but the old one is still loaded, and CUDA "
    "fails too. Reboot, or unload and load the nvidia modules.",
    "NVMLError_DriverNotLoaded": "Load the driver (modprobe nvidia); after a kernel update, reboot.",
    "NVMLError_NoPermission": "Let this user open /dev/nvidia*: add the user to the group video or "
    "render, or pass --gpus to the container.",
    "NVMLError_GpuIsLost": "The GPU has fallen off its bus: reboot, and look for NVRM in dmesg.",
}


def check_nvml(facts: Facts) -> Iterator[Check]:
    if (nvml := facts.nvml) is None:
        return
    if not nvml.error:
        yield Check("NVML", True, f"{nvml.gpus} GPU{'' if nvml.gpus == 1 else 's'}")
    elif nvml.error == "not installed":
        yield Check(
            "NVML",
            True,
            "not installed: llamasup reads the free memory from the runtime, which is slower",
            f"Install it: {install_command('gpu')}",
        )
    elif remedy := _NVML_BROKEN.get(nvml.error):
        yield Check("NVML", False, nvml.problem, remedy)
    else:
        yield Check("NVML", True, f"does not respond: {nvml.problem}", _NVML_CONTAINER)


_NVML_CONTAINER = "In a container it needs NVIDIA_DRIVER_CAPABILITIES=compute,utility."


# --- options of llama-server from files and the environment ----------------------------------------


def option_names(text: str) -> tuple[str, ...]:
    """Return the names of the options in a llama.cpp config.ini, as in the long flags."""
    lines = (line.strip() for line in text.splitlines())
    names = (line.partition("=")[0].strip() for line in lines if "=" in line and line[0] not in "#;[")
    return tuple(dict.fromkeys(name.removeprefix("--") for name in names if name))


# With these, llama-server refuses llamasup's own requests [run, b11434: with api-key in
# /etc/llama.cpp/config.ini the warm-up is answered 401; with api-prefix the server never gets ready].
_LOCKING_OPTIONS = frozenset({"api-key", "api-key-file", "api-prefix", "ssl-key-file", "ssl-cert-file"})


def check_config_files(facts: Facts) -> Iterator[Check]:
    for file in facts.config_files:
        names = ", ".join(file.settings)
        if file.is_ignored:
            yield Check("llama.cpp config", True, f"{file.path} is not read: {names}", _USE_OPTIONS)
            continue
        locks = ", ".join(name for name in file.settings if name in _LOCKING_OPTIONS)
        if locks:
            yield Check(
                "llama.cpp config",
                False,
                f"{file.path} sets {locks}: llama-server refuses llamasup's own requests",
                f"Remove {locks} from this file. For clients, use llamasup's --api-key-file.",
            )
        else:
            remedy = "llama-server always reads this file, but llamasup's flags take precedence."
            yield Check("llama.cpp config", True, f"{file.path} sets {names}", remedy)


_USE_OPTIONS = "Pass the settings that you need to llamasup, as options or after --."


def check_environment(facts: Facts) -> Iterator[Check]:
    if ignored := ignored_variables(facts.environ):
        yield Check("environment", True, ignored, _USE_OPTIONS)


def run_checks(facts: Facts) -> tuple[Check, ...]:
    """Return the results that apply to this machine, in the order of the report."""
    return tuple(result for check in _CHECKS for result in check(facts))


def as_json(checks: tuple[Check, ...]) -> dict[str, Any]:
    """Return the ``doctor`` object of the contract (docs/design.md)."""
    return {
        "ok": all(check.ok for check in checks),
        "checks": [
            # A path may contain bytes other than UTF-8, which strict JSON parsers refuse.
            {**asdict(check), "found": printable(check.found), "remedy": printable(check.remedy)}
            for check in checks
        ],
    }


# --- what llamasup itself needs ------------------------------------------------------------------


def _check_folders(facts: Facts) -> Iterator[Check]:
    for folder in facts.folders:
        name = f"{folder.name} folder"
        if folder.problem is not None:
            yield Check(name, False, folder.problem.message, folder.problem.remedy)
        else:
            yield Check(name, True, folder.path + (f" ({folder.note})" if folder.note else ""))


def _check_left_folders(facts: Facts) -> Iterator[Check]:
    answering = [folder for folder in facts.left_folders if folder.answering]
    if answering:
        sockets = " ".join(socket for folder in answering for socket in folder.answering)
        yield Check(
            "left behind",
            False,
            f"a process of a llamasup that has ended (pid {answering[0].pid}) still listens: {sockets}",
            "The next llamasup run ends it. If it remains, find the process (ss -xlp).",
        )
    elif facts.left_folders:
        paths = " ".join(folder.path for folder in facts.left_folders)
        found = f"by a llamasup that was killed: {paths}"
        yield Check("left behind", True, found, "Nothing to do: the next llamasup run removes it.")
    else:
        yield Check("left behind", True, "nothing")


def _check_port(facts: Facts) -> Iterator[Check]:
    if (running := facts.running) is not None:
        models = ", ".join(running.models) or "nothing"
        found = f"{facts.port}: a llamasup (pid {running.pid}) serves {models} at {running.url}"
        yield Check(
            "port", True, found, "To run another llamasup, give it another port (--port 0: any free port)."
        )
    elif facts.port_problem is not None:
        yield Check("port", False, facts.port_problem.message, facts.port_problem.remedy)
    else:
        yield Check("port", True, f"{facts.port} is free" if facts.port else "any free port")


def _check_certificate(facts: Facts) -> Iterator[Check]:
    if (certificate := facts.certificate) is None:
        return
    if not certificate.problem:
        yield Check("certificate", True, f"{certificate.path} is valid until {certificate.ends}")
        return
    remedy = "Clients reject it. Renew it, or correct the clock of this machine."
    if certificate.is_current:
        remedy = "Renew it before that date. A running llamasup loads the new file by itself."
    elif not certificate.ends:
        remedy = "Give a PEM file with the certificate, followed by its chain."
    yield Check("certificate", certificate.is_current, f"{certificate.path} {certificate.problem}", remedy)


_CHECKS: tuple[Callable[[Facts], Iterator[Check]], ...] = (
    check_runtimes,
    check_capabilities,
    check_ffmpeg,
    check_model,
    check_devices,
    check_nvml,
    check_memory,
    check_locked_memory,
    check_address_space,
    check_cpu,
    check_numa,
    check_huge_pages,
    check_priority,
    check_open_files,
    _check_folders,
    _check_left_folders,
    _check_port,
    _check_certificate,
    check_config_files,
    check_environment,
)
