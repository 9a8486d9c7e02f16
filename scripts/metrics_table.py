"""Writes the table of metrics into docs/observability.md, from the metric families of /metrics.

python scripts/metrics_table.py            write it
python scripts/metrics_table.py --check    exit code 1 if it is outdated
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup.core.observability.prometheus import own_families  # noqa: E402
from scripts.pages import main_of  # noqa: E402

DOC = ROOT / "docs" / "observability.md"
MARKS = "<!-- metrics: scripts/metrics_table.py -->", "<!-- end of metrics -->"
_SUFFIXES = {"counter": "_total"}


def table() -> str:
    rows = ["| metric | labels | type | |", "|---|---|---|---|"]
    for family in own_families():
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        name = family.name + _SUFFIXES.get(family.type, "")
        rows.append(f"| `{name}` | {labels} | {family.type} | {family.documentation} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, DOC, MARKS, table))
