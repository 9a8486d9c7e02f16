"""Hides the differences between operating systems behind one interface (``interface.py``).

``native`` is the implementation for this system. All other code calls it, and does not ask which system it
runs on. The modules import only ``own_command`` of llamasup, and little of Python: each start loads them.
mypy checks each of them for its own system.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamasup.core.system.native.interface import Native

if sys.platform == "linux":
    from llamasup.core.system.native.linux import Linux

    native: Native = Linux()
elif sys.platform == "win32":
    from llamasup.core.system.native.windows import Windows

    native: Native = Windows()
else:
    from llamasup.core.system.native.macos import MacOS

    native: Native = MacOS()

__all__ = ["native"]
