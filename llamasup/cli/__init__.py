"""The command line: parses, calls and prints. Enter at ``app``.

Only this room, and ``command.py`` of the features, print and exit.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    """The ``llamasup`` command."""
    began_s = time.monotonic()
    from llamasup.cli.gc_pause import do_not_collect
    from llamasup.cli.stop_signals import STOP_SIGNALS, Interrupted, ensure_standard_streams

    do_not_collect()
    ensure_standard_streams()
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - the import of pathlib may be interrupted
        os.environ["HOME"] = "/"  # as container engines set it for a user without a name
    try:
        STOP_SIGNALS.install()
        from llamasup.core.system.native import native

        native.prepare_streams()
        from llamasup.cli.app import app

        app(prog_name="llamasup", obj=began_s)
    except Interrupted as interrupted:
        # For a server, a stop before its start is a success.
        serves = sys.argv[1:2] in (["run"], ["serve"], ["rpc-worker"], ["wrap"])
        sys.exit(0 if serves else 128 + interrupted.signal_number)
