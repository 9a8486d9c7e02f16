"""Writes the table of causes into docs/sidecar.md: those of ``failed`` and ``exit``, by the exit code.

python scripts/causes_table.py            write it
python scripts/causes_table.py --check    exit code 1 if it is outdated
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup import errors  # noqa: E402
from llamasup.core.llama_server import diagnosis  # noqa: E402
from scripts.pages import main_of  # noqa: E402

DOC = ROOT / "docs" / "sidecar.md"
MARKS = "<!-- causes: scripts/causes_table.py -->", "<!-- end of causes -->"
# A diagnosis that no line of the log gives: where it is made, its cause and its exit code are literals.
_MADE = re.compile(r'Diagnosis\(\s*cause="(\w+)",(?:(?!Diagnosis\().)*?exit_code=(\d+)', re.DOTALL)
_HANGS = re.compile(r'_hang\(\s*"(\w+)"')
_HANG_CODE = 75


def table() -> str:
    of_llamasup, of_server = defaultdict(set), defaultdict(set)
    for error_class in errors.ERRORS:
        if error_class is not errors.ServerFailed:
            of_llamasup[error_class.exit_code].add(error_class.cause)
    others = (diagnosis._OOM_KILLED, diagnosis._KILLED_BY, diagnosis._EXITED, diagnosis._UNKNOWN)
    for rule in (*diagnosis._RULES, *diagnosis._SIGNALS.values(), *others):
        of_server[rule.exit_code].add(rule.cause)
    for path in (ROOT / "llamasup").rglob("*.py"):
        source = path.read_text("utf-8")
        for cause, code in _MADE.findall(source):
            of_server[int(code)].add(cause)
        of_server[_HANG_CODE].update(_HANGS.findall(source))
    rows = ["| Exit code | Causes found by llamasup | Causes of the end of a llama-server |", "|---|---|---|"]
    for code in sorted({*of_llamasup, *of_server}):
        names = (", ".join(f"`{cause}`" for cause in sorted(of[code])) for of in (of_llamasup, of_server))
        rows.append(f"| {code} | {' | '.join(names)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, DOC, MARKS, table))
