"""The command line with which llamasup starts a part of itself as another process.

Python runs a part by its module or its file. The program that ``scripts/bundle`` makes has no Python: it
becomes the part that its hidden first argument names (``llamasup.frozen``). Another frozen application would
start itself again, so it has no command line for any part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

BUNDLE = "llamasup"
"""``sys.frozen`` of a program that becomes parts. PyInstaller sets it to True."""

Part = Literal["llamasup", "embedded", "exec_child", "exec_guardian", "sweep", "console_stop"]

PART_ARGUMENT = "--become"
"""The hidden first argument; the name of the part follows."""

MODULES: Mapping[Part, str] = MappingProxyType(
    {
        "llamasup": "llamasup.__main__",
        "embedded": "llamasup.embedded.__main__",
        "exec_child": "llamasup.core.system.process.exec_child",
        "exec_guardian": "llamasup.core.system.process.exec_guardian",
        "sweep": "llamasup.core.system.process.sweep",
        "console_stop": "llamasup.core.system.native.console_stop",
    }
)
"""Their modules. ``main()`` runs a part, with its own arguments in ``sys.argv``."""

# Files that import nothing of llamasup: without site-packages, Python starts in half the time.
_FILES = ("exec_child", "exec_guardian", "console_stop")
_ROOT = Path(__file__).parents[3]


def own_command(part: Part) -> tuple[str, ...] | None:
    """Return the command line of ``part``, which its arguments follow.

    Returns None if this program cannot start it.
    """
    if getattr(sys, "frozen", False) == BUNDLE:
        return (sys.executable,) if part == "llamasup" else (sys.executable, PART_ARGUMENT, part)
    python = python_executable()
    if python is None:
        return None
    if part in _FILES:
        return python, "-I", "-S", str(_ROOT.joinpath(*MODULES[part].split(".")).with_suffix(".py"))
    return python, "-P", "-m", MODULES[part].removesuffix(".__main__")


def python_executable() -> str | None:
    """Return the path of a Python with llamasup's modules; None in a frozen application."""
    return None if getattr(sys, "frozen", False) else sys.executable or None
