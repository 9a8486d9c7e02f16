"""Upgrades to the build that a symbolic link points to, each time the link changes.

It imports asyncio, and reads the clock and the link.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NoReturn

from llamasup.errors import BuildUnproven, Conflict, LlamasupError
from llamasup.system.storage.fact_cache import FileIdentity

__all__ = ["follow_link"]

_log = logging.getLogger(__name__)

_POLL_S = 1.0  # a stat
_RETRY_S = 600.0  # after an upgrade that another time may succeed


async def follow_link(
    link: str,
    running: Callable[[], str],
    upgrade: Callable[[str], Awaitable[object]],
    *,
    poll_s: float = _POLL_S,
    retry_s: float = _RETRY_S,
) -> NoReturn:
    """Call ``upgrade`` with the file that ``link`` leads to, once that is another one and no longer changes.

    ``running``: the path of the build that serves now. A build that is refused is tried again when the link
    or the file changes; one that is not proven, or that waits for another upgrade, also after ``retry_s``.
    """
    handled = serving = _seen(running())
    retry_at_s = math.inf
    while True:
        await asyncio.sleep(poll_s)
        seen = await asyncio.to_thread(_seen, link)
        if seen is None or (seen == handled and monotonic() < retry_at_s):
            continue  # None: the link is being replaced
        await asyncio.sleep(poll_s)
        if seen != await asyncio.to_thread(_seen, link):
            continue  # it is still being written
        handled, retry_at_s = seen, math.inf
        if seen.path != running():
            if await _may_succeed_later(upgrade, seen.path):
                retry_at_s = monotonic() + retry_s
            elif seen.path == running():
                serving = seen
        elif serving is not None and seen.path == serving.path and seen != serving:
            serving = seen
            _log.warning(
                "upgrade: %s was replaced in place: its servers run the old build until their next start, "
                "which takes the new one without a proof. Put each build into its own folder, and change the "
                "link.",
                seen.path,
            )


def _seen(path: str) -> FileIdentity | None:
    try:
        return FileIdentity.of(path)
    except OSError:
        return None


async def _may_succeed_later(upgrade: Callable[[str], Awaitable[object]], path: str) -> bool:
    """Upgrade, which logs its errors. Whether another try may have another result."""
    try:
        await upgrade(path)
    except (BuildUnproven, Conflict):
        return True
    except LlamasupError:
        pass
    return False
