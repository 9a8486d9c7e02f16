"""The main program of ``scripts/bundle``: becomes llamasup, or the part of it that its first argument names.

This module is imported only by a program that calls ``main``; ``own_command`` relies on that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module

from llamasup.system.own_command import MODULES, PART_ARGUMENT

__all__ = ["main"]

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_BEFORE = "LD_LIBRARY_PATH_ORIG"
_OF_PYINSTALLER = "_PYI_"


def main() -> None:
    """Run llamasup with the arguments in ``sys.argv``."""
    restore(os.environ)
    module = MODULES["llamasup"]
    if sys.argv[1:2] == [PART_ARGUMENT]:
        for part, its_module in MODULES.items():
            if sys.argv[2:3] == [part]:
                del sys.argv[1:3]
                module = its_module
    import_module(module).main()


def restore(environ: MutableMapping[str, str]) -> None:
    """Take back what PyInstaller's start program has set, before a child inherits it.

    On Linux it puts the bundle's folder into LD_LIBRARY_PATH: llama-server would load the bundle's libraries
    instead of the system's (PyInstaller 6.22).
    """
    for name in [name for name in environ if name.startswith(_OF_PYINSTALLER)]:
        del environ[name]
    if (before := environ.pop(_BEFORE, None)) is not None:
        environ[_LIBRARY_PATH] = before
    elif sys.platform == "linux":
        environ.pop(_LIBRARY_PATH, None)
