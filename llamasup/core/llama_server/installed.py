"""The builds of llama.cpp that ``llamasup runtime`` installed, and which of them new starts use.

``RUNTIMES/NAME/runtime.json`` describes one build, and ``RUNTIMES/chosen.json`` names the one in use and the
one before. ``features/runtimes`` writes these files.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec

from llamasup.core.system.storage.folders import models_folder, read_bounded
from llamasup.errors import RuntimeMissing

RECORD = "runtime.json"
CHOSEN = "chosen.json"
_MAX_BYTES = 1 << 16
T = TypeVar("T")


class InstalledRuntime(msgspec.Struct, frozen=True):
    """A build in its folder.

    ``program``: the path of llama-server in ``folder``. ``build``: its release, such as ``b11434``, or the
    name of an archive. ``installed``: an ISO time in UTC. ``version``: what llama-server says.
    """

    name: str
    build: str
    backend: str
    program: str
    source: str
    sha256: str | None
    installed: str
    version: str = ""

    @property
    def path(self) -> Path:
        return runtimes_folder() / self.name / self.program


class ChosenRuntimes(msgspec.Struct, frozen=True):
    """The names of the build that new starts use, and of the one before; empty: none."""

    now: str = ""
    before: str = ""


def runtimes_folder() -> Path:
    """Return the folder of all builds, next to the models folder. It may not exist yet."""
    return models_folder().parent / "runtimes"


def installed_runtimes() -> tuple[InstalledRuntime, ...]:
    """Return the installed builds, the latest first. Folders without a valid record are left out."""
    try:
        folders = list(runtimes_folder().iterdir())
    except OSError:
        return ()
    named = (folder for folder in folders if folder.name[:1] != ".")
    found = ((folder.name, _read(folder / RECORD, InstalledRuntime)) for folder in named)
    known = [each for name, each in found if each is not None and _is_valid(each, name)]
    return tuple(sorted(known, key=lambda each: (each.installed, each.name), reverse=True))


def _is_valid(runtime: InstalledRuntime, folder: str) -> bool:
    """Whether the record is of this folder, and its program is in it."""
    program = PurePath(runtime.program)
    is_inside = not program.is_absolute() and ".." not in program.parts
    return runtime.name == folder and is_inside and runtime.path.is_file()


def find_installed(wanted: str) -> InstalledRuntime | None:
    """Return the latest installed build with this name, build or backend, or None."""
    known = installed_runtimes() if wanted else ()
    names = (known_by for known_by in ("name", "build", "backend"))
    return next((each for field in names for each in known if getattr(each, field) == wanted), None)


def chosen_runtimes() -> ChosenRuntimes:
    return _read(runtimes_folder() / CHOSEN, ChosenRuntimes) or ChosenRuntimes()


def chosen_runtime() -> InstalledRuntime | None:
    """Return the installed build that new starts use; None if none was chosen."""
    return find_installed(chosen_runtimes().now)


def check_chosen() -> None:
    """Raise RuntimeMissing if the chosen build is gone, or if the choice cannot be read."""
    if chosen_runtime() is None and os.path.lexists(runtimes_folder() / CHOSEN):
        raise RuntimeMissing(
            f"The build {chosen_runtimes().now!r} that `llamasup runtime use` chose is gone.",
            remedy="Install it again: llamasup runtime install; or choose one: llamasup runtime use NAME.",
        )


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_bounded(path, _MAX_BYTES)[0], type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
