"""The command line: parse, call, render. The only place that prints and exits."""

from __future__ import annotations

import time

__all__ = ["main"]


def main() -> None:
    """The ``llamasup`` command."""
    began_s = time.monotonic()
    from llamasup.cli.app import app

    app(prog_name="llamasup", obj=began_s)
