"""The exit of a process, and the run folder of an exited llamasup."""

from __future__ import annotations

from msgspec import Struct


class Exit(Struct, frozen=True):
    """The exit of a process: either its exit code or the name of the signal (``"SIGKILL"``) is set."""

    code: int | None
    signal: str | None

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else self.signal


class StaleRun(Struct, frozen=True):
    """The run folder of a llamasup that has exited."""

    path: str
    pid: int
    answering: tuple[str, ...] = ()  # sockets in it on which a process still listens
