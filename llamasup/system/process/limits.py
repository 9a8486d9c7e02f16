"""How many files and connections this process may have open.

The soft limit is 1,024 almost everywhere, for programs that use select(); the hard one is what the system
allows. A proxy needs two descriptors for a client that is being served, and uses epoll.
"""

from __future__ import annotations

import contextlib
import sys

if sys.platform != "win32":
    import resource

__all__ = ["give_back_limit", "raise_limit"]

# What a process had before ``raise_limit``: its children get it back, for they may well use select().
_before: tuple[int, int] | None = None

_NO_LIMIT = 1 << 20  # what the kernel allows a process at most, unless it was told otherwise (fs.nr_open)


def raise_limit() -> int:
    """Allow this process as many descriptors as it may have. Returns how many; 1,024 where nobody tells."""
    global _before
    if sys.platform != "linux":  # elsewhere a child could not get its own limit back
        return 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NO_LIMIT if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _before = _before or (soft, hard)
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


def give_back_limit(pid: int) -> None:
    """Let a child that was just started have the limit that we had."""
    if sys.platform == "linux" and _before is not None:
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
