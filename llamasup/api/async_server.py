"""A running llamasup, for the event loop that started it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from msgspec import Struct

from llamasup.api.arguments import ModelArguments
from llamasup.api.events import AsyncEvents, Feed, Reader
from llamasup.api.inputs import ConfigInputs, entry_of, successor
from llamasup.core.http.address import Address, UnixAddress
from llamasup.core.http.httpx_client import UnixTransport, httpx
from llamasup.core.proxy.live.requests import MAX_ENDED, LiveRequests
from llamasup.core.supervision.events import Bus, PublishedEvent, Ready
from llamasup.errors import LlamasupError, NotRunning, Stopping, UsageInvalid
from llamasup.service.configured_models import ConfiguredModels
from llamasup.service.hosting import Service
from llamasup.service.serve import ServeOptions


class AsyncServer:
    """The result of ``async with llamasup.serve(…)``. Use it only in the loop that started it.

    ``model`` is any name of a model; the default is the config's default model, or the only one. Methods
    raise a ``LlamasupError`` if they fail, and NotRunning once the server has stopped.
    """

    def __init__(
        self, service: Service, options: ServeOptions, bus: Bus, given: ConfigInputs, name: str | None
    ) -> None:
        """Use ``serve`` to create one."""
        self._options = options
        self._given = given
        self._name = name
        self._service = service
        self._feed = Feed()
        self._loop = asyncio.get_running_loop()
        self._ready: Ready | None = None
        self._started = asyncio.Event()  # is ready, or has ended
        self._ended = asyncio.Event()
        self._switching = asyncio.Lock()
        self._reported = False
        self._client: httpx.AsyncClient | None = None
        bus.listen(self._notice)
        # No task group: a fixture enters in one task and leaves in another.
        self._running = self._loop.create_task(_run(service), name="llamasup")
        self._running.add_done_callback(self._on_done)

    def __repr__(self) -> str:
        return f"<llamasup.AsyncServer at {self.url}{' (ended)' if self._feed.ended else ''}>"

    # --- access ---------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """``http://127.0.0.1:43121``; of a Unix socket ``http://localhost``."""
        return self._access.address.url

    @property
    def client(self) -> httpx.AsyncClient:
        """A client for ``url`` with the API key and without a read timeout."""
        if self._client is None or self._feed.ended:
            raise ended()
        return self._client

    def status(self) -> Mapping[str, Any]:
        """Return the ``status`` object of docs/design.md."""
        return self._hosted.control_target.status()

    def why(self, model: str | None = None) -> Mapping[str, Any]:
        """Say why the model is in its state, and what would have to change (docs/control.md)."""
        return self._hosted.control_target.why(self._name_of(model))

    async def usage(self, *, by: str = "model", since: str | None = None) -> Mapping[str, Any]:
        """Return the ``usage`` object of docs/design.md. ``by``: ``model``, ``key``, ``day``, or several with
        commas; ``since``: ``YYYY-MM-DD`` or ``7d``. Raises UsageInvalid.
        """
        self._hosted_here()
        return await self._service.usage(by, since)

    async def requests(self, *, ended: int = 0) -> Mapping[str, Any]:
        """Return the requests in flight, the oldest first, and the last ``ended`` finished ones, the newest
        first (docs/control.md, GET requests). At most 200 are kept. Raises UsageInvalid.
        """
        if not 0 <= ended <= MAX_ENDED:
            raise UsageInvalid(f"ended={ended!r} is not a valid number.", remedy=f"Use 0 to {MAX_ENDED}.")
        return await self._live_requests.shown(ended)

    def cancel(self, request_id: str) -> Mapping[str, Any]:
        """Cancel the requests with this id (``X-Request-Id``), and return ``{"cancelled": […]}``.

        A stream ends with an error event, and frees its slot. Raises RequestUnknown.
        """
        return self._live_requests.shown_cancel(request_id)

    def events(self) -> AsyncEvents:
        """The events from now on, as in ``--events jsonl``; the last is ``{"event": "stopped"}``.

        A reader that is too slow gets ``{"event": "missed", "count": N}`` in place of the oldest events.
        """
        return self._read(AsyncEvents())

    # --- commands ---------------------------------------------------------------------------------------

    async def load(self, model: str | None = None) -> None:
        """Load the model, and wait until it serves. Raises ModelUnknown, DoesNotFit or ServerFailed."""
        hosted = self._hosted_here()
        await hosted.control_target.load(self._name_of(model))

    async def unload(self, model: str | None = None) -> None:
        """Unload the model once its requests end, and wait for its memory. The next request loads it."""
        hosted = self._hosted_here()
        await hosted.control_target.unload(self._name_of(model))

    async def restart(self, model: str | None = None) -> None:
        """Restart the model, and wait until it serves again."""
        hosted = self._hosted_here()
        await hosted.control_target.restart(self._name_of(model))

    async def reload(self) -> Mapping[str, Any]:
        """Read the config and the folders again. Returns ids of models that are ``added``, ``removed``,
        ``changed``, ``retouched`` or ``unchanged``. Raises ConfigInvalid; the previous config then stays.
        """
        hosted = self._hosted_here()
        return await hosted.control_target.reload()

    async def switch(
        self, model: str | Path, *, name: str | None = None, **options: Unpack[ModelArguments]
    ) -> None:
        """Serve ``model`` under an existing name, and wait until it does. No request is lost: the old model
        finishes running requests, the new one answers waiting ones.

        The new model starts next to the old one if both fit, else after it. It starts with ``options`` only;
        aliases, ``ttl_s``, queue limits and the like stay as they were unless ``options`` has them. A model
        that is not loaded stays unloaded. If another model of this server has the same file and compatible
        options, one process serves both: the first one's id stays, the other becomes an alias.

        Raises the error of the new model, such as ModelMissing, DoesNotFit or ServerFailed; then, or if
        cancelled, the old model is served again. Concurrent switches run one after another.
        """
        hosted = self._hosted_here()
        entry = entry_of(model, options)
        async with self._switching:
            before = self._given.models
            config = await asyncio.to_thread(self._given)
            id_ = self._name_of(name)
            if id_ not in config.models:  # an alias, or a found model
                id_ = hosted.catalog.known(id_).spec.id
            served = hosted.catalog.known(id_)
            was_loaded = served.holds_memory
            models = {**before, id_: successor(entry, config.models.get(id_), options)}
            await hosted.check(await asyncio.to_thread(self._given.with_models, models), id_)
            self._given.models = models
            try:
                await hosted.reload()
                await hosted.settled(id_)
                self._refuse_if_stopping()  # the server is ending instead
                if was_loaded and hosted.catalog.known(id_) is not served:
                    await hosted.control_target.load(id_)
            except LlamasupError:
                self._given.models = before
                if not self._service.stops_asked:
                    await _restore(hosted, id_ if was_loaded else None)
                raise
            except BaseException:
                self._given.models = before
                hosted.ask_reload()
                raise

    async def stop(self, *, now: bool = False) -> None:
        """Stop the server after its running requests (``now``: at once). Leaving the block does the same, and
        an exception does it at once. May be repeated.
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
        """Only after it is ready."""
        assert self._ready is not None
        options = self._options
        key = options.api_keys[-1] if options.api_keys else None  # the client's own key
        return Access(self._ready.address, key, options.tls_cert)

    async def _until_ready(self) -> None:
        """Raises the error of a failed start."""
        await self._started.wait()
        if self._ready is None:
            await self._until_ended(quiet=False)
            raise NotRunning("llamasup was stopped before it was ready.")
        self._client = self._access.async_client()

    def _ask_stop(self, *, now: bool) -> None:
        while not self._ended.is_set() and self._service.stops_asked < (2 if now else 1):
            self._service.ask_stop()

    async def _until_ended(self, *, quiet: bool) -> None:
        """Raises the error of the server, once; not if ``quiet``.

        If the caller is cancelled, the server stops at once, and the caller waits for its end.
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
        if not (quiet or self._reported or self._running.cancelled()):
            self._reported = True
            self._running.result()

    def _on_done(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled():
            running.exception()  # marks the error as retrieved
        self._feed.end()
        self._started.set()
        self._ended.set()

    def _notice(self, notice: PublishedEvent) -> None:
        if isinstance(notice, Ready):
            self._ready = notice
            self._started.set()
        self._feed.notice(notice)

    # --- helpers ----------------------------------------------------------------------------------------

    def _read(self, reader: Reader) -> Reader:
        if not self._feed.add(reader):
            raise ended()
        return reader

    def _hosted_here(self) -> ConfiguredModels:
        self._refuse_other_loops()
        return self._hosted

    @property
    def _live_requests(self) -> LiveRequests:
        self._hosted_here()
        live_requests = self._service.live_requests
        assert live_requests is not None  # it has been ready
        return live_requests

    def _refuse_other_loops(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageInvalid(
                "This server belongs to another event loop.",
                remedy="Use it in the loop that started it, or use a Server (`with llamasup.serve(…)`).",
            )

    def _refuse_if_stopping(self) -> None:
        if self._service.stops_asked:
            raise Stopping("llamasup is stopping.", remedy="Start another one with llamasup.serve().")

    @property
    def _hosted(self) -> ConfiguredModels:
        hosted = self._service.hosted_models
        if hosted is None or self._feed.ended:
            raise ended()
        assert isinstance(hosted, ConfiguredModels)
        return hosted

    def _name_of(self, name: str | None) -> str:
        name = name or self._name or self._hosted.registry.default
        if name is None:
            raise UsageInvalid(
                "Several models are served, and no name was given.", remedy="Give the name of the model."
            )
        return name


async def begin(
    given: ConfigInputs, options: Callable[[ConfigInputs], ServeOptions], name: str | None = None
) -> AsyncServer:
    """Start a server, and wait until it is ready. Raises the error of a failed start."""
    bus = Bus()

    def checked() -> tuple[Service, ServeOptions]:
        made = options(given)
        return Service(made, bus, given.environ), made

    server = AsyncServer(*await asyncio.to_thread(checked), bus, given, name)
    try:
        await server._until_ready()
    except BaseException:
        server._ask_stop(now=True)
        await server._until_ended(quiet=True)
        raise
    return server


async def _restore(hosted: ConfiguredModels, loaded: str | None) -> None:
    """Apply the previous settings again; if cancelled, without waiting for it."""
    try:
        with contextlib.suppress(LlamasupError):  # the error of the switch matters more
            await hosted.reload()
            if loaded is not None:
                await hosted.control_target.load(loaded)
    except BaseException:
        hosted.ask_reload()
        raise


async def _run(service: Service) -> None:
    """Run the service; raises the user's error in place of a group."""
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
    return NotRunning("This llamasup has stopped.", remedy="Start another one with llamasup.serve().")


# --- clients -----------------------------------------------------------------------------------------

# A request may wait for a load, and a long prompt sends nothing for minutes.
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class Access(Struct, frozen=True):
    """The address of the server and what its clients need. ``certificate``: the served chain, with TLS."""

    address: Address
    api_key: str | None = None
    certificate: Path | None = None

    def __repr__(self) -> str:
        return f"Access({self.address!r})"  # without the key

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(**self._transport_options()), **self._options())

    def async_client(self) -> httpx.AsyncClient:
        options = self._transport_options()
        path = options["uds"]
        transport = httpx.AsyncHTTPTransport(**options) if path is None else UnixTransport(path)
        return httpx.AsyncClient(transport=transport, **self._options())

    def _options(self) -> dict[str, Any]:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.address.url, "headers": headers, "timeout": _TIMEOUT, "trust_env": False}

    def _transport_options(self) -> dict[str, Any]:
        path = str(Path(self.address.path).absolute()) if isinstance(self.address, UnixAddress) else None
        return {"uds": path, "verify": self._trust()}

    def _trust(self) -> ssl.SSLContext | bool:
        """Trust exactly this certificate, whatever its name: the address is our own and may not be in it."""
        if self.certificate is None:
            return False  # plain HTTP; loading certificates would take 20 ms
        trust = ssl.create_default_context(cafile=self.certificate)
        trust.check_hostname = False
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return trust
