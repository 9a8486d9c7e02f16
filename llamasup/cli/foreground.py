"""``run``, ``wrap`` and ``serve`` in the foreground: signals become stops, events become lines."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamasup.cli.output.console import Narrator
from llamasup.cli.output.error_report import show_error
from llamasup.cli.output.view import JsonView, Level, TextView, View, ViewHandler
from llamasup.cli.output.writer import OutputWriter
from llamasup.cli.parent_watch import ENDINGS, HURRY_S, tie_to_parent
from llamasup.cli.process import STOP_SIGNALS, Interrupted
from llamasup.system.process.platform import loop_factory
from llamasup.system.text import json_text

if TYPE_CHECKING:
    from llamasup.service.run import RunOptions, Service, WrapOptions
    from llamasup.service.serve import ServeService
    from llamasup.service.systemd.notify import Systemd
    from llamasup.service.systemd.reporter import SystemdReporter
    from llamasup.supervision.events import Bus

    AnyService = Service | ServeService

__all__ = ["OutputOptions", "serve_until_stopped"]

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is printed where, and which program started llamasup."""

    events: str | None
    log_level: Level
    log_format: str
    sidecar: bool = False
    parent_pid: int | None = None
    server_log: str = "file"


def _one_model(options: RunOptions | WrapOptions, bus: Bus) -> Service:
    from llamasup.service.run import Service

    return Service(options, bus)


def serve_until_stopped(
    ask: Callable[[], Any],
    output: OutputOptions,
    began_s: float,
    going_on: str | None = None,
    *,
    make: Callable[[Any, Bus], AnyService] = _one_model,
    before_serving: Callable[[View], None] | None = None,
) -> int:
    """Serve until stopped; show any error. Returns the exit code (docs/design.md, Exit codes).

    ``make`` makes the service of the options that ``ask`` returns. ``going_on`` is shown until the service
    starts. ``before_serving`` runs first, and shows its own progress.
    """
    stderr, stdout = OutputWriter(sys.stderr), OutputWriter(sys.stdout)
    view: View = TextView(stderr)
    handler: ViewHandler | None = None
    try:
        view = _view(output, stderr)
        handler = ViewHandler(view)
        logging.basicConfig(handlers=[handler], format="%(message)s", level=logging.WARNING)
        tie_to_parent(stdin=output.sidecar, parent_pid=output.parent_pid)
        if before_serving is not None:
            before_serving(view)
        view.loading(going_on)
        return _serve(ask, make, output, view, stdout, began_s)
    except Interrupted as interrupted:
        if interrupted.why:
            view.say("info", "stop", f"{interrupted.why}: stopping.")
        raise
    except Exception as error:
        view.loading(None)
        return show_error(view, error)
    finally:
        view.loading(None)
        if handler is not None:
            handler.close()
        stderr.close()
        stdout.close()


def _view(output: OutputOptions, stderr: OutputWriter) -> View:
    style = JsonView if output.log_format == "json" else TextView
    return style(stderr, level=output.log_level)


def _serve(
    ask: Callable[[], Any],
    make: Callable[[Any, Bus], AnyService],
    output: OutputOptions,
    view: View,
    stdout: OutputWriter,
    began_s: float,
) -> int:
    from llamasup.service.systemd.notify import take_systemd
    from llamasup.supervision.events import Bus, as_json

    bus = Bus()
    if output.events is not None or output.sidecar:
        bus.listen(lambda notice: stdout.write(json_text(as_json(notice)) + "\n", keep=True))
    systemd = take_systemd(os.environ)
    service = make(ask(), bus)
    narrator = Narrator(view, service, began_s)
    bus.listen(narrator.notice)
    service.on_request = narrator.request
    service.on_slow_request = narrator.slow_request
    if output.server_log == "stderr":
        service.on_log = view.server_said
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_supervise(service, bus, view, narrator, systemd))
    return 0


async def _supervise(
    service: AnyService, bus: Bus, view: View, narrator: Narrator, systemd: Systemd | None
) -> None:
    loop = asyncio.get_running_loop()
    with ExitStack() as opened:
        manager: SystemdReporter | None = None
        if systemd is not None:
            from llamasup.service.systemd.reporter import SystemdReporter

            manager = opened.enter_context(SystemdReporter(systemd, service, service.options.policy))
            bus.listen(manager.notice)

        had_terminal = os.isatty(0)

        def signalled(name: str) -> None:
            is_closed = had_terminal and not os.isatty(0)  # a terminal that hung up is no terminal
            begins_anew = service.launch is None or (manager is not None and not had_terminal)
            if name == "SIGHUP" and begins_anew and not is_closed:
                narrator.reload_asked(name)
                if manager is not None:
                    manager.reload_asked()
                service.ask_reload()
                return
            if name in ENDINGS:
                loop.call_later(HURRY_S, service.ask_stop)
                if service.stops_asked:
                    return
            narrator.stop_asked(name, hurry_s=HURRY_S if name in ENDINGS else None)
            service.ask_stop()  # first: no report may prevent the stop
            if manager is not None:
                manager.stop_asked()

        def asked(what: str, model: str) -> None:
            """A request of the control API, which carries it out itself."""
            if what == "stop":
                narrator.stop_asked("llamasup stop")
            else:
                narrator.asked(what, model)
            if manager is not None:
                manager.asked(what)

        service.on_asked = asked

        def deliver(name: str) -> None:
            loop.call_soon_threadsafe(signalled, name)

        STOP_SIGNALS.deliver_to(deliver)
        ticker = _Ticker(loop, view)
        bus.listen(lambda _notice: ticker.wake())
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
