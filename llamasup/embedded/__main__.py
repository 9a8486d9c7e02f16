"""Behaves like the program llama-server: ``python -m llamasup.embedded``."""

from __future__ import annotations

import signal
import sys

# Like in a C program, a signal during start and load ends the process at once, without KeyboardInterrupt and
# its traceback. First, because the imports below take tens of milliseconds.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main() -> None:
    from llamasup.embedded.program import main as run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
