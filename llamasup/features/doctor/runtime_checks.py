"""Checks of the runtime, its devices, the model, and llama-server's own configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llamasup.core.llama_server.foreign_words import ignored_variables
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.text import memory_text
from llamasup.errors import LlamasupError
from llamasup.features.doctor.facts import Check, Facts


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

_HIDING_VARIABLES = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
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
    unused = [
        vendor
        for vendor in sorted(facts.gpu_drivers)
        if not any(facts.environ.get(name) in ("", "-1") for name in _HIDING_VARIABLES[vendor])
    ]
    if not unused:
        yield Check("devices", True, f"none: the CPU computes{message}")
    else:
        vendor = unused[0]
        yield Check(
            "devices",
            False,
            f"none, although this machine has an {vendor} GPU with a driver: the CPU computes, many times "
            f"slower{message}",
            f"Give a llama-server built for {_BUILDS[vendor]} with --runtime. If this one is, its driver "
            f"does not respond: check with {_DRIVER_TOOLS[vendor]}.",
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
            "not installed: llamasup asks the runtime for free memory, which is slower",
            'Install it: pip install "llamasup[gpu]"',
        )
    elif remedy := _NVML_BROKEN.get(nvml.error):
        yield Check("NVML", False, nvml.problem, remedy)
    else:
        yield Check("NVML", True, f"does not respond: {nvml.problem}", _NVML_CONTAINER)


_NVML_CONTAINER = "In a container it needs NVIDIA_DRIVER_CAPABILITIES=compute,utility."


# --- options of llama-server from files and the environment ----------------------------------------


def option_names(text: str) -> tuple[str, ...]:
    """The names of the options in a llama.cpp config.ini, as in the long flags."""
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
