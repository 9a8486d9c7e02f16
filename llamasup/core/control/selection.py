"""Selects the running llamasup that a command talks to (pure)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping, UsageInvalid


class Running(Struct, frozen=True):
    """A llamasup that answers. ``models``: each with its state, as ``tiny (ready)``."""

    pid: int
    url: str
    version: str
    models: tuple[str, ...]
    socket: str

    @property
    def shown(self) -> str:
        served = ", ".join(self.models[:_MAX_NAMED]) or "no models"
        more = f" and {len(self.models) - _MAX_NAMED} more" if len(self.models) > _MAX_NAMED else ""
        return f"--pid {self.pid}  {self.url}  {served}{more}"


class Unresponsive(Struct, frozen=True):
    """A llamasup whose process runs and does not answer."""

    pid: int
    reason: Literal["starting", "stopping", "hangs"]


class Discovered(Struct, frozen=True):
    """The llamasups on this machine. ``closed``: names of services that this user may not access."""

    running: tuple[Running, ...] = ()
    unresponsive: tuple[Unresponsive, ...] = ()
    closed: tuple[str, ...] = ()


_MAX_NAMED = 4


def select_running(found: Discovered, pid: int | None) -> Running:
    """The llamasup with this process ID; without an ID the only one. Raises if there is no such one."""
    if pid is not None:
        return _with_pid(found, pid)
    hanging = [process for process in found.unresponsive if process.reason == "hangs"]
    if len(found.running) == 1 and not hanging:
        return found.running[0]
    if len(found.running) + len(hanging) > 1:
        raise UsageInvalid(
            f"{_counted(len(found.running) + len(hanging))} llamasup processes are running:",
            remedy="Choose one with --pid or --url.",
            details=(
                *(running.shown for running in found.running),
                *(f"--pid {process.pid}  does not answer" for process in hanging),
            ),
        )
    if found.unresponsive:
        raise _unresponsive_error((*hanging, *found.unresponsive)[0])
    closed = ""
    if found.closed:
        closed = f" Only root can access these services: {', '.join(found.closed)}; use sudo."
    raise NotRunning(
        "No llamasup is running on this machine for this user.",
        remedy=f"Start one: llamasup run MODEL, or llamasup serve; or choose one with --url.{closed}",
    )


def _counted(count: int) -> str:
    return ("Two", "Three", "Four", "Five")[count - 2] if count < 6 else str(count)


def _with_pid(found: Discovered, pid: int) -> Running:
    for running in found.running:
        if running.pid == pid:
            return running
    for process in found.unresponsive:
        if process.pid == pid:
            raise _unresponsive_error(process)
    raise NotRunning(
        f"No llamasup with process ID {pid} is running on this machine for this user.",
        remedy="Choose one of these with --pid." if found.running else "Start llamasup first.",
        details=tuple(running.shown for running in found.running),
    )


def _unresponsive_error(process: Unresponsive) -> LlamasupError:
    name = f"llamasup (process {process.pid})"
    match process.reason:
        case "starting":
            return NotRunning(f"{name} is still starting.", remedy="Try again in a moment.")
        case "stopping":
            return Stopping(f"{name} is stopping.", remedy="Wait until it has exited, then start it again.")
        case _:
            return ControlFailed(
                f"{name} does not answer.",
                remedy=f"Resume it if it is suspended (fg, kill -CONT {process.pid}), or reduce the load.",
            )
