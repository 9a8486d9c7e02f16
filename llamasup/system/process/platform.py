"""What this platform offers to processes: executables, our own Python, free ports, an event loop, memory."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from llamasup.errors import BrokenRuntime

__all__ = [
    "broken",
    "find_executable",
    "free_loopback_port",
    "give_memory_back",
    "loop_factory",
    "python_executable",
]


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """The absolute path of what ``name`` means, or BrokenRuntime."""
    if os.sep in name or (os.altsep is not None and os.altsep in name):
        path = Path(name).absolute()
        if not path.exists():
            raise broken(str(path), os.strerror(errno.ENOENT))
        if path.is_dir():
            raise broken(str(path), os.strerror(errno.EISDIR))
        if not os.access(path, os.X_OK):
            raise broken(str(path), os.strerror(errno.EACCES), remedy=f"Make it executable: chmod +x {path}")
        return str(path)
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise broken(name, "not found on PATH")
    return str(Path(found).absolute())


def broken(path: str, reason: str, *, remedy: str = "") -> BrokenRuntime:
    return BrokenRuntime(
        f"Cannot execute {path!r}: {reason}.",
        remedy=remedy or "Name a llama-server that runs on this machine with --runtime.",
    )


def give_memory_back() -> None:
    """glibc keeps freed memory below a block in use. Takes 0.1 ms for each MiB that is returned."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function. None: other C libraries return memory themselves, or have no such call."""
    import ctypes

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows, where CDLL takes no None
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def python_executable() -> str | None:
    """The path of a Python that has our modules; None: there is none that could be run."""
    return None if getattr(sys, "frozen", False) else sys.executable or None


def free_loopback_port() -> int:
    """A port that was free a moment ago; if somebody takes it first, the next start asks for another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop halves the proxy's cost per request; without it everything works all the same."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
