"""The errors that clients get because a llama-server, or the connection to it, has failed."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from llamasup.core.http.heads import HttpError

TRANSIENT: Final = (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError)
"""The child or its socket file is gone, or its backlog is full. Supervision handles these."""


def connect_failure(server: str, error: OSError | TimeoutError) -> HttpError:
    """No connection could be made."""
    if isinstance(error, TimeoutError):
        status, reason = 504, f"timeout while connecting to {server}"
    elif isinstance(error, (ConnectionRefusedError, FileNotFoundError, BlockingIOError)):
        status, reason = 503, f"{server} accepts no connections ({error.strerror or error})"
    else:
        status, reason = 502, f"{server} cannot be reached ({error.strerror or error})"
    return HttpError(status, reason, "unavailable_error", "upstream_unreachable", "try again shortly", 1.0)


def broken_answer(server: str, reason: str) -> HttpError:
    """The answer cannot be completed."""
    return HttpError(502, f"{server} {reason}", "server_error", "upstream_broke", "see llamasup's log")


def silent_answer(server: str, idle_s: float) -> HttpError:
    """The answer has made no progress for ``idle_s``."""
    reason = f"{server} has sent nothing for {idle_s:g} s"
    return HttpError(504, reason, "timeout_error", "upstream_idle", "try again")


def refused_key(server: str) -> HttpError:
    """Another node does not accept our key."""
    reason = f"{server} does not accept our key"
    return HttpError(502, reason, "server_error", "node_refused", "see llamasup's log")


def with_cause(error: HttpError, why: HttpError) -> HttpError:
    """The same error with the cause, once that is known."""
    return replace(error, message=why.message, cause=why.cause, remedy=why.remedy)
