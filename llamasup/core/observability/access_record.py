"""Formats a finished request as one line of JSON, and limits how many slow requests are logged.

A line never contains a prompt, a completion, a key or a query.
"""

from __future__ import annotations

import re
from datetime import datetime
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from llamasup.core.observability.counters import RequestRecord

_LONGEST_PATH = 512  # a client may send one of 64 KiB
_UNPRINTABLE = re.compile(r"[^!-~]")


# The fields of ``RequestRecord`` in the order of the output.
_FIELDS = (
    *("request_id", "trace_id", "client", "method", "path", "route", "model", "generation", "status"),
    *("outcome", "queue_s", "waited_s", "first_byte_s", "duration_s", "bytes_in", "bytes_out"),
    *("tokens_prompt", "tokens_cached", "tokens_completion", "tokens_per_s"),
    *("context", "n_prompt_tokens", "n_ctx", "replayed", "continued", "repaired", "cause"),
)
_values = attrgetter(*_FIELDS)
_SECONDS = ("queue_s", "waited_s", "first_byte_s", "duration_s")
_NULL_IF_EMPTY = ("trace_id", "client", "model", "context", "repaired", "cause")

_encode = msgspec.json.Encoder().encode


def access_line(record: RequestRecord, ended: datetime) -> bytes:
    """Format the line with its line feed. ``ended`` is the end of the request in UTC."""
    return _encode(access_record(record, ended)) + b"\n"


def access_record(record: RequestRecord, ended: datetime) -> dict[str, Any]:
    """Return the JSON object of the line."""
    shown: dict[str, Any] = {"time": ended, **dict(zip(_FIELDS, _values(record), strict=True))}
    shown["path"] = shown_path(record.path)
    for name in _SECONDS:
        if (seconds := shown[name]) is not None:
            shown[name] = int(seconds * 1e6) / 1e6  # microseconds, three times as fast as round()
    for name in _NULL_IF_EMPTY:
        shown[name] = shown[name] or None
    if (speed := record.tokens_per_s) is not None:
        shown["tokens_per_s"] = int(speed * 100) / 100
    return shown


def shortened(record: RequestRecord) -> RequestRecord:
    """Cut the path of the record to the shown length, as 20,000 records may wait for a slow disk."""
    if len(record.path) <= _LONGEST_PATH:
        return record
    return msgspec.structs.replace(record, path=record.path[: _LONGEST_PATH + 1])


def shown_path(path: str) -> str:
    """Bound the length of the path, and remove terminal control characters."""
    if len(path) <= _LONGEST_PATH and not _UNPRINTABLE.search(path):
        return path
    safe = _UNPRINTABLE.sub(
        lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("latin-1", "replace")), path
    )
    return safe if len(safe) <= _LONGEST_PATH else safe[:_LONGEST_PATH] + "…"


# A person can read one line in 5 s; the first ten are logged at once, so that a burst is complete.
_BURST = 10.0
_PER_SECOND = 0.2


class SlowLog(Struct, frozen=True):
    """A token bucket. ``allowed``: lines that may be logged now; ``left_out``: those not logged since."""

    at_s: float
    allowed: float = _BURST
    left_out: int = 0


def waiting_time_s(first_byte_s: float | None, duration_s: float) -> float:
    """Compute how long the client waited for the first byte, or for the end if no byte came.

    The rest of a stream is not part of it: a long answer is not slow.
    """
    return duration_s if first_byte_s is None else first_byte_s


def admit_slow(log: SlowLog, now_s: float) -> tuple[SlowLog, bool]:
    """Whether to log this slow request; ``log.left_out`` says how many before it were not logged."""
    allowed = min(_BURST, log.allowed + (now_s - log.at_s) * _PER_SECOND)
    if allowed < 1.0:
        return SlowLog(now_s, allowed, log.left_out + 1), False
    return SlowLog(now_s, allowed - 1.0, 0), True
