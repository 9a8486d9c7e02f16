"""HTTP heads: which headers of a request are forwarded or refused, and how responses are written.

The C parser (llhttp, through httptools) has already refused invalid framing: two Content-Lengths,
Content-Length with Transfer-Encoding, bare LF, folded lines, bad chunk sizes. ``traceparent`` (W3C Trace
Context, level 1) and ``tracestate`` are forwarded unchanged and never created.
"""

from __future__ import annotations

import re
from enum import IntEnum
from http import HTTPStatus
from typing import final

import msgspec

from llamasup.core.http.routes import CONTROL, Route, plain_path, route_of
from llamasup.core.system.text import eta_text, path_text
from llamasup.errors import as_sentence


class Priority(IntEnum):
    """The priority classes, the first served first. ``BATCH`` runs only while the others are away."""

    HIGH = 0
    NORMAL = 1
    LOW = 2
    BATCH = 3


RawHeaders = list[tuple[bytes, bytes]]  # in order of arrival; a request's names in lower case


@final
class HttpError(msgspec.Struct, frozen=True):
    """The reason why llamasup does not serve a request, with the fields of llama-server's error object.

    An empty ``type`` is the usual one of the status. ``close``: the connection cannot be used afterwards.
    ``queueable``: a generation that serves will come, so a request may queue. ``absent``: no server has the
    model, and none is starting. ``percent``: how much of the model is loaded; ``eta_s``: until it serves, or
    until a permit is free. None: not known.
    """

    status: int
    message: str
    type: str = ""
    cause: str = ""
    remedy: str = ""
    retry_after_s: float | None = None
    close: bool = False
    queueable: bool = False
    absent: bool = False
    percent: float | None = None
    eta_s: float | None = None

    def __post_init__(self) -> None:
        if not self.type:
            usual = "unavailable_error" if self.status == 503 else "invalid_request_error"
            msgspec.structs.force_setattr(self, "type", usual)

    @property
    def sentence(self) -> str:
        """The message. During a load, it also says how far the load is."""
        if self.percent is None or self.eta_s is None:
            return self.message
        return f"{self.message}; {self.percent:.0f} % loaded, about {eta_text(self.eta_s)} left"

    def without_reason(self) -> HttpError:
        """Return the error without its reason, for clients without a key.

        The reason may be a diagnosis that quotes the server's log.
        """
        message = self.message if self.message == "Loading model" else "The server is not ready"
        return HttpError(self.status, message, self.type, retry_after_s=self.retry_after_s)


class HeadRules(msgspec.Struct, frozen=True):
    """Decides which parts of a request's head llama-server gets.

    ``transparent``: all of them, as without a proxy, with Host, Origin, keys and forwarding headers.
    ``credentials``: the clients' keys are for llama-server. ``prefix``: of all paths (``--api-prefix``).
    ``batches``: /v1/files and /v1/batches are for the API for batches. ``data_only``: what servers answer is
    data, which no browser may show as a page or run (X3). Otherwise, llama-server's own pages are forwarded.
    """

    transparent: bool = False
    credentials: bool = False
    prefix: bytes = b""
    batches: bool = False
    data_only: bool = False


DEFAULT_RULES = HeadRules()


class TraceParent(msgspec.Struct, frozen=True):
    """The client's trace and span, from ``traceparent``: ``trace_id`` has 32 digits, ``span_id`` 16.

    Both are empty without a valid header. ``is_sampled``: the client exports its span.
    """

    trace_id: str = ""
    span_id: str = ""
    is_sampled: bool = False


NO_TRACE_PARENT = TraceParent()


