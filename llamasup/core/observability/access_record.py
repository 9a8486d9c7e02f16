"""Formats a finished request as one line of JSON, and limits how many slow requests are logged.

A line never contains a prompt, a completion, a key or a query.
"""

from __future__ import annotations

import re
from datetime import datetime

import msgspec
from msgspec import Struct

from llamasup.core.observability.counters import RequestRecord

_LONGEST_PATH = 512  # a client may send one of 64 KiB
_UNPRINTABLE = re.compile(r"[^!-~]")


class AccessRecord(msgspec.Struct):
    """The fields in the order of the output, with their names in ``RequestRecord``."""

    time: datetime
    request_id: str
    trace_id: str | None
    client: str | None
    method: str
    path: str
    route: str
    model: str | None
    generation: int
    status: int
    outcome: str
    queue_s: float
    waited_s: float
    first_byte_s: float | None
    duration_s: float
    bytes_in: int
    bytes_out: int
    tokens_prompt: int | None
    tokens_cached: int | None
    tokens_completion: int | None
    tokens_per_s: float | None
    context: str | None
    n_prompt_tokens: int | None
    n_ctx: int | None
    replayed: bool
    continued: bool
    repaired: str | None
    cause: str | None


_encode = msgspec.json.Encoder().encode


def access_line(record: RequestRecord, ended: datetime) -> bytes:
    """Format the line with its line feed. ``ended`` is the end of the request in UTC."""
    return _encode(access_record(record, ended)) + b"\n"


def access_record(record: RequestRecord, ended: datetime) -> AccessRecord:
    first_byte_s, speed = record.first_byte_s, record.tokens_per_s
    return AccessRecord(
        ended,
        record.request_id,
        record.trace_id or None,
        record.client or None,
        record.method,
        shown_path(record.path),
        record.route,
        record.model or None,
        record.generation,
        record.status,
        record.outcome,
        int(record.queue_s * 1e6) / 1e6,  # microseconds, three times as fast as round()
        int(record.waited_s * 1e6) / 1e6,
        None if first_byte_s is None else int(first_byte_s * 1e6) / 1e6,
        int(record.duration_s * 1e6) / 1e6,
        record.bytes_in,
        record.bytes_out,
        record.tokens_prompt,
        record.tokens_cached,
        record.tokens_completion,
        None if speed is None else int(speed * 100) / 100,
        record.context or None,
        record.n_prompt_tokens,
        record.n_ctx,
        record.replayed,
        record.continued,
        record.repaired or None,
        record.cause or None,
    )


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
