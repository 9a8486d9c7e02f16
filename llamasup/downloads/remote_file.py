"""A file on a server: what is known of it, whether it is unchanged, and which of its bytes are on the disk.

Ranges of bytes are half-open, ``(start, end)``, in order, and none touches the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = [
    "ContentRange",
    "Ranges",
    "RemoteFile",
    "added",
    "checked",
    "content_range",
    "linked_sha256",
    "missing",
    "piece_bytes",
    "pieces",
    "prefix",
    "retry_after_s",
    "strong_etag",
    "total",
    "why_not_resumed",
]


_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """``size`` in bytes, ``sha256`` in lower-case hex, ``etag`` a strong one. None: the server says none."""

    size: int | None = None
    sha256: str | None = None
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class ContentRange:
    """``end`` is exclusive; ``size`` of the whole file, None where the server does not know it."""

    start: int
    end: int
    size: int | None


def why_not_resumed(before: RemoteFile, now: RemoteFile) -> str:
    """Why bytes of ``before`` are none of ``now``; empty where they are."""
    if before.size != now.size:
        return f"the file has {now.size} bytes now, and had {before.size}"
    if before.sha256 and now.sha256:
        return "" if before.sha256 == now.sha256 else "the file has another checksum now"
    if before.etag and now.etag:
        return "" if before.etag == now.etag else "the file has changed on the server"
    return "the server does not say whether the file is still the same"


def content_range(text: str | None) -> ContentRange | None:
    """A Content-Range header (RFC 9110, 14.4); None for what is none, or makes no sense."""
    found = _CONTENT_RANGE.fullmatch((text or "").strip())
    if found is None:
        return None
    start, last = int(found[1]), int(found[2])
    size = None if found[3] == "*" else int(found[3])
    if last < start or (size is not None and last >= size):
        return None
    return ContentRange(start, last + 1, size)


def strong_etag(text: str | None) -> str | None:
    """An ETag that changes with every byte; a weak one does not."""
    return None if not text or text.startswith("W/") else text.strip('" ')


def linked_sha256(headers: Mapping[str, str]) -> str | None:
    """The checksum that the hub gives of a large file, in ``X-Linked-Etag``."""
    tag = (headers.get("x-linked-etag") or "").strip('" ').lower()
    return tag if _SHA256.fullmatch(tag) else None


def retry_after_s(text: str | None, now: datetime) -> float | None:
    """A Retry-After header, seconds or a date; None where it says nothing that can be understood."""
    text = (text or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the second: a year of eleven digits
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())


Ranges = tuple[tuple[int, int], ...]

# A request costs a redirect and a signed URL: not more of them than it takes to keep all connections busy to
# the end, and no piece so small that the asking takes longer than the reading.
_MIN_PIECE = 16 << 20
_MAX_PIECE = 1 << 30
_PIECES_EACH = 4


def added(ranges: Ranges, start: int, end: int) -> Ranges:
    """``ranges`` and the bytes from ``start`` to before ``end``."""
    if start >= end:
        return ranges
    before = tuple(each for each in ranges if each[1] < start)
    after = tuple(each for each in ranges if each[0] > end)
    touching = ranges[len(before) : len(ranges) - len(after)]
    joined = (
        (min(start, *(each[0] for each in touching)), max(end, *(each[1] for each in touching)))
        if touching
        else (start, end)
    )
    return (*before, joined, *after)


def checked(ranges: Ranges, size: int) -> Ranges:
    """``ranges`` as read from a file that anything may have happened to; empty where they make no sense."""
    last = -1
    for start, end in ranges:
        if not last < start < end <= size:
            return ()
        last = end
    return ranges


def missing(ranges: Ranges, size: int) -> Ranges:
    """What is not here of ``size`` bytes."""
    edges = [0, *(edge for each in ranges for edge in each), size]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, end) for start, end in gaps if start < end)


def prefix(ranges: Ranges) -> int:
    """How many bytes are here from the very beginning."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def total(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def piece_bytes(size: int, parallel: int) -> int:
    """How much one request asks for."""
    return min(max(size // (parallel * _PIECES_EACH), _MIN_PIECE), _MAX_PIECE)


def pieces(gaps: Ranges, most_bytes: int) -> Iterator[tuple[int, int]]:
    """``gaps`` in requests of at most ``most_bytes``, first bytes first: the checksum follows them."""
    for start, end in gaps:
        for at in range(start, end, most_bytes):
            yield at, min(at + most_bytes, end)
