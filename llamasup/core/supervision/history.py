"""The last events of one instance, for ``status``, bug reports and exceptions."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.supervision.states import Event, State

MAX_RECORDS = 50


class Record(Struct, frozen=True):
    """An event, and the state that it led to. ``count``: so many times in a row, the last one at ``time``.

    ``cause``: of a diagnosis. Never a message, because that may quote llama-server's log.
    """

    time: datetime
    event: str
    state: State
    generation: int
    cause: str = ""
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "time": self.time.isoformat(timespec="milliseconds"),
            "event": self.event,
            "state": self.state.value,
            "generation": self.generation,
        }
        if self.cause:
            shown["cause"] = self.cause
        if self.count > 1:
            shown["count"] = self.count
        return shown


class History:
    """The last ``MAX_RECORDS`` records, oldest first."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)

    def add(self, time: datetime, event: Event, state: State, generation: int) -> None:
        """Add a record of ``event``. ``state`` and ``generation`` are those after it."""
        cause: str = event.diagnosis.cause if hasattr(event, "diagnosis") else ""
        record = Record(time, _name(event), state, generation, cause)
        if self._records and replace(self._records[-1], time=time, count=1) == record:
            record = replace(record, count=self._records.pop().count + 1)
        self._records.append(record)

    @property
    def records(self) -> Sequence[Record]:
        return tuple(self._records)

    def as_json(self) -> list[dict[str, Any]]:
        return [record.as_json() for record in self._records]

    def __str__(self) -> str:
        """A line for each record."""
        return "\n".join(
            " ".join(str(field) for field in record.as_json().values()) for record in self._records
        )


def _name(event: Event) -> str:
    """``warmup_succeeded`` for ``WarmupSucceeded``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
