"""Writes the table of metrics into docs/observability.md, from the families that /metrics is made of.

python scripts/metrics_table.py            write it
python scripts/metrics_table.py --check    exit code 1 if it is not what /metrics has
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamasup.control.metrics import own_families

DOC = Path(__file__).parents[1] / "docs" / "observability.md"
BEGIN, END = "<!-- metrics: scripts/metrics_table.py -->\n", "<!-- end of metrics -->\n"
_SUFFIXES = {"counter": "_total"}


def table() -> str:
    rows = ["| metric | labels | type | |", "|---|---|---|---|"]
    for family in own_families():
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        name = family.name + _SUFFIXES.get(family.type, "")
        rows.append(f"| `{name}` | {labels} | {family.type} | {family.documentation} |")
    return "".join(f"{row}\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--doc", type=Path, default=DOC)
    options = parser.parse_args()
    text = options.doc.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{options.doc}: no place for the table", file=sys.stderr)
        return 2
    new = before + BEGIN + table() + END + after
    if options.check:
        if new != text:
            print(f"{options.doc} is stale: run scripts/metrics_table.py", file=sys.stderr)
        return int(new != text)
    options.doc.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
