"""How a process ended, and the folder that it left behind."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Exit", "LeftFolder"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Exactly one is set: its exit code, or the signal's name (``"SIGKILL"``)."""

    code: int | None
    signal: str | None

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else self.signal


@dataclass(frozen=True, slots=True)
class LeftFolder:
    """The run folder of a process that has ended."""

    path: str
    pid: int
    answering: tuple[str, ...] = ()  # sockets in it that something still listens on
