"""Checks a config against this machine: files, folders, keys, certificates, runtime, devices, models.

``config check`` and the control API use the same checks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from llamasup.core.auth.key_source import KeyFile, environment_keys
from llamasup.core.config.config_keys import Config
from llamasup.core.config.issues import NOT_SHOWN, Issue, issue_at, place_text, shown
from llamasup.core.config.reading import Reading
from llamasup.core.http.address import is_local
from llamasup.core.llama_server.installed import find_installed
from llamasup.core.models.registry import Registry
from llamasup.core.models.rules import Problem
from llamasup.core.settings.declaration import Place, settings_of
from llamasup.core.settings.kinds import FilePath, Many
from llamasup.core.settings.model import ModelSettings
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.core.system.text import printable
from llamasup.errors import ConfigInvalid, LlamasupError, RuntimeMissing
from llamasup.features import attached, config_keys

if TYPE_CHECKING:
    from llamasup.service.config_source import ConfigSource

__all__ = ["environment_issues", "model_issues"]

_Found = Iterator[tuple[Place, str]]
DevicesOf = Callable[[str | None, Mapping[str, str]], Sequence[str]]


def environment_issues(
    reading: Reading, environ: Mapping[str, str], *, devices_of: DevicesOf | None = None
) -> tuple[Issue, ...]:
    """The files, folders, keys, programs and devices of a config that this machine does not have.

    ``devices_of`` lists the devices of a runtime; called only if a model names devices.
    """
    reading = _of_this_machine(reading)
    found = (
        *_auth(reading, environ),
        *_tls(reading),
        *_features(reading),
        *_paths(reading),
        *_model_files(reading),
        *_runtime(reading),
        *_devices(reading, environ, devices_of or _devices_of),
    )
    return tuple(_issue(reading, place, problem) for place, problem in found)


def model_issues(
    reading: Reading,
    environ: Mapping[str, str],
    known: Sequence[Issue] = (),
    source: ConfigSource | None = None,
) -> tuple[tuple[Issue, ...], str, tuple[tuple[str, ...], ...]]:
    """The models that ``serve`` would refuse, and the names of unknown models.

    The second value says why models were not checked: there is no runtime. The third has names of the config
    that share one process. ``known`` are the issues found so far. A model with a known issue gets no second
    one. If a folder is missing, names are not checked, since their models may be in it.
    ``source``: that of a running ``serve``; None: a new one.
    """
    from llamasup.core.config.inventory import read_inventory
    from llamasup.service.config_source import ConfigOptions, ConfigSource

    reading = _of_this_machine(reading)
    # ``environment_issues`` has checked the files of peers.
    features = {name: value for name, value in reading.config.features.items() if name != "peers"}
    config = replace(reading.config, features=features)
    found: list[Issue] = []
    unchecked = ""
    try:
        try:
            source = source or ConfigSource(ConfigOptions.of(lambda: config), environ)
        except RuntimeMissing as error:
            unchecked, inventory = error.message, read_inventory(config)
        else:
            configured = source.configured(config)
            inventory = configured.inventory
            for wrong in source.rejected(configured):
                model = place_text(wrong.place[:2])
                if any(issue.key == model or issue.key.startswith(f"{model}.") for issue in known):
                    continue
                issue = _issue(reading, wrong.place, reading.as_written(wrong.error.message))
                key = place_text(wrong.place)
                found.append(replace(issue, key=key, more=tuple(map(reading.as_written, wrong.details))))
    except ConfigInvalid as error:
        return (Issue(0, "", reading.as_written(error.message)),), "", ()
    has_folders = not any(issue.key.startswith("models_dir") for issue in known)
    names = _unknown_names(config, inventory.registry) if has_folders else ()
    shared = tuple(spec.shares for spec in inventory.registry.specs.values() if spec.shares)
    return (*found, *(_issue(reading, place, problem) for place, problem in names)), unchecked, shared


def _of_this_machine(reading: Reading) -> Reading:
    """Leave out what concerns other machines, such as the models of a fleet."""
    config = reading.config
    for key in config_keys():
        if key.of_this_machine is not None:
            config = key.of_this_machine(config)
    return replace(reading, config=config)


def _unknown_names(config: Config, registry: Registry) -> _Found:
    problems = {name: problem for problem in registry.problems for name in problem.names}
    if config.default_model is not None and registry.default is None:
        yield ("default_model",), _text(problems[config.default_model])
    for group, members in config.groups.items():
        for number, member in enumerate(members):
            problem = problems.get(member)
            if problem is not None and problem.cause == "model_not_found":
                yield ("groups", group, number), _text(problem)
    for name in config.models:
        spec = registry.specs.get(registry.names.get(name, ""))
        if spec is not None and not (spec.source or spec.engine):
            yield ("models", name), _text(problems[name]) if name in problems else spec.problem


def _text(problem: Problem) -> str:
    remedy = problem.remedy[:1].lower() + problem.remedy[1:].rstrip(".")
    return "; ".join(filter(None, (problem.message, remedy)))


def _issue(reading: Reading, place: Place, problem: str) -> Issue:
    return issue_at(place, reading.as_written(problem), reading.config.lines)


# --- access ----------------------------------------------------------------------------------------


def _auth(reading: Reading, environ: Mapping[str, str]) -> _Found:
    auth = reading.config.auth
    try:
        has_key = bool(environment_keys(environ))
    except LlamasupError as error:
        has_key = True
        yield (), error.message
    if auth.api_key_file is not None:
        has_key = True
        try:
            KeyFile(auth.api_key_file, of="auth.api_key_file")
        except LlamasupError as error:
            yield ("auth", "api_key_file"), error.message
    public = [host for host in reading.config.hosts if not is_local(host)]
    if public and not (has_key or auth.insecure_no_auth):
        yield (
            ("listen",),
            f"{shown(public[0])} can be reached from other machines, and no API key is set; "
            "set auth.api_key_file, or auth.insecure_no_auth to allow access without a key",
        )


def _tls(reading: Reading) -> _Found:
    http = reading.config.http
    if http.tls_cert is None or http.tls_key is None:
        return
    from llamasup.core.proxy.listeners.tls import TlsContext

    try:
        TlsContext(str(http.tls_key), str(http.tls_cert))
    except LlamasupError as error:
        yield ("http", "tls_cert"), error.message


def _features(reading: Reading) -> _Found:
    for problems in attached("config_problems"):
        for place, error in problems(reading.config):
            yield place, _one_line(error)


def _one_line(error: LlamasupError) -> str:
    return f"{error.message.rstrip('.')}; {error.remedy[:1].lower()}{error.remedy[1:].rstrip('.')}"


# --- files and folders -------------------------------------------------------------------------------


def _paths(reading: Reading) -> _Found:
    config = reading.config
    for number, folder in enumerate(config.models_dir):
        if problem := _no_folder(folder):
            yield ("models_dir", number), problem
    downloads = config.features.get("downloads")
    if downloads is not None:
        token: Place = ("downloads", "token_file")
        if downloads.token_file is not None and (problem := _no_file(downloads.token_file)):
            yield token, f"the file {NOT_SHOWN} cannot be read" if token in reading.hidden else problem
        folder = downloads.folder  # a missing one is created
        if (
            folder is not None
            and path_kind(folder) is not PathKind.NOTHING
            and (problem := _no_folder(folder))
        ):
            yield ("downloads", "folder"), problem
    log = config.http.access_log
    if log is not None and log != Path("-") and (problem := _no_folder(log.parent)):
        yield ("http", "access_log"), problem
    for number, address in enumerate(config.hosts):
        if address.endswith(".sock") and (problem := _no_folder(Path(address).parent)):
            yield ("listen", number), problem


def _model_keys(config: Config) -> list[tuple[Place, ModelSettings]]:
    """The defaults and each model's own values, by their place in the config."""
    models = [(("models", name), keys) for name, keys in config.models.items()]
    return [(("defaults",), config.defaults), *models]


