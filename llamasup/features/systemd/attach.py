"""Attaches a service in the foreground to systemd, if systemd started it and expects notifications."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from llamasup.features.systemd.notify import take_systemd

if TYPE_CHECKING:
    from llamasup.core.supervision.states import Policy
    from llamasup.features.systemd.reporter import ReportedService, SystemdReporter


def manager(
    environ: MutableMapping[str, str],
) -> Callable[[ReportedService, Policy], SystemdReporter] | None:
    """Make the reporter of a service later. Removes the variables of systemd at once."""
    systemd = take_systemd(environ)
    if systemd is None:
        return None

    def reporter(service: ReportedService, policy: Policy) -> SystemdReporter:
        from llamasup.features.systemd.reporter import SystemdReporter  # here, to keep the start short

        return SystemdReporter(systemd, service, policy)

    return reporter
