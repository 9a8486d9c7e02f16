#!/usr/bin/env python3
"""Write the generated parts of the docs: tables, diagrams and the Grafana board, each from its code.

    scripts/docs.py                  write all parts
    scripts/docs.py causes rooms     write these parts
    scripts/docs.py --check          write nothing; exit code 1 if a part is outdated
    scripts/docs.py --list           the parts with their files

``--root FOLDER`` writes into the files of another folder. What needs minutes (``scripts/bench``,
``scripts/simulate``) or a browser (``scripts/pictures``) is not here.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.pages import keep_current, marks_of  # noqa: E402


class Part(NamedTuple):
    """A generated part of a file: between its marks, or the whole file."""

    file: str
    maker: str
    """The function that returns the text, as ``module:function`` in ``scripts/generated``."""
    is_whole_file: bool = False


# A module is imported only for its parts: some need the tests, or grimp.
PARTS = {
    "arguments": Part("llamasup/api/arguments.py", "settings:arguments"),
    "causes": Part("docs/sidecar.md", "tables:causes"),
    "checks": Part("docs/security.md", "security:checks_list"),
    "golden-help": Part("tests/golden/help.txt", "contract:help_texts", is_whole_file=True),
    "golden-schema": Part("tests/golden/config-schema.json", "contract:config_schema", is_whole_file=True),
    "exchange-states": Part(
        "docs/diagrams/exchange-states.mmd", "tables:exchange_states", is_whole_file=True
    ),
    **{
        f"completion-{shell}": Part(f"packaging/completions/{file}", f"man_page:{shell}", is_whole_file=True)
        for shell, file in (("bash", "llamasup.bash"), ("zsh", "_llamasup"), ("fish", "llamasup.fish"))
    },
    "grafana": Part("configs/grafana/llamasup.json", "grafana_board:board_text", is_whole_file=True),
    "keys": Part("docs/configuration.md", "settings:keys"),
    "man": Part("packaging/llamasup.1", "man_page:man_page", is_whole_file=True),
    "metrics": Part("docs/observability.md", "tables:metrics"),
    "pool-states": Part("docs/diagrams/model-states.mmd", "pool_states:diagram", is_whole_file=True),
    "reach": Part("docs/security.md", "security:reach_table"),
    "rooms": Part("docs/diagrams/rooms.mmd", "rooms:diagram", is_whole_file=True),
    "states": Part("docs/diagrams/server-states.mmd", "states:diagram", is_whole_file=True),
    "targets": Part("docs/performance.md", "targets:table"),
}


def text_of(name: str) -> str:
    module, _, function = PARTS[name].maker.partition(":")
    return str(getattr(import_module(f"scripts.generated.{module}"), function)())


def keep(name: str, root: Path, *, check: bool) -> int:
    """Write a part or, with ``check``, only compare it. Returns the exit code: 1 outdated, 2 no marks."""
    part = PARTS[name]
    is_python = part.file.endswith(".py")
    marks = None if part.is_whole_file else marks_of(name, "scripts/docs.py", python=is_python)
    return keep_current(root / part.file, marks, text_of(name), check, f"scripts/docs.py {name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--list", action="store_true", help="print the parts with their files")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.list:
        print("\n".join(f"{name:12} {part.file}" for name, part in PARTS.items()))
        return 0
    return max(keep(name, options.root, check=options.check) for name in options.parts or PARTS)


if __name__ == "__main__":
    sys.exit(main())
