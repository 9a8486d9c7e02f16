"""Attaches the count of the usage to a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamasup.core.control.interface import Host
from llamasup.core.observability.observer import Observer
from llamasup.features.usage.recorder import UsageRecorder


def attach(host: Host) -> None:
    if host.usage_keep_days is None:
        host.usage = _not_counted
        return
    recorder = UsageRecorder(host.usage_keep_days, held_slots=host.held_slots)
    host.usage = recorder.report
    host.observe(Observer(recorder.add, close=recorder.close))


async def _not_counted(by: str, since: str | None) -> Mapping[str, Any]:
    from llamasup.features.usage.report import not_counted  # here, to keep the start short
    from llamasup.features.usage.store import today

    return not_counted(by, since, today())
