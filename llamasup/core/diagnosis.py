"""Why a child ended, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Diagnosis", "Exit", "Phase", "diagnose"]

Phase = Literal["starting", "ready", "stopping"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Exactly one is set: its exit code, or the signal's name (``"SIGKILL"``)."""

    code: int | None
    signal: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of an end, for people and for decisions.

    ``cause`` is a stable word (metrics, events); ``message`` says what happened; ``remedy`` what to do.
    ``lines`` are the telling lines of the child's output, oldest first. ``deterministic``: it would happen
    again at once, so do not restart (S4). ``exit_code`` is llamasup's own, if it has to give up on this.
    """

    cause: str
    message: str
    remedy: str
    lines: tuple[str, ...]
    deterministic: bool
    exit_code: int


def diagnose(
    exit: Exit, lines: Sequence[str], *, phase: Phase, asked: bool = False, oom_killed: bool = False
) -> Diagnosis:
    return Diagnosis("unknown", "", "", tuple(lines[-8:]), False, 75)
