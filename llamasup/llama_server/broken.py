"""Why a runtime that is there cannot be used: the error for each case, with what to do about it."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import signal
import stat
from pathlib import Path

from llamasup.errors import BrokenRuntime, RuntimeMissing
from llamasup.llama_server.capabilities import Option
from llamasup.system.process.run_once import CommandResult

__all__ = ["cannot_start", "check_file", "no_devices", "no_use"]

_ANOTHER = "give another llama-server with --runtime, or use --runtime embedded"
_INSIDE_A_FOLDER = ("llama-server", "bin/llama-server", "build/bin/llama-server", "llama-server.exe")

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


def check_file(path: Path, origin: str) -> None:
    """Raise RuntimeMissing or BrokenRuntime unless ``path`` is a file that may be run."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _not_there(path, origin, error) from error
    if stat.S_ISDIR(mode):
        inside = [path / name for name in _INSIDE_A_FOLDER if (path / name).is_file()]
        raise BrokenRuntime(
            f"{path} ({origin}) is a folder, not a program.",
            remedy=f"Give the program in it: {inside[0]}"
            if inside
            else "Give the path of llama-server itself.",
        )
    if not stat.S_ISREG(mode):
        raise BrokenRuntime(f"{path} ({origin}) is not a regular file.", remedy=_sentence(_ANOTHER))
    if not os.access(path, os.X_OK):
        if _first_bytes(path).startswith(b"GGUF"):
            raise BrokenRuntime(
                f"{path} ({origin}) is a GGUF model, not a program.",
                remedy="Give the model as MODEL, and a llama-server with --runtime.",
            )
        raise BrokenRuntime(
            f"{path} ({origin}) is not executable (mode {stat.S_IMODE(mode):o}).",
            remedy=f"Make it executable: chmod +x {shlex.quote(str(path))}; or {_ANOTHER}.",
        )


def cannot_start(path: Path, error: OSError) -> BrokenRuntime:
    """The system refused to start it; ``error`` says how."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENOEXEC:
        return BrokenRuntime(
            f"{path} cannot be run on this machine ({reason}): {_what_it_is(path)}.",
            remedy=f"Get a llama-server for {platform.system()} on {platform.machine()}, or {_ANOTHER}.",
        )
    if error.errno == errno.ENOENT:
        # The file itself is there: it is the interpreter of a script, or an ELF file's loader, that is not.
        return BrokenRuntime(
            f"{path} cannot be run: the program that it needs to be loaded by is missing{_loader(path)}.",
            remedy=f"It was built for another distribution. Install that program, or {_ANOTHER}.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return BrokenRuntime(
            f"{path} may not be run ({reason}).",
            remedy=f"See whether findmnt -T {shlex.quote(str(path))} says noexec, or {_ANOTHER}.",
        )
    return BrokenRuntime(f"{path} cannot be run ({reason}).", remedy=_sentence(_ANOTHER))


def no_use(name: str, answer: CommandResult, options: tuple[Option, ...], timeout_s: float) -> BrokenRuntime:
    """It was started, and its answer to ``--help`` is not llama-server's."""
    printed = answer.stderr or answer.stdout
    if answer.too_slow:
        return BrokenRuntime(
            f"{name} did not answer --help within {timeout_s:g} s.",
            remedy=f"Run it by hand to see what it waits for: {shlex.quote(name)} --help; or {_ANOTHER}.",
            lines=_last_lines(printed),
        )
    if answer.too_long:
        return BrokenRuntime(
            f"{name} is not llama-server: it answers --help with text that does not end.",
            remedy=_sentence(_ANOTHER),
        )
    if match := _MISSING_LIBRARY.search(printed):
        library = next(filter(None, match.groups()))
        return BrokenRuntime(
            f"{name} cannot start: its shared library {library} is missing.",
            remedy=_library_remedy(name, library),
            lines=_last_lines(printed),
        )
    if match := _OLD_SYSTEM.search(printed):
        return BrokenRuntime(
            f"{name} cannot start: it was built for a newer system ({match['symbol']} is missing here).",
            remedy=f"Build llama-server on this machine, or {_ANOTHER}.",
            lines=_last_lines(printed),
        )
    if _WRONG_LIBRARY.search(printed):
        return BrokenRuntime(
            f"{name} cannot start: the libraries that it finds are of another build.",
            remedy="Keep libllama and libggml of its own build beside it; see what LD_LIBRARY_PATH adds.",
            lines=_last_lines(printed),
        )
    if answer.exit_code in (-signal.SIGILL, 128 + signal.SIGILL):
        return BrokenRuntime(
            f"{name} was built for another processor: it met an instruction that this one lacks (SIGILL).",
            remedy=f"Build it here, or with -DGGML_NATIVE=OFF; or {_ANOTHER}.",
            lines=_last_lines(printed),
        )
    if answer.exit_code < 0:
        return BrokenRuntime(
            f"{name} crashed at --help ({_signal_name(-answer.exit_code)}).",
            remedy=f"Build or download it anew, or {_ANOTHER}.",
            lines=_last_lines(printed),
        )
    return _not_llama_server(name, answer, options)


