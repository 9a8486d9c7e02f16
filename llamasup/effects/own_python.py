"""The Python that runs us, where another process can be made of it.

In a frozen application (PyInstaller) ``sys.executable`` is the application: to run a module with it would be
to start that a second time. An interpreter inside another program may have none at all.
"""

from __future__ import annotations

import sys

__all__ = ["own_python"]


def own_python() -> str | None:
    """The path of a Python that has our modules; None: there is none that could be run."""
    return None if getattr(sys, "frozen", False) else sys.executable or None
