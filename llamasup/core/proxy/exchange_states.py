"""The states of an exchange, and which state may follow which (pure).

``exchange.py`` sets the state; the tests of the proxy check each change against this table, from which
``scripts/docs.py`` draws docs/diagrams/exchange-states.mmd.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(Enum):
    CONNECTING = "connecting"
    """A connection to llama-server is taken or made, or work comes before it."""
    SENT = "sent"
    """The request is being sent to llama-server, or was sent; the client has no byte of its answer."""
    HELD = "held"
    """A stage holds the answer until its end, because the request may be sent a second time."""
    RELAYING = "relaying"
    """The answer has begun, and its bytes pass as they arrive."""
    LOST = "lost"
    """The connection to llama-server has closed; the reason is awaited (``cause_wait_s``)."""
    OVER = "over"
    """The request is recorded, or waits in the queue again."""


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
CONNECTING: Final = State.CONNECTING
SENT: Final = State.SENT
HELD: Final = State.HELD
RELAYING: Final = State.RELAYING
LOST: Final = State.LOST
OVER: Final = State.OVER

TRANSITIONS: Final[Mapping[State, Mapping[State, str]]] = MappingProxyType(
    {
        CONNECTING: {
            SENT: "connected",
            RELAYING: "a second attempt failed, so the first answer is used",
            LOST: "connection refused",
            OVER: "cancelled, failed, queued again",
        },
        SENT: {
            CONNECTING: "an idle connection was closed meanwhile",
            HELD: "an answer to check",
            RELAYING: "the answer begins",
            LOST: "connection closed",
            OVER: "cancelled, failed, queued again",
        },
        HELD: {
            CONNECTING: "second attempt",
            RELAYING: "the answer is right, or too large",
            LOST: "connection closed",
            OVER: "cancelled, failed, queued again",
        },
        RELAYING: {
            LOST: "connection closed between two events",
            OVER: "complete, cancelled, failed, continued by another server",
        },
        LOST: {
            OVER: "the reason is known, or too late",
        },
    }
)
