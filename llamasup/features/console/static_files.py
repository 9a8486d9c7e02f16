"""The files of the console, read once: a fixed table of paths, so no path leads out of it.

The files are served as they are; there is no build step. Each answer allows only scripts, styles and images
of this server, and no other page may frame it.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

__all__ = ["FOLDER", "PAGE_HEADERS", "StaticFile", "answer_of", "read_static_files"]

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"

# Other files, such as notes and sources of images, are not served.
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
_COMPRESSED_FROM_BYTES = 1024
_SECRET_PLACE = b"PAGE_SECRET"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SANDBOX = "; sandbox allow-scripts allow-forms"
PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser asks each time whether its copy is current: a new version has the same names.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


class StaticFile(Struct, frozen=True):
    """A file of the console. ``etag`` is that of the uncompressed content. ``compressed`` (gzip) is None if
    it is not smaller.
    """

    content_type: str
    content: bytes
    compressed: bytes | None
    etag: str

    def __repr__(self) -> str:
        return f"StaticFile({self.content_type!r}, {len(self.content)} bytes)"


def read_static_files(folder: Path = FOLDER, page_secret: str = "") -> Mapping[str, StaticFile]:
    """Return the files by their paths below ``/llamasup/``; the page itself, which gets its secret, has the
    path ``""``.
    """
    files = {
        file.relative_to(folder).as_posix(): _static_file(file.suffix, file.read_bytes())
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix in _TYPES
    }
    page = files.pop(INDEX)
    content = page.content.replace(_SECRET_PLACE, page_secret.encode())
    return {"": _static_file(".html", content), **files}


def _static_file(suffix: str, content: bytes) -> StaticFile:
    # Level 9, because it is done once; without a time, so that the same content gives the same bytes.
    compressed = gzip.compress(content, 9, mtime=0) if len(content) >= _COMPRESSED_FROM_BYTES else content
    return StaticFile(
        _TYPES[suffix],
        content,
        compressed if len(compressed) < len(content) else None,
        hashlib.sha256(content).hexdigest()[:32],
    )


def answer_of(
    file: StaticFile, accept_encoding: str, if_none_match: str, *, sandboxed: bool = False
) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of the answer to a GET.

    ``sandboxed``: a page has an origin of its own, so that no other page of this address reaches into it.
    """
    codings = {coding.partition(";")[0].strip().lower() for coding in accept_encoding.split(",")}
    body, etag = file.content, f'"{file.etag}"'
    headers = {"content-type": file.content_type, **PAGE_HEADERS}
    if sandboxed:
        headers["content-security-policy"] += _SANDBOX
        del headers["cross-origin-opener-policy"]  # with it, a browser refuses a sandboxed page
    if file.compressed is not None and "gzip" in codings:
        body, etag = file.compressed, f'"{file.etag}-gzip"'
        headers["content-encoding"] = "gzip"
    headers["etag"] = etag
    known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    if etag in known or "*" in known:
        headers.pop("content-encoding", None)
        return 304, b"", headers
    return 200, body, headers
