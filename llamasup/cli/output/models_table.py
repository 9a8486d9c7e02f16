"""The ``status`` object as people read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from llamasup.cli.output.layout import cut_to, table
from llamasup.cli.output.view import duration_text
from llamasup.pool.state import AWAY
from llamasup.system.text import display_width, memory_text, printable

__all__ = ["models_table", "summary"]

Model = Mapping[str, Any]
Rows = list[tuple[str, ...]]

_HEADINGS = ("NAME", "STATE", "SIZE", "DEVICE", "CONTEXT", "SLOTS", "MEMORY", "UNTIL", "RESTARTS")

# Where a terminal is too narrow for all, these are left out, the first ones first.
_DISPENSABLE = ("DEVICE", "SIZE", "RESTARTS", "CONTEXT", "UNTIL", "MEMORY", "SLOTS")
_MIN_NAME = 16  # a shorter one could be any


def models_table(models: Sequence[Model], columns: int | None = None) -> str:
    """A row each; of ``columns`` width at most, if given: by shorter names, then by fewer columns."""
    now = datetime.now(UTC)
    rows: Rows = [_HEADINGS, *(_row(model, now) for model in models)]
    shown = table(rows, indent="")
    if columns is None or _width(shown) <= columns:
        return shown
    rows = [(cut_to(max(_MIN_NAME, columns // 3), name), *rest) for name, *rest in rows]
    for heading in ("", *_DISPENSABLE):
        if heading:
            left_out = rows[0].index(heading)
            rows = [(*row[:left_out], *row[left_out + 1 :]) for row in rows]
        shown = table(rows, indent="")
        if _width(shown) <= columns:
            break
    return shown


def _width(text: str) -> int:
    return max(map(display_width, text.splitlines()))


def summary(status: Mapping[str, Any], shown: Sequence[Model], columns: int | None = None) -> str:
    """Version, address and uptime, the table of the ``shown`` models, and their problems."""
    lines = [
        f"llamasup {printable(str(status.get('version', '')))} (process {status.get('pid')}) "
        f"at {printable(str(status.get('url')))}, up {duration_text(float(status.get('uptime_s') or 0))}"
    ]
    if shown:
        lines.append(models_table(shown, columns))
    lines += [told for model in shown if (told := _trouble(model))]
    return "\n".join(lines)


def _row(model: Model, now: datetime) -> tuple[str, ...]:
    # What an older llamasup does not tell is not known.
    memory = model.get("memory") or {}
    return (
        printable(str(model.get("id"))),
        printable(str(model.get("state"))),
        _size(model.get("size_bytes")),
        printable(str(model.get("device") or "-")),
        "-" if model.get("state") in AWAY else _count(model.get("ctx_size")),
        "-" if model.get("state") in AWAY else _slots(model),
        _memory(memory.get("ram_bytes"), memory.get("vram_bytes")),
        _until(model, now),
        _count(model.get("restarts")),
    )


def _size(count_bytes: int | None) -> str:
    return "-" if count_bytes is None else memory_text(count_bytes)


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _slots(model: Model) -> str:
    """Busy and all slots, and the number of queued requests."""
    slots = model.get("slots")
    busy = model.get("slots_busy", model.get("in_flight"))
    waiting = f" +{model['queued']}" if model.get("queued") else ""
    return f"{busy}/{slots}{waiting}" if slots is not None else f"{busy or '-'}{waiting}"


def _memory(ram_bytes: int | None, vram_bytes: int | None) -> str:
    if ram_bytes is None:
        return "-"
    vram = "" if vram_bytes is None else f" + {memory_text(vram_bytes)} VRAM"
    return f"{memory_text(ram_bytes)}{vram}"


def _until(model: Model, now: datetime) -> str:
    if model.get("pinned"):
        return "pinned"
    if (until := model.get("until")) is None:
        return "-"
    return f"in {duration_text(max(0.0, (datetime.fromisoformat(until) - now).total_seconds()))}"


def _trouble(model: Model) -> str:
    """Of one that does not serve as it should: why, or how its server ended last."""
    if model.get("state") not in ("failed", "backoff", "broken"):
        return ""
    last = model.get("last_exit")
    if last is None:
        why = model.get("problem")
        return _told(f"{model.get('id')}: {why}", model.get("remedy")) if why else ""
    how = last.get("signal") or (f"exit code {last['code']}" if last.get("code") is not None else "")
    told = f"{model.get('id')}: {last.get('cause')}" + (f" ({how})" if how else "")
    return _told(told, last.get("remedy"))


def _told(what: str, remedy: str | None) -> str:
    return printable(what) + (f"\n  → {printable(remedy)}" if remedy else "")
