"""The values that the event loop and the thread that saves the sums pass to each other (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date

from msgspec import Struct

from llamasup.features.usage.ledger import Group, Sums


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
