"""The table of targets of docs/performance.md, computed from the tables of measurements in this page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from scripts.pages import DOCS

_NUMBER = re.compile(r"[\d,]+(?:\.\d+)?")
_PART = re.compile(r"<!-- (\w+): python -m .*?-->(.*?)<!-- end of \1 -->", re.DOTALL)
_SATURATED, _ONE_RATE = "CPU per request, saturated, 32 connections", "CPU per request, 2,000 requests/s"
_CHUNK = "CPU per streamed chunk"
# The targets that are ratios to nginx: their words, and their rows in the table of ratios, with the limits.
_RATIOS = (
    ("P1: CPU per request, saturated", f"{_SATURATED}: run / nginx"),
    ("P1: CPU per request at 2,000 requests/s", f"{_ONE_RATE}: run / nginx"),
    ("P2: CPU per streamed chunk", f"{_CHUNK}: run / nginx"),
)

Row = Mapping[str, str]


def table() -> str:
    """A row for each target: its limit, what the page has measured, and whether it is reached."""
    lines = ["| Target | Limit | Measured | Reached |", "|---|---:|---:|---|"]
    lines += [
        f"| {target} | {limit} | {measured} | {'yes' if reached else 'no'} |"
        for target, limit, measured, reached in _targets()
    ]
    return "\n".join(lines)


def _targets() -> Iterator[tuple[str, str, str, bool]]:
    parts = dict(_PART.findall((DOCS / "performance.md").read_text("utf-8")))
    proxy, start, swap = _rows(parts["proxy"]), _rows(parts["start"]), _rows(parts["swap"])
    for target, name in _RATIOS:
        measured, limit = _first(proxy[name]["Measured"]), _first(proxy[name]["Limit"])
        yield target, f"{limit:g} × nginx", f"{measured:.2f} × nginx", measured <= limit
    for which, name, limit in (("median", "first byte, median, ms", 0.3), ("p99", "first byte, p99, ms", 1)):
        added = _first(proxy[name]["run"]) - _first(proxy[name]["direct"])
        target = f"P3: time added to the first byte, {which}"
        yield target, f"{limit:g} ms", f"{added:.2f} ms", added <= limit
    names = ("lost", "out of order", "later than 50 ms")
    wrong = sum(_first(proxy[f"many streams: {name}"]["run"]) for name in names)
    yield "P4: of many streams, tokens lost, out of order or later than 50 ms", "0", f"{wrong:g}", wrong == 0
    memory_mb = _first(proxy["many streams: RSS above idle, MB"]["run"])
    yield "P4: memory of many streams above idle", "60 MB", f"{memory_mb:g} MB", memory_mb <= 60
    for target, rows, name, limit in (
        ("P5: from exec to ready, without llama-server's own start", start, "llamasup's share", 150),
        ("`--version`", start, "--version", 80),
        ("`--help`", start, "--help", 80),
        ("`ps`", start, "ps", 200),
        ("`serve`: llamasup's share of a model's start", swap, "llamasup's share of a cold start", 50),
        ("`serve`: llamasup's share of a swap", swap, "llamasup's share of a swap", 50),
    ):
        took_ms = _first(list(rows[name].values())[1])  # the median, of llama-server if there are two
        yield target, f"{limit} ms", f"{took_ms:g} ms", took_ms <= limit


def _rows(part: str) -> Mapping[str, Row]:
    """The rows of all tables of a part by their first cells; of equal first cells, the first row."""
    found: dict[str, Row] = {}
    head: list[str] = []
    for line in part.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells
        elif set(cells[0]) - {"-", ":"}:
            found.setdefault(cells[0], dict(zip(head, cells, strict=True)))
    return found


def _first(cell: str) -> float:
    """The median in a cell, which may be followed by a range."""
    number = _NUMBER.search(cell)
    if number is None:
        raise ValueError(f"docs/performance.md has no number in the cell {cell!r}")
    return float(number[0].replace(",", ""))
