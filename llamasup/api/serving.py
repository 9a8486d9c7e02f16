"""``serve``: what there is to be served, and the two ways to begin with it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from llamasup.api.async_server import AsyncServer, begin
from llamasup.api.inputs import ConfigInputs, ModelArguments, absolute_of, config_of, entry_of, name_of
from llamasup.api.server import LoopThread, Server
from llamasup.auth.key_source import environment_keys
from llamasup.config import Config
from llamasup.errors import UnsafeBind, UsageInvalid
from llamasup.http.address import addresses, is_local, why_no_host
from llamasup.service.serve import ServeOptions, serve_options
from llamasup.system.storage.paths import refuse_no_folder

__all__ = ["Serving", "serve"]


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
    """What there is to serve: enter it with ``async with`` or ``with``.

    ``model`` is what ``llamasup run`` takes: a path, ``demo``, ``org/repo[:quant]`` or a URL; it is loaded
    before the block begins, unless ``preload=False``. It is served as ``name`` (by default as its file is
    called). ``options`` are those of a model in a config, as Python values: ``ctx_size=4096, ttl_s=600.0``.
    ``config`` (a file, or a dict of what stands in one) and ``models_dir`` serve many. Port 0 takes any free
    one; a ``host`` that ends in ``.sock`` is a Unix socket; of the config only these two do not count. With
    an ``api_key``, or a key of the config's or of ``$LLAMASUP_API_KEY``, requests need one; ``client`` has
    its own. ``environ`` is what ``${NAME}`` in a config means, and where the runtime and that key are looked
    for.

    Raises UsageInvalid, and ConfigInvalid for a dict. Entering raises why nothing can be served:
    ModelMissing, ModelInvalid, DoesNotFit, RuntimeMissing, ConfigInvalid, PortInUse, ServerFailed, GaveUp, …
    All are a ``LlamasupError``.
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
            f"{', '.join(options) or 'name'}: said of no model.",
            remedy="Give the model first, or say it in the config.",
        )
    elif config is None and not folders:
        raise UsageInvalid("There is nothing to serve.", remedy="Give a model, a config or a models_dir.")
    if not _is_port(port):
        raise UsageInvalid(f"port={port!r} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
    if not addresses(host):
        raise UsageInvalid(f"host={host!r} names no address.", remedy="Leave it out for 127.0.0.1.")
    for each in addresses(host):
        if remedy := why_no_host(each):
            raise UsageInvalid(f"host={each!r} is no address.", remedy=remedy.replace("--port", "port"))
    if not (api_key is None or _is_key(api_key)):
        raise UsageInvalid(
            "The api_key is no key (not shown).", remedy="Give letters, digits and signs, without spaces."
        )
    environ = os.environ if environ is None else environ
    read = config_of(config, environ, more_models=bool(models or folders))
    given = ConfigInputs(read, tuple(map(absolute_of, folders)), environ, models)
    if isinstance(runtime, PathLike):  # a name alone would be looked for on PATH
        runtime = str(absolute_of(runtime))
    return Serving(given, name, host=host, port=port, runtime=runtime, api_key=api_key)


def _is_port(port: object) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535


def _is_key(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isprintable() and key.split() == [key]


def _refuse_types(**arguments: object) -> None:
    """Those that would fail later, and worse. Raises UsageInvalid."""
    path = ((str, PathLike), "a text or a Path")
    text = (str, "a text")
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
            raise _mistaken(argument, value, what)


def _mistaken(argument: str, value: object, takes: str) -> UsageInvalid:
    return UsageInvalid(
        f"{argument}={value!r:.60}: it takes {takes}.", remedy="docs/python.md says what each means."
    )


class Serving:
    """Something to be served: ``async with`` gives an AsyncServer, ``with`` and ``start`` give a Server.

    May be begun again once it has ended: as it was said at first.
    """

    def __init__(self, given: ConfigInputs, name: str | None, *, api_key: str | None, **options: Any) -> None:
        """Not to be called: ``serve`` makes it."""
        self._given = given
        self._name = name
        self._options = {
            **options,
            "api_keys": () if api_key is None else (api_key,),
            "fail_on_preload_error": True,
        }
        self._beginning = False
        self._server: AsyncServer | Server | None = None

    async def __aenter__(self) -> AsyncServer:
        self._refuse_twice()
        self._beginning = True
        try:
            self._server = server = await begin(self._given.copy(), self._serve_options, self._name)
        finally:
            self._beginning = False
        return server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server = self._server
        assert isinstance(server, AsyncServer)
        server._ask_stop(now=kind is not None)
        await server._until_ended(quiet=kind is not None)

    def start(self) -> Server:
        """Without a block: for notebooks, and whatever else ends with ``server.stop()``. What nobody has
        stopped ends with the process.
        """
        self._refuse_twice()
        self._beginning = True
        try:
            thread = LoopThread(lambda: begin(self._given.copy(), self._serve_options, self._name))
            self._server = server = thread.start()
        finally:
            self._beginning = False
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
        if self._beginning or not (self._server is None or self._server._has_ended):
            raise UsageInvalid(
                "This is being served already.", remedy="Call llamasup.serve() once for each server."
            )

    def _serve_options(self, given: ConfigInputs) -> ServeOptions:
        refuse_no_folder(given.folders, of="models_dir")
        options = serve_options(given, config_file=given.file, **self._options)
        keys = (*options.api_keys, *environment_keys(given.environ))
        if keys or options.api_key_file is not None:
            # Of a file's keys only digests are known, and each may have limits: the client has its own.
            return replace(options, api_keys=(*keys, secrets.token_urlsafe(32)))
        outside = [each for each in addresses(options.host) if not is_local(each)]
        if outside and not options.insecure_no_auth:
            raise UnsafeBind(
                f"host={outside[0]!r} can be reached from other machines, and no API key is set.",
                remedy="Give an api_key; or let the config's auth say who may come in.",
            )
        return options
