"""Which of the llamasups that run here is meant (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping, UsageInvalid

__all__ = ["Found", "Running", "RunningFact", "Silent", "choose"]


@dataclass(frozen=True, slots=True)
class Running:
    """One that answers. ``models``: each with its state, as ``tiny (ready)``."""

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


@dataclass(frozen=True, slots=True)
class Silent:
    """One whose process lives, and that does not answer."""

    pid: int
    why: Literal["starting", "stopping", "hangs"]


@dataclass(frozen=True, slots=True)
class Found:
    """``closed``: services by name that this user may not ask."""

    running: tuple[Running, ...] = ()
    silent: tuple[Silent, ...] = ()
    closed: tuple[str, ...] = ()


_MAX_NAMED = 4  # of a thousand


def choose(found: Found, pid: int | None) -> Running:
    """The one with this process number; without one the only one. Raises what keeps from that."""
    if pid is not None:
        return _with_number(found, pid)
    hanging = [each for each in found.silent if each.why == "hangs"]
    if len(found.running) == 1 and not hanging:
        return found.running[0]
    if len(found.running) + len(hanging) > 1:
        raise UsageInvalid(
            f"{len(found.running) + len(hanging)} llamasups run here.",
            remedy="Choose one of them with --pid or --url.",
            details=(
                *(each.shown for each in found.running),
                *(f"--pid {each.pid}  does not answer" for each in hanging),
            ),
        )
    if found.silent:
        raise _why_silent((*hanging, *found.silent)[0])
    closed = ""
    if found.closed:
        closed = f" Only root may ask these services: {', '.join(found.closed)}; use sudo."
    raise NotRunning(
        "No llamasup runs here.",
        remedy=f"Start one: llamasup run MODEL, or llamasup serve; or name one with --url.{closed}",
    )


def _with_number(found: Found, pid: int) -> Running:
    for running in found.running:
        if running.pid == pid:
            return running
    for silent in found.silent:
        if silent.pid == pid:
            raise _why_silent(silent)
    raise NotRunning(
        f"No llamasup runs here with the process number {pid}.",
        remedy="See --pid in what runs." if found.running else "None runs at all.",
        details=tuple(each.shown for each in found.running),
    )


def _why_silent(silent: Silent) -> LlamasupError:
    what = f"llamasup (process {silent.pid})"
    match silent.why:
        case "starting":
            return NotRunning(f"{what} is only just starting.", remedy="Try again in a moment.")
        case "stopping":
            return Stopping(f"{what} is stopping.", remedy="Wait until it has ended, then start it again.")
        case _:
            return ControlFailed(
                f"{what} does not answer.",
                remedy=f"Is it stopped (fg, kill -CONT {silent.pid}), or the machine overloaded?",
            )


@dataclass(frozen=True, slots=True)
class RunningFact:
    """A llamasup of this user that has the port."""

    pid: int
    url: str
    models: tuple[str, ...]  # with their states, for people