class Head(msgspec.Struct):
    """The head of a request. ``opening`` goes upstream: request line and header lines.

    A client repeats its head, so all that follows from the head alone is computed here, once.
    """

    method: bytes
    path: bytes  # raw, without the query
    query: bytes  # without the question mark
    route: Route
    authority: bytes = b""  # of the absolute target, else of the Host header
    opening: bytes = b""
    origin: bytes | None = None
    credentials: tuple[bytes, ...] = ()
    chunked: bool = False
    expects_continue: bool = False
    upgrades: bool = False  # offers another protocol, which the proxy ignores
    request_id: bytes = b""  # of the client, if valid
    priority: Priority | None = None  # requested by the client
    needs_permit: bool = False  # its request runs the model
    may_wait: bool = False  # its request may wait for a generation
    compressed: bool = False  # its body is
    # For records and logs:
    method_text: str = ""
    path_text: str = ""
    trace_parent: TraceParent = NO_TRACE_PARENT  # also this if there are several
    console_secret: bytes = b""  # of a page of the console (docs/console.md)
    asked_headers: bytes = b""  # of a preflight: the headers that a page wants to send
    fetch_dest: bytes = b""  # what a browser makes of the answer; empty: another client, or an old browser
    forwarded_for: bytes = b""  # the clients of the proxies before this one, as the last one says
    peer: str = ""  # the address of the client
    from_node: bool = False  # another llamasup has forwarded it: it goes no further (docs/peers.md)


# --- reading a head --------------------------------------------------------------------------------

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})


# What llamasup does with a header of a request.
_HOST, _ORIGIN, _BEARER, _KEY, _CONNECTION, _CODING, _EXPECT, _ID, _TRACE = range(9)
_UPGRADE, _WEBSOCKET, _PRIORITY, _CONSOLE, _NODE, _FORWARDED_FOR, _ASKED, _DEST, _DROP = range(9, 18)

_KINDS = {
    b"host": _HOST,
    b"origin": _ORIGIN,  # checked here; llama-server would add its own CORS headers
    b"authorization": _BEARER,  # for llamasup, never for the child
    b"x-api-key": _KEY,
    b"connection": _CONNECTION,
    b"transfer-encoding": _CODING,
    b"expect": _EXPECT,
    b"x-request-id": _ID,
    b"x-llamasup-priority": _PRIORITY,
    b"x-llamasup-console": _CONSOLE,
    b"x-llamasup-node": _NODE,
    b"x-forwarded-for": _FORWARDED_FOR,
    b"traceparent": _TRACE,
    b"access-control-request-headers": _ASKED,
    b"sec-fetch-dest": _DEST,
    b"content-length": _DROP,  # llamasup frames the upstream request itself (RFC 9112 §6)
    # hop by hop (RFC 9110 §7.6.1), with the upgrade headers of browsers and Java
    b"keep-alive": _DROP,
    b"proxy-authenticate": _DROP,
    b"proxy-authorization": _DROP,
    b"proxy-connection": _DROP,
    b"te": _DROP,
    b"trailer": _DROP,
    b"upgrade": _UPGRADE,
    b"sec-websocket-version": _WEBSOCKET,  # nginx forwards it without the offer
    b"http2-settings": _DROP,
}

# A server gets no other header of a client: no cookie and no key of another program at this address, no claim
# about proxies (X-Forwarded-For), nothing for llamasup itself, and no X-Conversation-Id, with which a
# disconnect does not cancel the generation (llama.cpp b11434).
_FORWARDED = frozenset(
    b"""
    accept accept-encoding accept-language cache-control content-encoding content-language content-type
    if-match if-modified-since if-none-match if-range if-unmodified-since last-event-id pragma range
    tracestate user-agent
    """.split()
)
_PRIORITIES = {priority.name.lower().encode(): priority for priority in Priority}

_VALID_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}").fullmatch
_NOMINATE_NOTHING = frozenset({b"close", b"keep-alive", b"", b"host"})  # without Host there is no request


# Headers that only a transparent proxy forwards. `x-request-id` is llamasup's own.
_TRANSPARENT = frozenset(
    {
        *(b"host", b"origin", b"access-control-request-headers", b"sec-fetch-dest"),
        *(b"x-llamasup-priority", b"x-llamasup-console", b"x-llamasup-node", b"x-forwarded-for"),
        b"sec-websocket-version",
    }
)
_CREDENTIALS = frozenset({_BEARER, _KEY})


