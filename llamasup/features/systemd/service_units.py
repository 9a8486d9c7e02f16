"""Collects the requirements of the units of ``llamasup run`` and ``llamasup serve``: an absolute command
line, and the files to read.

The service cannot access files that a later config adds; install the unit again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field, structs
from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile
from llamasup.core.config.config_keys import Config
from llamasup.core.config.inventory import read_inventory
from llamasup.core.gguf.files import split_name, split_paths
from llamasup.core.http.address import addresses
from llamasup.core.llama_server.argv_builder import with_absolute_paths
from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.planning.facts import DEMO, Launch, find_model, prepare
from llamasup.core.pool.estimate import prepare_listed
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.states import Policy
from llamasup.core.system.storage.paths import expanded
from llamasup.errors import ConfigInvalid, ModelMissing
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
from llamasup.features.systemd.unit_file import (
    Credential,
    Unit,
    checked_name,
    is_hidden,
    is_home,
    name_for,
    own_folders,
)

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


def run_unit(request: ServiceRequest, environ: Mapping[str, str]) -> Unit:
    """Build the unit, after all checks that need no started process.

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
        launch, paths = _model_paths(prepared, is_demo=request.model == DEMO)
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


def _model_paths(launch: Launch, *, is_demo: bool = False) -> tuple[Launch, list[Path]]:
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


# --- many models


class ServeRequest(Struct, frozen=True, kw_only=True):
    """The options of ``llamasup service install --config``.

    ``config`` is the content of ``config_file`` (if any), as the service will read it, with the ``given``
    folders. ``arguments(config_file, given, runtime)`` returns the command line of ``llamasup serve``;
    ``runtime`` is None if the config decides.
    """

    name: str
    config: Config
    config_file: Path | None
    given: Mapping[str, Any]
    arguments: Callable[[Path | None, Mapping[str, Any], str | None], list[str]]
    runtime: str | None = None
    account: Account


