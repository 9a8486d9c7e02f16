"""Gathers what the unit of a service needs: an absolute command line, and what it must be able to read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamasup.core.address import addresses, is_local
from llamasup.core.errors import ConfigInvalid, UsageInvalid
from llamasup.core.hand_paths import with_absolute_paths
from llamasup.core.settings import Settings
from llamasup.core.unit_file import Credential, Unit, checked_name, is_hidden, name_for
from llamasup.effects.keys import KeyFile
from llamasup.effects.model_file import split_name, split_paths
from llamasup.effects.units import gpu_groups, systemd_version, unreadable_by_others
from llamasup.runtime.launch import DEMO, Launch, expanded, prepare

__all__ = ["ServiceRequest", "unit_for"]

_LEAST_FREE_PORT = 1024
_CREDENTIALS = {
    "api_key_file": "--api-key-file",
    "tls_cert": "--tls-cert",
    "tls_key": "--tls-key",
}


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """What ``llamasup service install`` can be told. ``given`` are the options of ``llamasup run`` by field,
    and ``arguments(model, settings, given, runtime)`` writes its command line.
    """

    model: str
    settings: Settings
    given: Mapping[str, Any]
    arguments: Callable[[str, Settings, Mapping[str, Any], str], list[str]]
    runtime: str | None = None
    of_user: bool = False
    name: str | None = None
    run_as: str | None = None

    @property
    def is_local(self) -> bool:
        return all(map(is_local, addresses(self.given["host"])))


def unit_for(request: ServiceRequest, environ: Mapping[str, str]) -> Unit:
    """The unit, checked as far as it can be before anything is started.

    Raises what ``llamasup run`` would for the model and the runtime; UsageInvalid, ConfigInvalid.
    """
    name = request.name if request.name is not None else name_for(request.model, request.settings.alias)
    _refuse(request)
    launch = prepare(request.model, request.settings, runtime=request.runtime, environ=environ)
    launch, extra_paths = _with_plain_paths(launch)
    model = DEMO if request.model == DEMO else str(launch.model_path)
    given: dict[str, Any] = {
        field: _plain(expanded(str(value))) if isinstance(value, Path) and str(value) != "-" else value
        for field, value in request.given.items()
    }
    _refuse_unusable(given)
    credentials = tuple(
        Credential(option, str(given.pop(field)))
        for field, option in _CREDENTIALS.items()
        if given[field] is not None
    )
    program = (str(_plain(sys.executable)), "-P", "-m", "llamasup")
    unit = Unit(
        name=checked_name(name),
        command=(
            *program,
            *request.arguments(
                model,
                _as_given(launch, request.settings),
                {**dict.fromkeys(_CREDENTIALS), **given},
                # A service has another PATH than the person who installs it.
                str(_plain(launch.runtime.path)) if launch.runtime.kind == "binary" else "embedded",
            ),
        ),
        reload_command=(*program, "reload", "--pid"),
        drain_timeout_s=given["drain_timeout_s"],
        stop_timeout_s=given["stop_timeout_s"],
        is_local=request.is_local,
        of_user=request.of_user,
        run_as=request.run_as,
        groups=() if request.of_user else gpu_groups(),
        needed_paths=_needed_paths(launch, model, extra_paths),
        credentials=credentials,
        systemd_version=systemd_version(),
    )
    _refuse_unreadable(unit)
    return unit


def _refuse(request: ServiceRequest) -> None:
    given = request.given
    port: int = given["port"]
    if request.of_user and request.run_as is not None:
        raise UsageInvalid(
            "--run-as and --user exclude each other: a user's own service runs as that user.",
            remedy="Leave one of them out.",
        )
    if request.run_as is not None and not _is_user(request.run_as):
        raise UsageInvalid(f"There is no user {request.run_as!r}.", remedy="Name one that exists.")
    if not 0 <= port <= 65535:
        raise UsageInvalid(f"--port {port} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
    if 0 < port < _LEAST_FREE_PORT:
        raise UsageInvalid(
            f"--port {port} needs a right that the service is not given.",
            remedy="Use a port above 1023, or let systemd open it (docs/systemd.md, Socket activation).",
        )
    if not (request.is_local or given["api_key_file"] or given["insecure_no_auth"]):
        raise ConfigInvalid(
            f"--host {given['host']} can be reached from other machines, and no API key is set.",
            remedy="Give --api-key-file: a service does not see your $LLAMASUP_API_KEY.",
        )
    if not request.of_user and given["access_log"] not in (None, Path("-")):
        raise UsageInvalid(
            f"--access-log {given['access_log']}: a system service may write to its own folders alone.",
            remedy="Use --access-log -: the journal keeps it.",
        )


def _refuse_unusable(given: Mapping[str, Any]) -> None:
    """Files that ``llamasup run`` would refuse."""
    if given["api_key_file"] is not None:
        KeyFile(given["api_key_file"])


def _is_user(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _as_given(launch: Launch, given: Settings) -> Settings:
    """With absolute paths, and "none" where that was said."""
    found = launch.settings
    return found if found.mmproj is not None else replace(found, mmproj=given.mmproj)


def _plain(path: str | Path) -> Path:
    """Absolute and without "..": systemd takes no such path, and the folder before it may be hidden."""
    path = Path(path).absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def _with_plain_paths(launch: Launch) -> tuple[Launch, list[Path]]:
    """``launch`` with plain paths, and the files that llama-server's own flags name."""
    named: list[Path] = []

    def plain(name: str) -> str:
        named.append(path := _plain(name))
        return str(path)

    settings = launch.settings
    settings = replace(
        settings,
        draft_model=None if settings.draft_model is None else str(_plain(settings.draft_model)),
        mmproj=None if settings.mmproj is None else str(_plain(settings.mmproj)),
        extra=with_absolute_paths(launch.runtime.capabilities, settings.extra, plain),
    )
    # What is not there yet llama-server may want to write.
    there = [path for path in named if path.exists()]
    return replace(launch, model_path=_plain(launch.model_path), settings=settings), there


def _needed_paths(launch: Launch, model: str, extra: list[Path]) -> tuple[str, ...]:
    """Python, llamasup, the runtime and the model's files, under their own names and their real ones."""
    import llamasup

    python = Path(sys.executable)
    named = [
        Path(sys.prefix),
        Path(sys.base_prefix),
        python.resolve().parent.parent,
        Path(llamasup.__path__[0]).parent,
    ]
    if launch.runtime.kind == "binary":
        named.append(_plain(launch.runtime.path).parent)
    if model != DEMO:
        named += _parts(launch.model_path)
    named += [Path(path) for path in (launch.settings.draft_model, launch.settings.mmproj) if path]
    if launch.found is not None and launch.found.projector is not None:
        named.append(_plain(launch.found.projector.path))
    named += extra
    both = (each for path in named for each in (path, path.resolve()))
    return tuple(dict.fromkeys(str(path) for path in both))


def _parts(path: Path) -> list[Path]:
    split = split_name(path.name)
    if split is None:
        return [path]
    count = int(path.stem.rpartition("-")[2])
    return split_paths(path, count)


def _refuse_unreadable(unit: Unit) -> None:
    if unit.of_user or unit.run_as is not None:
        return
    hidden = [path for path in unit.needed_paths if is_hidden(path)]
    reason = unreadable_by_others(unit.needed_paths, hidden)
    if reason is not None:
        raise ConfigInvalid(
            f"The service's own user could not read all it needs: {reason}.",
            remedy="Let others read it (chmod o+rX), or name a user who may with --run-as USER.",
        )
