"""HTTP heads: which headers are forwarded, which are refused, and how errors and responses are written.

Pure: nothing here reads a socket. The C parser (llhttp, through httptools) has already refused what breaks
framing: two Content-Lengths, Content-Length with Transfer-Encoding, bare LF, folded lines, bad chunk sizes.
This module decides on what llhttp accepts. ``traceparent`` (W3C Trace Context, level 1) and ``tracestate``
are forwarded unchanged and are never made up.
"""

from __future__ import annotations

import re
from enum import IntEnum
from http import HTTPStatus

import msgspec

from llamasup.http.routes import Route, route_of
from llamasup.system.text import path_text

__all__ = [
    "DEFAULT_RULES",
    "METHODS",
    "STATUS_LINES",
    "Head",
    "HeadRules",
    "HttpError",
    "Priority",
    "RawHeaders",
    "error_body",
    "error_response",
    "parse_authority",
    "read_head",
    "read_response_headers",
    "response",
    "split_target",
    "status_line",
    "trace_id_of",
]


class Priority(IntEnum):
    """The classes, in the order in which they are served."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


RawHeaders = list[tuple[bytes, bytes]]  # in order of arrival; a request's names in lower case


class HttpError(msgspec.Struct, frozen=True):
    """An answer that llamasup itself gives. ``close``: the connection cannot be trusted afterwards."""

    status: int
    message: str
    type: str = "invalid_request_error"
    cause: str = ""
    remedy: str = ""
    retry_after_s: float | None = None
    close: bool = False


class HeadRules(msgspec.Struct, frozen=True):
    """Whose business a request's head is.

    ``transparent``: llama-server's alone, as if nobody stood before it. Host, Origin, keys, and what is said
    about clients go on to it. ``credentials``: the keys that clients send are llama-server's. ``prefix`` is
    what its paths begin with (``--api-prefix``).
    """

    transparent: bool = False
    credentials: bool = False
    prefix: bytes = b""


DEFAULT_RULES = HeadRules()


class Head(msgspec.Struct):
    """A request's head, read once. ``opening`` is what of it goes upstream: request line and header lines."""

    method: bytes
    path: bytes  # raw, without the query
    query: bytes  # without the question mark
    route: Route
    authority: bytes = b""  # of the target in absolute form, else the Host header
    opening: bytes = b""
    origin: bytes | None = None
    credentials: tuple[bytes, ...] = ()
    chunked: bool = False
    expects_continue: bool = False
    upgrades: bool = False  # offers to speak something else, which is not taken up
    request_id: bytes = b""  # the client's own, if it is sane
    priority: Priority | None = None  # what it asks for
    traceparent: bytes = b""  # goes on as it came; empty if there are several, which are of no trace


# --- reading a head --------------------------------------------------------------------------------

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})

_HOST, _ORIGIN, _BEARER, _KEY, _CONNECTION, _CODING = range(6)
_EXPECT, _ID, _TRACE, _UPGRADE, _PRIORITY, _DROP = range(6, 12)

_KINDS = {
    b"host": _HOST,
    b"origin": _ORIGIN,  # judged here; upstream would answer it with CORS headers of its own
    b"authorization": _BEARER,  # ours, never the child's
    b"x-api-key": _KEY,
    b"connection": _CONNECTION,
    b"transfer-encoding": _CODING,
    b"expect": _EXPECT,
    b"x-request-id": _ID,
    b"x-llamasup-priority": _PRIORITY,
    b"traceparent": _TRACE,
    b"content-length": _DROP,  # the framing upstream is ours; the parser has judged the client's
    # hop by hop (RFC 9110 §7.6.1), with what browsers and Java send for an upgrade that we do not do
    b"keep-alive": _DROP,
    b"proxy-authenticate": _DROP,
    b"proxy-authorization": _DROP,
    b"proxy-connection": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"upgrade": _UPGRADE,
    b"http2-settings": _DROP,
    # said about us by somebody whom we cannot check
    b"forwarded": _DROP,
    b"x-real-ip": _DROP,
    # with it a disconnect does not cancel the generation (llama.cpp b11434)
    b"x-conversation-id": _DROP,
}

_OURS = (b"x-forwarded-", b"x-llamasup-")  # of the proxy before llama-server, or said to it
_PRIORITIES = {priority.name.lower().encode(): priority for priority in Priority}

