"""llamasup in a Python program.

    async with llamasup.serve("model.gguf") as server:
        answer = await server.client.post("/v1/chat/completions", json={…})

    with llamasup.serve("model.gguf") as server:
        answer = server.client.post("/v1/chat/completions", json={…})

What it serves, it serves as ``llamasup serve`` does: with the same proxy, supervision and residency, at an
address of its own, in this process (``with``: in a thread of its own). No signal is touched.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msgspec import structs

from llamasup.config import Config, load
from llamasup.config.values import ModelEntry
from llamasup.core.errors import NotRunning, UsageInvalid
from llamasup.core.hub import is_reference
from llamasup.core.model_names import file_id
from llamasup.effects.httpx_alone import httpx
from llamasup.hosted_models import HostedModels
from llamasup.runtime.events import Bus, Notice, Ready, Stopped, as_json
from llamasup.runtime.launch import DEMO
from llamasup.serving import ServeOptions, ServeService, serve_options

__all__ = ["AsyncServer", "Server", "Serving", "serve"]

T = TypeVar("T")

_MOST_EVENTS = 1000  # that a reader may be behind: a load has six
# A request may wait for a load, and a long prompt says nothing for minutes.
_TIMEOUT = httpx.Timeout(None, connect=10.0)


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
    **options: Any,
) -> Serving:
    """What there is to serve: enter it with ``async with`` or ``with``.

    ``model`` is what ``llamasup run`` takes: a path, ``demo``, ``org/repo[:quant]`` or a URL; it is loaded
    before the block begins. It is served as ``name`` (by default as its file is called). ``options`` are
    those of a model in a config, as Python values: ``ctx_size=4096, parallel=2, ttl_s=600.0``.
    ``config`` (a file, or a ``Config``) and ``models_dir`` serve many. Port 0 takes any free one; with an
    ``api_key`` requests need it, and ``client`` sends it.

    Entering raises ModelMissing, ModelInvalid, DoesNotFit, RuntimeMissing, ConfigInvalid, PortInUse,
    ServerFailed or GaveUp: see ``llamasup.LlamasupError``.
    """
    folders = (models_dir,) if isinstance(models_dir, str | Path) else models_dir
    said = _Said(config, tuple(Path(each).expanduser().absolute() for each in folders), environ)
    if model is not None:
        name = name or _name_of(model)
        said.models[name] = structs.replace(_entry_of(model, options), preload=True)
    elif options or name is not None:
        raise UsageInvalid(
            f"{', '.join(options) or 'name'}: said of no model.",
            remedy="Give the model first, or say it in the config.",
        )
    elif config is None and not folders:
        raise UsageInvalid("There is nothing to serve.", remedy="Give a model, a config or a models_dir.")
    return Serving(said, name, host, port, runtime, api_key)


class _Said:
    """The config as it is now: of a file or a value, with what was said of single models."""

    def __init__(
        self,
        config: str | Path | Config | None,
        folders: tuple[Path, ...],
        environ: Mapping[str, str] | None,
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.models: dict[str, ModelEntry] = {}
        self._config = config
        self._folders = folders

    def __call__(self) -> Config:
        config = self._config
        if config is None:
            config = Config()
        elif not isinstance(config, Config):
            config = load(Path(config).expanduser().absolute(), self.environ)
        return structs.replace(
            config,
            models_dir=(*config.models_dir, *self._folders),
            models={**config.models, **self.models},
        )


class Serving:
    """Something to be served, not begun yet: ``async with`` gives an AsyncServer, ``with`` a Server."""

    def __init__(
        self, said: _Said, name: str | None, host: str, port: int, runtime: str | None, api_key: str | None
    ) -> None:
        self._said = said
        self._name = name
        self._given = {"host": host, "port": port, "runtime": runtime}
        self._api_key = api_key
        self._server: AsyncServer | None = None
        self._thread: _Thread | None = None

    async def __aenter__(self) -> AsyncServer:
        server = AsyncServer(self._said, self._options, self._name, self._api_key)
        await server._begin()
        self._server = server
        return server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server._end(now=kind is not None)

    def __enter__(self) -> Server:
        self._thread = _Thread(self)
        return self._thread.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.end(now=kind is not None)

    def _options(self) -> ServeOptions:
        keys = () if self._api_key is None else (self._api_key,)
        return serve_options(self._said, api_keys=keys, insists=True, **self._given)


class AsyncServer:
    """A running llamasup at ``url``, for the loop that began it."""

    def __init__(
        self,
        said: _Said,
        options: Callable[[], ServeOptions],
        name: str | None,
        api_key: str | None,
    ) -> None:
        self.url = ""
        self._said = said
        self._options = options
        self._name = name
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._bus = Bus()
        self._service: ServeService | None = None
        self._running: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """Bound to ``url``; without a limit on how long an answer may take."""
        assert self._client is not None
        return self._client

    # --- what can be asked ------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """The ``status`` object of docs/design.md."""
        return self._hosted.controlled.status()

    async def events(self) -> AsyncIterator[Mapping[str, Any]]:
        """What happens from now on, as ``--events`` tells it; until the end. A reader that is too far behind
        gets ``{"event": "missed", "count": N}`` in the place of the oldest.
        """
        reader = _Reader()
        self._bus.listen(reader.notice)
        try:
            while True:
                event = await reader.next()
                yield event
                if event["event"] == "stopped":
                    return
        finally:
            self._bus.forget(reader.notice)

    async def load(self, model: str) -> None:
        """Until it serves. Raises ModelUnknown, DoesNotFit, ServerFailed, …"""
        await self._hosted.controlled.load(model)

    async def unload(self, model: str) -> None:
        """Until its memory is free."""
        await self._hosted.controlled.unload(model)

    async def restart(self, model: str | None = None) -> None:
        """Until it serves again."""
        await self._hosted.controlled.restart(self._named(model))

    async def reload(self) -> Mapping[str, Any]:
        """Read the config and the folders again. Raises ConfigInvalid; then all is as before."""
        return await self._hosted.controlled.reload()

    async def switch(self, model: str | Path, *, name: str | None = None, **options: Any) -> None:
        """Serve another model under the name of this one, and lose no request: those in flight are finished
        by the old one, those that wait are answered by the new one. Until that serves.

        Beside the old one, if both fit, else after it. Raises what keeps the new one from serving; where it
        was to begin beside the old one, that goes on.
        """
        name = self._named(name)
        before = self._said.models.get(name)
        said = self._said().models.get(name)
        entry = _entry_of(model, options)
        self._said.models[name] = structs.replace(
            entry, aliases=said.aliases if said else (), preload=bool(said and said.preload)
        )
        try:
            await self._hosted.reload()
            await self._hosted.settled(name)
        except BaseException:
            if before is None:
                del self._said.models[name]
            else:
                self._said.models[name] = before
            await self._hosted.reload()
            raise

    async def stop(self) -> None:
        """End it: requests in flight may finish. Leaving the block does the same."""
        await self._end(now=False)

    # --- life -------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        ready: asyncio.Future[Ready | None] = asyncio.get_running_loop().create_future()

        def notice(notice: Notice) -> None:
            if isinstance(notice, Ready | Stopped) and not ready.done():
                ready.set_result(notice if isinstance(notice, Ready) else None)

        self._bus.listen(notice)
        self._service = await asyncio.to_thread(
            lambda: ServeService(self._options(), self._bus, self._said.environ)
        )
        loop = asyncio.get_running_loop()
        self._running = loop.create_task(self._service.run(), name="llamasup")
        try:
            said = await self._ready_or_over(ready)
        except BaseException:
            await self._end(now=True)
            raise
        self.url = said.address.url
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=_TIMEOUT, trust_env=False
        )

    async def _ready_or_over(self, ready: asyncio.Future[Ready | None]) -> Ready:
        """Raises what it ended with instead."""
        assert self._running is not None

        def over(_: asyncio.Task[None]) -> None:
            if not ready.done():
                ready.set_result(None)

        self._running.add_done_callback(over)
        said = await ready
        if said is None:
            await self._running
            raise NotRunning("It was stopped before it was ready.")
        return said

    async def _end(self, *, now: bool) -> None:
        running, service = self._running, self._service
        if running is None or service is None:
            return
        for _ in range(2 if now else 1):
            service.ask_stop()
        # Whoever cancels us waits for the end all the same: nothing is to be left behind.
        cancelled = False
        while not running.done():
            try:
                await asyncio.shield(asyncio.wait({running}))
            except asyncio.CancelledError:
                cancelled = True
                service.ask_stop()
        if self._client is not None:
            await self._client.aclose()
        if cancelled:
            raise asyncio.CancelledError
        if not now:
            running.result()

    def _named(self, name: str | None) -> str:
        name = name or self._name
        if name is None:
            raise UsageInvalid("Which model?", remedy="Give its name: several are served.")
        return name

    @property
    def _hosted(self) -> HostedModels:
        assert self._service is not None
        hosted = self._service.hosted_models
        if hosted is None:
            raise NotRunning("This server has not begun, or has ended.")
        return hosted


class Server:
    """A running llamasup, for programs without a loop of their own. As ``AsyncServer``, waiting for each."""

    def __init__(self, server: AsyncServer, thread: _Thread, client: httpx.Client) -> None:
        self.url = server.url
        self.client = client
        self._server = server
        self._thread = thread

    def status(self) -> Mapping[str, Any]:
        async def ask() -> Mapping[str, Any]:
            return self._server.status()

        return self._thread.do(ask())

    def events(self) -> Iterator[Mapping[str, Any]]:
        events = self._server.events()
        try:
            while True:
                try:
                    yield self._thread.do(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            self._thread.do(_close(events))

    def load(self, model: str) -> None:
        self._thread.do(self._server.load(model))

    def unload(self, model: str) -> None:
        self._thread.do(self._server.unload(model))

    def restart(self, model: str | None = None) -> None:
        self._thread.do(self._server.restart(model))

    def reload(self) -> Mapping[str, Any]:
        return self._thread.do(self._server.reload())

    def switch(self, model: str | Path, *, name: str | None = None, **options: Any) -> None:
        self._thread.do(self._server.switch(model, name=name, **options))

    def stop(self) -> None:
        self._thread.end(now=False)


class _Thread:
    """The loop of a ``Server``. llama-server dies with the thread that started it (PR_SET_PDEATHSIG)."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._begun: Future[AsyncServer] = Future()
        self._end_asked: asyncio.Event | None = None
        self._now = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llamasup", daemon=True)
        self._error: BaseException | None = None
        self._client: httpx.Client | None = None

    def begin(self) -> Server:
        self._thread.start()
        try:
            server = self._begun.result()
        except BaseException:
            self.end(now=True)
            raise
        self._client = httpx.Client(
            base_url=server.client.base_url, headers=server._headers, timeout=_TIMEOUT, trust_env=False
        )
        return Server(server, self, self._client)

    def end(self, *, now: bool) -> None:
        if self._client is not None:
            self._client.close()
        self._now = now
        if self._loop is not None and self._end_asked is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end_asked.set)
        self._thread.join()
        error, self._error = self._error, None
        if error is not None and not now:
            raise error

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._begun.done():
                self._begun.set_exception(error)
            else:
                self._error = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end_asked = asyncio.Event()
        server = await self._serving.__aenter__()
        try:
            self._begun.set_result(server)
            await self._end_asked.wait()
        finally:
            await server._end(now=self._now)


