"""Builds the systemd unit of a service, and checks it first: the user can read and write all files, the
address is allowed, and the command line stays valid.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Self

from msgspec import Struct

from llamasup.core.http.address import is_local
from llamasup.core.llama_server.inspect import Runtime
from llamasup.core.system.native import native
from llamasup.core.system.own_command import own_command, python_executable
from llamasup.errors import ConfigInvalid, LlamasupError, UsageInvalid
from llamasup.features.systemd.systemctl import closed_to_others, gpu_groups, systemd_version
from llamasup.features.systemd.unit_file import (
    Credential,
    Unit,
    is_hidden,
    odd_names,
    own_folders,
)

_MIN_FREE_PORT = 1024
_MAX_REASONS = 8  # a split model has many files
CREDENTIALS: Mapping[str, str] = {
    "api_key_file": "--api-key-file",
    "tls_cert": "--tls-cert",
    "tls_key": "--tls-key",
    "token_file": "--token-file",
}
"""Options whose files may be readable only for their owner, by field."""


class Obstacles:
    """Collects the errors of checks, each ``with obstacles:``, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self._found: dict[str, LlamasupError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> bool:
        if isinstance(error, LlamasupError):
            self.add(error)
        return isinstance(error, LlamasupError)

    def add(self, error: LlamasupError) -> None:
        self._found.setdefault(error.message, error)

    def raise_all(self) -> None:
        """Raise the error that was found, or one that describes all, with the exit code of the first."""
        found = list(self._found.values())
        if not found:
            return
        first = found[0]
        if len(found) == 1:
            raise first
        details: list[str] = []
        for error in found:
            details += (error.message, *(f"    {line}" for line in error.details))
            details += [f"  → {error.remedy}"] if error.remedy else []
        merged = LlamasupError(f"{len(found)} problems prevent this service:", details=tuple(details))
        merged.exit_code, merged.cause, merged.http_status = first.exit_code, first.cause, first.http_status
        raise merged


class Account(Struct, frozen=True, kw_only=True):
    """The user of the service. A system service runs as ``run_as`` or a dynamic user; ``of_user``: the user's
    own service manager runs it.
    """

    of_user: bool = False
    run_as: str | None = None

    def check(self) -> None:
        """Raises UsageInvalid."""
        if self.of_user and self.run_as is not None:
            raise UsageInvalid(
                "--run-as and --user exclude each other: a user's own service runs as that user.",
                remedy="Remove one of them.",
            )
        if self.run_as is not None and not native.has_user(self.run_as):
            raise UsageInvalid(f"There is no user {self.run_as!r}.", remedy="Choose an existing user.")

    @property
    def is_dynamic(self) -> bool:
        """Whether systemd makes a user for it (DynamicUser=), which owns only the service's folders."""
        return not self.of_user and self.run_as is None


class Requirements(Struct, frozen=True, kw_only=True):
    """The arguments of a service, and the files it uses. ``written``: the reason for each written folder."""

    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    read: tuple[str, ...]
    drain_timeout_s: float
    stop_timeout_s: float
    written: Mapping[str, str]
    credentials: tuple[Credential, ...] = ()
    of_many: bool = False
    downloads: bool = False
    has_nodes: bool = False


def build_unit(name: str, account: Account, requirements: Requirements, obstacles: Obstacles) -> Unit:
    """Build the unit. Raises all ``obstacles``, among them each file that its user cannot read or write."""
    command = own_command("llamasup")
    if command is None:
        command = ("llamasup",)
        obstacles.add(
            UsageInvalid(
                "This application has no program that systemd can start as llamasup.",
                remedy="Install llamasup itself on this machine, and use its `llamasup service`.",
            )
        )
    program = (str(plain_path(command[0])), *command[1:])
    own = own_folders(name)
    written = {
        folder: what
        for folder, what in requirements.written.items()
        if not any(PurePath(folder).is_relative_to(parent) for parent in own)
    }
    unit = Unit(
        name=name,
        command=(*program, *requirements.arguments),
        reload_command=(*program, "reload", "--pid"),
        drain_timeout_s=requirements.drain_timeout_s,
        stop_timeout_s=requirements.stop_timeout_s,
        of_many=requirements.of_many,
        is_local=all(map(is_local, requirements.hosts)),
        downloads=requirements.downloads,
        has_nodes=requirements.has_nodes,
        of_user=account.of_user,
        run_as=account.run_as,
        groups=() if account.of_user else gpu_groups(),
        needed_paths=requirements.read,
        written_folders=tuple(written),
        credentials=requirements.credentials,
        systemd_version=systemd_version(),
    )
    if not account.of_user:
        _check_writable(unit, account, written, obstacles)
    if account.is_dynamic:
        with obstacles:
            _check_readable(unit)
    for error in odd_names(unit):
        obstacles.add(error)
    obstacles.raise_all()
    return unit


# --- checks ------------------------------------------------------------------------------------------


def check_service_address(
    obstacles: Obstacles, hosts: Iterable[str], port: int, *, needs_key: bool, remedy: str
) -> None:
    """Check the address. ``needs_key``: no API key is set, and --insecure-no-auth neither; ``remedy`` is for
    this case.
    """
    if not 0 <= port <= 65535:
        obstacles.add(
            UsageInvalid(
                f"--port {port} is not a valid port.", remedy="Use 1 to 65535, or 0 for any free one."
            )
        )
    if 0 < port < _MIN_FREE_PORT:
        obstacles.add(
            UsageInvalid(
                f"--port {port} needs a privilege that the service does not get.",
                remedy="Use a port above 1023, or let systemd open it (docs/systemd.md, Socket activation).",
            )
        )
    outside = [host for host in hosts if not is_local(host)]
    if outside and needs_key:
        text = f"--host {outside[0]} can be reached from other machines, and no API key is set."
        obstacles.add(ConfigInvalid(text, remedy=remedy))


def _check_readable(unit: Unit) -> None:
    hidden = [path for path in unit.needed_paths if is_hidden(path)]
    if reasons := closed_to_others(unit.needed_paths, hidden):
        shown = "; ".join(reasons[:_MAX_REASONS]) + ("; …" if len(reasons) > _MAX_REASONS else "")
        raise ConfigInvalid(
            f"The service's user cannot read all its files: {shown}.",
            remedy="Make them readable for others (chmod o+rX), or choose a user with --run-as USER.",
        )


def _check_writable(unit: Unit, account: Account, written: Mapping[str, str], obstacles: Obstacles) -> None:
    """Check that the folders exist and are writable for a dynamic user; a ``run_as`` user is not checked."""
    own = own_folders(unit.name)[0]
    for folder, what in written.items():
        reasons = closed_to_others([folder], [folder] if is_hidden(folder) else [], stat.S_IWOTH)
        if not Path(folder).is_dir():
            problem = f"the folder {folder} does not exist, and the service cannot create it"
            remedy = f"Create it first, or use a folder below {own}, which belongs to the service."
        elif account.is_dynamic and reasons:
            problem = f"the service's user cannot write there: {'; '.join(reasons)}"
            remedy = f"Use a folder below {own}, which belongs to the service, or choose a user that can "
            remedy += "write there with --run-as USER."
        else:
            continue
        obstacles.add(ConfigInvalid(f"{what}: {problem}.", remedy=remedy))


# --- paths -------------------------------------------------------------------------------------------


def plain_path(path: str | Path) -> Path:
    """Make the path absolute without "..", which systemd does not accept, and whose parent may be hidden."""
    path = Path(path).absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def runtime_argument(runtime: Runtime) -> str:
    """Return the argument for ``--runtime``: the PATH of a service differs from that of the user who installs
    it.
    """
    return str(plain_path(runtime.path)) if runtime.kind == "binary" else "embedded"


def program_paths(runtime: Runtime) -> list[Path]:
    """Return the folders of Python, llamasup and the runtime; in the bundle, which has no Python, its
    folders.
    """
    program = Path(sys.executable)
    paths = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[3]]
    paths.append(program.parent if python_executable() is None else program.resolve().parent.parent)
    return [*paths, plain_path(runtime.path).parent] if runtime.kind == "binary" else paths


def with_real_paths(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return each path, and its real path if it is a symlink."""
    return tuple(dict.fromkeys(str(name) for path in paths for name in (path, path.resolve())))


def written_folders(hosts: Iterable[str], access_log: Path | None) -> dict[str, str]:
    """Return the folders of listening sockets and of the access log, each with its reason."""
    folders = {str(Path(host).parent): f"The socket {host}" for host in hosts if host.endswith(".sock")}
    if access_log not in (None, Path("-")):
        folders[str(access_log.parent)] = f"The access log {access_log}"
    return folders
