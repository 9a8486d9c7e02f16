"""Which bytes of a file are here: half-open ranges ``(start, end)``, in order, none touching the next."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Ranges", "added", "checked", "missing", "piece_bytes", "pieces", "prefix", "total"]

Ranges = tuple[tuple[int, int], ...]

# A request costs a redirect and a signed URL: not more of them than it takes to keep all connections busy to
# the end, and no piece so small that the asking takes longer than the reading.
_LEAST_PIECE = 16 << 20
_MOST_PIECE = 1 << 30
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
    return min(max(size // (parallel * _PIECES_EACH), _LEAST_PIECE), _MOST_PIECE)


def pieces(gaps: Ranges, most_bytes: int) -> Iterator[tuple[int, int]]:
    """``gaps`` in requests of at most ``most_bytes``, first bytes first: the checksum follows them."""
    for start, end in gaps:
        for at in range(start, end, most_bytes):
            yield at, min(at + most_bytes, end)