def service_environment(name: str, account: Account, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of the service that a config can refer to."""
    if account.of_user:
        return {key: environ[key] for key in ("HOME", "USER", "LOGNAME", "SHELL") if key in environ}
    state, cache, run = own_folders(name)
    return {"HOME": state, "STATE_DIRECTORY": state, "CACHE_DIRECTORY": cache, "RUNTIME_DIRECTORY": run}


def serve_unit(request: ServeRequest, environ: Mapping[str, str], obstacles: Obstacles) -> Unit:
    """Build the unit, after all checks that need no started process.

    Raises ModelMissing and ModelInvalid for a model of the config; RuntimeMissing, UsageInvalid and
    ConfigInvalid. If there are several ``obstacles``, one error describes them all.
    """
    config, given, account = request.config, dict(request.given), request.account
    hosts = config.hosts if given["host"] is None else tuple(addresses(given["host"]))
    files = {**_files_of(config), **{field: given.pop(field) for field in CREDENTIALS if given[field]}}
    check_service_address(
        obstacles,
        hosts,
        config.port if given["port"] is None else given["port"],
        needs_key=not (files["api_key_file"] or config.auth.insecure_no_auth or given["insecure_no_auth"]),
        remedy="Give auth.api_key_file in the config: a service does not see your $LLAMASUP_API_KEY.",
    )
    if config.caches and not account.of_user:
        folders = f"caches: {', '.join(config.caches)}: these folders are in your home"
        text = f"{folders}, which a system service does not use."
        obstacles.add(ConfigInvalid(text, remedy="Add the folder to models_dir."))
    if config.runtime.watch and is_hidden(config.runtime.path or ""):
        text = f"runtime.watch: a service cannot follow {config.runtime.path!r}, which its sandbox hides."
        remedy = "Put llama.cpp into another folder, such as one in /opt, or remove watch."
        obstacles.add(ConfigInvalid(text, remedy=remedy))
    runtime, read = None, list[Path]()
    with obstacles:
        runtime = find_runtime(request.runtime, environ, config.runtime.path)
        read += program_paths(runtime)
    path = None if runtime is None else runtime_argument(runtime)
    with obstacles:
        read += [] if request.config_file is None else _config_paths(request.config_file)
    downloads = _downloads(config)
    # A user's own service reads the files itself.
    named = files if not account.of_user else {field: request.given[field] for field in CREDENTIALS}
    requirements = Requirements(
        arguments=tuple(
            request.arguments(
                request.config_file,
                {**dict.fromkeys(CREDENTIALS), **given},
                None if request.runtime is None and config.runtime.watch else path,
            )
        ),
        hosts=hosts,
        read=with_real_paths(
            [
                *read,
                *config.models_dir,
                *_files_of_models(config, path, environ, obstacles),
                *_files_of_peers(config),
            ]
        ),
        written={
            **written_folders(hosts, config.http.access_log),
            **({str(folder): "downloads.folder" for folder in _downloads_to(config)} if downloads else {}),
        },
        drain_timeout_s=max(_drains(config)),
        stop_timeout_s=Policy().stop_timeout_s,
        credentials=tuple(
            Credential(option, str(named[field])) for field, option in CREDENTIALS.items() if named[field]
        ),
        of_many=True,
        downloads=downloads,
        has_nodes=bool(config.features.get("peers")),
    )
    return build_unit(request.name, account, requirements, obstacles)


def _files_of(config: Config) -> dict[str, Path | None]:
    """The files of ``CREDENTIALS`` in the config."""
    auth, http = config.auth, config.http
    return {
        "api_key_file": auth.api_key_file,
        "tls_cert": http.tls_cert,
        "tls_key": http.tls_key,
        "token_file": _of_downloads(config, "token_file"),
    }


def _config_paths(file: Path) -> Iterator[Path]:
    """The file. If the sandbox hides it, also its folder: editors replace the file, and a service that can
    access only the file would still see the old one.
    """
    for path in dict.fromkeys((plain_path(file), file.resolve())):
        if not is_hidden(str(path)):
            yield path
        elif is_home(str(path.parent)):
            raise ConfigInvalid(
                f"The config {path} is in {path.parent}, so the service would get access to all files "
                "of that folder.",
                remedy="Move it to a folder of its own, or to /etc/llamasup.",
            )
        else:
            yield path.parent
            yield path


def _downloads(config: Config) -> bool:
    named = any(entry.repo or entry.url for entry in config.models.values())
    return named or bool(_of_downloads(config, "on_demand"))


def _of_downloads(config: Config, field: str) -> Any:
    """A setting of another feature; None without it, and without the section."""
    return getattr(config.features.get("downloads"), field, None)


def _downloads_to(config: Config) -> tuple[Path, ...]:
    """The configured folder; without one the service uses its own."""
    folder = _of_downloads(config, "folder")
    return config.models_dir[:1] if folder is None else (folder,)


def _drains(config: Config) -> Iterator[float]:
    """The drain time-outs of the defaults and of each model."""
    yield Policy().drain_timeout_s
    for keys in (config.defaults, *config.models.values()):
        if keys.drain_timeout_s is not None:
            yield keys.drain_timeout_s


def _files_of_peers(config: Config) -> Iterator[Path]:
    for entry in config.features.get("peers", {}).values():
        yield from filter(None, (entry.key_file, entry.ca_file))


def _files_of_models(
    config: Config, runtime: str | None, environ: Mapping[str, str], obstacles: Obstacles
) -> Iterator[Path]:
    """The files of the models that the config names; other models in its folders may change."""
    has_demo = any(entry.path == DEMO for entry in config.models.values())
    demo = str(find_model(DEMO)) if has_demo else None
    for spec in read_inventory(config).registry.specs.values():
        if spec.is_remote or not any(name in config.models for name in spec.names):
            continue
        if not spec.source:
            obstacles.add(ModelMissing(f"{spec.problem}.", remedy="Set its path, repo or url."))
        elif runtime is not None:
            with obstacles:
                launch = prepare_listed(spec, runtime=runtime, environ=environ)
                yield from _model_paths(launch, is_demo=spec.source == demo)[1]
            yield from map(Path, spec.settings.adapters)
