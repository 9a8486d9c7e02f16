"""Formats the ``usage`` object of the contract as a table (``llamasup usage``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamasup.cli.output.layout import fitted_table
from llamasup.core.system.text import printable

Row = Mapping[str, Any]

# Left out on a narrow terminal, in this order.
_OPTIONAL = ("ENERGY", "SLOT TIME", "CACHED", "ERRORS")


def usage_table(usage: Mapping[str, Any], columns: int | None = None) -> str:
    """One row for each group. The energy has a column if it was measured."""
    by, rows = usage["by"], usage["rows"]
    has_energy = any(row.get("energy_j") is not None for row in rows)
    headings = (*map(str.upper, by), "REQUESTS", "ERRORS", "PROMPT", "CACHED", "COMPLETION", "SLOT TIME")
    shown = [_row(row, by) for row in rows]
    if has_energy:
        headings = (*headings, "ENERGY")
        shown = [(*cells, _energy(row)) for cells, row in zip(shown, rows, strict=True)]
    return fitted_table([headings, *shown], [name for name in _OPTIONAL if name in headings], columns)


def _row(row: Row, by: Sequence[str]) -> tuple[str, ...]:
    about = f" +{row['tokens_estimated']:,} est." if row["tokens_estimated"] else ""
    return (
        *(printable(str(row.get(name) or "-")) for name in by),
        f"{row['requests']:,}",
        f"{row['errors']:,}",
        f"{row['tokens_prompt']:,}",
        f"{row['tokens_cached']:,}",
        f"{row['tokens_completion']:,}{about}",
        _time(row["slot_s"]),
    )


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def _energy(row: Row) -> str:
    joules = row.get("energy_j")
    if joules is None:
        return "-"
    return f"{joules:,.0f} J" if joules < 36_000 else f"{joules / 3.6e6:,.2f} kWh"
