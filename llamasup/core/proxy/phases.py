"""The phases of a client connection, and how long each may last (pure).

The sweep of the proxy checks these times, so no phase has a timer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from llamasup.core.proxy.settings import Limits


class Phase(Enum):
    NEW = "new"
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    PAUSED = "paused"
    BUSY = "busy"
    CLOSING = "closing"


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
NEW: Final = Phase.NEW
IDLE: Final = Phase.IDLE
HEAD: Final = Phase.HEAD
BODY: Final = Phase.BODY
PAUSED: Final = Phase.PAUSED
BUSY: Final = Phase.BUSY
CLOSING: Final = Phase.CLOSING


class PhaseRule(Struct, frozen=True):
    """``limit``: the field of ``Limits`` with the longest time in seconds; empty: it may last for ever.

    ``part``: the part of the request that was too slow, for the 408; empty: the connection is closed.
    """

    meaning: str
    limit: str = ""
    part: str = ""


PHASES: Final[Mapping[Phase, PhaseRule]] = MappingProxyType(
    {
        NEW: PhaseRule("accepted, and no byte has arrived", "head_s"),
        IDLE: PhaseRule("between two requests", "keepalive_s"),
        HEAD: PhaseRule("from the first byte of a head to its last", "head_s", part="head"),
        BODY: PhaseRule(
            "waiting for the next piece of a body; a slow body gets less time", "body_idle_s", part="body"
        ),
        PAUSED: PhaseRule("the client is not read, because llama-server does not take the body"),
        BUSY: PhaseRule("a request waits, or is served; it has limits of its own"),
        CLOSING: PhaseRule("the last response is written, and the client reads it", "linger_s"),
    }
)


def longest_s(phase: Phase, limits: Limits) -> float:
    """Returns how long a connection may stay in this phase, in seconds."""
    limit = PHASES[phase].limit
    return float(getattr(limits, limit)) if limit else float("inf")
