"""A running llamasup, for the event loop that began it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from llamasup.api.access import Access
from llamasup.api.events import AsyncEvents, Feed, Reader
from llamasup.api.inputs import ConfigInputs, ModelArguments, entry_of, successor
from llamasup.errors import LlamasupError, NotRunning, Stopping, UsageInvalid
from llamasup.http.httpx_import import httpx
from llamasup.service.many_models import HostedModels
from llamasup.service.serve import ServeOptions, ServeService
from llamasup.supervision.events import Bus, PublishedEvent, Ready

__all__ = ["AsyncServer", "begin", "ended"]


class AsyncServer:
    """What ``async with llamasup.serve(…)`` gives. All of it is for the loop that began it.

    ``model`` is any name of a model; without one the only model is meant, or the config's default. What
    cannot be done raises a ``LlamasupError``; after the end that is NotRunning.
    """

    def __init__(self, service: ServeService, bus: Bus, given: ConfigInputs, name: str | None) -> None:
        """Not to be called: ``serve`` makes it."""
        self._given = given
        self._name = name
        self._service = service
        self._feed = Feed()
        self._loop = asyncio.get_running_loop()
        self._ready: Ready | None = None
        self._began = asyncio.Event()  # or has ended
        self._ended = asyncio.Event()
        self._switching = asyncio.Lock()
        self._told = False
        self._client: httpx.AsyncClient | None = None
        bus.listen(self._notice)
        # No task group: a fixture enters in one task and leaves in another.
        self._running = self._loop.create_task(_run(service), name="llamasup")
        self._running.add_done_callback(self._over)

    def __repr__(self) -> str:
        return f"<llamasup.AsyncServer at {self.url}{' (ended)' if self._feed.ended else ''}>"

    # --- how it is asked --------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """``http://127.0.0.1:43121``; of a Unix socket ``http://localhost``."""
        return self._access.address.url

    @property
    def client(self) -> httpx.AsyncClient:
        """Bound to ``url``, with the key; an answer may take as long as it takes."""
        if self._client is None or self._feed.ended:
            raise ended()
        return self._client

    def status(self) -> Mapping[str, Any]:
        """The ``status`` object of docs/design.md."""
        return self._hosted.control_target.status()

    def events(self) -> AsyncEvents:
        """What happens from now on, as ``--events jsonl`` tells it; ends with ``{"event": "stopped"}``.

        A reader that is too far behind gets ``{"event": "missed", "count": N}`` in the place of the oldest.
        """
        return self._read(AsyncEvents())

    # --- what it does -----------------------------------------------------------------------------------

    async def load(self, model: str | None = None) -> None:
        """Until it serves. Raises ModelUnknown, ModelMissing, ModelInvalid, DoesNotFit, ServerFailed, …"""
        hosted = self._here()
        await hosted.control_target.load(self._meant(model))

    async def unload(self, model: str | None = None) -> None:
        """Until its memory is free. Requests in flight have their time to finish; the next one loads it."""
        hosted = self._here()
        await hosted.control_target.unload(self._meant(model))

    async def restart(self, model: str | None = None) -> None:
        """Until it serves again."""
        hosted = self._here()
        await hosted.control_target.restart(self._meant(model))

    async def reload(self) -> Mapping[str, Any]:
        """Read the config and the folders again: ids of models that were ``added``, ``removed``, ``changed``,
        ``retouched`` or are ``unchanged``. Raises ConfigInvalid; then all is as before.
        """
        hosted = self._here()
        return await hosted.control_target.reload()

    async def switch(
        self, model: str | Path, *, name: str | None = None, **options: Unpack[ModelArguments]
    ) -> None:
        """Serve ``model`` under the name of the one that is served, and lose no request: those in flight are
        finished by the old one, those that wait are answered by the new one. Until that is so.

        The new one is started beside the old one where both fit, else after it. How it is started is what
        ``options`` say and nothing else; its aliases, and how long it stays and who may wait for it, are as
        they were where ``options`` do not say otherwise. One that is not loaded stays so. A file that another
        model of this server has, and that can be started as both say, is served by one process for both: its
        id is the first one's, the other is an alias.

        Raises what keeps the new one from serving, ModelMissing, ModelInvalid, DoesNotFit, ServerFailed and
        the like; all is as it was then. Cancelled, it is taken back. Several are done in their turn.
        """
        hosted = self._here()
        entry = entry_of(model, options)
        async with self._switching:
            before = self._given.models
            config = await asyncio.to_thread(self._given)
            id_ = self._meant(name)
            if id_ not in config.models:  # an alias, or one that was found
                id_ = hosted.backend.known(id_).spec.id
            served = hosted.backend.known(id_)
            was_loaded = served.holds
            models = {**before, id_: successor(entry, config.models.get(id_), options)}
            await hosted.check(await asyncio.to_thread(self._given.with_models, models), id_)
            self._given.models = models
            try:
                await hosted.reload()
                await hosted.settled(id_)
                self._refuse_if_stopping()  # what was to be changed ended instead
                if was_loaded and hosted.backend.known(id_) is not served:
                    await hosted.control_target.load(id_)
            except LlamasupError:
                self._given.models = before
                if not self._service.stops_asked:
                    await _put_back(hosted, id_ if was_loaded else None)
                raise
            except BaseException:
                self._given.models = before
                hosted.ask_reload()
                raise

    async def stop(self, *, now: bool = False) -> None:
        """End it: requests in flight may finish (``now``: may not). Leaving the block does the same, and
        leaving it by an exception does it now. May be repeated.
        """
        self._refuse_other_loops()
        self._ask_stop(now=now)
        await self._until_ended(quiet=False)

    # --- life -------------------------------------------------------------------------------------------

    @property
    def _has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def _access(self) -> Access:
        """Once it is ready."""
        assert self._ready is not None
        options = self._service.options
        key = options.api_keys[-1] if options.api_keys else None  # its own
        return Access(self._ready.address, key, options.tls_cert)

    async def _until_ready(self) -> None:
        """Raises what it ended with instead."""
        await self._began.wait()
        if self._ready is None:
            await self._until_ended(quiet=False)
            raise NotRunning("It was stopped before it was ready.")
        self._client = self._access.async_client()

    def _ask_stop(self, *, now: bool) -> None:
        while not self._ended.is_set() and self._service.stops_asked < (2 if now else 1):
            self._service.ask_stop()

    async def _until_ended(self, *, quiet: bool) -> None:
        """Raises what it ended with, once; not if ``quiet``.

        Whoever is cancelled meanwhile has it end now, and waits for that: nothing is left behind.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.is_set():
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self._ask_stop(now=True)
        if self._client is not None:
            await self._client.aclose()
        if cancelled is not None:
            raise cancelled
        if not (quiet or self._told or self._running.cancelled()):
            self._told = True
            self._running.result()

    def _over(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled():
            running.exception()  # somebody may ask for it, or not
        self._feed.end()
        self._began.set()
        self._ended.set()

    def _notice(self, notice: PublishedEvent) -> None:
        if isinstance(notice, Ready):
            self._ready = notice
            self._began.set()
        self._feed.notice(notice)

    # --- within -----------------------------------------------------------------------------------------

    def _read(self, reader: Reader) -> Reader:
        if not self._feed.add(reader):
            raise ended()
        return reader

    def _here(self) -> HostedModels:
        self._refuse_other_loops()
        return self._hosted

    def _refuse_other_loops(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageInvalid(
                "This server belongs to another event loop.",
                remedy="Ask it in the loop that began it; a Server (with llamasup.serve(…)) has none.",
            )

    def _refuse_if_stopping(self) -> None:
        if self._service.stops_asked:
            raise Stopping("llamasup is stopping.", remedy="Begin another with llamasup.serve().")

    @property
    def _hosted(self) -> HostedModels:
        hosted = self._service.hosted_models
        if hosted is None or self._feed.ended:
            raise ended()
        return hosted

    def _meant(self, name: str | None) -> str:
        name = name or self._name or self._hosted.registry.default
        if name is None:
            raise UsageInvalid("Which model? Several are served.", remedy="Give its name.")
        return name


async def begin(
    given: ConfigInputs, options: Callable[[ConfigInputs], ServeOptions], name: str | None = None
) -> AsyncServer:
    """Serve until it is ready. Raises why it cannot be; then nothing is left of it."""
    bus = Bus()
    service = await asyncio.to_thread(lambda: ServeService(options(given), bus, given.environ))
    server = AsyncServer(service, bus, given, name)
    try:
        await server._until_ready()
    except BaseException:
        server._ask_stop(now=True)
        await server._until_ended(quiet=True)
        raise
    return server


async def _put_back(hosted: HostedModels, loaded: str | None) -> None:
    """Take over what is said now, in the place of what could not be; cancelled, without waiting for it."""
    try:
        with contextlib.suppress(LlamasupError):  # why it could not be switched counts more
            await hosted.reload()
            if loaded is not None:
                await hosted.control_target.load(loaded)
    except BaseException:
        hosted.ask_reload()
        raise


async def _run(service: ServeService) -> None:
    """Of a group of errors the one that is meant for people."""
    try:
        await service.run()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, LlamasupError):
            raise error from group
        raise


def ended() -> NotRunning:
    return NotRunning("This llamasup has ended.", remedy="Begin another with llamasup.serve().")
