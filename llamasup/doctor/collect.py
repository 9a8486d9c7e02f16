"""Collects what ``llamasup doctor`` looks at. Starts no server; makes our own folders if there are none."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from llamasup.control.selection import RunningFact
from llamasup.doctor.facts import (
    CertificateFact,
    ConfigFile,
    Facts,
    FolderFact,
    ModelFact,
    NvmlFact,
    Problem,
    RuntimeFact,
)
from llamasup.doctor.server import settings_in
from llamasup.errors import FolderUnusable, LlamasupError, PortInUse
from llamasup.http.certificate import validity_of
from llamasup.llama_server.inspect import FoundRuntime, Runtime, survey_runtimes
from llamasup.llama_server.settings import Settings
from llamasup.planning.memory.estimate import MemoryEstimate
from llamasup.system.hardware.devices import Device, is_amd_card
from llamasup.system.hardware.nvml import ask_nvml
from llamasup.system.hardware.probe import hardware, system_text
from llamasup.system.process.run_folder import run_folder
from llamasup.system.process.sweep import stale_runs
from llamasup.system.storage.folders import cache_folder, read_bounded, state_folder
from llamasup.system.text import memory_text

__all__ = ["gather"]

_CERTIFICATE_BYTES = 1 << 20
_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


def gather(
    model: str | None,
    *,
    runtime: str | None,
    port: int,
    port_problem: LlamasupError | None,
    environ: Mapping[str, str],
    tls_cert: Path | None = None,
) -> Facts:
    """Everything there is to know. What is broken is a fact, never an error."""
    found = survey_runtimes(runtime, environ)
    used = found[0].answer if isinstance(found[0].answer, Runtime) else None
    runtimes = tuple(map(_runtime_fact, found))
    # Those of a moment ago: what is free on them is never remembered, and asking takes up to a second.
    devices: tuple[Device, ...] = () if used is None else used.capabilities.devices
    drivers = _gpu_drivers()
    return Facts(
        hardware=hardware(),
        runtimes=runtimes,
        environ=environ,
        port=port,
        devices=devices,
        gpu_drivers=drivers,
        nvml=_nvml_fact() if "NVIDIA" in drivers or any(each.is_cuda for each in devices) else None,
        folders=tuple(_folder_facts(environ)),
        left=stale_runs(),
        port_problem=None if port_problem is None else _problem(port_problem),
        running=_running(port) if isinstance(port_problem, PortInUse) else None,
        config_files=tuple(_config_files(environ)),
        certificate=None if tls_cert is None else _certificate_fact(tls_cert),
        model=None if model is None else _model_fact(model, runtime, environ, used is not None),
    )


def _certificate_fact(path: Path) -> CertificateFact:
    try:
        content, _ = read_bounded(path, _CERTIFICATE_BYTES)
    except OSError as error:
        return CertificateFact(str(path), f"cannot be read: {error.strerror}", is_current=False)
    validity = validity_of(content.decode("latin-1"))
    if validity is None:
        return CertificateFact(str(path), "holds no PEM certificate that can be read", is_current=False)
    now = datetime.now(UTC)
    return CertificateFact(
        str(path), validity.problem(now), validity.is_current(now), ends=f"{validity.ends:%Y-%m-%d %H:%M} UTC"
    )


def _running(port: int) -> RunningFact | None:
    from llamasup.control.discovery import running_at  # with httpx 60 ms, for nothing where the port is free

    return running_at(port)


def _gpu_drivers(root: Path = Path("/")) -> frozenset[str]:
    """Whose cards are there and have a driver that this process could use."""
    found = set()
    # A container may have been given /dev/nvidia1 alone; /dev/nvidiactl alone is no GPU.
    if any((root / "dev").glob("nvidia[0-9]*")):
        found.add("NVIDIA")
    nodes = (root / _KFD_NODES).glob("*/properties") if (root / "dev/kfd").exists() else ()
    if any(is_amd_card(system_text(node)) for node in nodes):
        found.add("AMD")
    return frozenset(found)


def _problem(error: LlamasupError) -> Problem:
    return Problem(error.message, error.remedy)


def _runtime_fact(found: FoundRuntime) -> RuntimeFact:
    answer = found.answer
    if isinstance(answer, LlamasupError):
        return RuntimeFact(found.origin, _problem(answer))
    return RuntimeFact(found.origin, answer.capabilities, answer.path, answer.kind)


def _nvml_fact() -> NvmlFact:
    answer = ask_nvml()
    return NvmlFact(len(answer.gpus), answer.error, answer.problem)


def _model_fact(
    model: str, runtime: str | None, environ: Mapping[str, str], has_runtime: bool
) -> ModelFact | None:
    """What ``run`` would make of it; nothing where only the runtime is missing, which has its own check."""
    from llamasup.planning.facts import prepare, read_given  # with the planner 70 ms, for nothing without one
    from llamasup.planning.planner import Planner

    try:
        if not has_runtime:  # and not asked again: one whose driver hangs takes 20 s
            read_given(model)
            return None
        launch = prepare(model, Settings(), runtime=runtime, environ=environ)
        planner = Planner(launch, Path(os.devnull))
        planner.check()
        made = planner.admission().plan
    except LlamasupError as error:
        return ModelFact(model, problem=_problem(error))
    facts = launch.model
    kind = f"{facts.architecture} {facts.model_class}, {facts.quantization}"
    slots = f"{made.parallel} slot{'' if made.parallel == 1 else 's'}"
    return ModelFact(launch.model_id, f"{kind}; {slots}, {_needs(made.memory)}")


def _needs(memory: MemoryEstimate) -> str:
    """Host and devices apart, since neither lends to the other; nor is the prompt cache the model's need."""
    room, kept = memory.room, memory.prompt_cache_bytes
    needs = f"{memory_text(memory.host_bytes - kept)} of {memory_text(room.host_bytes)}"
    if memory.device_bytes:
        needs += f" and {memory_text(memory.device_bytes)} of {memory_text(room.device_bytes)} on devices"
    return needs + (f"; up to {memory_text(kept)} for prompts already read" if kept else "")


