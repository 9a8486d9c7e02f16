"""The builds of llama.cpp that ``llamasup runtime`` installed, and which of them new starts use.

``RUNTIMES/NAME/runtime.json`` describes one build, and ``RUNTIMES/chosen.json`` names the one in use and the
one before. ``features/runtimes`` writes these files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from llamasup.core.system.storage.folders import models_folder

RECORD = "runtime.json"
CHOSEN = "chosen.json"
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
    """Return the folder of all builds, beside the models folder. It may not exist yet."""
    return models_folder().parent / "runtimes"


def installed_runtimes() -> tuple[InstalledRuntime, ...]:
    """Return the installed builds, the latest first. Folders without a readable record are left out."""
    try:
        folders = list(runtimes_folder().iterdir())
    except OSError:
        return ()
    found = (_read(folder / RECORD, InstalledRuntime) for folder in folders if folder.name[:1] != ".")
    known = [each for each in found if each is not None and each.path.parent.is_dir()]
    return tuple(sorted(known, key=lambda each: (each.installed, each.name), reverse=True))


def find_installed(wanted: str) -> InstalledRuntime | None:
    """Return the latest installed build with this name, build or backend; None if there is none."""
    known = installed_runtimes()
    names = (known_by for known_by in ("name", "build", "backend"))
    return next((each for field in names for each in known if getattr(each, field) == wanted), None)


def chosen_runtimes() -> ChosenRuntimes:
    return _read(runtimes_folder() / CHOSEN, ChosenRuntimes) or ChosenRuntimes()


def chosen_runtime() -> InstalledRuntime | None:
    """Return the installed build that new starts use; None if none was chosen."""
    name = chosen_runtimes().now
    return find_installed(name) if name else None


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
