"""Chooses the archive of a release of llama.cpp for a machine, and explains the choice (pure).

The names are those of the releases since b9000: ``llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz``. Archives
named ``cudart-…`` hold the CUDA libraries for the archive with the same ending.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from llamasup.core.system.text import printable
from llamasup.errors import DownloadFailed, RuntimeMissing

BACKENDS = ("auto", "cpu", "cuda", "metal", "rocm", "sycl", "vulkan")

_NAME = re.compile(r"llama-(b[0-9]+)-bin-(ubuntu|win|macos)-((?:[a-z0-9.]+-)*)(x64|arm64)\.(?:zip|tar\.gz)")
_LIBRARIES = re.compile(r"cudart-llama-(?:b\d+-)?bin-(.+)\.(?:zip|tar\.gz)")
_RESERVED = ("auto", "chosen.json", "embedded", "llama-server", "previous")
_MAX_LETTERS = 100
_OLDER_NAMES = {"hip": "rocm", "": "cpu"}


class Machine(Struct, frozen=True):
    """The facts that decide on a backend.

    ``system`` and ``arch`` as in names of archives, empty for others. ``cuda``: the newest CUDA that the
    NVIDIA driver supports, as (major, minor); None without a GPU of NVIDIA.
    """

    system: str
    arch: str
    cuda: tuple[int, int] | None = None
    rocm: bool = False
    vulkan: bool = False


class _File(Struct, frozen=True):
    name: str
    browser_download_url: str
    size: int
    digest: str | None = None

    @property
    def sha256(self) -> str | None:
        found = re.fullmatch(r"sha256:([0-9a-f]{64})", (self.digest or "").lower())
        return found[1] if found else None


class _Release(Struct, frozen=True):
    tag_name: str
    assets: tuple[_File, ...]


class Archive(Struct, frozen=True):
    """An archive of a build. ``files``: it, and that of the CUDA libraries if they are apart."""

    build: str
    backend: str
    variant: str
    files: tuple[_File, ...]

    @property
    def name(self) -> str:
        """The name of the installed build, such as ``b11462-cuda-13.4``."""
        return "-".join(filter(None, (self.build, self.backend, self.variant)))

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class Choice(Struct, frozen=True):
    """The archive for a machine, and the reasons in sentences."""

    archive: Archive
    reasons: tuple[str, ...]


def read_release(body: bytes, machine: Machine) -> tuple[Archive, ...]:
    """Return the archives for the machine's system and processor in an answer of the release API.

    Raises DownloadFailed if it is not such an answer.
    """
    try:
        release = msgspec.json.decode(body, type=_Release)
    except msgspec.MsgspecError as error:
        raise DownloadFailed(
            f"The list of releases cannot be read: {error}.",
            remedy="Check --releases and $LLAMASUP_RELEASES, or give an archive with --from FILE.",
        ) from None
    for file in release.assets:
        if not file.browser_download_url.startswith(("https://", "http://")) or file.size < 0:
            raise DownloadFailed(f"The release has no valid address and size for {printable(file.name)!r}.")
    libraries = {found[1]: file for file in release.assets if (found := _LIBRARIES.fullmatch(file.name))}
    return tuple(_archives(release.assets, libraries, machine))


def _archives(files: Sequence[_File], libraries: dict[str, _File], machine: Machine) -> Iterator[Archive]:
    for file in files:
        if (found := _NAME.fullmatch(file.name)) is None:
            continue
        _, system, middle, arch = found.groups()
        if (system, arch) == (machine.system, machine.arch):
            extra = libraries.get(f"{system}-{middle}{arch}")
            yield _archive(found, (file,) if extra is None else (file, extra))


def _archive(found: re.Match[str], files: tuple[_File, ...] = ()) -> Archive:
    """Read the parts of an archive's name. For macOS, it names no backend."""
    build, system, middle, arch = found.groups()
    backend, _, variant = middle.rstrip("-").partition("-")
    if (system, arch) == ("macos", "arm64"):
        backend = "metal"
    return Archive(build, _OLDER_NAMES.get(backend, backend), variant, files)


def named(file_name: str) -> Archive:
    """Return the archive with this file name, for a file that the user gives."""
    if (found := _NAME.fullmatch(file_name)) is not None:
        return _archive(found)
    stem = re.sub(r"(-(?:py|cp)\d.*)?\.(zip|whl|tgz|tar(\.\w+)?)$", "", file_name)
    name = re.sub(r"[^A-Za-z0-9._+-]", "-", stem).lstrip(".-")[:_MAX_LETTERS] or "build"
    return Archive(f"build-{name}" if name in _RESERVED else name, "", "", ())


def choose(archives: Sequence[Archive], machine: Machine, wanted: str = "auto") -> Choice:
    """Return the archive for the machine. Raises RuntimeMissing if the release has none."""
    if not archives:
        raise RuntimeMissing(
            f"The release has no archive for this machine ({machine.system or 'another system'}, "
            f"{machine.arch or 'another processor'}).",
            remedy="Build llama.cpp (docs/gpus.md), and give its llama-server with --runtime.",
        )
    reasons: list[str] = []
    for backend, reason in (
        _preferred(machine) if wanted == "auto" else ((wanted, f"--backend {wanted} was given."),)
    ):
        fitting = [archive for archive in archives if archive.backend == backend]
        best = max(fitting, key=lambda archive: _order(archive, machine.cuda), default=None)
        if best is not None and (backend != "cuda" or _is_supported(best, machine.cuda)):
            return Choice(best, (*reasons, reason))
        lacking = "" if best is None else f" for CUDA {_text(machine.cuda)} or older"
        reasons.append(f"{reason} The release has no archive with {backend}{lacking} for this machine.")
    known = ", ".join(sorted({archive.backend for archive in archives}))
    raise RuntimeMissing(
        " ".join(reasons),
        remedy=f"Choose one of these with --backend: {known}; or build it: docs/gpus.md.",
    )


def _preferred(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the backends of a machine, the fastest first, each with its reason."""
    if machine.system == "macos" and machine.arch == "arm64":
        yield "metal", "This Mac has a GPU of Apple."
    if machine.cuda is not None:
        yield "cuda", f"There is a GPU of NVIDIA, and its driver supports CUDA {_text(machine.cuda)}."
    if machine.rocm:
        yield "rocm", "There is a GPU of AMD, and ROCm is installed."
    if machine.vulkan:
        yield "vulkan", "There is a GPU with a Vulkan driver."
    yield "cpu", "No other backend is usable here: the CPU computes."


def _order(archive: Archive, cuda: tuple[int, int] | None) -> tuple[bool, tuple[int, ...], str]:
    """Order archives of one backend: those that the driver supports first, then the newest, then f32."""
    return _is_supported(archive, cuda), _version(archive.variant), archive.variant


def _is_supported(archive: Archive, cuda: tuple[int, int] | None) -> bool:
    """Whether the driver runs this CUDA. A driver runs all minor versions of its major one."""
    version = _version(archive.variant)
    return cuda is None or not version or version[0] <= cuda[0]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("."))) if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})*", text) else ()


def _text(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
