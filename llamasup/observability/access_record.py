"""A finished request as one line of JSON, and which requests are slow enough to be logged.

A line never holds a prompt, a completion, a key or a query (X13). The number of slow requests in the log is
limited: a slow day must not become a flood of lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

import msgspec

from llamasup.observability.metrics import RequestRecord

__all__ = ["SlowLog", "access_line", "shortened", "shown_path", "slow_after", "tell_slow"]


_LONGEST_PATH = 512  # a client may make up one of 64 KiB
_ODD = re.compile(r"[^!-~]")


class _Line(msgspec.Struct):
    """The fields in the order in which they are read; those of ``RequestRecord`` under their names there."""

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


_encode = msgspec.json.Encoder().encode


def access_line(record: RequestRecord, ended: datetime) -> bytes:
    """With its line feed. ``ended`` is when the request was over, in UTC."""
    first_byte_s, speed = record.first_byte_s, record.tokens_per_s
    line = _Line(
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
        int(record.queue_s * 1e6) / 1e6,  # three times as fast as round(), for what nobody reads in ns
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
    )
    return _encode(line) + b"\n"


def shortened(record: RequestRecord) -> RequestRecord:
    """The record with its path cut to the shown length, as 20,000 records may wait for a slow disk."""
    if len(record.path) <= _LONGEST_PATH:
        return record
    return msgspec.structs.replace(record, path=record.path[: _LONGEST_PATH + 1])


def shown_path(path: str) -> str:
    """The path with a bounded length and without terminal control characters."""
    if len(path) <= _LONGEST_PATH and not _ODD.search(path):
        return path
    safe = _ODD.sub(lambda odd: "".join(f"%{byte:02X}" for byte in odd[0].encode("latin-1", "replace")), path)
    return safe if len(safe) <= _LONGEST_PATH else safe[:_LONGEST_PATH] + "…"


# A person who watches reads one line in 5 s; the first ten come at once, so that a burst is seen whole.
_BURST = 10.0
_PER_SECOND = 0.2


@dataclass(frozen=True, slots=True)
class SlowLog:
    """``allowed``: lines that may be told now; ``left_out``: slow requests since the last line told."""

    at_s: float
    allowed: float = _BURST
    left_out: int = 0


def slow_after(first_byte_s: float | None, duration_s: float) -> float:
    """How long the client had nothing: to the first byte, or to the end where none came.

    Not the whole of a stream: a long answer is not a slow one.
    """
    return duration_s if first_byte_s is None else first_byte_s


def tell_slow(log: SlowLog, now_s: float) -> tuple[SlowLog, bool]:
    """Whether the slow request of now is told; if so, ``log.left_out`` before it is how many were not."""
    allowed = min(_BURST, log.allowed + (now_s - log.at_s) * _PER_SECOND)
    if allowed < 1.0:
        return SlowLog(now_s, allowed, log.left_out + 1), False
    return SlowLog(now_s, allowed - 1.0, 0), True
