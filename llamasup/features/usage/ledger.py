"""Adds finished requests up by day, model and key (pure), and defines what the thread that saves them gets.

All sums are whole numbers (microseconds, microjoules), so that every grouping has the same total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Final, NamedTuple

from msgspec import Struct

from llamasup.core.observability.counters import GAVE_WAY, RequestRecord

_KEY_PREFIX: Final = "key:"
_NO_ERRORS: Final = frozenset({"ok", "local", "client_gone", GAVE_WAY})
# The clock may be set, and a machine that was suspended continues on another day.
_CHECK_DAY_S: Final = 60.0


class Group(NamedTuple):
    """The key of a sum. ``day`` is ``YYYY-MM-DD``; ``key`` is the name of an API key, empty for a request
    without one.
    """

    day: str
    model: str
    key: str


class Sums(Struct):
    """The sums of a group. ``tokens_prompt`` includes ``tokens_cached``. ``unreported``: requests that held a
    slot and whose answer reported no tokens; ``tokens_estimated`` is the estimate of the tokens that answers
    did not report. ``energy_uj`` is None if it was never measured.
    """

    requests: int = 0
    errors: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_completion: int = 0
    tokens_estimated: int = 0
    unreported: int = 0
    slot_us: int = 0
    energy_uj: int | None = None

    def add(self, other: Sums) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.energy_uj is not None:
            self.energy_uj = (self.energy_uj or 0) + other.energy_uj


COUNTS: Final = tuple(name for name in Sums.__struct_fields__ if name != "energy_uj")


def key_of(client: str) -> str:
    """Return the name of the key in ``RequestRecord.client``; empty for an address."""
    return client.removeprefix(_KEY_PREFIX) if client.startswith(_KEY_PREFIX) else ""


def is_error(record: RequestRecord) -> bool:
    """Whether the client got no complete answer, or one with an error status. A client that disconnected is
    no error, and neither is a batch that gave way to other clients.
    """
    if record.outcome not in _NO_ERRORS:
        return True
    return record.outcome == "ok" and record.status >= 400


def day_at(now: datetime) -> tuple[str, float]:
    """Return the day of a local time, and after how many seconds to call this again."""
    midnight = datetime.combine(now.date() + timedelta(days=1), time(), now.tzinfo)
    return now.date().isoformat(), min(_CHECK_DAY_S, (midnight - now).total_seconds())


class Ledger:
    """Sums that are not saved yet. For one thread."""

    def __init__(self) -> None:
        self._sums: dict[Group, Sums] = {}

    def __repr__(self) -> str:
        return f"<Ledger of {len(self._sums)} groups>"

    def __len__(self) -> int:
        return len(self._sums)

    def count(self, record: RequestRecord, day: str) -> Group:
        """Add a finished request, which was for a model."""
        group = Group(day, record.model, key_of(record.client))
        sums = self._of(group)
        sums.requests += 1
        sums.errors += is_error(record)
        sums.tokens_prompt += record.tokens_prompt or 0
        sums.tokens_cached += record.tokens_cached or 0
        sums.tokens_completion += record.tokens_completion or 0
        sums.tokens_estimated += record.tokens_estimated
        sums.slot_us += round(record.slot_s * 1e6)
        is_unreported = record.tokens_prompt is None and record.tokens_completion is None
        if record.slot_s > 0.0 and record.status < 400 and is_unreported:
            sums.unreported += 1
        return group

    def add(self, taken: Mapping[Group, Sums]) -> None:
        for group, sums in taken.items():
            self._of(group).add(sums)

    def add_energy(self, shares_uj: Mapping[Group, int]) -> None:
        self.add({group: Sums(energy_uj=share_uj) for group, share_uj in shares_uj.items()})

    def rows(self) -> Sequence[tuple[Group, Sums]]:
        return list(self._sums.items())

    def take(self) -> Mapping[Group, Sums]:
        """Return all sums; the ledger is empty then."""
        taken, self._sums = self._sums, {}
        return taken

    def _of(self, group: Group) -> Sums:
        sums = self._sums.get(group)
        if sums is None:
            sums = self._sums[group] = Sums()
        return sums


# --- what the event loop and the thread pass to each other


class Work(Struct, frozen=True):
    """The time in which one request had ``slots`` (monotonic); their mean number. ``ended_s`` is infinite for
    a request in flight.
    """

    group: Group
    began_s: float
    ended_s: float
    slots: float


class Saved(Struct, frozen=True):
    """The answer to a question. ``rows`` include unsaved ones if there is a ``problem``."""

    rows: Sequence[tuple[Group, Sums]]
    file: str | None
    problem: str | None


class Question(Struct, frozen=True):
    """Requests the sums by the fields ``by``, from the day ``since`` on."""

    by: Sequence[str]
    since: date | None
    answer: Callable[[Saved], None]


class Flush(Struct, frozen=True):
    """The sums and orders for the thread. ``sums``: to add to the unsaved ones; ``measures``: read the energy
    counters and divide the energy among ``work``; ``saves``: write the sums; then answer the ``question``.
    """

    sums: Mapping[Group, Sums] = {}
    work: Sequence[Work] = ()
    measures: bool = False
    saves: bool = False
    question: Question | None = None