# --- folders -------------------------------------------------------------------------------------


def _folder_facts(environ: Mapping[str, str]) -> Iterator[FolderFact]:
    try:
        with run_folder() as run:
            note = _not_at_home(run.path, environ)
            yield FolderFact("run", str(run.path.parent), note=note)
    except FolderUnusable as error:
        yield FolderFact("run", problem=_problem(error))
    yield _written("cache", cache_folder)
    yield _written("state", state_folder)


def _not_at_home(path: Path, environ: Mapping[str, str]) -> str:
    home = environ.get("XDG_RUNTIME_DIR")
    if sys.platform != "linux" or not home or environ.get("RUNTIME_DIRECTORY"):
        return ""
    return "" if path.is_relative_to(home) else f"{home} is not writable, or too long for sockets"


def _written(name: str, make: Callable[[], Path]) -> FolderFact:
    """A folder in which a file could be written just now."""
    try:
        folder = make()
        try:
            with tempfile.TemporaryFile(dir=folder):
                return FolderFact(name, str(folder))
        except OSError as error:
            message = f"The folder {str(folder)!r} cannot be written: {error.strerror}."
            return FolderFact(
                name, problem=Problem(message, "Make it this user's, or make room on its disk.")
            )
    except FolderUnusable as error:
        return FolderFact(name, problem=_problem(error))


# --- where llama-server takes options from -------------------------------------------------------


def _config_files(environ: Mapping[str, str]) -> Iterator[ConfigFile]:
    """Its own configuration (#26118). The user's is shut out by our XDG_CONFIG_HOME, /etc cannot be."""
    if sys.platform == "win32":
        return
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    for path, shut_out in ((Path(home) / "llama.cpp", True), (Path("/etc/llama.cpp"), False)):
        try:
            settings = settings_in((path / "config.ini").read_text(errors="replace"))
        except OSError:
            continue
        if settings:
            yield ConfigFile(str(path / "config.ini"), settings, shut_out)
