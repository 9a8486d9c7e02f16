"""Gathers what the unit of ``llamasup serve`` needs: what its config names, to be read or written, and
whether models are downloaded.

What a later config names beyond that, the service has no way to: the unit is installed again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamasup.config import Config
from llamasup.errors import ConfigInvalid, ModelMissing
from llamasup.http.address import addresses
from llamasup.llama_server.inspect import find_runtime
from llamasup.planning.facts import DEMO, find_model
from llamasup.pool.model import prepare_listed
from llamasup.service.library import read_library
from llamasup.service.systemd.installation import (
    CREDENTIALS,
    Account,
    Needs,
    plain_path,
    program_paths,
    refuse_address,
    runtime_word,
    under_all_names,
    unit_of,
    writing_places,
)
from llamasup.service.systemd.run_unit import model_paths
from llamasup.service.systemd.unit_file import Credential, Unit, is_hidden, is_home, own_folders
from llamasup.supervision.states import Policy

__all__ = ["ServeRequest", "serve_unit", "service_environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What ``llamasup service install --config`` can be told.

    ``config`` is that of ``config_file`` (None: there is none), as the service will read it, with the folders
    that are ``given`` beside it. ``arguments(config_file, given, runtime)`` writes the command line of
    ``llamasup serve``.
    """

    name: str
    config: Config
    config_file: Path | None
    given: Mapping[str, Any]
    arguments: Callable[[Path | None, Mapping[str, Any], str], list[str]]
    runtime: str | None = None
    account: Account


def service_environment(name: str, account: Account, environ: Mapping[str, str]) -> Mapping[str, str]:
    """What a service knows of ``environ``, and has instead, as far as a config may ask for it."""
    if account.of_user:
        return {key: environ[key] for key in ("HOME", "USER", "LOGNAME", "SHELL") if key in environ}
    state, cache, run = own_folders(name)
    return {"HOME": state, "STATE_DIRECTORY": state, "CACHE_DIRECTORY": cache, "RUNTIME_DIRECTORY": run}


def serve_unit(request: ServeRequest, environ: Mapping[str, str]) -> Unit:
    """The unit, checked as far as it can be before anything is started.

    Raises ModelMissing and ModelInvalid for a model that the config names; RuntimeMissing, UsageInvalid,
    ConfigInvalid.
    """
    config, given, account = request.config, dict(request.given), request.account
    hosts = config.hosts if given["host"] is None else tuple(addresses(given["host"]))
    files = {**_files_of(config), **{each: given.pop(each) for each in CREDENTIALS if given[each]}}
    account.check()
    refuse_address(
        hosts,
        config.port if given["port"] is None else given["port"],
        needs_key=not (files["api_key_file"] or config.auth.insecure_no_auth or given["insecure_no_auth"]),
        remedy="Give auth.api_key_file in the config: a service does not see your $LLAMASUP_API_KEY.",
    )
    if config.caches and not account.of_user:
        raise ConfigInvalid(
            f"caches: {', '.join(config.caches)}: those are folders below a home, and the system's service "
            "has another one than you.",
            remedy="Name the folder in models_dir.",
        )
    runtime = find_runtime(request.runtime, environ, config.runtime)
    downloads = _downloads(config)
    # A user's own service reads them itself, where the config or the option says.
    named = files if not account.of_user else {each: request.given[each] for each in CREDENTIALS}
    needs = Needs(
        arguments=tuple(
            request.arguments(
                request.config_file, {**dict.fromkeys(CREDENTIALS), **given}, runtime_word(runtime)
            )
        ),
        hosts=hosts,
        read=under_all_names(
            [
                *program_paths(runtime),
                *([] if request.config_file is None else _config_places(request.config_file)),
                *config.models_dir,
                *_files_of_models(config, runtime_word(runtime), environ),
            ]
        ),
        written={
            **writing_places(hosts, config.http.access_log),
            **({str(folder): "downloads.folder" for folder in _downloads_to(config)} if downloads else {}),
        },
        drain_timeout_s=max(_drains(config)),
        stop_timeout_s=Policy().stop_timeout_s,
        credentials=tuple(
            Credential(option, str(named[each])) for each, option in CREDENTIALS.items() if named[each]
        ),
        of_many=True,
        downloads=downloads,
    )
    return unit_of(request.name, account, needs)


def _files_of(config: Config) -> dict[str, Path | None]:
    """Those that may be their owner's alone, by the field of their option."""
    auth, http = config.auth, config.http
    return {
        "api_key_file": auth.api_key_file,
        "tls_cert": http.tls_cert,
        "tls_key": http.tls_key,
        "token_file": config.downloads.token_file,
    }


def _config_places(file: Path) -> Iterator[Path]:
    """The file; where the sandbox hides it, its folder: an editor puts a new file in its place, and of a
    single file the service would go on seeing the old one.
    """
    for path in dict.fromkeys((plain_path(file), file.resolve())):
        if not is_hidden(str(path)):
            yield path
        elif is_home(str(path.parent)):
            raise ConfigInvalid(
                f"The config {path} lies in {path.parent}, all of which the service would see with it.",
                remedy="Put it into a folder of its own, or into /etc/llamasup.",
            )
        else:
            yield path.parent
            yield path


def _downloads(config: Config) -> bool:
    return config.downloads.on_demand or any(entry.repo or entry.url for entry in config.models.values())


def _downloads_to(config: Config) -> tuple[Path, ...]:
    """Nowhere in particular: a folder of its own."""
    folder = config.downloads.folder
    return config.models_dir[:1] if folder is None else (folder,)


def _drains(config: Config) -> Iterator[float]:
    """How long requests may take to finish, of each model about which something is said."""
    yield Policy().drain_timeout_s
    for keys in (config.defaults, *config.models.values()):
        if keys.drain_timeout_s is not None:
            yield keys.drain_timeout_s


def _files_of_models(config: Config, runtime: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Of the models that the config names. What else lies in its folders may come and go."""
    has_demo = any(entry.path == DEMO for entry in config.models.values())
    demo = str(find_model(DEMO)) if has_demo else None
    for spec in read_library(config).registry.specs.values():
        if spec.is_remote or not any(name in config.models for name in spec.names):
            continue
        if not spec.source:
            raise ModelMissing(f"{spec.problem}.", remedy="Say where it is: path, repo or url.")
        launch = prepare_listed(spec, runtime=runtime, environ=environ)
        yield from model_paths(launch, is_demo=spec.source == demo)[1]
        yield from map(Path, spec.settings.adapters)
