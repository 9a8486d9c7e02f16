"""Imports httpx without its command line, which would import rich, pygments and click.

That would take 60 ms of every start and 6 MB of memory (httpx 0.28, measured). A module that is None in
``sys.modules`` cannot be imported, and httpx works without it.
"""

from __future__ import annotations

import sys

__all__ = ["httpx"]

_COMMAND_LINE = "httpx._main"

if _COMMAND_LINE in sys.modules:  # the embedding program has imported it already
    import httpx
else:
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        del sys.modules[_COMMAND_LINE]
