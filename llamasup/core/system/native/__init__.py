"""Hides the differences between operating systems behind methods of the same names.

``native`` is the object for this system; begin with ``posix.py``. All other code calls it, and does not ask
which system it runs on. The modules import only ``own_command`` of llamasup, and little of Python: each start
loads them. mypy checks each of them for its own system.
"""

from __future__ import annotations

import sys

if sys.platform == "linux":
    from llamasup.core.system.native.linux import Linux

    native = Linux()
elif sys.platform == "win32":
    from llamasup.core.system.native.windows import Windows

    native = Windows()
else:
    from llamasup.core.system.native.macos import MacOS

    native = MacOS()

__all__ = ["native"]
