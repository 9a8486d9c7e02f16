"""The answers of a llama-server about itself: its health, the proof of one token, and saved slots."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from llamasup.system.text import INVALID_JSON

__all__ = ["Health", "Proof", "SlotAnswer", "read_answer"]


class Health(Enum):
    """What ``/health`` came to."""

    OK = "ok"
    LOADING = "loading"
    SILENT = "silent"  # nothing listens, or nothing sensible answers in time


@dataclass(frozen=True, slots=True)
class Proof:
    """The end of a request for one token: ``missing`` says what was wrong with it, None if nothing was."""

    missing: str | None


@dataclass(frozen=True, slots=True)
class SlotAnswer:
    """What llama-server says to ``/slots/N?action=…``. ``problem``: why it was not done; empty: it was."""

    tokens: int = 0
    problem: str = ""


def read_answer(status: int, body: bytes, counted: str) -> SlotAnswer:
    """``counted``: ``n_saved`` or ``n_restored``, the number of tokens in it."""
    try:
        answer = json.loads(body)
        if status == 200:
            return SlotAnswer(tokens=int(answer[counted]))
        return SlotAnswer(problem=str(answer["error"]["message"]))
    except (KeyError, TypeError, *INVALID_JSON):
        return SlotAnswer(problem=f"it answered {status}: {body[:200].decode(errors='replace')}")