_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}").fullmatch
_NOMINATE_NOTHING = frozenset({b"close", b"keep-alive", b"", b"host"})  # without Host there is no request


# What of it goes on when llama-server is to see its client as it is. `x-request-id` is llamasup's own.
_PASSED = frozenset(
    {b"host", b"origin", b"forwarded", b"x-real-ip", b"x-conversation-id", b"x-llamasup-priority"}
)
_CREDENTIALS = frozenset({_BEARER, _KEY})


def read_head(
    method: bytes, target: bytes, version: str, headers: RawHeaders, rules: HeadRules = DEFAULT_RULES
) -> Head | HttpError:
    """Sort the headers into what llamasup needs, what goes upstream, and what is dropped.

    An ``HttpError`` is returned for heads that cannot be forwarded safely.
    """
    if version not in ("1.1", "1.0"):
        return HttpError(505, f"HTTP/{version} is not served here; use HTTP/1.1", close=True)
    if method not in METHODS:
        return HttpError(405, f"method {method.decode('latin-1')} is not served here", close=True)
    split = split_target(target, method)
    if split is None:
        return HttpError(400, "the request target is neither a path nor an http URL", close=True)
    authority, path, query = split
    lines: list[bytes] = []
    head = Head(method, path, query, route_of(path.removeprefix(rules.prefix)))
    hosts = traces = 0
    nominated: set[bytes] = set()
    for name, value in headers:
        kind = _KINDS.get(name)
        if kind is None:
            if rules.transparent or not name.startswith(_OURS):
                lines.append(name + b": " + value + b"\r\n")
            continue
        if (rules.transparent and name in _PASSED) or (rules.credentials and kind in _CREDENTIALS):
            lines.append(name + b": " + value + b"\r\n")
        if kind == _HOST:
            hosts += 1
            head.authority = value.strip(b" \t")
        elif kind == _BEARER:
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                head.credentials += (token.strip(),)
        elif kind == _KEY:
            head.credentials += (value.strip(),)
        elif kind == _CONNECTION:
            for token in value.lower().split(b","):
                if (token := token.strip(b" \t")) not in _NOMINATE_NOTHING:
                    nominated.add(token)
        elif kind == _ORIGIN:
            if head.origin is not None:
                return HttpError(400, "more than one Origin header", close=True)
            head.origin = value.strip()
        elif kind == _ID:
            head.request_id = value if _SANE_ID(value) else b""
        elif kind == _TRACE:
            head.traceparent = b"" if traces else value
            traces += 1
            lines.append(name + b": " + value + b"\r\n")
        elif kind == _CODING:
            if version == "1.0" or value.strip(b" \t").lower() != b"chunked":
                # Dropping a coding that we do not undo would hand the body on as something else.
                return HttpError(
                    400, "the only Transfer-Encoding served here is chunked, in HTTP/1.1", close=True
                )
            head.chunked = True
        elif kind == _PRIORITY:
            head.priority = _PRIORITIES.get(value.strip().lower())
            if head.priority is None and not rules.transparent:
                return HttpError(
                    400,
                    f"X-Llamasup-Priority: {value.decode('latin-1')[:40]!r} is no priority",
                    cause="bad_priority",
                    remedy="ask for high, normal or low, or leave the header out",
                )
        elif kind == _UPGRADE:
            head.upgrades = True
        elif kind == _EXPECT:
            if value.strip().lower() != b"100-continue":
                return HttpError(417, "the only expectation served here is 100-continue", close=True)
            head.expects_continue = version == "1.1"
    if hosts > 1 or (hosts == 0 and version == "1.1" and not rules.transparent):
        return HttpError(400, f"a request carries exactly one Host header; this one has {hosts}", close=True)
    if authority:
        if hosts and not rules.transparent and parse_authority(head.authority) is None:
            return HttpError(400, "the Host header is malformed", close=True)
        head.authority = authority  # RFC 9112 §3.2.2: the absolute form overrules Host
    if nominated:
        lines = [line for line in lines if line.partition(b":")[0] not in nominated]
    query = b"?" + query if query else b""
    host = b"" if rules.transparent and hosts else b"Host: localhost\r\n"
    head.opening = b"".join((method, b" ", path, query, b" HTTP/1.1\r\n", host, *lines))
    return head


