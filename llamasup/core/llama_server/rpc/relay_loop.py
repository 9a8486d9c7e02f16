"""A thread with an event loop of its own for the relays of a tunnel.

Weights of many gigabytes pass through them, which would delay everything else in the main loop. And relays
need ``add_reader``, which the main loop does not have on Windows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["RelayLoop"]

T = TypeVar("T")

_STOP_S = 10.0


class RelayLoop:
    """Runs from its creation to ``close``. All methods may be called from any thread but its own."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._serve, name="rpc-tunnels", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` until it ends, or until its future or this loop is cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs, and wait for its end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def _serve(self) -> None:
        loop = self._loop
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()
