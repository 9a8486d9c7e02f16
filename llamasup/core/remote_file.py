"""A file on a server: what is known of it, whether it is still the same, and what answers about it mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = [
    "ContentRange",
    "RemoteFile",
    "content_range",
    "linked_sha256",
    "retry_after_s",
    "strong_etag",
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