_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([^?#]*)(?:\?([^#]*))?", re.IGNORECASE).fullmatch


def split_target(target: bytes, method: bytes) -> tuple[bytes, bytes, bytes] | None:
    """A request target as (authority, path, query); None if it is not one. Nothing is decoded."""
    if b"#" in target:
        return None
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return b"", path, query
    if target == b"*":
        return (b"", b"*", b"") if method == b"OPTIONS" else None
    if match := _ABSOLUTE(target):
        authority, path, query = match.group(1, 2, 3)
        return authority, path or b"/", query or b""
    return None


_AUTHORITY = re.compile(
    rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_](?:[A-Za-z0-9._-]{0,253})))(?::([0-9]{1,5}))?"
)


def parse_authority(value: bytes) -> tuple[str, int | None] | None:
    """A Host header as (name in lower case, port), IPv6 without its brackets; None if it is malformed."""
    match = _AUTHORITY.fullmatch(value)
    if match is None:
        return None
    literal, name, digits = match.group(1, 2, 3)
    port = None if digits is None else int(digits)
    if port is not None and port > 65535:
        return None
    return (literal or name).decode("ascii").lower().rstrip("."), port


# --- a response's head -----------------------------------------------------------------------------

# Framing and persistence are ours. CORS is decided at our door (X3); llama-server would answer every Origin.
_NOT_FORWARDED = frozenset(
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


def read_response_headers(headers: RawHeaders, rules: HeadRules = DEFAULT_RULES) -> tuple[bytes, bool]:
    """The header lines that go downstream, and whether the body is a stream of events (SSE)."""
    lines: list[bytes] = []
    streams_events = False
    nominated = {
        token.strip(b" \t")
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.lower().split(b",")
    }
    for name, value in headers:
        lower = name.lower()
        if lower in _NOT_FORWARDED or lower in nominated:
            continue
        if lower.startswith(b"access-control-") and not rules.transparent:
            continue
        if lower == b"content-type" and value.startswith(b"text/event-stream"):
            streams_events = True
        lines.append(name + b": " + value + b"\r\n")
    return b"".join(lines), streams_events


# --- writing responses -----------------------------------------------------------------------------

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def error_body(error: HttpError) -> bytes:
    """The error object of OpenAI and llama-server, with cause and remedy where they are known."""
    fields: dict[str, str | int] = {
        "message": path_text(error.message),
        "type": error.type,
        "code": error.status,
    }
    if error.cause:
        fields["cause"] = error.cause
    if error.remedy:
        fields["remedy"] = path_text(error.remedy)
    return msgspec.json.encode({"error": fields})


def response(
    status: int, body: bytes, *lines: bytes, method: bytes = b"GET", close: bool = False, json: bool = True
) -> bytes:
    """A whole response. ``lines`` are more header lines, each with its CRLF. HEAD gets the head alone."""
    parts = [status_line(status)]
    if json and status != HTTPStatus.NO_CONTENT:
        parts.append(b"Content-Type: application/json; charset=utf-8\r\n")
    if status != HTTPStatus.NO_CONTENT:
        parts.append(b"Content-Length: %d\r\n" % len(body))
    parts += lines
    parts.append(b"Connection: close\r\n\r\n" if close else b"\r\n")
    if method != b"HEAD":
        parts.append(body)
    return b"".join(parts)


def error_response(error: HttpError, *lines: bytes, method: bytes = b"GET", close: bool = False) -> bytes:
    """The response that says ``error``. Retry-After is in whole seconds, at least one."""
    if error.retry_after_s is not None:
        lines += (b"Retry-After: %d\r\n" % max(1, -(-error.retry_after_s // 1)),)
    if error.status == HTTPStatus.UNAUTHORIZED:
        lines += (b"WWW-Authenticate: Bearer\r\n",)
    return response(error.status, error_body(error), *lines, method=method, close=close or error.close)


# A version to come may carry more behind the flags; ff is none, and ids of zeros alone are invalid (§3.2.2).
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_LENGTH_00 = 55  # of version 00, which has nothing behind the flags


def trace_id_of(traceparent: bytes) -> str:
    """The 32 digits of the trace's id; empty for a header that is invalid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent.startswith(b"00") and len(traceparent) != _LENGTH_00):
        return ""
    return found[1].decode("ascii")
