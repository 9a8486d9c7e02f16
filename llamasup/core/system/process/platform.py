"""Services of the platform: executables, free ports, an event loop, and memory."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from llamasup.errors import BrokenRuntime


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """Return the absolute path of the executable ``name``. Raises BrokenRuntime."""
    if any(separator in name for separator in (os.sep, os.altsep or os.sep)):
        path = Path(name).absolute()
        if not path.exists():
            raise cannot_execute(str(path), os.strerror(errno.ENOENT))
        if path.is_dir():
            raise cannot_execute(str(path), os.strerror(errno.EISDIR))
        if not os.access(path, os.X_OK):
            raise cannot_execute(
                str(path), os.strerror(errno.EACCES), remedy=f"Make it executable: chmod +x {path}"
            )
        return str(path)
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise cannot_execute(name, "not found on PATH")
    return str(Path(found).absolute())


def cannot_execute(path: str, reason: str, *, remedy: str = "") -> BrokenRuntime:
    return BrokenRuntime(
        f"Cannot execute {path!r}: {reason}.",
        remedy=remedy or "Choose a llama-server that runs on this machine with --runtime.",
    )


def give_memory_back() -> None:
    """Return freed memory, which glibc keeps below a block in use. Takes 0.1 ms per returned MiB."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; None for other C libraries, which return memory themselves or have no such call."""
    import ctypes

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def free_loopback_port() -> int:
    """Return a free port. If another process takes it first, the next start tries another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which halves the proxy's cost per request, or None for asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
