"""The command line: parse, call, render. The only place that prints and exits."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The ``llamasup`` command."""
    from llamasup.cli.app import app

    app(prog_name="llamasup")
