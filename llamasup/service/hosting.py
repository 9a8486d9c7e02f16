"""Everything around what is served: where clients come in, the run folder and its guardian, the control
application, the access log, the ready file, metrics. What is served is somebody else's (``Workload``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llamasup.control.app import ControlServer
from llamasup.control.interface import ControlTarget
from llamasup.errors import LlamasupError
from llamasup.http.address import Address
from llamasup.observability.access_log import AccessLog, check_log_file
from llamasup.observability.access_record import SlowLog, access_line, shortened, slow_after, tell_slow
from llamasup.observability.metrics import Metrics, RequestRecord
from llamasup.proxy.connections import most_connections
from llamasup.proxy.interfaces import Backend
from llamasup.proxy.listen import ListenerSet
from llamasup.proxy.proxy import Proxy
from llamasup.proxy.settings import ProxyConfig
from llamasup.service.options import ServiceOptions
from llamasup.supervision.events import (
    Bus,
    ModelUnloading,
    PublishedEvent,
    Ready,
    ServerExited,
    ServerWarned,
    StateChanged,
    Stopped,
    as_json,
)
from llamasup.supervision.states import State
from llamasup.system.process.guardian import Guardian, guarded_run_folder
from llamasup.system.process.limits import raise_limit
from llamasup.system.process.ready_file import ReadyFile
from llamasup.system.process.sweep import record_ready_file, sweep

__all__ = ["STANDARD_ERROR", "ServiceHost", "Workload", "prepare_place"]

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
STANDARD_ERROR = Path("-")


class Workload(Protocol):
    """What is served behind one address, made in the loop that serves it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def controlled(self) -> ControlTarget: ...

    async def run(self) -> None:
        """Own all that is started, until cancelled; then nothing of it is left."""
        ...

    def start(self) -> None:
        """Begin with what is to be there from the start."""
        ...

    async def begun(self) -> None:
        """Wait until requests may come, and wait for it."""
        ...

    async def ready(self) -> tuple[str, ...] | None:
        """Wait until all that was begun serves: its names. None: it ends before."""
        ...

    def still_ready(self) -> bool: ...

    async def ended(self) -> LlamasupError | None:
        """Wait for the end: asked for (None), or because of an error."""
        ...

    def ask_stop(self, *, now: bool) -> None:
        """End it, kindly or at once. After ``start``, at any time."""
        ...


