"""Runs llama.cpp's HTTP server in this process until a stop signal.

``xllamacpp.Server(params)`` binds, loads and returns when the model is ready. It holds the interpreter until
then, while its HTTP threads answer (503 "Loading model" like llama-server), and installs no signal handler.
Its destructor stops the server, waits for it, and holds the interpreter meanwhile.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from llamasup.core.system.native import native

# The destructor tells the task loop to end. If the loop's thread has not begun the loop yet, it misses that
# and runs for ever (seen when stopped 20 to 200 µs after ready; xllamacpp 2026.10). 50 ms is far beyond.
_LOOP_BEGINS_S = 0.05

# The server's text if llama.cpp's log has the reason.
_LOGGED = "Failed to init server"


def serve(params: Any) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Until the model is loaded these signals end the process at once, as they do llama-server; the first one
    after that stops the server when its current batch is done, and a second one ends the process at once.
    """
    import xllamacpp

    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError, MemoryError) as error:
        if _LOGGED not in str(error):
            sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        _flush_log(xllamacpp.xllamacpp.__file__)
        return 1
    sockets = _SocketFiles(params.hostnames)
    ready_at = time.monotonic()
    native.wait_for_stop()
    sockets.remove()  # before the server closes them, so that no new file can get their inodes
    time.sleep(max(0.0, ready_at + _LOOP_BEGINS_S - time.monotonic()))
    del server
    return 0


def _flush_log(library: str) -> None:
    """Wait for the thread that writes llama.cpp's log: the process could end before the line that says why
    (1 of 558 starts on a port in use, eight at a time; xllamacpp 2026.10). xllamacpp has no call for it.
    """
    import ctypes

    functions = ctypes.CDLL(library)
    try:
        log, flush = functions._Z15common_log_mainv, functions._Z16common_log_flushP10common_log
    except AttributeError:  # other symbol names (Windows)
        return
    log.restype = ctypes.c_void_p
    flush.argtypes, flush.restype = [ctypes.c_void_p], None
    flush(log())


class _SocketFiles:
    """The Unix sockets that this process made. It removes them unless they were replaced: a supervisor may
    have put the next generation's socket at the same path.
    """

    __slots__ = ("_made",)

    def __init__(self, hostnames: list[str]) -> None:
        self._made = {path: identity for path in hostnames if (identity := _identity(path))}

    def remove(self) -> None:
        for path, identity in self._made.items():
            if _identity(path) == identity:
                Path(path).unlink(missing_ok=True)


def _identity(path: str) -> tuple[int, int] | None:
    if not path.endswith(".sock"):
        return None
    try:
        status = Path(path).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
