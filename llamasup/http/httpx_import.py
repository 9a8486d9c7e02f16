"""httpx without its own command line, which it imports wherever that could run.

That one takes rich, pygments and click along: 60 ms of every start, and 6 MB for as long as the service lives
(httpx 0.28, measured). A module that is None in ``sys.modules`` cannot be imported; httpx goes on without it.
"""

from __future__ import annotations

import sys

__all__ = ["httpx"]

_COMMAND_LINE = "httpx._main"

if _COMMAND_LINE in sys.modules:  # whoever uses us as a library has imported it whole
    import httpx
else:
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        del sys.modules[_COMMAND_LINE]
