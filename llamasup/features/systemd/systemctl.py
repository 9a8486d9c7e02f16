"""Reads and writes unit files, and calls ``systemctl``. ``unit_file.py`` decides the content."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import atomic_write
from llamasup.errors import ServiceManagerFailed, UnitNotOurs
from llamasup.features.systemd.unit_file import is_ours

_TIMEOUT_S = 120.0
_SYSTEM_FOLDER = Path("/etc/systemd/system")
_PROPERTIES = (
    *("LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "StatusText"),
    *("UnitFileState", "MemoryCurrent", "ActiveEnterTimestamp", "ExecMainStatus"),
)


class Units(Struct, frozen=True):
    """The units of the system's service manager, or of the user's own."""

    of_user: bool

    @property
    def folder(self) -> Path:
        if not self.of_user:
            return _SYSTEM_FOLDER
        import platformdirs

        return platformdirs.user_config_path(appauthor=False) / "systemd/user"

    def path(self, file_name: str) -> Path:
        return self.folder / file_name

    def require_permission(self) -> None:
        """Raises ServiceManagerFailed if units cannot be installed or removed."""
        if shutil.which("systemctl") is None:
            raise ServiceManagerFailed(
                "There is no systemctl on PATH: this machine does not use systemd.",
                remedy="Start `llamasup run` with the service manager of this machine.",
            )
        if not self.of_user and not native.is_root():
            raise ServiceManagerFailed(
                f"System units are in {self.folder}, where only root can write.",
                remedy="Use sudo, or --user for a service of your own.",
            )
        self.systemctl("show", "--property=Version")

    def read(self, file_name: str) -> str | None:
        """Return the text of an installed unit; None if it does not exist."""
        path = self.path(file_name)
        try:
            return path.read_text("utf-8", "replace")
        except FileNotFoundError:
            if not path.is_symlink():
                return None
            return ""  # a dangling symlink, not written by llamasup
        except OSError as error:
            raise _unusable(path, error) from error

    def own(self, file_name: str) -> str | None:
        """Return the same as ``read``. Raises UnitNotOurs for a unit that llamasup has not written."""
        text, path = self.read(file_name), self.path(file_name)
        if text is not None and (path.is_symlink() or not is_ours(text)):
            raise UnitNotOurs(
                f"{path} exists, and llamasup has not written it.",
                remedy="Choose another name with --name, or remove the file yourself.",
            )
        return text

    def write(self, file_name: str, text: str) -> bool:
        """Install the unit; False if it has this text already."""
        if self.own(file_name) == text:
            return False
        path = self.path(file_name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text.encode(), durable=True, mode=0o644)
        except OSError as error:
            raise _unusable(path, error) from error
        return True

    def remove(self, file_name: str) -> None:
        path = self.path(file_name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(path, error) from error

    def systemctl(self, *words: str, timeout_s: float | None = _TIMEOUT_S) -> str:
        """Run ``systemctl`` and return its output. Raises ServiceManagerFailed with its error."""
        manager = ["systemctl", *(["--user"] if self.of_user else [])]
        named = shlex.join([*manager, *words[:2]])
        try:
            done = subprocess.run(
                [*manager, "--no-pager", "--no-ask-password", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServiceManagerFailed(f"`{named}` could not be run: {error}.") from error
        if done.returncode != 0:
            problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ServiceManagerFailed(f"`{named}` failed: {problem}", remedy=self._remedy(problem))
        return done.stdout

    def _remedy(self, problem: str) -> str:
        if "not been booted with systemd" in problem or (not self.of_user and "connect to bus" in problem):
            return "systemd does not run here. In a container, start `llamasup run` without systemd."
        if "connect to bus" in problem:
            return "Log in as that user (not with su or sudo), or run `machinectl shell USER@`."
        return ""

    def state(self, file_name: str) -> Mapping[str, str]:
        """Return the properties of a unit."""
        lines = self.systemctl("show", file_name, f"--property={','.join(_PROPERTIES)}").splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}


def systemd_version() -> int:
    """Return 252, 257 …; 0 if unknown."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["systemctl", "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if found := re.match(r"systemd (\d+)", done.stdout):
            return int(found[1])
    return 0


def gpu_groups() -> tuple[str, ...]:
    """Return the existing groups whose members can open GPUs; systemd rejects unknown groups."""
    return tuple(name for name in ("render", "video") if native.has_group(name))


def closed_to_others(
    paths: Sequence[str], hidden: Sequence[str], right: int = stat.S_IROTH
) -> tuple[str, ...]:
    """Return why a user without files here cannot read some of ``paths``; empty if all are readable.

    The parents of ``hidden`` paths do not count, as the sandbox creates them. With ``stat.S_IWOTH`` as the
    ``right``, return why such a user cannot create files in some of these folders.
    """
    return tuple(dict.fromkeys(_closed_parts(paths, hidden, right)))


def _closed_parts(paths: Sequence[str], hidden: Sequence[str], right: int) -> Iterator[str]:
    for path in map(Path, paths):
        parents = [] if str(path) in hidden else list(path.resolve().parents)
        for part in (path, *parents):
            try:
                mode = part.stat().st_mode
            except OSError as error:
                yield f"{part}: {error.strerror}"
                continue
            needed = right if part is path else 0
            if stat.S_ISDIR(mode):
                needed |= stat.S_IXOTH
            if mode & needed != needed:
                yield f"{part} has mode {stat.S_IMODE(mode):04o}"


def _unusable(path: Path, error: OSError) -> ServiceManagerFailed:
    return ServiceManagerFailed(f"{path} cannot be read or written: {error.strerror}.")