def read_head(
    method: bytes, target: bytes, version: str, headers: RawHeaders, rules: HeadRules = DEFAULT_RULES
) -> Head | HttpError:
    """Sort the headers: for llamasup, for upstream, or dropped. An unsafe head is an HttpError."""
    if version not in ("1.1", "1.0"):
        return HttpError(505, f"HTTP/{version} is not served here; use HTTP/1.1", close=True)
    if method not in METHODS:
        return HttpError(405, f"method {method.decode('latin-1')} is not served here", close=True)
    split = split_target(target, method)
    if split is None:
        return HttpError(400, "the request target is neither a path nor an http URL", close=True)
    authority, path, query = split
    if not rules.transparent:
        path = plain_path(path, rules.prefix, batches=rules.batches)
    lines: list[bytes] = []
    head = Head(method, path, query, route_of(path.removeprefix(rules.prefix), batches=rules.batches))
    hosts = traces = 0
    websocket = offers_websocket = False
    nominated: set[bytes] = set()
    for name, value in headers:
        kind = _KINDS.get(name)
        if kind is None:
            if name in _FORWARDED or rules.transparent:
                lines.append(name + b": " + value + b"\r\n")
            continue
        if (rules.transparent and name in _TRANSPARENT) or (rules.credentials and kind in _CREDENTIALS):
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
            head.request_id = value if _VALID_ID(value) else b""
        elif kind == _TRACE:
            head.trace_parent = NO_TRACE_PARENT if traces else trace_parent_of(value)
            traces += 1
            lines.append(name + b": " + value + b"\r\n")
        elif kind == _CODING:
            # RFC 9112 §6.1: chunked has to be the last coding, and HTTP/1.0 knows none.
            if version == "1.0" or value.strip(b" \t").lower() != b"chunked":
                # Without the header, llama-server would misread a body in another coding.
                return HttpError(
                    400, "the only Transfer-Encoding served here is chunked, in HTTP/1.1", close=True
                )
            head.chunked = True
        elif kind == _PRIORITY:
            head.priority = _PRIORITIES.get(value.strip().lower())
            if head.priority is None and not rules.transparent:
                return HttpError(
                    400,
                    f"X-Llamasup-Priority: {value.decode('latin-1')[:40]!r} is not a priority",
                    cause="bad_priority",
                    remedy="send high, normal, low or batch, or leave the header out",
                )
        elif kind == _UPGRADE:
            head.upgrades = True
            offers_websocket |= b"websocket" in value.lower()
        elif kind == _WEBSOCKET:
            websocket = True
        elif kind == _CONSOLE:
            head.console_secret = value.strip(b" \t")
            if head.route is CONTROL and not rules.transparent:
                lines.append(name + b": " + value + b"\r\n")
        elif kind == _NODE:
            head.from_node = True
        elif kind == _FORWARDED_FOR:
            head.forwarded_for += b"," + value if head.forwarded_for else value
        elif kind == _ASKED:
            head.asked_headers = value.strip(b" \t")
        elif kind == _DEST:
            head.fetch_dest += value.strip(b" \t").lower()  # of several, none is a known one
        elif kind == _EXPECT:
            if value.strip().lower() != b"100-continue":
                return HttpError(417, "the only expectation served here is 100-continue", close=True)
            head.expects_continue = version == "1.1"  # RFC 9110 §10.1.1: ignored in HTTP/1.0
    # RFC 9112 §3.2: exactly one Host in HTTP/1.1.
    if hosts > 1 or (hosts == 0 and version == "1.1" and not rules.transparent):
        return HttpError(
            400, f"a request must have exactly one Host header; this one has {hosts}", close=True
        )
    if hosts and not (head.authority or authority or rules.transparent):
        return HttpError(400, "the Host header is empty", close=True)
    websocket |= offers_websocket and b"upgrade" in nominated and version == "1.1"
    # Codex continues over HTTP at once after a 426, and tries again for seconds after any other status.
    if websocket and method == b"GET" and not rules.transparent:
        return _NO_WEBSOCKETS
    if authority:
        if hosts and not rules.transparent and parse_authority(head.authority) is None:
            return HttpError(400, "the Host header is malformed", close=True)
        head.authority = authority  # RFC 9112 §3.2.2: the absolute form overrules Host
    if nominated:
        lines = [line for line in lines if line.partition(b":")[0] not in nominated]
    query = b"?" + query if query else b""
    host = b"" if rules.transparent and hosts else b"Host: localhost\r\n"
    head.opening = b"".join((method, b" ", path, query, b" HTTP/1.1\r\n", host, *lines))
    head.method_text, head.path_text = method.decode("ascii"), path.decode("latin-1")
    head.needs_permit = head.route.infers and method == b"POST"
    head.may_wait = head.route.waits and method == b"POST"
    head.compressed = _is_compressed(head.opening) is not None
    return head


