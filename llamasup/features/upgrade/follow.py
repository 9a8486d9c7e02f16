"""Follows the path of a llama-server: upgrades when it points to another build.

It imports asyncio, and reads the clock and the files; ``followed_path.py`` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, NoReturn

from llamasup.core.llama_server.inspect import build_at
from llamasup.errors import BuildUnproven, Conflict, LlamasupError
from llamasup.features.upgrade.followed_path import Followed, Outcome, after_upgrade, look

__all__ = ["follow"]

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""For some 20 stats, those of the program and its libraries."""


async def follow(
    path: str, running: Callable[[], str], upgrade: Callable[[str], Awaitable[object]]
) -> NoReturn:
    """Call ``upgrade`` with the file that ``path`` points to, each time it is another one.

    ``running``: the path of the build that serves now.
    """
    first = await asyncio.to_thread(build_at, running())
    followed = Followed(first, first)
    while True:
        await asyncio.sleep(POLL_S)
        seen = await asyncio.to_thread(build_at, path)
        followed, step = look(followed, seen, running(), monotonic())
        match step:
            case "upgrade":
                assert seen is not None
                outcome = await _outcome(upgrade, seen[0])
                followed = after_upgrade(followed, outcome, monotonic())
            case "replaced":
                _log.warning(
                    "upgrade: %s was replaced in place: its servers run the old build until their next "
                    "start, which takes the new one without a proof. Put each build into its own folder, and "
                    "change the link.",
                    running(),
                )
            case "missing":
                _log.warning("upgrade: %s points to nothing; the models keep their build", path)
            case "wait":
                pass


async def _outcome(upgrade: Callable[[str], Awaitable[object]], path: str) -> Outcome:
    """Upgrade, which logs its errors."""
    try:
        await upgrade(path)
    except Conflict:
        return "conflict"
    except BuildUnproven:
        return "unproven"
    except LlamasupError:
        return "refused"
    return "serves"
