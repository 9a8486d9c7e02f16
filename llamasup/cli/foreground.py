"""Runs ``run``, ``wrap``, ``serve`` and ``rpc-worker`` in the foreground.

Signals and the exit of a parent program become stops, and events become lines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from llamasup.cli.gc_pause import START_S, collect_again
from llamasup.cli.output.error_report import as_reported, show_error
from llamasup.cli.output.event_lines import ConsoleReporter
from llamasup.cli.output.nonblocking_writer import OutputWriter
from llamasup.cli.output.rate_limit import ViewHandler
from llamasup.cli.output.view import JsonView, Level, TextView, View
from llamasup.cli.parent_watch import PARENT_STOP_REASONS, tie_to_parent
from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted
from llamasup.core.observability.own_log import OwnLog
from llamasup.core.system.process.platform import loop_factory
from llamasup.core.system.text import json_text
from llamasup.features import attached

if TYPE_CHECKING:
    from socket import socket

    from llamasup.core.supervision.events import Bus, PublishedEvent
    from llamasup.core.supervision.states import Policy
    from llamasup.errors import LlamasupError
    from llamasup.service.hosting import Service
    from llamasup.service.rpc_worker import RpcWorker

    AnyService = Service | RpcWorker
    MakeManager = Callable[[AnyService, Policy], "ServiceManager"]

TICK_S = 0.1
PARENT_STOP_TIMEOUT_S = 1.0
"""Time for requests in flight: their client has probably gone, and llamasup must exit within 2 s (S14)."""


class ServiceManager(AbstractContextManager["ServiceManager"], Protocol):
    """Learns how the service is, as a context manager in the thread of the event loop."""

    def notice(self, notice: PublishedEvent) -> None: ...
    def stop_asked(self) -> None: ...
    def reload_asked(self) -> None: ...
    def asked(self, what: str) -> None:
        """Called with each request of the control API."""
        ...


def open_sockets() -> tuple[socket, ...]:
    """Take the listening sockets that a service manager opened for this process."""
    return tuple(sock for take in attached("sockets") for sock in take(os.environ))


class OutputOptions(Struct, frozen=True):
    """Say what is printed where, and which program started llamasup."""

    events: str | None
    log_level: Level
    log_format: str
    sidecar: bool = False
    parent_pid: int | None = None
    server_log: str = "file"


def serve_until_stopped(
    prepare: Callable[[], Callable[[Bus], AnyService]],
    output: OutputOptions,
    began_s: float,
    activity: str | None = None,
    *,
    before_serving: Callable[[View], None] | None = None,
) -> int:
    """Serve until stopped; show any error. Returns the exit code (docs/design.md, Exit codes).

    ``prepare`` checks the options and returns a function that makes the service. ``activity`` is shown until
    the service starts. ``before_serving`` runs first, and shows its own progress.
    """
    stderr, stdout = OutputWriter(sys.stderr), OutputWriter(sys.stdout)
    events = EventLines(stdout) if output.events is not None or output.sidecar else None
    view: View = TextView(stderr)
    handler: ViewHandler | None = None
    own_log = OwnLog()
    reported: LlamasupError | None = None
    try:
        kind = JsonView if output.log_format == "json" else TextView
        view = kind(stderr, level=output.log_level, note=own_log.add)
        handler = ViewHandler(view)
        logging.basicConfig(handlers=[handler], format="%(message)s", level=logging.WARNING)
        tie_to_parent(stdin=output.sidecar, parent_pid=output.parent_pid)
        if before_serving is not None:
            before_serving(view)
        view.show_activity(activity)
        _serve(prepare, output, view, events, own_log, began_s)
    except Interrupted as interrupted:
        if interrupted.reason:
            view.say("info", "stop", f"{interrupted.reason}: stopping.")
        raise
    except Exception as error:
        view.show_activity(None)
        reported = as_reported(view, error)
        return show_error(view, reported)
    else:
        return 0
    finally:
        if events is not None:
            events.end(reported)
        view.show_activity(None)
        if handler is not None:
            handler.close()
        stderr.close()
        stdout.close()


def _serve(
    prepare: Callable[[], Callable[[Bus], AnyService]],
    output: OutputOptions,
    view: View,
    events: EventLines | None,
    own_log: OwnLog,
    began_s: float,
) -> None:
    from llamasup.core.observability.observer import Observer
    from llamasup.core.supervision.events import Bus

    bus = Bus()
    if events is not None:
        bus.listen(events.on_event)
    managers: list[MakeManager | None] = [take(os.environ) for take in attached("manager")]
    service = prepare()(bus)
    service.own_log = own_log
    reporter = ConsoleReporter(
        view, service, began_s, at_terminal=not output.sidecar and sys.stdin.isatty() and sys.stderr.isatty()
    )
    service.observe(Observer(reporter.request, slow=reporter.slow_request, event=reporter.on_event))
    if output.server_log == "stderr":
        service.on_log = view.show_server_log
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_supervise(service, bus, view, reporter, next(filter(None, managers), None)))


class EventLines:
    """The events as lines of JSON. The last line is ``stopped``, after the reason of a failure."""

    def __init__(self, stdout: OutputWriter) -> None:
        self._stdout = stdout

    def on_event(self, event: PublishedEvent) -> None:
        from llamasup.core.supervision.events import Stopped

        if not isinstance(event, Stopped):
            self._write(event)

    def end(self, error: LlamasupError | None = None) -> None:
        from llamasup.core.supervision.events import LoadFailed, Stopped

        if error is not None:
            self._write(LoadFailed(None, error))
        self._write(Stopped())

    def _write(self, event: PublishedEvent) -> None:
        from llamasup.core.supervision.events import as_json

        self._stdout.write(json_text(as_json(event)) + "\n", keep=True)


async def _supervise(
    service: AnyService, bus: Bus, view: View, reporter: ConsoleReporter, make_manager: MakeManager | None
) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(START_S, collect_again)
    with ExitStack() as opened:
        manager: ServiceManager | None = None
        if make_manager is not None:
            manager = opened.enter_context(make_manager(service, service.options.policy))
            bus.listen(manager.notice)

        had_terminal = os.isatty(0)

        def on_signal(name: str) -> None:
            hung_up = had_terminal and not os.isatty(0)  # a closed terminal is no terminal
            reloads = service.launch is None or (manager is not None and not had_terminal)
            if name == "SIGHUP" and reloads and not hung_up:
                reporter.reload_requested(name)
                if manager is not None:
                    manager.reload_asked()
                service.ask_reload()
                return
            if name in PARENT_STOP_REASONS:
                loop.call_later(PARENT_STOP_TIMEOUT_S, service.ask_stop)
                if service.stops_asked:
                    return
            time_limit_s = PARENT_STOP_TIMEOUT_S if name in PARENT_STOP_REASONS else None
            reporter.stop_requested(name, time_limit_s=time_limit_s)
            service.ask_stop()  # before the report to systemd, which must not prevent the stop
            if manager is not None:
                manager.stop_asked()

        def on_command(command: str, model: str) -> None:
            """Reports a command of the control API, which carries it out itself."""
            if command == "stop":
                reporter.stop_requested("llamasup stop")
            else:
                reporter.command(command, model)
            if manager is not None:
                manager.asked(command)

        service.on_asked = on_command

        def deliver(name: str) -> None:
            loop.call_soon_threadsafe(on_signal, name)

        STOP_SIGNALS.deliver_to(deliver)
        ticker = _Ticker(loop, view)
        bus.listen(lambda _event: ticker.wake())
        try:
            await service.run()
        finally:
            STOP_SIGNALS.end()


class _Ticker:
    """Moves the live line, only while there is one: an idle supervisor does not wake up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, view: View) -> None:
        self._loop = loop
        self._view = view
        self._scheduled = False

    def wake(self) -> None:
        if self._view.is_busy and not self._scheduled:
            self._scheduled = True
            self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        self._view.tick()
        self.wake()