class _Reader:
    """Keeps what happens until it is read."""

    def __init__(self) -> None:
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._missed = 0
        self._arrived = asyncio.Event()

    def notice(self, notice: Notice) -> None:
        self._missed += len(self._events) == _MOST_EVENTS
        self._events.append(as_json(notice))
        self._arrived.set()

    async def next(self) -> Mapping[str, Any]:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        if self._missed:
            missed, self._missed = self._missed, 0
            return {"event": "missed", "count": missed}
        return self._events.popleft()


async def _next(events: AsyncIterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await anext(events)


async def _close(events: AsyncIterator[Mapping[str, Any]]) -> None:
    await events.aclose()  # type: ignore[attr-defined]


def _entry_of(model: str | Path, options: Mapping[str, Any]) -> ModelEntry:
    """Raises UsageInvalid for an option that there is not."""
    known = ModelEntry.__struct_fields__
    unknown = [each for each in options if each not in known]
    if unknown:
        raise UsageInvalid(
            f"A model has no option {', '.join(unknown)}.", remedy=f"It has {', '.join(sorted(known))}."
        )
    text = str(model)
    path = Path(model).expanduser().absolute()
    if text == DEMO and not path.exists():
        return ModelEntry(path=DEMO, **options)
    if isinstance(model, str) and is_reference(model) and not path.exists():
        return ModelEntry(url=text, **options) if "://" in text else ModelEntry(repo=text, **options)
    return ModelEntry(path=str(path), **options)


def _name_of(model: str | Path) -> str:
    return file_id(str(model)) or "model"
