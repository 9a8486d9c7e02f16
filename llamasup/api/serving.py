"""``serve``: what there is to be served, and the two ways to begin with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from llamasup.api.async_server import AsyncServer, begin
from llamasup.api.given import Given, ModelArguments, absolute_of, entry_of, name_of
from llamasup.api.server import LoopThread, Server
from llamasup.config import Config
from llamasup.core.errors import UsageInvalid
from llamasup.serving import ServeOptions, serve_options

__all__ = ["Serving", "serve"]

_KEY = re.compile(r"[!-~]+")  # what a header can carry as a token


def serve(
    model: str | Path | None = None,
    *,
    name: str | None = None,
    config: str | Path | Config | None = None,
    models_dir: str | Path | Sequence[str | Path] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    runtime: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Unpack[ModelArguments],
) -> Serving:
    """What there is to serve: enter it with ``async with`` or ``with``.

    ``model`` is what ``llamasup run`` takes: a path, ``demo``, ``org/repo[:quant]`` or a URL; it is loaded
    before the block begins, unless ``preload=False``. It is served as ``name`` (by default as its file is
    called). ``options`` are those of a model in a config, as Python values: ``ctx_size=4096, ttl_s=600.0``.
    ``config`` (a file, or a ``Config``) and ``models_dir`` serve many. Port 0 takes any free one; a ``host``
    that ends in ``.sock`` is a Unix socket; of the config only these two do not count. With an ``api_key``
    requests need it, and ``client`` sends it. ``environ`` is what ``${NAME}`` in a config means, and where
    the runtime is looked for.

    Raises UsageInvalid. Entering raises why nothing can be served: ModelMissing, ModelInvalid, DoesNotFit,
    RuntimeMissing, ConfigInvalid, PortInUse, ServerFailed, GaveUp, … All are a ``LlamasupError``.
    """
    folders = (models_dir,) if isinstance(models_dir, str | Path) else tuple(models_dir)
    models = {}
    if model is not None:
        name = name or name_of(model)
        models[name] = entry_of(model, {"preload": True, **options})
    elif options or name is not None:
        raise UsageInvalid(
            f"{', '.join(options) or 'name'}: said of no model.",
            remedy="Give the model first, or say it in the config.",
        )
    elif config is None and not folders:
        raise UsageInvalid("There is nothing to serve.", remedy="Give a model, a config or a models_dir.")
    if isinstance(port, bool) or not isinstance(port, int):
        raise UsageInvalid(f"port={port!r} is no port.", remedy="Give 1 to 65535, or 0 for any free one.")
    if api_key is not None and not (
        api_key.isascii() and api_key.isprintable() and api_key.split() == [api_key]
    ):
        raise UsageInvalid(
            "The api_key is no key (not shown).", remedy="Give letters, digits and signs, without spaces."
        )
    given = Given(config, tuple(map(absolute_of, folders)), environ, models)
    return Serving(given, name, host=host, port=port, runtime=runtime, api_key=api_key)


class Serving:
    """Something to be served: ``async with`` gives an AsyncServer, ``with`` and ``start`` give a Server.

    May be begun again once it has ended: as it was said at first.
    """

    def __init__(self, given: Given, name: str | None, *, api_key: str | None, **options: Any) -> None:
        """Not to be called: ``serve`` makes it."""
        self._given = given
        self._name = name
        self._options = {**options, "api_keys": () if api_key is None else (api_key,), "insists": True}
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

    def _serve_options(self, given: Given) -> ServeOptions:
        return serve_options(given, config_file=given.file, **self._options)
