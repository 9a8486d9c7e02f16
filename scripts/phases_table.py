"""Writes the phases of a client connection into docs/proxy.md.

python scripts/phases_table.py            write it
python scripts/phases_table.py --check    exit code 1 if it is outdated
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup.core.proxy.phases import PHASES, longest_s  # noqa: E402
from llamasup.core.proxy.settings import Limits  # noqa: E402
from scripts.pages import main_of  # noqa: E402

DOC = ROOT / "docs" / "proxy.md"
MARKS = "<!-- phases: scripts/phases_table.py -->", "<!-- end of phases -->"


def table() -> str:
    rows = ["| phase | of the connection | at most | and then |", "|---|---|---|---|"]
    for phase, rule in PHASES.items():
        limit = f"`{rule.limit}`, {longest_s(phase, Limits()):g} s" if rule.limit else "–"
        end = "" if not rule.limit else f"408: the {rule.part} took too long" if rule.part else "closed"
        rows.append(f"| {phase.value} | {rule.meaning} | {limit} | {end} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, DOC, MARKS, table))