class ServiceHost:
    """``listen`` takes the addresses; it is called once, before anything is started. An ``Owner`` of what it
    hosts (``control.one_model``).
    """

    def __init__(
        self, options: ServiceOptions, bus: Bus, *, listen: Callable[[], ListenerSet], proxy: ProxyConfig
    ) -> None:
        self.on_request: Callable[[RequestRecord], None] | None = None
        self.on_slow_request: Callable[[RequestRecord, int], None] | None = None
        """Hears of slow requests, at a bounded rate: with how many since the last one it did not hear of."""
        self.on_asked: Callable[[str, str], None] | None = None
        """Hears what the control API asks for, before it is done: see ``control.one_model.Owner``."""
        self.metrics = Metrics()
        self._options = options
        self._bus = bus
        self._listen = listen
        self._proxy_config = proxy
        self._proxy: Proxy | None = None
        self._hosted: Workload | None = None
        self._stops_asked = 0
        self._loads_began_s: dict[str, float] = {}
        self._access_log: AccessLog[RequestRecord] | None = None
        self._slow = SlowLog(time.monotonic())

    @property
    def stops_asked(self) -> int:
        return self._stops_asked

    def ask_stop(self) -> None:
        """Stop kindly; asked again, stop now. For the event loop's thread, at any time."""
        self._stops_asked += 1
        if self._hosted is not None:
            self._hosted.ask_stop(now=self._stops_asked > 1)

    def control_asks(self, what: str, model: str = "") -> None:
        if self.on_asked is not None:
            self.on_asked(what, model)

    async def host(self, make: Callable[[Path, Address], Workload]) -> None:
        """Serve what ``make`` makes, given the folder of this run and the address, until it ends.

        Raises PortInUse and PortNotAllowed before anything is started, and what it ended with.
        """
        options = self._options
        front = self._listen()
        ready_file = None if options.ready_file is None else ReadyFile(options.ready_file)
        if (path := options.access_log) is not None:
            self._access_log = AccessLog(None if path == STANDARD_ERROR else path, access_line)
            self.metrics.lines_dropped = self._access_log.dropped
        try:
            with guarded_run_folder() as (folder, guardian):
                if ready_file is not None:
                    record_ready_file(folder, ready_file.path)
                self._hosted = make(folder, front.address)
                error = await self._serve(self._hosted, front, folder, guardian, ready_file)
        finally:
            front.close()
            if self._access_log is not None:
                self._access_log.close()
            if ready_file is not None:
                ready_file.remove()
            self._bus.publish(Stopped())
        if error is not None:
            raise error

    async def _serve(
        self,
        hosted: Workload,
        front: ListenerSet,
        folder: Path,
        guardian: Guardian,
        ready_file: ReadyFile | None,
    ) -> LlamasupError | None:
        control = ControlServer(folder / "control.sock", hosted.controlled, self.metrics)
        limits = self._proxy_config.limits
        most = min(limits.connections, most_connections(raise_limit()))
        proxy = self._proxy = Proxy(
            hosted.backend,
            replace(self._proxy_config, limits=replace(limits, connections=most)),
            metrics=self.metrics,
            control=control.endpoint,
            on_finished=self._finished,
        )
        self._bus.listen(self._notice)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(hosted.run(), name="hosted")
            try:
                control.start(tasks)
                hosted.start()
                for number in range(min(self._stops_asked, 2)):  # asked for before there was anything
                    hosted.ask_stop(now=number > 0)
                await hosted.begun()
                if front.tls is not None:
                    front.tls.when_warned = self._address_warned
                # No earlier: a request must find a model that it may wait for.
                await proxy.start(front.sockets, tls=front.tls)
                while (names := await hosted.ready()) is not None:
                    await asyncio.to_thread(guardian.established)
                    if not hosted.still_ready():
                        continue  # it crashed before we came round to say so
                    ready = Ready(front.address, os.getpid(), names)
                    if ready_file is not None:
                        ready_file.write(as_json(ready))
                    self._bus.publish(ready)
                    break
                return await hosted.ended()
            finally:
                # The control API first: its answers and streams come to their ends through the proxy.
                for close in (control.aclose, lambda: _close_entrance(front, proxy)):
                    try:
                        async with asyncio.timeout(CLOSE_TIMEOUT_S):
                            await close()
                    except Exception:
                        _log.exception("closing failed")  # the children must be put down all the same
                running.cancel()

    def _notice(self, notice: PublishedEvent) -> None:
        match notice:
            case StateChanged(model, State.STARTING, _):
                self._loads_began_s[model] = asyncio.get_running_loop().time()
                self.metrics.count_load(model)
            case StateChanged(model, State.READY, _):
                began_s = self._loads_began_s.pop(model, None)
                if began_s is not None:  # of one that has had another name since it is not known
                    self.metrics.observe_load(model, asyncio.get_running_loop().time() - began_s)
            case StateChanged(_, State.DRAINING | State.STOPPING, _) if self._stops_asked:
                if self._proxy is not None:
                    self._proxy.drain()
            case ServerExited(model, _, _, diagnosis, restart_in_s) if restart_in_s is not None:
                self.metrics.count_restart(model, diagnosis.cause)
            case ModelUnloading(model, reason, _):
                self.metrics.count_eviction(model, reason)
            case _:
                pass

    def _address_warned(self, message: str, remedy: str) -> None:
        self._bus.publish(ServerWarned("", 0, message, remedy))

    def _finished(self, record: RequestRecord) -> None:
        record = shortened(record)
        if self._access_log is not None:
            self._access_log.write(record)
        if self.on_request is not None:
            self.on_request(record)
        limit_s = self._options.slow_request_s
        is_for_model = record.model or record.outcome == "unavailable"
        if limit_s and is_for_model and slow_after(record.first_byte_s, record.duration_s) > limit_s:
            left_out = self._slow.left_out
            self._slow, told = tell_slow(self._slow, time.monotonic())
            if told and self.on_slow_request is not None:
                self.on_slow_request(record, left_out)


async def _close_entrance(front: ListenerSet, proxy: Proxy) -> None:
    front.stop_listening()
    await proxy.aclose()  # stops reading from them first


def prepare_place(options: ServiceOptions) -> None:
    """Before anything else: what an earlier run left alive has the memory that this one asks for.

    Raises UsageInvalid where the access log cannot be written.
    """
    if options.access_log is not None and options.access_log != STANDARD_ERROR:
        check_log_file(options.access_log)
    for swept in sweep():
        _log.warning("%s", swept)
