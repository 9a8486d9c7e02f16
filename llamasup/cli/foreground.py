"""Runs ``run``, ``wrap``, ``serve`` and ``rpc-worker``: signals become stops, events become lines."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Struct

from llamasup.cli.gc_pause import START_S, collect_again
from llamasup.cli.output.error_report import as_reported, show_error
from llamasup.cli.output.event_lines import ConsoleReporter
from llamasup.cli.output.nonblocking_writer import OutputWriter
from llamasup.cli.output.rate_limit import ViewHandler
from llamasup.cli.output.view import JsonView, Level, TextView, View
from llamasup.cli.parent_watch import PARENT_STOP_REASONS, PARENT_STOP_TIMEOUT_S, tie_to_parent
from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted
from llamasup.core.observability.own_log import OwnLog
from llamasup.core.system.process.platform import loop_factory
from llamasup.core.system.text import json_text

if TYPE_CHECKING:
    from llamasup.core.supervision.events import Bus, PublishedEvent
    from llamasup.errors import LlamasupError
    from llamasup.features.systemd.notify import Systemd
    from llamasup.features.systemd.reporter import SystemdReporter
    from llamasup.service.rpc_worker import RpcWorker
    from llamasup.service.run import Service
    from llamasup.service.serve import ServeService

    AnyService = Service | ServeService | RpcWorker

TICK_S = 0.1


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
    from llamasup.core.supervision.events import Bus
    from llamasup.features.systemd.notify import take_systemd

    bus = Bus()
    if events is not None:
        bus.listen(events.on_event)
    systemd = take_systemd(os.environ)
    service = prepare()(bus)
    service.own_log = own_log
    reporter = ConsoleReporter(view, service, began_s)
    bus.listen(reporter.on_event)
    service.on_request = reporter.request
    service.on_slow_request = reporter.slow_request
    if output.server_log == "stderr":
        service.on_log = view.show_server_log
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_supervise(service, bus, view, reporter, systemd))


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
    service: AnyService, bus: Bus, view: View, reporter: ConsoleReporter, systemd: Systemd | None
) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(START_S, collect_again)
    with ExitStack() as opened:
        manager: SystemdReporter | None = None
        if systemd is not None:
            from llamasup.features.systemd.reporter import SystemdReporter

            manager = opened.enter_context(SystemdReporter(systemd, service, service.options.policy))
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
