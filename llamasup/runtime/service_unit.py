"""Gathers what the unit of a service needs: an absolute command line, and what it must be able to read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamasup.core.errors import ConfigInvalid, UsageInvalid
from llamasup.core.hand_paths import with_absolute_paths
from llamasup.core.run_arguments import run_arguments
from llamasup.core.settings import Settings
from llamasup.core.unit_file import Unit, checked_name, is_hidden, name_for
from llamasup.effects.keys import read_api_keys
from llamasup.effects.model_file import split_name, split_paths
from llamasup.effects.units import gpu_groups, systemd_version, unreadable_by_others
from llamasup.runtime.launch import DEMO, Launch, expanded, prepare

__all__ = ["ServiceRequest", "unit_for"]

_LEAST_FREE_PORT = 1024


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """What ``llamasup service install`` can be told. ``options`` and ``switches`` go to ``llamasup run``."""

    model: str
    settings: Settings
    host: str
    port: int
    is_local: bool
    runtime: str | None
    api_key_file: Path | None
    drain_timeout_s: float
    stop_timeout_s: float
    of_user: bool = False
    name: str | None = None
    run_as: str | None = None
    switches: list[str] = field(default_factory=list)


def unit_for(request: ServiceRequest, environ: Mapping[str, str]) -> Unit:
    """The unit, checked as far as it can be before anything is started.

    Raises what ``llamasup run`` would for the model and the runtime; UsageInvalid, ConfigInvalid.
    """
    name = request.name if request.name is not None else name_for(request.model, request.settings.alias)
    _refuse(request)
    launch = prepare(request.model, request.settings, runtime=request.runtime, environ=environ)
    launch, extra_paths = _with_plain_paths(launch)
    model = DEMO if request.model == DEMO else str(launch.model_path)
    runtime = str(_plain(launch.runtime.path)) if launch.runtime.kind == "binary" else "embedded"
    keys = None if request.api_key_file is None else _plain(expanded(str(request.api_key_file)))
    if keys is not None:
        read_api_keys(keys, {})
    arguments = run_arguments(
        model,
        _as_given(launch, request.settings),
        {
            "--host": request.host,
            "--port": str(request.port),
            # A service has another PATH than the person who installs it.
            "--runtime": runtime,
            "--drain-timeout": f"{request.drain_timeout_s:g}",
            "--stop-timeout": f"{request.stop_timeout_s:g}",
        },
        request.switches,
    )
    unit = Unit(
        name=checked_name(name),
        command=(str(_plain(sys.executable)), "-P", "-m", "llamasup", *arguments),
        drain_timeout_s=request.drain_timeout_s,
        stop_timeout_s=request.stop_timeout_s,
        is_local=request.is_local,
        of_user=request.of_user,
        run_as=request.run_as,
        groups=() if request.of_user else gpu_groups(),
        needed_paths=_needed_paths(launch, model, extra_paths),
        api_key_file=None if keys is None else str(keys),
        systemd_version=systemd_version(),
    )
    _refuse_unreadable(unit)
    return unit


def _refuse(request: ServiceRequest) -> None:
    if request.of_user and request.run_as is not None:
        raise UsageInvalid(
            "--run-as and --user exclude each other: a user's own service runs as that user.",
            remedy="Leave one of them out.",
        )
    if request.run_as is not None and not _is_user(request.run_as):
        raise UsageInvalid(f"There is no user {request.run_as!r}.", remedy="Name one that exists.")
    if 0 < request.port < _LEAST_FREE_PORT:
        raise UsageInvalid(
            f"--port {request.port} needs a right that the service is not given.",
            remedy="Use a port above 1023, or let systemd open it (docs/systemd.md, Socket activation).",
        )
    if not (request.is_local or request.api_key_file or "--insecure-no-auth" in request.switches):
        raise ConfigInvalid(
            f"--host {request.host} can be reached from other machines, and no API key is set.",
            remedy="Give --api-key-file: a service does not see your $LLAMASUP_API_KEY.",
        )


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
