"""Formats the ``status`` object of the control API as text: the table of ``ps`` and ``status``.

``core/pool/catalog/status.py`` makes the object of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from llamasup.cli.output.layout import fitted_table, with_nodes
from llamasup.cli.output.view import duration_text
from llamasup.core.pool.shown_state import AWAY, IN_TROUBLE
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.system.text import memory_text, printable

Model = Mapping[str, Any]

_HEADINGS = ("NAME", "STATE", "SIZE", "DEVICE", "CONTEXT", "SLOTS", "MEMORY", "UNTIL", "RESTARTS")

# Left out on a narrow terminal, in this order.
_OPTIONAL = ("DEVICE", "SIZE", "RESTARTS", "CONTEXT", "UNTIL", "MEMORY", "SLOTS")


def models_table(models: Sequence[Model], columns: int | None = None) -> str:
    """One row for each model. A table wider than ``columns`` gets shorter names, then fewer columns."""
    now = datetime.now(UTC)
    rows = [_HEADINGS, *(_row(model, now) for model in models)]
    return fitted_table(with_nodes(rows, models), _OPTIONAL, columns)


def summary(status: Mapping[str, Any], shown: Sequence[Model], columns: int | None = None) -> str:
    """Version, address and uptime, the table of the ``shown`` models, and their problems."""
    lines = [
        f"llamasup {printable(str(status.get('version', '')))} (process {status.get('pid')}) "
        f"at {printable(str(status.get('url')))}, up {duration_text(float(status.get('uptime_s') or 0))}"
    ]
    if shown:
        lines.append(models_table(shown, columns))
    lines += filter(None, map(_problem, shown))
    lines += filter(None, map(_node_problem, status.get("nodes") or ()))
    return "\n".join(lines)


def _row(model: Model, now: datetime) -> tuple[str, ...]:
    # An older llamasup has fewer fields.
    memory = model.get("memory") or {}
    return (
        printable(str(model.get("id"))),
        _state(model),
        _or_dash(model.get("size_bytes"), memory_text),
        printable(str(model.get("device") or "-")),
        "-" if model.get("state") in AWAY else _or_dash(model.get("ctx_size")),
        "-" if model.get("state") in AWAY else _slots(model),
        _memory(memory.get("ram_bytes"), memory.get("vram_bytes")),
        _until(model, now),
        _or_dash(model.get("restarts")),
    )


def _state(model: Model) -> str:
    """Format the state: ``ready``, ``loading 43 %, 12 s``."""
    load = model.get("load") or {}
    shown = progress_text(load.get("percent"), load.get("eta_s"), after="")
    return printable(str(model.get("state"))) + (f" {shown}" if shown else "")


def _or_dash(value: int | None, text: Callable[[int], str] = str) -> str:
    return "-" if value is None else text(value)


def _slots(model: Model) -> str:
    """Format the slots: ``busy/slots +queued``."""
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


def _node_problem(node: Mapping[str, Any]) -> str:
    """Say why another node gets no requests."""
    if not node.get("reason"):
        return ""
    remedy = f"\n  → {printable(str(node['remedy']))}" if node.get("remedy") else ""
    return printable(f"node {node.get('name')} ({node.get('url')}): {node['reason']}") + remedy


def _problem(model: Model) -> str:
    """The problem and remedy of a model that cannot serve: the last exit of its server, if it had one."""
    if model.get("state") not in IN_TROUBLE:
        return ""
    last = model.get("last_exit")
    if last is None:
        problem, remedy = model.get("problem"), model.get("remedy")
    else:
        status = last.get("signal") or (f"exit code {last['code']}" if last.get("code") is not None else "")
        problem = f"{last.get('cause')}" + (f" ({status})" if status else "")
        remedy = last.get("remedy")
    if not problem:
        return ""
    return printable(f"{model.get('id')}: {problem}") + (f"\n  → {printable(remedy)}" if remedy else "")
