"""Checks the arguments of ``serve``, and starts a server for ``async with`` or ``with``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from msgspec.structs import replace

from llamasup.api.arguments import ModelArguments
from llamasup.api.async_server import AsyncServer, begin
from llamasup.api.inputs import ConfigInputs, absolute_of, config_of, entry_of, name_of
from llamasup.api.server import LoopThread, Server
from llamasup.core.auth.key_source import environment_keys
from llamasup.core.config.config_keys import Config
from llamasup.core.http.address import addresses, invalid_host_remedy, is_local
from llamasup.core.system.storage.paths import require_folders
from llamasup.errors import UnsafeBind, UsageInvalid
from llamasup.service.serve import ServeOptions


def serve(
    model: str | Path | None = None,
    *,
    name: str | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    models_dir: str | Path | Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    runtime: str | Path | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Unpack[ModelArguments],
) -> Serving:
    """Serve models in this process: enter the result with ``async with`` or ``with``.

    ``model`` is a path, ``demo``, ``org/repo[:quant]`` or a URL, as for ``llamasup run``. It is loaded before
    the block begins, unless ``preload=False``, and served as ``name`` (default: the name of its file).
    ``options`` are the settings of a model in a config, as Python values: ``ctx_size=4096, ttl_s=600.0``.
    ``config`` (a file or a dict) and ``models_dir`` serve many models. Port 0 is any free one; a ``host``
    that ends in ``.sock`` is a Unix socket; both replace ``listen`` of the config. With an ``api_key``, or a
    key of the config or ``$LLAMASUP_API_KEY``, requests need a key; ``client`` has one. ``environ`` replaces
    the environment for ``${NAME}`` in a config, the search for a runtime and that key.

    Raises UsageInvalid, and ConfigInvalid for a dict. Entering raises the error of a failed start:
    ModelMissing, ModelInvalid, DoesNotFit, RuntimeMissing, ConfigInvalid, PortInUse, ServerFailed, … All are
    ``LlamasupError``.
    """
    _refuse_types(model=model, name=name, host=host, runtime=runtime, environ=environ)
    folders = (models_dir,) if isinstance(models_dir, str | PathLike) else tuple(models_dir)
    for folder in folders:
        _refuse_types(models_dir=folder)
    models = {}
    if model is not None:
        name = name or name_of(model)
        preload = options.get("preload")
        models[name] = entry_of(model, {**options, "preload": True if preload is None else preload})
    elif options or name is not None:
        raise UsageInvalid(
            f"{', '.join(options) or 'name'} was given without a model.",
            remedy="Give a model, or set it in the config.",
        )
    elif config is None and not folders:
        raise UsageInvalid("No models to serve.", remedy="Give a model, a config or a models_dir.")
    if not _is_port(port):
        raise UsageInvalid(
            f"port={port!r} is not a valid port.", remedy="Give 1 to 65535, or 0 for any free port."
        )
    if not addresses(host):
        raise UsageInvalid(f"host={host!r} is empty.", remedy="Leave it out for 127.0.0.1.")
    for address in addresses(host):
        if remedy := invalid_host_remedy(address):
            raise UsageInvalid(
                f"host={address!r} is not a valid address.", remedy=remedy.replace("--port", "port")
            )
    if not (api_key is None or _is_key(api_key)):
        raise UsageInvalid(
            "The api_key is invalid (not shown).",
            remedy="Use ASCII letters, digits and signs, without spaces.",
        )
    environ = os.environ if environ is None else environ
    read = config_of(config, environ, more_models=bool(models or folders))
    given = ConfigInputs(read, tuple(map(absolute_of, folders)), environ, models)
    if isinstance(runtime, PathLike):  # a name alone would be searched on PATH
        runtime = str(absolute_of(runtime))
    return Serving(given, name, host=host, port=port, runtime=runtime, api_key=api_key)


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535


def _is_key(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isprintable() and key.split() == [key]


def _refuse_types(**arguments: object) -> None:
    """Raises UsageInvalid for types that would fail later with a worse error."""
    path = ((str, PathLike), "a string or a Path")
    text = (str, "a string")
    kinds: Mapping[str, tuple[Any, str]] = {
        "model": path,
        "name": text,
        "host": text,
        "runtime": path,
        "models_dir": path,
        "environ": (Mapping, "a mapping, as os.environ is"),
    }
    for argument, value in arguments.items():
        kind, what = kinds[argument]
        if not isinstance(value, kind) and (value is not None or argument in ("host", "models_dir")):
            raise _wrong_type(argument, value, what)


def _wrong_type(argument: str, value: object, expected: str) -> UsageInvalid:
    return UsageInvalid(
        f"{argument}={value!r:.60}: expected {expected}.", remedy="docs/python.md describes the arguments."
    )


class Serving:
    """The result of ``serve``: ``async with`` gives an AsyncServer, ``with`` and ``start`` give a Server.

    It can be started again after its end, with the same arguments.
    """

    def __init__(self, given: ConfigInputs, name: str | None, *, api_key: str | None, **options: Any) -> None:
        """Use ``serve`` to create one."""
        self._given = given
        self._name = name
        self._options = {
            **options,
            "api_keys": () if api_key is None else (api_key,),
            "fail_on_preload_error": True,
        }
        self._starting = False
        self._server: AsyncServer | Server | None = None

    async def __aenter__(self) -> AsyncServer:
        self._refuse_twice()
        self._starting = True
        try:
            self._server = server = await begin(self._given.copy(), self._serve_options, self._name)
        finally:
            self._starting = False
        return server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server = self._server
        assert isinstance(server, AsyncServer)
        server._ask_stop(now=kind is not None)
        await server._until_ended(quiet=kind is not None)

    def start(self) -> Server:
        """Start without a block, for notebooks and the like. End it with ``server.stop()``, or with the
        process.
        """
        self._refuse_twice()
        self._starting = True
        try:
            thread = LoopThread(lambda: begin(self._given.copy(), self._serve_options, self._name))
            self._server = server = thread.start()
        finally:
            self._starting = False
        return server

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server = self._server
        assert isinstance(server, Server)
        server._end(now=kind is not None, quiet=kind is not None)

    def _refuse_twice(self) -> None:
        if self._starting or not (self._server is None or self._server._has_ended):
            raise UsageInvalid(
                "This server is already running.", remedy="Call llamasup.serve() once for each server."
            )

    def _serve_options(self, given: ConfigInputs) -> ServeOptions:
        require_folders(given.folders, of="models_dir")
        options = ServeOptions.of(given, config_file=given.file, **self._options)
        from llamasup.fleet.settings import is_front  # here, as most programs have one model

        if options.initial_config is not None and is_front(options.initial_config):
            from llamasup.fleet.membership import as_front

            options = as_front(options, given.environ, has_own_models=bool(given.models or given.folders))
        keys = (*options.api_keys, *environment_keys(given.environ))
        if keys or options.api_key_file is not None:
            # Only digests of a file's keys are known, and keys may have limits, so the client gets its own
            # key.
            return replace(options, api_keys=(*keys, secrets.token_urlsafe(32)))
        outside = [address for address in addresses(options.host) if not is_local(address)]
        if outside and not options.insecure_no_auth:
            raise UnsafeBind(
                f"host={outside[0]!r} can be reached from other machines, and no API key is set.",
                remedy="Give an api_key, or set auth in the config.",
            )
        return options
