"""Writes the tables of keys into docs/configuration.md, from the Structs that decode a config.

python scripts/config_tables.py            write them
python scripts/config_tables.py --check    exit code 1 if they are outdated
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llamasup.config.config_keys import Config, ModelEntry, ModelKeys  # noqa: E402
from llamasup.config.json_schema import Row, rows_of  # noqa: E402
from llamasup.config.kinds import Section  # noqa: E402
from llamasup.config.reading import keys_of  # noqa: E402
from scripts.pages import keep_current  # noqa: E402

DOC = ROOT / "docs" / "configuration.md"
MARKS = "<!-- keys: scripts/config_tables.py -->", "<!-- end of keys -->"


def tables() -> str:
    parts = [_table("At the top", "", rows_of(Config))]
    for name, (_, key) in keys_of(Config).items():
        if name == "models":
            about = f"{key.about}\n\nOf one model, besides the keys of [`defaults`](#defaults):"
            parts.append(_table("`models`", about, rows_of(ModelEntry, but=ModelKeys)))
        elif isinstance(key.kind, Section):
            parts.append(
                _table(f"`{name}`", (key.kind.keys.__doc__ or "").replace("``", "`"), rows_of(key.kind.keys))
            )
    return "\n\n".join(parts)


def _table(title: str, about: str, rows: Iterable[Row]) -> str:
    lines = [
        f"### {title}",
        "",
        *([about, ""] if about else []),
        "| key | takes | default | |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{row.key}` | {_cell(row.takes)} | {_cell(row.default)} | {_cell(row.about)} |" for row in rows
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A table cell that shows patterns and variables unchanged."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--doc", type=Path, default=DOC)
    options = parser.parse_args()
    return keep_current(options.doc, MARKS, tables(), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
