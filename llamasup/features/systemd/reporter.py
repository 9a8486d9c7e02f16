"""Reports the state of a service to systemd, and sends the watchdog's heartbeats.

The heartbeat runs in the event loop that carries the traffic: a thread would keep sending WATCHDOG=1 while
the loop hangs. ``status.py`` decides what to send when.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from llamasup.core.supervision.events import (
    ConfigRejected,
    ModelsChanged,
    PublishedEvent,
    Ready,
    ServerExited,
    StateChanged,
    Stopped,
)
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy
from llamasup.features.systemd import status
from llamasup.features.systemd.notify import Systemd
from llamasup.features.systemd.status import Messages, ServiceStatus

__all__ = ["SystemdReporter"]


class ReportedService(Protocol):
    """The service that is reported. ``runner`` is that of one model, once it exists; many models have neither
    it nor a ``launch``.
    """

    @property
    def launch(self) -> object | None: ...

    @property
    def runner(self) -> InstanceRunner | None: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def drain_timeout_s(self) -> float:
        """The limit for requests in flight at a stop."""
        ...


_SLACK_S = 5.0
"""A stop needs this besides drain and stop time-out: closing connections, removing the run folder."""


class SystemdReporter:
    """Receives the events of one service. Use it as a context manager in its event loop's thread."""

    def __init__(self, systemd: Systemd, service: ReportedService, policy: Policy) -> None:
        self._notifier = systemd.notifier
        self._watchdog_s = systemd.watchdog_s
        self._service = service
        self._policy = policy
        self._status = ServiceStatus(of_many=service.launch is None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> SystemdReporter:
        self._heartbeat()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._notifier.close()

    def notice(self, notice: PublishedEvent) -> None:
        runner = self._service.runner
        slots = runner.plan.parallel if runner is not None and runner.plan is not None else None
        match notice:
            case StateChanged(model, state, _):
                self._send(status.state_changed(self._status, model, state, slots=slots))
            case Ready(address, _, models):
                self._send(status.serving(self._status, models, address.shown, slots=slots))
            case ServerExited(model, _, _, diagnosis, restart_in_s):
                self._send(
                    status.exited(
                        self._status,
                        model,
                        diagnosis,
                        restarts=restart_in_s is not None,
                        crashes=len(runner.instance.crashes) if runner is not None else None,
                        most_crashes=self._policy.restart.most_crashes,
                    )
                )
            case ModelsChanged(changes, models):
                self._send(status.reloaded(self._status, models, gone=(*changes.removed, *changes.changed)))
            case ConfigRejected(error):
                # The first of possibly many issues; the log has all of them.
                problem = " ".join((error.message, *error.details[:1]))
                self._send(status.reloaded(self._status, None, problem))
            case Stopped():
                self.stop_asked()
            case _:
                pass

    def stop_asked(self) -> None:
        needs_s = self._service.drain_timeout_s + self._policy.stop_timeout_s + _SLACK_S
        self._send(status.stopping(self._status, in_flight=self._service.in_flight, needs_s=needs_s))

    def asked(self, what: str) -> None:
        """Called for a request of the control API, which carries it out. The restart of one of many models is
        not a reload, as the others serve.
        """
        if what == "stop":
            self.stop_asked()
        elif what == "reload" or (what == "restart" and not self._status.of_many):
            self.reload_asked()

    def reload_asked(self) -> None:
        runner = self._service.runner
        now_us = time.monotonic_ns() // 1000
        self._send(
            status.reloading(self._status, None if runner is None else runner.model, monotonic_us=now_us)
        )

    def _send(self, update: tuple[ServiceStatus, Messages]) -> None:
        self._status, messages = update
        if messages:
            self._notifier.send(*messages)

    def _heartbeat(self) -> None:
        self._notifier.send(*status.heartbeat(self._status), keep=False)
        every_s = []
        if self._watchdog_s is not None:
            every_s.append(self._watchdog_s / 2)
        if self._status.is_starting:
            every_s.append(status.EXTENSION_S / 3)
        # Otherwise systemd expects no heartbeat, and an idle supervisor does not wake up.
        self._timer = self._loop.call_later(min(every_s), self._heartbeat) if every_s else None
