"""Groups the saved rows, and formats them: as the object of the control API, as a table and as CSV."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, Final

from llamasup.errors import UsageInvalid
from llamasup.features.usage.ledger import Group, Sums

COLUMNS: Final = (
    *("requests", "errors", "tokens_prompt", "tokens_cached", "tokens_completion"),
    *("tokens_estimated", "unreported", "slot_s", "energy_j"),
)
_BY: Final = ("day", "model", "key")
_DAYS_AGO = re.compile(r"([0-9]{1,5})d", re.ASCII)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
# Programs for spreadsheets run a cell that begins with one of these (CWE-1236).
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def read_by(text: str) -> tuple[str, ...]:
    """Read ``model``, ``key``, ``day``, or several of them with commas. Raises UsageInvalid."""
    by = tuple(dict.fromkeys(text.split(",")))
    for one in by:
        if one not in _BY:
            raise UsageInvalid(
                f"{one[:40]!r} is not a valid grouping of the usage.",
                remedy="Use model, key or day, or several of them: day,model.",
            )
    return by


def read_since(text: str, today: date) -> date:
    """Read a day, or how many days ago. Raises UsageInvalid."""
    since = None
    with contextlib.suppress(ValueError, OverflowError):
        if ago := _DAYS_AGO.fullmatch(text):
            since = today - timedelta(days=int(ago[1]))
        elif _DAY.fullmatch(text):
            since = date.fromisoformat(text)
    if since is None:
        raise UsageInvalid(
            f"{text[:40]!r} is not a valid day.", remedy=f"Write it like {today}, or like 7d for 7 days ago."
        )
    if since > today:
        raise UsageInvalid(
            f"The day {since} is in the future; today is {today}.", remedy="Use an earlier day."
        )
    return since


def grouped(rows: Iterable[tuple[Group, Sums]], by: Sequence[str]) -> Mapping[tuple[str, ...], Sums]:
    """Return the sums by the values of ``by``, sorted by them."""
    totals: dict[tuple[str, ...], Sums] = {}
    for group, sums in rows:
        key = tuple(getattr(group, name) for name in by)
        totals.setdefault(key, Sums()).add(sums)
    return dict(sorted(totals.items()))


def report(
    rows: Iterable[tuple[Group, Sums]],
    by: Sequence[str],
    since: date | None,
    *,
    file: str | None = None,
    problem: str | None = None,
) -> Mapping[str, Any]:
    """Return the ``usage`` object (docs/design.md) of rows that are all of ``since`` or later."""
    return {
        "by": list(by),
        "since": None if since is None else since.isoformat(),
        "file": file,
        "problem": problem,
        "rows": [
            {
                **dict(zip(by, key, strict=True)),
                **{name: getattr(sums, name) for name in COLUMNS if not name.endswith(("_s", "_j"))},
                "slot_s": sums.slot_us / 1e6,
                "energy_j": None if sums.energy_uj is None else sums.energy_uj / 1e6,
            }
            for key, sums in grouped(rows, by).items()
        ],
    }


def not_counted(by: str, since: str | None, today: date) -> Mapping[str, Any]:
    """Return the ``usage`` object of a llamasup that does not count the usage. Raises UsageInvalid."""
    return report(
        [],
        read_by(by),
        None if since is None else read_since(since, today),
        problem="This llamasup does not count the usage: it runs with --no-usage or usage: {enabled: false}.",
    )


def csv_text(report: Mapping[str, Any]) -> str:
    """Write RFC 4180 with a header. A name that a spreadsheet would run as a formula gets an apostrophe."""
    import csv  # 2 ms, which a start does not have to pay

    text = io.StringIO()
    writer = csv.writer(text)
    names = (*report["by"], *COLUMNS)
    writer.writerow(names)
    for row in report["rows"]:
        writer.writerow([_cell(row.get(name)) for name in names])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
