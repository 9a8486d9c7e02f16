"""Run one module of a folder of scripts by its name: ``python -m scripts.bench NAME``.

Such a module has ``add_options``, which declares its options, and ``main``, which gets them. If it has
``PAGE``, the name of a page of docs/, it has the option ``--write``, and ``main`` gives its result to
``publish``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from scripts.pages import DOCS, keep_current, marks_of


def run(package: str, purposes: Mapping[str, str]) -> None:
    """Run what the command line names; exit with its exit code. Without a name, list the names."""
    command = f"python -m {package}"
    if len(sys.argv) < 2 or sys.argv[1] not in purposes:
        listed = "\n".join(f"    {name:12} {purpose}" for name, purpose in purposes.items())
        print(f"usage: {command} NAME [OPTIONS]; the options of one: {command} NAME --help\n\n{listed}")
        sys.exit(0 if sys.argv[1:2] in ([], ["--help"], ["-h"]) else 2)
    name = sys.argv[1]
    module = import_module(f"{package}.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"{command} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=f"{command} {name}", part=name)
    module.add_options(parser)
    if page := getattr(module, "PAGE", ""):
        parser.set_defaults(page=DOCS / page)
        text = f"write the result into docs/{page}, or into the page PAGE"
        parser.add_argument("--write", nargs="?", const=DOCS / page, type=Path, metavar="PAGE", help=text)
    sys.exit(module.main(parser.parse_args(sys.argv[2:])))


def publish(options: argparse.Namespace, text: str, part: str = "") -> int:
    """Print a result. Write it between its marks with ``--write``; with ``--check``, compare the page.

    ``part`` is the name in the marks, by default that of the module. Returns the exit code.
    """
    print(text, flush=True)
    checks = getattr(options, "check", False)
    if options.write is None and not checks:
        return 0
    marks = marks_of(part or options.part, options.command)
    page = options.write or options.page
    code = keep_current(page, marks, f"\n{text}\n", checks, f"{options.command} --write")
    if code > 1:
        sys.exit(code)
    return code
