"""``llamasup service …``: writes, removes and shows a systemd unit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from llamasup.cli.commands.service_units import Asked
from llamasup.cli.errors import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View
from llamasup.errors import ServiceManagerFailed, UsageInvalid
from llamasup.service.systemd.systemctl import Units
from llamasup.service.systemd.unit_file import Unit, checked_name, name_for, unit_text

__all__ = ["install_command", "print_command", "status_command", "uninstall_command"]


def print_command(asked: Asked, *, json: bool) -> int:
    """Print the unit. Returns the exit code, as all of these do."""

    def act(view: View) -> None:
        unit = asked.unit()
        text = unit_text(unit)
        path = str(Units(unit.of_user).path(unit.file_name))
        if json:
            write_json({"unit": unit.file_name, "path": path, "text": text})
        else:
            write_result(text.rstrip("\n"))

    return guarded(act)


def install_command(asked: Asked, *, json: bool, now: bool) -> int:
    """Write the unit and tell systemd; with ``now`` also start it, now and at every boot."""

    def act(view: View) -> None:
        units = Units(asked.user)
        units.demand()
        unit = asked.unit()
        path = units.path(unit.file_name)
        was_there = units.own(unit.file_name) is not None
        changed = units.write(unit.file_name, unit_text(unit))
        _say(
            view, f"{'Changed' if was_there else 'Wrote'} {path}" if changed else f"{path} is as it should be"
        )
        units.systemctl("daemon-reload")
        if now:
            units.systemctl("enable", unit.file_name)
            # Waits until it serves; a change only counts for a fresh start.
            units.systemctl("restart" if changed else "start", unit.file_name, timeout_s=None)
            _say(view, f"{unit.file_name} serves, and starts at every boot")
        else:
            prefix = "systemctl --user" if unit.of_user else "systemctl"
            _say(view, f"  → Start it: {prefix} enable --now {unit.file_name}")
        if unit.of_user:
            _say(view, "  → It ends with your last session, unless you say: loginctl enable-linger")
        if os.environ.get("LLAMASUP_API_KEY") and _has_no_key(unit):
            _say(view, "  → The service does not see your $LLAMASUP_API_KEY: use --api-key-file.")
        if json:
            write_json({"unit": unit.file_name, "path": str(path), "changed": changed, "started": now})

    return guarded(act)


def uninstall_command(name: str, *, user: bool, json: bool) -> int:
    """Stop the service, and remove its unit if it is ours."""

    def act(view: View) -> None:
        units, file_name = Units(user), _file_name(name)
        units.demand()
        path = units.path(file_name)
        removed = units.own(file_name) is not None
        if removed:
            units.systemctl("disable", "--now", file_name, timeout_s=None)
            units.remove(file_name)
            units.systemctl("daemon-reload")
            with suppress(ServiceManagerFailed):  # a failed one stays listed without its file
                units.systemctl("reset-failed", file_name)
            _say(view, f"Stopped {file_name} and removed {path}. Its logs in the state folder are left.")
        else:
            _say(view, f"There is no {path}.")
        if json:
            write_json({"unit": file_name, "path": str(path), "removed": removed})

    return guarded(act)


def status_command(name: str, *, user: bool, json: bool) -> int:
    """Show how the service does."""

    def act(view: View) -> None:
        units, file_name = Units(user), _file_name(name)
        path = units.path(file_name)
        text = units.read(file_name)
        state = _state(units, file_name)
        shown = {"unit": file_name, "path": str(path), "installed": text is not None, **state}
        if json:
            write_json(shown)
        else:
            write_result(table([(key, _shown(value)) for key, value in shown.items()], indent=""))

    return guarded(act)


def _has_no_key(unit: Unit) -> bool:
    """As far as the unit tells: the config of many is read by a user's own service itself."""
    told = any(each.option == "--api-key-file" for each in unit.credentials)
    return not told and not (unit.of_many and unit.of_user)


def _file_name(text: str) -> str:
    """Of what a person calls the service: its name, its unit, or its model."""
    if not PurePath(text).name:
        raise UsageInvalid(f"{text!r} names no service.", remedy="Give its name, its unit or its model.")
    name = text.removeprefix("llamasup-").removesuffix(".service") if text.endswith(".service") else text
    return f"llamasup-{checked_name(name_for(name))}.service"


def _state(units: Units, file_name: str) -> Mapping[str, Any]:
    found = units.state(file_name)
    pid, restarts = found.get("MainPID", "0"), found.get("NRestarts", "0")
    memory = found.get("MemoryCurrent", "")
    return {
        "loaded": found.get("LoadState") == "loaded",
        "enabled": found.get("UnitFileState") == "enabled",
        "active": found.get("ActiveState", "unknown"),
        "sub": found.get("SubState", ""),
        "result": found.get("Result", ""),
        "exit_code": int(found.get("ExecMainStatus") or 0),
        "status": found.get("StatusText", ""),
        "pid": int(pid) or None,
        "restarts": int(restarts),
        "since": found.get("ActiveEnterTimestamp") or None,
        "memory_bytes": int(memory) if memory.isdecimal() and int(memory) < 1 << 63 else None,
    }


def _shown(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _say(view: View, text: str) -> None:
    view.say("info", "service", text)
