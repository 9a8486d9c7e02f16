"""Collects the facts for ``llamasup doctor``. Starts no server; creates llamasup's own folders."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llamasup._version import __version__
from llamasup.core.control.client import ControlAddress, ControlClient
from llamasup.core.control.discovery import discover
from llamasup.core.control.selection import Running
from llamasup.core.http.certificate import MAX_PEM_BYTES, validity_of
from llamasup.core.llama_server.inspect import FoundRuntime, Runtime, survey_runtimes
from llamasup.core.llama_server.log_lines import shareable_lines
from llamasup.core.planning.memory.estimate import MemoryEstimate
from llamasup.core.settings.model import Settings
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.nvml import ask_nvml
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.native import native
from llamasup.core.system.process.run_folder import run_folder
from llamasup.core.system.process.sweep import stale_runs
from llamasup.core.system.storage.folders import cache_folder, read_bounded, state_folder
from llamasup.core.system.text import memory_text
from llamasup.errors import FolderUnusable, LlamasupError, PortInUse
from llamasup.features.doctor.bug_report import RunningReport
from llamasup.features.doctor.checks import option_names
from llamasup.features.doctor.facts import (
    CertificateFact,
    ConfigFile,
    Facts,
    FolderFact,
    ModelFact,
    NvmlFact,
    RuntimeFact,
)


def collect_facts(
    model: str | None,
    *,
    runtime: str | None,
    port: int,
    port_problem: LlamasupError | None,
    environ: Mapping[str, str],
    tls_cert: Path | None = None,
) -> Facts:
    """Collect all facts. A problem is a fact, never an error."""
    found = survey_runtimes(runtime, environ)
    used = found[0].answer if isinstance(found[0].answer, Runtime) else None
    runtimes = tuple(map(_runtime_fact, found))
    # Listed a moment ago: free memory is never cached, and another listing takes up to a second.
    devices: tuple[Device, ...] = () if used is None else used.capabilities.devices
    machine = hardware()
    return Facts(
        hardware=machine,
        runtimes=runtimes,
        environ=environ,
        port=port,
        devices=devices,
        nvml=_nvml_fact()
        if "NVIDIA" in machine.gpu_drivers or any(device.is_cuda for device in devices)
        else None,
        folders=tuple(_folder_facts(environ)),
        left_folders=stale_runs(),
        port_problem=port_problem,
        running=_running(port) if isinstance(port_problem, PortInUse) else None,
        config_files=tuple(_config_files(environ)),
        certificate=None if tls_cert is None else _certificate_fact(tls_cert),
        model=None if model is None else _model_fact(model, runtime, environ, used is not None),
    )


def _certificate_fact(path: Path) -> CertificateFact:
    try:
        content, _ = read_bounded(path, MAX_PEM_BYTES)
    except OSError as error:
        return CertificateFact(str(path), f"cannot be read: {error.strerror}", is_current=False)
    validity = validity_of(content.decode("latin-1"))
    if validity is None:
        return CertificateFact(str(path), "contains no readable PEM certificate", is_current=False)
    now = datetime.now(UTC)
    return CertificateFact(
        str(path), validity.problem(now), validity.is_current(now), ends=f"{validity.ends:%Y-%m-%d %H:%M} UTC"
    )


def _running(port: int) -> Running | None:
    from llamasup.core.control.discovery import running_at  # its import with httpx takes 60 ms

    return running_at(port)


def _runtime_fact(found: FoundRuntime) -> RuntimeFact:
    answer = found.answer
    if isinstance(answer, LlamasupError):
        return RuntimeFact(found.origin, answer)
    return RuntimeFact(found.origin, answer.capabilities, answer.path, answer.kind)


def _nvml_fact() -> NvmlFact:
    answer = ask_nvml()
    return NvmlFact(len(answer.gpus), answer.error, answer.problem)


def _model_fact(
    model: str, runtime: str | None, environ: Mapping[str, str], has_runtime: bool
) -> ModelFact | None:
    """The plan of ``run`` or its error. None if only the runtime is missing, which has its own check."""
    from llamasup.core.models.by_name import file_of
    from llamasup.core.planning.facts import prepare, read_given  # its import with the planner takes 70 ms
    from llamasup.core.planning.planner import Planner

    try:
        model = file_of(model)
        if not has_runtime:  # no second search: a runtime whose driver hangs takes 20 s
            read_given(model)
            return None
        launch = prepare(model, Settings(), runtime=runtime, environ=environ)
        planner = Planner(launch, Path(os.devnull))
        planner.check()
        admission = planner.admission()
        plan = admission.plan
    except LlamasupError as error:
        return ModelFact(model, problem=error)
    facts = launch.model
    kind = f"{facts.architecture} {facts.model_class}, {facts.quantization}"
    slots = f"{plan.parallel} slot{'' if plan.parallel == 1 else 's'}"
    found = f"{kind}; {slots}, {_memory_text(plan.memory)}"
    return ModelFact(launch.model_id, found, plan=planner.as_json(admission))


def _memory_text(memory: MemoryEstimate) -> str:
    """Host and devices apart, since they share no memory; without the prompt cache, which is optional."""
    free, cache_bytes = memory.free, memory.prompt_cache_bytes
    text = f"{memory_text(memory.host_bytes - cache_bytes)} of {memory_text(free.host_bytes)}"
    if memory.device_bytes:
        text += f" and {memory_text(memory.device_bytes)} of {memory_text(free.device_bytes)} on devices"
    return text + (f"; up to {memory_text(cache_bytes)} for the prompt cache" if cache_bytes else "")


# --- folders -------------------------------------------------------------------------------------


def _folder_facts(environ: Mapping[str, str]) -> Iterator[FolderFact]:
    try:
        with run_folder() as run:
            note = _other_folder_note(run.path, environ)
            yield FolderFact("run", str(run.path.parent), note=note)
    except FolderUnusable as error:
        yield FolderFact("run", problem=error)
    yield _folder_fact("cache", cache_folder)
    yield _folder_fact("state", state_folder)


def _other_folder_note(path: Path, environ: Mapping[str, str]) -> str:
    """The reason why the run folder is not in $XDG_RUNTIME_DIR."""
    home = environ.get("XDG_RUNTIME_DIR")
    if not home or environ.get("RUNTIME_DIRECTORY"):
        return ""
    return "" if path.is_relative_to(home) else f"{home} is not writable, or too long for sockets"


def _folder_fact(name: str, make: Callable[[], Path]) -> FolderFact:
    """Tries to write a file into the folder."""
    try:
        folder = make()
        try:
            with tempfile.TemporaryFile(dir=folder):
                return FolderFact(name, str(folder))
        except OSError as error:
            message = f"The folder {str(folder)!r} is not writable: {error.strerror}."
            remedy = "Give this user the right to write to it, or free space on its disk."
            return FolderFact(name, problem=FolderUnusable(message, remedy=remedy))
    except FolderUnusable as error:
        return FolderFact(name, problem=error)


# --- configuration files of llama-server ---------------------------------------------------------


def _config_files(environ: Mapping[str, str]) -> Iterator[ConfigFile]:
    """Find llama-server's own configuration (#26118).

    The child gets another XDG_CONFIG_HOME, so it ignores the user's file. It always reads the one in /etc.
    """
    if native.config_folder is None:  # Windows
        return
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    of_machine = Path(native.config_folder) / "llama.cpp"
    for path, is_ignored in ((Path(home) / "llama.cpp", True), (of_machine, False)):
        try:
            settings = option_names((path / "config.ini").read_text(errors="replace"))
        except OSError:
            continue
        if settings:
            yield ConfigFile(str(path / "config.ini"), settings, is_ignored)


# --- a running llamasup ----------------------------------------------------------------------------


_PACKAGES = ("httpx", "httptools", "msgspec", "psutil", "typer", "uvloop", "uvicorn", "xllamacpp")
_MAX_LINES = 200
_READ_LINES = 5000  # a start writes about 150 lines, and each request about 20


def versions() -> Mapping[str, str]:
    found = {
        "llamasup": __version__,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def collect_running() -> Iterator[RunningReport]:
    found = discover()
    for running in found.running:
        try:
            with ControlClient(ControlAddress(socket=running.socket)) as client:
                status = client.status()
                logs = {model["id"]: _log_of(client, model["id"]) for model in status["models"]}
                shown = {name: lines for name, lines in logs.items() if lines}
                yield RunningReport(running.pid, status, shown)
        except LlamasupError as error:
            yield RunningReport(running.pid, problem=error.message)
    for process in found.unresponsive:
        yield RunningReport(process.pid, problem=f"does not answer ({process.reason})")


def _log_of(client: ControlClient, model: str) -> list[str]:
    """Return the shareable lines; none for a model that was never loaded."""
    try:
        content = b"".join(client.log(model, lines=_READ_LINES))
    except LlamasupError:
        return []
    return shareable_lines(content.decode(errors="replace").splitlines(), _MAX_LINES)