def no_devices(name: str, answer: CommandResult) -> BrokenRuntime:
    """It answers ``--help`` and failed at ``--list-devices``: no sign that there are none."""
    how = _signal_name(-answer.exit_code) if answer.exit_code < 0 else f"exit code {answer.exit_code}"
    return BrokenRuntime(
        f"{name} answers --help, but fails at --list-devices ({how}).",
        remedy="Its GPU driver may be broken: see whether nvidia-smi or vulkaninfo answers. "
        "CUDA_VISIBLE_DEVICES= leaves NVIDIA's GPUs out.",
        lines=_last_lines(answer.stderr or answer.stdout),
    )


def _not_llama_server(name: str, answer: CommandResult, options: tuple[Option, ...]) -> BrokenRuntime:
    ended = f"exit code {answer.exit_code}"
    beside = Path(name).with_name("llama-server")
    remedy = (
        f"Give the llama-server beside it: {beside}" if _is_other_file(beside, name) else _sentence(_ANOTHER)
    )
    lines = _last_lines(answer.stderr or answer.stdout)
    if not lines:
        return BrokenRuntime(f"{name} printed nothing for --help ({ended}).", remedy=remedy)
    if options:
        listed = {spelling for option in options for spelling in option.spellings}
        missing = [o for o in ("--model", "--host", "--port", "--ctx-size", "--parallel") if o not in listed]
        return BrokenRuntime(
            f"{name} is not llama-server: its --help lists no {', '.join(missing)}.", remedy=remedy
        )
    telling = lines[-1] if "Traceback (most recent call last)" in answer.stderr else _first_line(answer)
    return BrokenRuntime(
        f"{name} is not llama-server: its --help lists no options, but says {telling!r} ({ended}).",
        remedy=remedy,
        lines=lines,
    )


# --- details -------------------------------------------------------------------------------------


def _not_there(path: Path, origin: str, error: OSError) -> RuntimeMissing:
    if path.is_symlink():
        return BrokenRuntime(
            f"{path} ({origin}) is a symbolic link to {path.readlink()}, which is not there.",
            remedy=_sentence(_ANOTHER),
        )
    if isinstance(error, PermissionError):
        return BrokenRuntime(
            f"{path} ({origin}) cannot be looked at: permission denied.",
            remedy=f"Give this user the right to enter its folders, or {_ANOTHER}.",
        )
    return RuntimeMissing(
        f"There is no {path} ({origin}).",
        remedy="Give the path of a llama-server, its name on PATH, 'embedded' or 'auto'.",
    )


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(256)
    except OSError:
        return b""


def _what_it_is(path: Path) -> str:
    head = _first_bytes(path)
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        machine = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
        return f"it is an ELF program for {_ELF_MACHINES.get(machine, f'machine {machine}')}"
    if head.startswith(b"MZ"):
        return "it is a Windows program"
    if head.startswith(_MACH_O):
        return "it is a macOS program"
    return "it is empty" if not head else "it is neither a program nor a script that begins with #!"


def _loader(path: Path) -> str:
    head = _first_bytes(path)
    if not head.startswith(b"#!"):
        return ""
    interpreter = head[2:].split(b"\n")[0].decode("utf-8", "replace").strip()
    return f": {interpreter}"


def _library_remedy(name: str, library: str) -> str:
    if re.match(r"libcu|libnvidia|libnccl", library):
        return f"It is a build for NVIDIA GPUs: install the CUDA runtime that has {library}; or {_ANOTHER}."
    if re.match(r"lib(hip|roc|amd)", library):
        return f"It is a build for AMD GPUs: install the ROCm runtime that has {library}; or {_ANOTHER}."
    if library.startswith("libvulkan"):
        return f"It is a build for Vulkan: install the Vulkan loader (libvulkan1); or {_ANOTHER}."
    folder = Path(os.path.realpath(name)).parent
    return f"Install the package that has {library}, or put the file into {folder}; or {_ANOTHER}."


def _is_other_file(candidate: Path, name: str) -> bool:
    return candidate.is_file() and not candidate.samefile(name)


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
    """A line fit to be shown: 200 characters, and none that would act on a terminal."""
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )
    return shown.strip()[:200]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
