"""Decides which headers of a server's response reach the client, what a browser may make of its body, and
where that body ends.

A response comes from a llama-server or from another node. Where responses are data (``HeadRules.data_only``),
no browser shows one as a page or runs it, because other pages have the same address (docs/security.md). The
proxy calls this once for each new head of a server, not for each response.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from llamasup.core.http.heads import DEFAULT_RULES, HeadRules, RawHeaders

# llamasup decides framing and persistence, and names the request.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"transfer-encoding",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
        b"x-request-id",
    }
)

# Others act on the whole address (Set-Cookie, Clear-Site-Data, Service-Worker-Allowed, Alt-Svc, CORS), or
# make a browser load something (Link, Refresh).
_FORWARDED: Final = frozenset(
    b"""
    accept-ranges age allow cache-control content-disposition content-encoding content-language content-range
    content-type date etag expires last-modified retry-after server server-timing vary www-authenticate
    x-accel-buffering x-llamasup-repaired
    """.split()
)
# A page of llama-server needs these; Location leads to its own paths (--api-prefix).
_OF_PAGES: Final = frozenset(
    b"""
    content-security-policy cross-origin-embedder-policy cross-origin-opener-policy
    cross-origin-resource-policy location permissions-policy referrer-policy x-content-type-options
    x-frame-options
    """.split()
)

# A browser takes the last type of a list.
_is_data = re.compile(
    rb"(?:application/(?:[a-z0-9.-]+\+)?json|application/(?:x-ndjson|jsonl|octet-stream)"
    rb"|text/(?:event-stream|plain)|(?:audio|video)/[a-z0-9.+-]+|image/(?:png|jpeg|webp|gif))"
    rb"[ \t]*(?:;[^,]*)?",
    re.IGNORECASE,
).fullmatch
_UNKNOWN_DATA: Final = b"application/octet-stream"
_AS_DATA: Final = (
    b"Content-Security-Policy: sandbox; default-src 'none'\r\nX-Content-Type-Options: nosniff\r\n"
)

_READ_BY_SCRIPTS: Final = frozenset({b"", b"empty", b"audio", b"image", b"track", b"video"})
_SERVICE_WORKER: Final = b"serviceworker"


def is_shown_or_run(fetch_dest: bytes, rules: HeadRules) -> bool:
    """Return whether a browser would show the answer as a page, or run it, which these rules do not allow.

    A service worker of llama-server's pages would also answer the requests for the console.
    """
    return fetch_dest not in _READ_BY_SCRIPTS and (rules.data_only or fetch_dest == _SERVICE_WORKER)


def _is_forwarded(name: bytes, rules: HeadRules) -> bool:
    return rules.transparent or name in _FORWARDED or (name in _OF_PAGES and not rules.data_only)


def read_response_headers(headers: RawHeaders, rules: HeadRules = DEFAULT_RULES) -> tuple[bytes, bool]:
    """Return the header lines that go downstream, and whether the body is a stream of events (SSE)."""
    lines: list[bytes] = []
    streams_events = False
    as_data = not rules.transparent
    nominated = {
        token.strip(b" \t")
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.lower().split(b",")
    }
    for name, value in headers:
        lower = name.lower()
        if lower in _HOP_BY_HOP or lower in nominated or not _is_forwarded(lower, rules):
            continue
        if lower == b"content-type":
            streams_events = streams_events or value.startswith(b"text/event-stream")
            if not rules.transparent and not _is_data(value):
                as_data = rules.data_only
                value = _UNKNOWN_DATA if as_data else value
        lines.append(name + b": " + value + b"\r\n")
    if as_data:
        lines.append(_AS_DATA)
    return b"".join(lines), streams_events


# --- where the body ends (RFC 9112 §6.3)

WITHOUT_BODY: Final = (204, 304)  # whatever their Content-Length or Transfer-Encoding announces
MAX_LENGTH_DIGITS: Final = 32  # 2^64 has 20; the parser accepts any number of zeros before them


class Framing(Enum):
    EMPTY = "no body"
    LENGTH = "Content-Length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "the end of the connection"


# Looking up a member of an Enum is a call of a Python function in Python 3.11.
EMPTY: Final = Framing.EMPTY
LENGTH: Final = Framing.LENGTH
CHUNKED: Final = Framing.CHUNKED
UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE


def framing_of(
    status: int, transfer_coding: bytes | None, length: bytes | None, *, is_head: bool
) -> Framing | str:
    """The framing of the response to a request, from its head; or what is wrong with the response.

    ``transfer_coding``, ``length``: the values of Transfer-Encoding and Content-Length, which the parser has
    checked for characters; None: no such header. ``is_head``: whether the request is a HEAD request.
    Rule 2 is for CONNECT, which is never forwarded; rule 7 is for requests.
    """
    if is_head or status in WITHOUT_BODY:  # rule 1
        return EMPTY
    if transfer_coding is not None:  # rules 3 and 4: it overrules a Content-Length
        if transfer_coding.strip(b" ").lower() == b"chunked":
            return CHUNKED
        return f"used the transfer coding {transfer_coding.decode('latin-1')!r}"
    if length is None:  # rule 8
        return UNTIL_CLOSE
    if len(length) > MAX_LENGTH_DIGITS:  # rule 5
        return "sent a Content-Length with too many digits"
    return LENGTH  # rule 6


def ends_with_body(end: bytes) -> bool:
    """Whether a complete chunked body ends where these last bytes end (RFC 9112 §7.1).

    A last chunk or trailer ends with one empty line. After it the parser of httptools would skip stray line
    ends, and begin a next response.
    """
    return end.endswith(b"\r\n\r\n") and end[-5:-4] not in (b"\r", b"\n")
