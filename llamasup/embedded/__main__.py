"""``python -m llamasup.embedded``: behave as the program llama-server."""

from __future__ import annotations

import signal
import sys

# As in a C program, a signal during start and load ends the process at once: no handler, and so no
# KeyboardInterrupt with its traceback either. First, because what follows takes tens of milliseconds.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

if __name__ == "__main__":
    from llamasup.embedded.program import main

    sys.exit(main(sys.argv[1:]))
