"""The requirements of a unit for ``llamasup run``: an absolute command line, and the files to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs
from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.gguf.files import split_name, split_paths
from llamasup.core.http.address import addresses
from llamasup.core.llama_server.argv_builder import with_absolute_paths
from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.planning.demo import DEMO
from llamasup.core.planning.facts import Launch, prepare
from llamasup.core.settings.model import Settings
from llamasup.core.system.storage.paths import expanded
from llamasup.features.systemd.installation import (
    CREDENTIALS,
    Account,
    Obstacles,
    Requirements,
    build_unit,
    check_service_address,
    plain_path,
    program_paths,
    runtime_argument,
    with_real_paths,
    written_folders,
)
from llamasup.features.systemd.unit_file import Credential, Unit, checked_name, name_for

_CREDENTIALS = {name: option for name, option in CREDENTIALS.items() if name != "token_file"}


class ServiceRequest(Struct, frozen=True):
    """The options of ``llamasup service install MODEL``. ``given`` are the options of ``llamasup run`` by
    field, and ``arguments(model, settings, given, runtime)`` returns its command line.
    """

    model: str
    settings: Settings
    given: Mapping[str, Any]
    arguments: Callable[[str, Settings, Mapping[str, Any], str], list[str]]
    runtime: str | None = None
    name: str | None = None
    account: Account = field(default_factory=Account)


def unit_for(request: ServiceRequest, environ: Mapping[str, str]) -> Unit:
    """The unit, after all checks that need no started process.

    Raises the errors of ``llamasup run`` for the model and the runtime, UsageInvalid and ConfigInvalid. If
    there are several, one error describes them all.
    """
    obstacles = Obstacles()
    name = request.name if request.name is not None else name_for(request.model, request.settings.alias)
    given: dict[str, Any] = dict(request.given)
    hosts = tuple(addresses(given["host"]))
    with obstacles:
        request.account.check()
    with obstacles:
        checked_name(name)
    check_service_address(
        obstacles,
        hosts,
        given["port"],
        needs_key=not (given["api_key_file"] or given["insecure_no_auth"]),
        remedy="Give --api-key-file: a service does not see your $LLAMASUP_API_KEY.",
    )
    launch, paths = None, list[Path]()
    with obstacles:
        prepared = prepare(request.model, request.settings, runtime=request.runtime, environ=environ)
        launch, paths = model_paths(prepared, is_demo=request.model == DEMO)
    if launch is None:
        with obstacles:  # a model with an error is read before the runtime is searched
            find_runtime(request.runtime, environ)
    for option, value in given.items():
        if isinstance(value, Path) and str(value) != "-":
            given[option] = plain_path(expanded(str(value)))
    if given["api_key_file"] is not None:
        with obstacles:
            KeyFile(given["api_key_file"])  # raises if the file is invalid
    credentials = tuple(
        Credential(option, str(given.pop(field)))
        for field, option in _CREDENTIALS.items()
        if given[field] is not None
    )
    given = {**dict.fromkeys(_CREDENTIALS), **given}
    arguments, read = list[str](), list[Path]()
    if launch is not None:
        settings = _keep_none(launch, request.settings)
        model = DEMO if request.model == DEMO else str(launch.model_path)
        arguments = request.arguments(model, settings, given, runtime_argument(launch.runtime))
        read = [*program_paths(launch.runtime), *paths]
    requirements = Requirements(
        arguments=tuple(arguments),
        hosts=hosts,
        read=with_real_paths(read),
        written=written_folders(hosts, given["access_log"]),
        drain_timeout_s=given["drain_timeout_s"],
        stop_timeout_s=given["stop_timeout_s"],
        credentials=credentials,
    )
    return build_unit(name, request.account, requirements, obstacles)


def _keep_none(launch: Launch, given: Settings) -> Settings:
    """The settings with absolute paths, and with the user's "none"."""
    found = launch.settings
    return found if found.mmproj is not None else structs.replace(found, mmproj=given.mmproj)


def model_paths(launch: Launch, *, is_demo: bool = False) -> tuple[Launch, list[Path]]:
    """Return ``launch`` with paths that systemd accepts, and all files of its model, also those in
    llama-server's own flags. The service writes the demo model itself.
    """
    named: list[Path] = []

    def plain(name: str) -> str:
        named.append(path := plain_path(name))
        return str(path)

    settings = launch.settings
    settings = structs.replace(
        settings,
        draft_model=None if settings.draft_model is None else plain(settings.draft_model),
        mmproj=None if settings.mmproj is None else plain(settings.mmproj),
        extra=with_absolute_paths(launch.runtime.capabilities, settings.extra, plain),
    )
    # llama-server may create the other files.
    existing = [path for path in named if path.exists()]
    launch = replace(launch, model_path=plain_path(launch.model_path), settings=settings)
    if not is_demo:
        existing += _parts(launch.model_path)
    if launch.found is not None and launch.found.projector is not None:
        existing.append(plain_path(launch.found.projector.path))
    return launch, existing


def _parts(path: Path) -> list[Path]:
    split = split_name(path.name)
    if split is None:
        return [path]
    count = int(path.stem.rpartition("-")[2])
    return split_paths(path, count)