_NO_WEBSOCKETS = HttpError(
    426,
    "no WebSockets are served here",
    cause="websocket",
    remedy="send the request over HTTP; its answer can be a stream of events",
    close=True,
)

# llama-server also refuses these, unless its cpp-httplib was built with decompression.
_is_compressed = re.compile(
    rb"\r\ncontent-encoding:[^\r\n]*(?:gzip|deflate|br|zstd|compress)", re.IGNORECASE
).search


_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([^?#]*)(?:\?([^#]*))?", re.IGNORECASE).fullmatch


def with_query(head: Head, query: bytes) -> Head:
    """Return the head with this query in place of its own, which is not empty."""
    before = len(head.method) + 1 + len(head.path) + 1
    opening = head.opening[:before] + query + head.opening[before + len(head.query) :]
    return msgspec.structs.replace(head, query=query, opening=opening)


def split_target(target: bytes, method: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return a request target as (authority, path, query); None if it is not one. Nothing is decoded."""
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
    """Return a Host header as (name in lower case, port), IPv6 without its brackets.

    Returns None if it is malformed.
    """
    match = _AUTHORITY.fullmatch(value)
    if match is None:
        return None
    literal, name, digits = match.group(1, 2, 3)
    port = None if digits is None else int(digits)
    if port is not None and port > 65535:
        return None
    return (literal or name).decode("ascii").lower().rstrip("."), port


# --- writing responses -----------------------------------------------------------------------------

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def error_body(error: HttpError, message: str = "") -> bytes:
    """Return the error object of OpenAI and llama-server, with cause, remedy and progress if known.

    ``message`` is in place of the error's ``sentence``.
    """
    fields: dict[str, str | float] = {
        "message": path_text(message or error.sentence),
        "type": error.type,
        "code": error.status,
    }
    if error.cause:
        fields["cause"] = error.cause
    if error.remedy:
        fields["remedy"] = path_text(as_sentence(error.remedy))
    if error.percent is not None:
        fields["percent"] = error.percent
    if error.eta_s is not None:
        fields["eta_s"] = round(error.eta_s, 1)
    return msgspec.json.encode({"error": fields})


def response(
    status: int, body: bytes, *lines: bytes, method: bytes = b"GET", close: bool = False, json: bool = True
) -> bytes:
    """Return a complete response.

    ``lines`` are more header lines, each with its CRLF. HEAD gets only the head.
    """
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
    """Return the response for ``error``."""
    lines += error_lines(error)
    return response(error.status, error_body(error), *lines, method=method, close=close or error.close)


def error_lines(error: HttpError) -> tuple[bytes, ...]:
    """Return the header lines of ``error``."""
    lines: tuple[bytes, ...] = (retry_after_line(error),)
    if error.status == HTTPStatus.UNAUTHORIZED:
        lines += (b"WWW-Authenticate: Bearer\r\n",)
    if error.status == HTTPStatus.UPGRADE_REQUIRED:  # RFC 9110 §15.5.22
        lines += (b"Upgrade: HTTP/1.1\r\nConnection: Upgrade\r\n",)
    return lines


def retry_after_line(error: HttpError) -> bytes:
    """Return the header line with the wait in whole seconds, at least one; empty if none is known."""
    wait_s = error.retry_after_s
    return b"" if wait_s is None else b"Retry-After: %d\r\n" % max(1, -(-wait_s // 1))


def pairs_of(lines: bytes) -> RawHeaders:
    """Header lines, each with its CRLF, as names and values. The names are in lower case."""
    found = (line.partition(b":") for line in lines.split(b"\r\n") if line)
    return [(name.lower(), value.strip()) for name, _, value in found]


# A later version may have more fields after the flags; version ff and ids of zeros are invalid (§3.2.2).
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_LENGTH_00 = 55  # of version 00, which ends with the flags


_SAMPLED = 1


def trace_parent_of(traceparent: bytes) -> TraceParent:
    """Return the client's trace and span, and whether the client exports them."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (traceparent.startswith(b"00") and len(traceparent) != _LENGTH_00):
        return NO_TRACE_PARENT
    return TraceParent(found[1].decode("ascii"), found[2].decode("ascii"), bool(int(found[3], 16) & _SAMPLED))
