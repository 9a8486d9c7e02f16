"""What every service needs of this machine, whatever it serves: a command line that stays right, a user who
may read and write all that is wanted, an address that may be had. What cannot be is refused before anything
is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from llamasup.errors import ConfigInvalid, UsageInvalid
from llamasup.http.address import is_local
from llamasup.llama_server.inspect import Runtime
from llamasup.service.systemd.systemctl import (
    gpu_groups,
    systemd_version,
    unreadable_by_others,
    unwritable_by_others,
)
from llamasup.service.systemd.unit_file import Credential, Unit, checked_name, is_hidden, own_folders

__all__ = [
    "CREDENTIALS",
    "Account",
    "Needs",
    "plain_path",
    "program_paths",
    "refuse_address",
    "runtime_word",
    "under_all_names",
    "unit_of",
    "writing_places",
]

_MIN_FREE_PORT = 1024
CREDENTIALS: Mapping[str, str] = {
    "api_key_file": "--api-key-file",
    "tls_cert": "--tls-cert",
    "tls_key": "--tls-key",
    "token_file": "--token-file",
}
"""Options that name files which may be their owner's alone, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who the service is: one of the system's, as ``run_as`` or as a user of its own, or one ``of_user``."""

    of_user: bool = False
    run_as: str | None = None

    def check(self) -> None:
        """Raises UsageInvalid."""
        if self.of_user and self.run_as is not None:
            raise UsageInvalid(
                "--run-as and --user exclude each other: a user's own service runs as that user.",
                remedy="Leave one of them out.",
            )
        if self.run_as is not None and not _is_user(self.run_as):
            raise UsageInvalid(f"There is no user {self.run_as!r}.", remedy="Name one that exists.")

    @property
    def is_nobody(self) -> bool:
        """Whether it owns nothing but its own folders."""
        return not self.of_user and self.run_as is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a service takes, and what it is told. ``written``: folders, and what wants to write in each."""

    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    read: tuple[str, ...]
    drain_timeout_s: float
    stop_timeout_s: float
    written: Mapping[str, str]
    credentials: tuple[Credential, ...] = ()
    of_many: bool = False
    downloads: bool = False


def unit_of(name: str, account: Account, needs: Needs) -> Unit:
    """The unit. Raises UsageInvalid and ConfigInvalid for what its user could not read or write."""
    program = (str(plain_path(sys.executable)), "-P", "-m", "llamasup")
    own = own_folders(name)
    written = {
        folder: what
        for folder, what in needs.written.items()
        if not any(PurePath(folder).is_relative_to(each) for each in own)
    }
    unit = Unit(
        name=checked_name(name),
        command=(*program, *needs.arguments),
        reload_command=(*program, "reload", "--pid"),
        drain_timeout_s=needs.drain_timeout_s,
        stop_timeout_s=needs.stop_timeout_s,
        of_many=needs.of_many,
        is_local=all(map(is_local, needs.hosts)),
        downloads=needs.downloads,
        of_user=account.of_user,
        run_as=account.run_as,
        groups=() if account.of_user else gpu_groups(),
        needed_paths=needs.read,
        written_folders=tuple(written),
        credentials=needs.credentials,
        systemd_version=systemd_version(),
    )
    if not account.of_user:
        _refuse_unwritable(unit, account, written)
    if account.is_nobody:
        _refuse_unreadable(unit)
    return unit


# --- what is refused ---------------------------------------------------------------------------------


def refuse_address(hosts: Iterable[str], port: int, *, needs_key: bool, remedy: str) -> None:
    """``needs_key``: nobody has given one, or said that none is wanted; ``remedy`` says how to."""
    if not 0 <= port <= 65535:
        raise UsageInvalid(f"--port {port} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
    if 0 < port < _MIN_FREE_PORT:
        raise UsageInvalid(
            f"--port {port} needs a right that the service is not given.",
            remedy="Use a port above 1023, or let systemd open it (docs/systemd.md, Socket activation).",
        )
    outside = [host for host in hosts if not is_local(host)]
    if outside and needs_key:
        raise ConfigInvalid(
            f"--host {outside[0]} can be reached from other machines, and no API key is set.", remedy=remedy
        )


def _is_user(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _refuse_unreadable(unit: Unit) -> None:
    hidden = [path for path in unit.needed_paths if is_hidden(path)]
    reason = unreadable_by_others(unit.needed_paths, hidden)
    if reason is not None:
        raise ConfigInvalid(
            f"The service's own user could not read all it needs: {reason}.",
            remedy="Let others read it (chmod o+rX), or name a user who may with --run-as USER.",
        )


def _refuse_unwritable(unit: Unit, account: Account, written: Mapping[str, str]) -> None:
    """Whether a named user may write there is between that user and the folder; that it is there is not."""
    own = own_folders(unit.name)[0]
    for folder, what in written.items():
        if not Path(folder).is_dir():
            raise ConfigInvalid(
                f"{what}: there is no folder {folder}, and the service may not make it.",
                remedy=f"Make it first, or use one below {own}, which is the service's own.",
            )
        reason = unwritable_by_others([folder], [folder] if is_hidden(folder) else [])
        if account.is_nobody and reason is not None:
            raise ConfigInvalid(
                f"{what}: the service's own user could not write there: {reason}.",
                remedy=f"Use a folder below {own}, which is the service's own, or name a user who may write "
                "there with --run-as USER.",
            )


# --- paths -------------------------------------------------------------------------------------------


def plain_path(path: str | Path) -> Path:
    """Absolute and without "..": systemd takes no such path, and the folder before it may be hidden."""
    path = Path(path).absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def runtime_word(runtime: Runtime) -> str:
    """For ``--runtime``: a service has another PATH than the person who installs it."""
    return str(plain_path(runtime.path)) if runtime.kind == "binary" else "embedded"


def program_paths(runtime: Runtime) -> list[Path]:
    """Python, llamasup and the runtime."""
    python = Path(sys.executable)
    paths = [
        Path(sys.prefix),
        Path(sys.base_prefix),
        python.resolve().parent.parent,
        Path(__file__).parents[3],
    ]
    return [*paths, plain_path(runtime.path).parent] if runtime.kind == "binary" else paths


def under_all_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Each under its own name and its real one."""
    return tuple(dict.fromkeys(str(each) for path in paths for each in (path, path.resolve())))


def writing_places(hosts: Iterable[str], access_log: Path | None) -> dict[str, str]:
    """Folders by what is written there: sockets that are listened on, and the access log."""
    places = {str(Path(host).parent): f"The socket {host}" for host in hosts if host.endswith(".sock")}
    if access_log not in (None, Path("-")):
        places[str(access_log.parent)] = f"The access log {access_log}"
    return places
