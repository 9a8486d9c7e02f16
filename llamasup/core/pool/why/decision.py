"""A decision about a model, with its reason, and the last decisions (pure). ``recording.py`` makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

MAX_DECISIONS: Final = 200
"""For a pool of a few models under load, some minutes to hours; about 100 KB."""

Kind = Literal[
    "load",
    "wait",
    "smaller",
    "evict",
    "unload",
    "drain",
    "resume",
    "restart",
    "refuse",
    "fail",
    "update",
    "upgrade",
    "keep",
    "return",
]

_NOW: Final[dict[Kind, str]] = {
    "load": "is loaded",
    "wait": "waits",
    "smaller": "is smaller than asked",
    "evict": "is evicted",
    "unload": "is unloaded",
    "drain": "gets no new requests",
    "resume": "gets requests again",
    "restart": "is restarted",
    "refuse": "is refused",
    "fail": "is not restarted",
    "update": "is updated",
    "upgrade": "gets a new build of llama.cpp",
    "keep": "keeps its build of llama.cpp",
    "return": "returns to its old build of llama.cpp",
}


class Decision(Struct, frozen=True):
    """A decision about a model.

    ``why``: the end of a sentence, such as `` because a request asked for it``. ``change``: what would
    have to change for another decision, in sentences.
    """

    time: datetime
    model: str
    kind: Kind
    why: str
    change: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.model} {_NOW[self.kind]}{self.why}."

    def as_json(self) -> dict[str, Any]:
        """Return the decision as docs/control.md describes it."""
        return {
            "time": self.time.isoformat(timespec="milliseconds"),
            "model": self.model,
            "kind": self.kind,
            "text": self.text,
        }


class Decisions:
    """The last decisions of a pool, which alone adds to them."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def __repr__(self) -> str:
        return f"<{len(self._decisions)} Decisions>"

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def rename(self, model: str, new: str) -> None:
        """The decisions about ``model`` stay with it under its new name."""
        renamed = [replace(each, model=new) if each.model == model else each for each in self._decisions]
        self._decisions.clear()
        self._decisions.extend(renamed)

    def last(self, limit: int = MAX_DECISIONS) -> Sequence[Decision]:
        """The newest first."""
        return tuple(reversed(self._decisions))[:limit]

    def of(self, model: str) -> Sequence[Decision]:
        """The decisions about ``model``, the newest first."""
        return tuple(decision for decision in self.last() if decision.model == model)
