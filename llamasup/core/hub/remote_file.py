"""A file on a server: its size and checksum, whether it has changed, and how much of it is on the disk.

Ranges of bytes are half-open, ``(start, end)``, sorted, and do not touch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from msgspec import Struct

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Progress(Struct, frozen=True):
    """The progress of all files of a model together; ``total_bytes`` is None if unknown."""

    done_bytes: int
    total_bytes: int | None
    bytes_per_s: int


Listener = Callable[[Progress], None]


class RemoteFile(Struct, frozen=True):
    """A file on a server: ``size`` in bytes, ``sha256`` in lower-case hex, ``etag`` a strong one.

    None means unknown.
    """

    size: int | None = None
    sha256: str | None = None
    etag: str | None = None


class ContentRange(Struct, frozen=True):
    """A range of bytes in a response. ``end`` is exclusive; ``size`` is of the whole file, or None."""

    start: int
    end: int
    size: int | None


def why_not_resumed(before: RemoteFile, now: RemoteFile) -> str:
    """Return the reason why bytes of ``before`` cannot be kept for ``now``; empty if they can."""
    if before.size != now.size:
        return f"the size changed from {before.size} to {now.size} bytes"
    if before.sha256 and now.sha256:
        return "" if before.sha256 == now.sha256 else "the checksum has changed"
    if before.etag and now.etag:
        return "" if before.etag == now.etag else "the file has changed on the server"
    return "the server gives no checksum or ETag to compare"


def content_range(text: str | None) -> ContentRange | None:
    """Parse a Content-Range header (RFC 9110, 14.4); None if it is missing or invalid."""
    found = _CONTENT_RANGE.fullmatch((text or "").strip())
    if found is None:
        return None
    start, last = int(found[1]), int(found[2])
    size = None if found[3] == "*" else int(found[3])
    if last < start or (size is not None and last >= size):
        return None
    return ContentRange(start, last + 1, size)


def strong_etag(text: str | None) -> str | None:
    """Return the ETag if it is strong, so that it changes with every byte."""
    return None if not text or text.startswith("W/") else text.strip('" ')


def linked_sha256(headers: Mapping[str, str]) -> str | None:
    """Return the checksum of a large file on the hub, from ``X-Linked-Etag``."""
    tag = (headers.get("x-linked-etag") or "").strip('" ').lower()
    return tag if _SHA256.fullmatch(tag) else None


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Parse a Retry-After header, seconds or a date; None if it is missing or invalid."""
    from email.utils import parsedate_to_datetime  # only downloads need it

    text = (text or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # OverflowError: a year of eleven digits
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds())


Ranges = tuple[tuple[int, int], ...]

# Each request costs a redirect and a signed URL, so pieces are as large as possible while all connections
# stay busy to the end.
_MIN_PIECE = 16 << 20
_MAX_PIECE = 1 << 30
_PIECES_EACH = 4


def added(ranges: Ranges, start: int, end: int) -> Ranges:
    """Return ``ranges`` with the bytes from ``start`` to before ``end`` added."""
    if start >= end:
        return ranges
    before = tuple(known for known in ranges if known[1] < start)
    after = tuple(known for known in ranges if known[0] > end)
    touching = (*ranges[len(before) : len(ranges) - len(after)], (start, end))
    return (*before, (min(first for first, _ in touching), max(last for _, last in touching)), *after)


def checked(ranges: Ranges, size: int) -> Ranges:
    """Return ``ranges`` as read from a file; empty if they are invalid."""
    last = -1
    for start, end in ranges:
        if not last < start < end <= size:
            return ()
        last = end
    return ranges


def missing(ranges: Ranges, size: int) -> Ranges:
    """Return the gaps in ``ranges`` up to ``size`` bytes."""
    edges = [0, *(edge for known in ranges for edge in known), size]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start, end) for start, end in gaps if start < end)


def prefix(ranges: Ranges) -> int:
    """Return the number of bytes without a gap from the start of the file."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def total(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def piece_bytes(size: int, parallel: int) -> int:
    """Return the size of one request."""
    return min(max(size // (parallel * _PIECES_EACH), _MIN_PIECE), _MAX_PIECE)


def pieces(gaps: Ranges, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Return ``gaps`` in requests of at most ``max_bytes``, in order, so that the checksum can follow."""
    for start, end in gaps:
        for at in range(start, end, max_bytes):
            yield at, min(at + max_bytes, end)
