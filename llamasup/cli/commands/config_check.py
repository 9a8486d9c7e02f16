"""Checks what a config names on this machine: files, folders, keys, certificates, runtime, devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llamasup.auth.key_source import KeyFile, environment_keys
from llamasup.config.issues import NOT_SHOWN, Issue, Place, mistake_at, place_text, shown
from llamasup.config.keys import FilePath, Many
from llamasup.config.reading import Reading, keys_of
from llamasup.config.values import Config, ModelKeys
from llamasup.errors import ConfigInvalid, LlamasupError, RuntimeMissing
from llamasup.http.address import is_local
from llamasup.models.registry import Registry
from llamasup.models.rules import Problem
from llamasup.system.storage.paths import PathKind, path_kind
from llamasup.system.text import printable

__all__ = ["missing_here", "wrong_here"]

_Found = Iterator[tuple[Place, str]]
DevicesOf = Callable[[str | None, Mapping[str, str]], Sequence[str]]


def missing_here(
    reading: Reading, environ: Mapping[str, str], *, devices_of: DevicesOf | None = None
) -> tuple[Issue, ...]:
    """``devices_of`` lists the devices of a runtime; called only if a model names devices."""
    found = (
        *_auth(reading, environ),
        *_tls(reading),
        *_places(reading),
        *_model_files(reading),
        *_runtime(reading),
        *_devices(reading, environ, devices_of or _devices_of),
    )
    return tuple(_mistake(reading, place, what) for place, what in found)


def wrong_here(
    reading: Reading, environ: Mapping[str, str], told: Sequence[Issue] = ()
) -> tuple[tuple[Issue, ...], str]:
    """The models that ``serve`` would refuse, the names that no model has, and why the models could not be
    checked if there is no runtime.

    ``told``: the mistakes found so far. A model with one gets no second; if a folder is missing, names are
    not checked, since they may be in it.
    """
    from llamasup.service.inventory import read_inventory
    from llamasup.service.serve import ConfigSource, serve_options

    config = reading.config
    found: list[Issue] = []
    untold = ""
    try:
        try:
            source = ConfigSource(serve_options(lambda: config), environ)
        except RuntimeMissing as error:
            untold, inventory = error.message, read_inventory(config)
        else:
            configured = source.first()
            inventory = configured.inventory
            for each in source.rejected(configured):
                model = place_text(each.place[:2])
                if any(known.key == model or known.key.startswith(f"{model}.") for known in told):
                    continue
                issue = _mistake(reading, each.place, reading.as_written(each.error.message))
                key = place_text(each.place)
                found.append(replace(issue, key=key, more=tuple(map(reading.as_written, each.details))))
    except ConfigInvalid as error:
        return (Issue(0, "", reading.as_written(error.message)),), ""
    is_known = not any(known.key.startswith("models_dir") for known in told)
    names = _unknown_names(config, inventory.registry) if is_known else ()
    return (*found, *(_mistake(reading, place, what) for place, what in names)), untold


def _unknown_names(config: Config, registry: Registry) -> _Found:
    told = {name: problem for problem in registry.problems for name in problem.names}
    if config.default_model is not None and registry.default is None:
        yield ("default_model",), _said(told[config.default_model])
    for group, members in config.groups.items():
        for number, member in enumerate(members):
            problem = told.get(member)
            if problem is not None and problem.cause == "model_not_found":
                yield ("groups", group, number), _said(problem)
    for name in config.models:
        spec = registry.specs.get(registry.names.get(name, ""))
        if spec is not None and not spec.source:
            yield ("models", name), _said(told[name]) if name in told else spec.problem


def _said(problem: Problem) -> str:
    return "; ".join(filter(None, (problem.message, problem.remedy.rstrip("."))))


def _mistake(reading: Reading, place: Place, what: str) -> Issue:
    return mistake_at(place, reading.as_written(what), reading.config.lines)


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
    outside = [host for host in reading.config.hosts if not is_local(host)]
    if outside and not (has_key or auth.insecure_no_auth):
        yield (
            ("listen",),
            f"{shown(outside[0])} can be reached from other machines, and no API key is set; "
            "set auth.api_key_file, or auth.insecure_no_auth to allow access without a key",
        )


def _tls(reading: Reading) -> _Found:
    http = reading.config.http
    if http.tls_cert is None or http.tls_key is None:
        return
    from llamasup.proxy.tls import tls_context

    try:
        tls_context(str(http.tls_key), str(http.tls_cert))
    except LlamasupError as error:
        yield ("http", "tls_cert"), error.message


# --- files and folders -------------------------------------------------------------------------------


def _places(reading: Reading) -> _Found:
    config = reading.config
    for number, folder in enumerate(config.models_dir):
        if problem := _no_folder(folder):
            yield ("models_dir", number), problem
    downloads = config.downloads
    token: Place = ("downloads", "token_file")
    if downloads.token_file is not None and (problem := _no_file(downloads.token_file)):
        yield token, f"{NOT_SHOWN}: not a readable file" if token in reading.hidden else problem
    if (
        downloads.folder is not None
        and path_kind(downloads.folder) is not PathKind.NOTHING
        and (problem := _no_folder(downloads.folder))
    ):
        yield ("downloads", "folder"), problem  # a missing folder is created
    log = config.http.access_log
    if log is not None and log != Path("-") and (problem := _no_folder(log.parent)):
        yield ("http", "access_log"), problem
    for number, address in enumerate(config.hosts):
        if address.endswith(".sock") and (problem := _no_folder(Path(address).parent)):
            yield ("listen", number), problem


def _model_files(reading: Reading) -> _Found:
    config = reading.config
    said: list[tuple[Place, ModelKeys]] = [(("defaults",), config.defaults)]
    said += [(("models", name), entry) for name, entry in config.models.items()]
    for at, keys in said:
        for key, (field, said_of) in keys_of(type(keys)).items():
            value, kind = getattr(keys, field), said_of.kind
            files: list[tuple[Place, str]] = []
            if isinstance(kind, Many) and value:
                files = [((*at, key, number), each) for number, each in enumerate(value)]
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
    wanted = reading.config.runtime
    if wanted is None or wanted == "embedded":
        return  # llamasup doctor checks these
    if shutil.which(wanted) is None:
        yield ("runtime",), f"'{printable(wanted)}' is not an executable program; give another one, or auto"


def _devices(reading: Reading, environ: Mapping[str, str], devices_of: DevicesOf) -> _Found:
    config = reading.config
    said: list[tuple[Place, ModelKeys]] = [(("defaults",), config.defaults)]
    said += [(("models", name), entry) for name, entry in config.models.items()]
    wanted = [
        ((*at, "devices", number), device)
        for at, keys in said
        for number, device in enumerate(keys.devices or ())
        if device != "none"
    ]
    if not wanted:
        return
    try:
        there = devices_of(config.runtime, environ)
    except LlamasupError as error:
        yield wanted[0][0], f"cannot list the devices: {error.message}"
        return
    for place, device in wanted:
        if device not in there:
            yield place, f"{shown(device)} does not exist; the runtime has {', '.join(there) or 'no devices'}"


def _devices_of(configured: str | None, environ: Mapping[str, str]) -> Sequence[str]:
    from llamasup.llama_server.inspect import find_runtime

    runtime = find_runtime(None, environ, configured)
    return [device.name for device in runtime.capabilities.devices]
