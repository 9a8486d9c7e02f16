"""Runs a service around its models: listeners, proxy, run folder and guardian, control application, access
log, ready file and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from llamasup.core.control.app import ControlServer
from llamasup.core.control.interface import BatchWorker, ConsolePages, ControlTarget, UsageReport
from llamasup.core.http.address import Address
from llamasup.core.llama_server.answers import SlotProgress
from llamasup.core.observability.access_log import AccessLog
from llamasup.core.observability.access_record import access_line, shortened
from llamasup.core.observability.counters import HeldSlots, Metrics, RequestRecord
from llamasup.core.observability.last_hour import LastHour
from llamasup.core.observability.observer import Observer
from llamasup.core.observability.own_log import OwnLog
from llamasup.core.proxy.connections import most_connections
from llamasup.core.proxy.context import Dialect
from llamasup.core.proxy.listeners.listen import ListenerSet, listen
from llamasup.core.proxy.live.requests import LiveRequests
from llamasup.core.proxy.proxy import Proxy
from llamasup.core.queueing.endpoint import Endpoint
from llamasup.core.supervision.events import (
    Bus,
    PublishedEvent,
    Ready,
    ServerWarned,
    StateChanged,
    Stopped,
    as_json,
)
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import State
from llamasup.core.system.native import native
from llamasup.core.system.process.guardian import Guardian, guarded_run_folder
from llamasup.core.system.process.run_folder import ReadyFile, remove_stale
from llamasup.core.system.process.sweep import record_ready_file
from llamasup.errors import LlamasupError
from llamasup.features import attached, missing_feature, only_attached
from llamasup.service.answer_stages import ANSWER_STAGES
from llamasup.service.models import HostedEntry, HostedModels
from llamasup.service.observers import LastHourObserver, LoadMetrics, SlowRequests
from llamasup.service.options import STANDARD_ERROR, ServiceOptions

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from llamasup.core.control.routes import Application

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class Service:
    """Serves the models of ``run``, ``wrap`` or ``serve``, and is their ``ServiceOwner``.

    The constructor finds every error that can be found before a process is started (``ServiceOptions.spec``).
    """

    def __init__(self, options: ServiceOptions, bus: Bus, environ: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.environ = os.environ if environ is None else environ
        self._spec = options.spec(self.environ)
        self.launch = self._spec.launch
        if options.ready_file is not None:
            remove_stale(options.ready_file)
        self.on_log: Callable[[list[bytes]], None] | None = None
        """Gets the output of all llama-servers line by line, in their threads; must not wait or raise."""
        self.hosted_models: HostedModels | None = None
        """Set while it serves."""
        self.on_asked: Callable[[str, str], None] | None = None
        """Called for each request of the control API before it is carried out (``ServiceOwner``)."""
        self.own_log = OwnLog()
        """Whoever says something about this llamasup adds it here."""
        self.metrics = Metrics()
        self._bus = bus
        self._ollama: ListenerSet | None = None
        self._proxy: Proxy | None = None
        self.live_requests: LiveRequests | None = None
        """Set while it serves."""
        self.stops_asked = 0
        self._finished: list[Callable[[RequestRecord], None]] = []
        self._closing: list[Callable[[], None]] = []
        self.usage: UsageReport = _no_usage
        self.settings = options.features
        self.counts_usage = not options.no_usage
        self._last_hour = LastHour(time.monotonic())
        self._batches: BatchWorker | None = None
        self._batch_listener: ListenerSet | None = None

    def ask_stop(self) -> None:
        """Stop gracefully; on the second call at once. For the event loop's thread, at any time."""
        self.stops_asked += 1
        if self._batches is not None:
            self._batches.stop()
        if self.hosted_models is not None:
            self.hosted_models.ask_stop(now=self.stops_asked > 1)

    def observe(self, *observers: Observer, first: bool = False) -> None:
        """Call these observers from now on, after the earlier ones; ``first``: before the earlier ones."""
        finished: list[Callable[[RequestRecord], None]] = []
        for observer in observers:
            if observer.finished is not None:
                finished.append(observer.finished)
            if observer.slow is not None and self.options.slow_request_s:
                finished.append(SlowRequests(self.options.slow_request_s, observer.slow).finished)
            if observer.event is not None:
                self._bus.listen(observer.event)
            if observer.close is not None:
                self._closing.append(observer.close)
        at = 0 if first else len(self._finished)
        self._finished[at:at] = finished

    def _attach(self) -> None:
        """Attach the access log and the features. Those that are off do not exist."""
        others, self._finished = self._finished, []  # those of the caller come last
        if (path := self.options.access_log) is not None:
            log = AccessLog(None if path == STANDARD_ERROR else path, access_line)
            self.metrics.lines_dropped = log.dropped
            self.observe(Observer(log.write, close=log.close))
        for attach in attached("observer"):
            attach(self)
        self._finished += others

    def held_slots(self) -> Sequence[HeldSlots]:
        return () if self.live_requests is None else self.live_requests.held_slots()

    def control_asks(self, what: str, model: str = "") -> None:
        if self.on_asked is not None:
            self.on_asked(what, model)

    @property
    def runner(self) -> InstanceRunner | None:
        """The process of the only model, once the service has begun to start it; None for many models."""
        return self.hosted_models.runner if isinstance(self.hosted_models, HostedEntry) else None

    @property
    def in_flight(self) -> int:
        return 0 if self.hosted_models is None else self.hosted_models.in_flight

    @property
    def drain_timeout_s(self) -> float:
        models = self.hosted_models
        return self.options.drain_timeout_s if models is None else models.drain_timeout_s

    def ask_reload(self) -> None:
        """Carry out SIGHUP: ``serve`` reads its config again, ``run`` and ``wrap`` restart their server after
        the requests in flight. Does nothing while stopping.
        """
        if self.hosted_models is not None and not self.stops_asked:
            self.hosted_models.ask_reload()

    async def run(self) -> None:
        """Serve until a stop is requested, and clean up.

        Raises PortInUse and PortNotAllowed before any process is started, ServerFailed if the only model
        cannot be started, and GaveUp if it crashed too often.
        """
        options = self.options
        listeners = self._spec.listen()
        if self._spec.listen_ollama is not None:
            try:
                self._ollama = self._spec.listen_ollama()
            except BaseException:
                listeners.close()
                raise
        ready_file = None if options.ready_file is None else ReadyFile(options.ready_file)
        self._attach()
        try:
            with guarded_run_folder() as (folder, guardian):
                if ready_file is not None:
                    record_ready_file(folder, ready_file.path)
                models = self._spec.models(self, self._bus, folder, listeners.address, self.on_log)
                self.hosted_models = models
                error = await self._serve(models, listeners, folder, guardian, ready_file)
        finally:
            for opened in filter(None, (listeners, self._ollama)):
                opened.close()
            if ready_file is not None:
                ready_file.remove()
            for close in self._closing:
                try:
                    close()
                except Exception:
                    _log.exception(
                        "an observer could not be closed"
                    )  # the others, and the last event, must follow
            self._bus.publish(Stopped())
        if error is not None:
            raise error

    async def _serve(
        self,
        models: HostedModels,
        listeners: ListenerSet,
        folder: Path,
        guardian: Guardian,
        ready_file: ReadyFile | None,
    ) -> LlamasupError | None:
        limits = self._spec.proxy.limits
        connections = min(limits.connections, most_connections(native.raise_files_limit()))
        proxy = self._proxy = Proxy(
            models.backend,
            replace(self._spec.proxy, limits=replace(limits, connections=connections)),
            metrics=self.metrics,
            on_finished=self._on_finished,
            stages=ANSWER_STAGES,
            owners=models.catalog.owners_of,
        )
        requests = self.live_requests = LiveRequests(
            proxy.clients,
            partial(_slots, self._spec.proxy.rules.prefix),
            needs_key=lambda: proxy.keys.needed,
        )
        batch_routes: Sequence[BaseRoute] = ()
        if self.options.batches is not None:
            # In a thread: the imports take some 0.1 s.
            make = partial(_made, "batches", "batches", self.options.batches, proxy.keys)
            batches, batch_routes = await asyncio.to_thread(make)
            self._batches = batches
            if self.stops_asked:
                batches.stop()

        def make_application(tasks: asyncio.TaskGroup) -> Application:
            from llamasup.core.control.routes import Application

            return Application(
                models.control_target,
                self.metrics,
                requests,
                self._last_hour,
                tasks,
                partial(self._console, proxy, listeners.address, models.control_target),
                own_log=self.own_log,
                more_routes=lambda: [
                    *batch_routes,
                    *(route for make in attached("routes") for route in make(self, models.control_target)),
                ],
            )

        control = ControlServer(folder / "control.sock", make_application)
        proxy.control = control.endpoint
        last_hour = LastHourObserver(self._last_hour, models.control_target.held_bytes)
        self.observe(
            Observer(finished=requests.note_ended),  # before the usage, which reads the slots in use
            Observer(finished=last_hour.finished, event=last_hour.event),
            first=True,
        )
        self.observe(Observer(event=LoadMetrics(self.metrics).event), Observer(event=self._on_event))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(models.run(), name="hosted")
            serving: asyncio.Task[None] | None = None
            try:
                control.start(tasks)
                for number in range(min(self.stops_asked, 2)):  # requested before the models existed
                    models.ask_stop(now=number > 0)
                await models.begun()
                if listeners.tls is not None:
                    listeners.tls.when_warned = self._on_tls_warning
                # No earlier: a request must find a model to wait for.
                if self._batches is not None:
                    batch_listener = self._batch_listener = _listen_for_batches(folder)
                    await proxy.start(batch_listener.sockets, trusted=native.has_unix_sockets)
                    serving = tasks.create_task(self._batches.run(batch_listener.address), name="batches")
                await proxy.start(listeners.sockets, tls=listeners.tls)
                if self._ollama is not None:
                    dialect: Dialect = _made("dialect", "--ollama", models.keep)
                    await proxy.start(self._ollama.sockets, tls=self._ollama.tls, dialect=dialect)
                while (names := await models.ready()) is not None:
                    if not guardian.is_started:  # a thread may get the interpreter late, during imports
                        await asyncio.to_thread(guardian.wait_until_started)
                    if not models.still_ready():
                        continue  # it crashed in the meantime
                    ollama = None if self._ollama is None else self._ollama.address
                    ready = Ready(listeners.address, os.getpid(), names, ollama)
                    if ready_file is not None:
                        ready_file.write(as_json(ready))
                    self._bus.publish(ready)
                    break
                return await models.ended()
            finally:
                # The control API first: its answers and streams end through the proxy.
                for close in (control.aclose, lambda: _close_listeners(listeners, self._ollama, proxy)):
                    try:
                        async with asyncio.timeout(CLOSE_TIMEOUT_S):
                            await close()
                    except Exception:
                        _log.exception("closing failed")  # the children must be stopped in any case
                if serving is not None:
                    serving.cancel()
                if self._batch_listener is not None:
                    self._batch_listener.close()
                running.cancel()

    def _console(
        self, proxy: Proxy, address: Address, target: ControlTarget, wake: Callable[[], None]
    ) -> ConsolePages | None:
        """Called once, when the control application is loaded."""
        pages = only_attached("pages")
        if pages is None:
            return None
        return cast(ConsolePages, pages(proxy, address, self._spec.proxy.hosts, target, wake))

    def _on_event(self, event: PublishedEvent) -> None:
        is_stopping = isinstance(event, StateChanged) and event.state in {State.DRAINING, State.STOPPING}
        if is_stopping and self.stops_asked and self._proxy is not None:
            self._proxy.drain()

    def _on_tls_warning(self, message: str, remedy: str) -> None:
        self._bus.publish(ServerWarned("", 0, message, remedy))

    def _on_finished(self, record: RequestRecord) -> None:
        record = shortened(record)
        for finished in self._finished:
            finished(record)


def _listen_for_batches(folder: Path) -> ListenerSet:
    """A socket in the run folder. Windows has a loopback port instead, which needs a key if the others do."""
    return listen([str(folder / "batches.sock") if native.has_unix_sockets else "127.0.0.1"], 0)


def _made(seam: str, option: str, *arguments: Any) -> Any:
    """Make what the feature of ``option`` attaches to ``seam``. Raises UsageInvalid without the feature."""
    make = only_attached(seam)
    if make is None:
        raise missing_feature(option)
    return make(*arguments)


async def _no_usage(by: str, since: str | None) -> Mapping[str, Any]:
    raise missing_feature("usage")


async def _slots(prefix: bytes, endpoint: Endpoint) -> Sequence[SlotProgress] | None:
    """The busy slots of one llama-server."""
    from llamasup.core.llama_server.client import Prober  # here, to keep the start short

    async with Prober(endpoint.address, endpoint.api_key, prefix=prefix.decode()) as prober:
        return await prober.slots()


async def _close_listeners(listeners: ListenerSet, ollama: ListenerSet | None, proxy: Proxy) -> None:
    for opened in filter(None, (listeners, ollama)):
        opened.stop_listening()
    await proxy.aclose()
