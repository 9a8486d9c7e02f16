"""The command line: parse, call, render. The only place that prints and exits."""

from __future__ import annotations

import sys
import time

__all__ = ["main"]


def main() -> None:
    """The ``llamasup`` command."""
    began_s = time.monotonic()
    from llamasup.cli.process import STOP_SIGNALS, Interrupted, ensure_standard_streams

    ensure_standard_streams()
    try:
        STOP_SIGNALS.install()
        from llamasup.cli.app import app

        app(prog_name="llamasup", obj=began_s)
    except Interrupted as interrupted:
        # A server that was asked to stop before it could start has done what it was asked.
        sys.exit(0 if sys.argv[1:2] in (["run"], ["wrap"]) else 128 + interrupted.signal_number)
