"""Runs what blocks in a thread, to its end: files are not closed under it, whatever happens to its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], executor: Executor | None = None) -> T:
    """Return the result of ``function``. A cancelled caller gets its CancelledError after the end of the
    thread.

    So ``function`` must take a bounded time.
    """
    calling = asyncio.get_running_loop().run_in_executor(executor, function)
    cancelled: asyncio.CancelledError | None = None
    while not calling.done():
        try:
            await asyncio.wait((calling,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        calling.exception()  # read, so that asyncio does not log it
        raise cancelled
    return calling.result()
