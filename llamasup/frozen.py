"""The main program of ``scripts/bundle``: it becomes llamasup, or the part that its first argument names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from llamasup.core.system.own_command import BUNDLE, MODULES, PART_ARGUMENT

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_LIBRARY_PATH_BEFORE = "LD_LIBRARY_PATH_ORIG"
_OF_PYINSTALLER = "_PYI_"


def main() -> None:
    """Run llamasup with the arguments in ``sys.argv``."""
    for name, value in _changes(os.environ, sys.platform).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    setattr(sys, "frozen", BUNDLE)  # noqa: B010 - unknown to mypy
    module, sys.argv[1:] = _chosen(sys.argv[1:])
    import_module(module).main()


def _chosen(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The module to run, and its arguments."""
    if list(arguments[:1]) == [PART_ARGUMENT]:
        for part, module in MODULES.items():
            if list(arguments[1:2]) == [part]:
                return module, arguments[2:]
    return MODULES["llamasup"], arguments


def _changes(environ: Mapping[str, str], platform: str) -> Mapping[str, str | None]:
    """Return variables that take back the changes of PyInstaller's start program for child processes.

    None means: remove the variable.

    On Linux it puts the folder of the bundle into LD_LIBRARY_PATH: llama-server would load the libraries of
    the bundle instead of those of the system (PyInstaller 6.22).
    """
    changes: dict[str, str | None] = {name: None for name in environ if name.startswith(_OF_PYINSTALLER)}
    if platform == "linux":
        changes |= {_LIBRARY_PATH: environ.get(_LIBRARY_PATH_BEFORE), _LIBRARY_PATH_BEFORE: None}
    return changes
