"""Shows the requests and tokens of each model, key and day (``llamasup usage``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from llamasup.cli.command_group import command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import fitted_table, stdout_columns
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.target import URL_VARIABLE, TargetOptions, find_target
from llamasup.core.system.text import printable
from llamasup.errors import LlamasupError, UsageInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from llamasup.cli.output.view import View

commands = command_set()

By = Annotated[str, option("--by", "GROUPS", "model, key or day, or several of them: day,model.")]
Since = Annotated[str | None, option("--since", "DAY", "The first day: YYYY-MM-DD, or 7d for 7 days ago.")]
Csv = Annotated[bool, flag("--csv", "Print comma-separated values.")]


@commands.command()
@takes_groups
@guarded
def usage(
    view: View,
    *,
    by: By = "model",
    since: Since = None,
    target: TargetOptions,
    json: o.Json = False,
    csv: Csv = False,
) -> None:
    """Show the requests and tokens of each model, key and day.

    Without --pid and --url, the command reads the file of your user, and needs no running llamasup.
    """
    from llamasup.features.usage.report import csv_text, read_by

    if json and csv:
        raise UsageInvalid("--json and --csv exclude each other.", remedy="Leave one of them out.")
    read_by(by)  # before a running llamasup is asked
    is_chosen = any(value is not None for value in target.values()) or os.environ.get(URL_VARIABLE)
    shown = _of_running(by, since, target) if is_chosen else _of_file(view, by, since)
    if shown["problem"]:
        view.say("warning", "usage", shown["problem"])
    if json:
        write_json(shown)
    elif csv:
        write_result(csv_text(shown).removesuffix("\r\n"))
    elif shown["rows"]:
        write_result(usage_table(shown, stdout_columns()))
    else:
        view.say("info", "usage", "There is no usage yet." if since is None else "There is no usage.")


def _of_running(by: str, since: str | None, target: o.OptionValues) -> Mapping[str, Any]:
    from llamasup.core.control.client import ControlClient

    with ControlClient(find_target(**target)) as client:
        return client.usage(by, since)


def _of_file(view: View, by: str, since: str | None) -> Mapping[str, Any]:
    """Read the usage from the file, after each running llamasup has saved its last minute."""
    from llamasup.features.usage.report import read_by, read_since, report
    from llamasup.features.usage.store import read_rows, today, usage_file

    groups = read_by(by)
    first = None if since is None else read_since(since, today())
    path = usage_file()
    _save_running(view, path)
    return report(read_rows(path, groups, first), groups, first, file=str(path), problem=None)


def _save_running(view: View, path: Path) -> None:
    """Let each running llamasup save its sums, which its answer does first."""
    from llamasup.core.control.client import ControlAddress, ControlClient
    from llamasup.core.control.discovery import discover

    for running in discover().running:
        name = f"llamasup (process {running.pid})"
        # The other llamasup may not count the usage, may have exited, or may be an older version.
        with suppress(LlamasupError), ControlClient(ControlAddress(socket=running.socket)) as client:
            answer = client.usage("day")
            if answer.get("problem"):
                view.say("warning", "usage", f"{name}: {answer['problem']}")
            elif answer.get("file") != str(path):
                view.say(
                    "info",
                    "usage",
                    f"{name} has another file: `llamasup usage --pid {running.pid}` shows its usage.",
                )


# --- the table ---------------------------------------------------------------------------------------

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
