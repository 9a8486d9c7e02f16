"""One child of an instance: what belongs to it, what it leaves behind, and what is said if there is none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llamasup.core.address import Address, UnixAddress
from llamasup.core.diagnosis import Diagnosis, Exit
from llamasup.core.errors import BrokenRuntime, DoesNotFit, LlamasupError
from llamasup.core.instance import Policy
from llamasup.effects.logs import LogPump
from llamasup.effects.process import Child
from llamasup.runtime.endpoint import UNLIMITED, Endpoint
from llamasup.runtime.plans import ChildPlan

__all__ = [
    "NOT_STARTED",
    "PUMP_TIMEOUT_S",
    "Generation",
    "as_diagnosis",
    "clear_away",
    "places_of",
    "remove_socket",
    "spawn_error",
]

PUMP_TIMEOUT_S: Final = 1.0


@dataclass(slots=True)
class Generation:
    """One child and everything that lives and dies with it."""

    number: int
    plan: ChildPlan
    child: Child
    pump: LogPump
    endpoint: Endpoint
    oom_kills: int
    """The kernel's count when the child began."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    size_lines: list[str] = field(default_factory=list)
    """What the child said about its memory while it started."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    slots: asyncio.Task[None] | None = None
    """Has what they hold saved or restored."""
    exit: Exit | None = None
    warm_up_s: float = 0.0
    """What its first token took."""

    def let_slots_be(self) -> None:
        """Wait no longer for them: it would not end while it is asked for something (b11434)."""
        if self.slots is not None:
            self.slots.cancel()


def places_of(policy: Policy, plan: ChildPlan) -> int:
    places = policy.places(plan.parallel)
    return UNLIMITED if places is None else places


async def clear_away(generation: Generation) -> None:
    """What a child leaves that is ours: its pipe and its socket; and what it started and left alone."""
    await asyncio.to_thread(generation.child.end_descendants)
    await generation.pump.aclose(PUMP_TIMEOUT_S)
    remove_socket(generation.plan.address)


def remove_socket(address: Address) -> None:
    """llama-server removes neither an old socket in its way nor, at its end, its own (b11434)."""
    if isinstance(address, UnixAddress):
        Path(address.path).unlink(missing_ok=True)


# --- no child

NOT_STARTED = Diagnosis("stopped", "llama-server was not started: the stop came first.", "", (), False, 0)


def spawn_error(error: OSError) -> LlamasupError:
    return BrokenRuntime(
        f"llama-server could not be started: {error.strerror or error}",
        remedy="Check limits on processes and open files (ulimit -a).",
    )


def as_diagnosis(error: LlamasupError, *, first: bool) -> Diagnosis:
    """``first``: nothing served yet. What fitted before may fit again, once its memory is free (#97)."""
    deterministic = first or not isinstance(error, DoesNotFit)
    lines = (*error.details, *error.lines)
    return Diagnosis(error.cause, error.message, error.remedy, lines, deterministic, error.exit_code)