def _model_files(reading: Reading) -> _Found:
    config = reading.config
    for at, keys in _model_keys(config):
        for key, (field, declared) in settings_of(type(keys)).items():
            value, kind = getattr(keys, field), declared.kind
            files: list[tuple[Place, str]] = []
            if isinstance(kind, Many) and value:
                files = [((*at, key, number), path) for number, path in enumerate(value)]
                kind = kind.kind
            elif value is not None:
                files = [((*at, key), value)]
            if isinstance(kind, FilePath):
                for place, path in files:
                    if path not in kind.literal and (problem := _no_file(Path(path))):
                        yield place, problem


def _no_file(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe must not block
        try:
            os.read(fd, 1)
        finally:
            os.close(fd)
    except OSError as error:
        return _reason(path, error)
    return ""


def _no_folder(path: Path) -> str:
    try:
        with os.scandir(path):
            return ""
    except OSError as error:
        return _reason(path, error)


def _reason(path: Path, error: OSError) -> str:
    return f"'{printable(str(path))}': {error.strerror or error}"


# --- runtime ---------------------------------------------------------------------------------------


def _runtime(reading: Reading) -> _Found:
    wanted = reading.config.runtime.path
    if wanted is None or wanted == "embedded":
        return  # llamasup doctor checks these
    if find_installed(wanted) is None and shutil.which(wanted) is None:
        yield ("runtime",), f"'{printable(wanted)}' is not an executable program; give another one, or auto"


def _devices(reading: Reading, environ: Mapping[str, str], devices_of: DevicesOf) -> _Found:
    config = reading.config
    wanted = [
        ((*at, "devices", number), device)
        for at, keys in _model_keys(config)
        for number, device in enumerate(keys.devices or ())
        if device != "none"
    ]
    if not wanted:
        return
    try:
        available = devices_of(config.runtime.path, environ)
    except LlamasupError as error:
        yield wanted[0][0], f"cannot list the devices: {error.message}"
        return
    for place, device in wanted:
        if device not in available:
            existing = ", ".join(available) or "no devices"
            yield place, f"{shown(device)} does not exist; the runtime has {existing}"


def _devices_of(configured: str | None, environ: Mapping[str, str]) -> Sequence[str]:
    from llamasup.core.llama_server.inspect import find_runtime

    runtime = find_runtime(None, environ, configured)
    return [device.name for device in runtime.capabilities.devices]
