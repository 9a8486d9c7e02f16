"""Requests and responses that are nearly right: each piece of HTTP with the forms that parsers differ on.

A message draws few odd pieces, most none: what is wrong everywhere says nothing about any one rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

__all__ = [
    "bodiless_responses",
    "control_requests",
    "cut",
    "repeated_requests",
    "repeated_responses",
    "requests",
    "responses",
    "spelled_paths",
]


def _mostly(usual: Sequence[bytes], odd: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One in twelve or so is odd. (Hypothesis likes the ends of a range.)"""
    return st.integers(0, 11).flatmap(lambda die: st.sampled_from(odd if die == 7 else usual))


_END = _mostly([b"\r\n"], [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b" \r\n", b"\r\n\r\n", b""])
_SPACE = _mostly([b" "], [b"  ", b"\t", b"", b"\x0b", b"\x0c", b"\xa0", b"\r\n "])

# --- requests

_METHOD = _mostly(
    [b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS"],
    [b"get", b"CONNECT", b"TRACE", b"PRI", b"G ET", b"", b"POST\0", b"QUERY", b"GET\r\n", b"SOURCE"],
)
_TARGET = _mostly(
    [b"/a", b"/b?c=d", b"/props", b"/v1/chat/completions", b"/tokenize", b"//x", b"/a%20b"],
    [
        b"*",
        b"a",
        b"",
        b"/a b",
        b"/\xff",
        b"/#f",
        b"/\0",
        b"http://localhost/a",
        b"http://localhost:1?q",
        b"http://evil/a",
        b"http://localhost@evil/a",
        b"HTTPS://[::1]/a",
        b"ftp://localhost/a",
        b"http:///a",
        b"/a\r\nX: y",
        b"/\\a",
        b'/"<>^`{|}',
        b"/tools",
        b"localhost:80",
    ],
)
_VERSION = _mostly(
    [b"HTTP/1.1"],
    [b"HTTP/1.0", b"HTTP/2.0", b"http/1.1", b"HTTP/1.2", b"HTTP/1.10", b"HTTP/ 1.1", b"", b"RTSP/1.0"],
)
_HOST = _mostly(
    [b"localhost", b"127.0.0.1:80", b"[::1]"],
    [
        b"evil",
        b"localhost ",
        b"",
        b"a b",
        b"localhost, evil",
        b"me@localhost",
        b"[fe80::1%25lo]",
        b"localhost:",
    ],
)
_FIELD = _mostly(
    [
        b"Accept: */*",
        b"X-A: b",
        b"Pragma: b",
        b"Range:",
        b"Content-Type: application/json",
        b"Authorization: Bearer k",
        b"X-Api-Key: k",
        b"X-Forwarded-For: 1.2.3.4",
        b"X-Request-Id: r-1",
        b"Keep-Alive: 5",
        b"TE: trailers",
        b"User-Agent: \xe9\xff",
        b"Accept-Language:  a\tb  ",
        b"Cookie: a=b",
    ],
    [
        b"Connection: close",
        b"Connection: keep-alive, Pragma",
        b"Connection: host, authorization, content-length, transfer-encoding",
        b"Connection: upgrade\r\nUpgrade: h2c",
        b"Upgrade: websocket",
        b"Expect: 100-continue",
        b"Expect: x",
        b"Origin: null",
        b"Host: localhost",
        b"Host : localhost",
        b" X: y",
        b"X: a\r\n b",
        b"X : y",
        b": y",
        b"X",
        b"X: a\0b",
        b"X: a\rb",
        b"X: a\nb",
        b"X\xe9: y",
        b"X(): y",
        b"X: \x7f",
        b"X-Request-Id: a\tb",
        b"Content-Length: 0",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"content_length: 5",
    ],
)
_LENGTH = _mostly(
    [b"%d", b"%d", b"0%d"],
    [
        b"+%d",
        b"-%d",
        b"0x%d",
        b"%d ",
        b"%d, %d",
        b"%d %d",
        b"%d1",
        b"%d\x0b",
        b'"%d"',
        b"%d.0",
        b"9" * 19 + b"%d",
    ],
)
_CODING = _mostly(
    [b"chunked", b"chunked", b"Chunked", b" \tchunked", b"chunked "],
    [
        b"chunked, chunked",
        b"chunked,",
        b",chunked",
        b"gzip, chunked",
        b"chunked, gzip",
        b"identity",
        b"xchunked",
        b"chunked;q=1",
        b"\x0bchunked",
        b"chunked\x0b",
        b'"chunked"',
        b"",
        b"chun\r\n ked",
        b"chunked\r\nTransfer-Encoding: chunked",
        b"chunked\r\nContent-Length: 3",
    ],
)
_BODY = st.sampled_from(
    [b"", b"x", b"abc", b"{}", b"GET /in HTTP/1.1\r\nHost: localhost\r\n\r\n", b"0\r\n\r\n", b"\r\n"]
)
_SIZE = _mostly(
    [b"%x", b"%x", b"%X", b"0%x"],
    [
        b"0x%x",
        b"+%x",
        b"-%x",
        b" %x",
        b"%x ",
        b"\t%x",
        b"%x\t",
        b"%x_",
        b"",
        b"F" * 16 + b"%x",
        b"0" * 24 + b"%x",
        b"%x,",
    ],
)
_EXTENSION = _mostly(
    [b""],
    [
        b";a",
        b";a=b",
        b';a="b"',
        b";",
        b";a=",
        b"; a=b",
        b" ;a",
        b';a="\r\n"',
        b";a\nb",
        b";a\0",
        b';a="b',
        b";\xff",
        b";a;b=c",
    ],
)
_TRAILERS = _mostly(
    [b""],
    [
        b"X: y\r\n",
        b"Content-Length: 9\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Host: evil\r\n",
        b"Connection: close\r\n",
        b"X : y\r\n",
        b" x\r\n",
        b"\n",
        b"GET /in HTTP/1.1\r\n",
    ],
)


def _with_number(form: bytes, number: int) -> bytes:
    return form % ((number,) * form.count(b"%"))


def _chunks(draw: st.DrawFn, body: bytes) -> bytes:
    out = b""
    middle = len(body) // 2
    for piece in (body[:middle], body[middle:]):
        if piece:
            size = _with_number(draw(_SIZE), len(piece))
            out += size + draw(_EXTENSION) + draw(_END) + piece + draw(_END)
    return (
        out + draw(_mostly([b"0"], [b"00", b"0;a", b"-0", b"0 "])) + draw(_END) + draw(_TRAILERS) + draw(_END)
    )


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    end = b"\r\n"
    lines = [draw(_METHOD) + draw(_SPACE) + draw(_TARGET) + draw(_SPACE) + draw(_VERSION)]
    lines.append(b"Host:" + draw(_SPACE) + draw(_HOST))
    lines += draw(st.lists(_FIELD, max_size=3))
    body = draw(_BODY)
    framing = draw(st.sampled_from([b"none", b"length", b"chunked", b"both"][:3] * 5 + [b"both"]))
    after = b""
    if framing in (b"length", b"both"):
        lines.append(b"Content-Length:" + draw(_SPACE) + _with_number(draw(_LENGTH), len(body)))
        after = body
    if framing in (b"chunked", b"both"):
        lines.append(b"Transfer-Encoding:" + draw(_SPACE) + draw(_CODING))
        after = _chunks(draw, body)
    lines[1:] = draw(st.permutations(lines[1:]))
    ends = [draw(_END) if draw(_mostly([b""], [b"x"])) else end for _ in lines]
    return b"".join(line + end for line, end in zip(lines, ends, strict=True)) + draw(_END) + after


_GARBAGE = st.sampled_from(
    [b"\r", b"\n", b"\0", b" ", b":", b"0", b"\xff", b",", b";", b"\t", b"\r\n", b"\r\n\r\n"]
)


@st.composite
def _mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes], *, one_in: int = 5) -> bytes:
    """Now and then a piece is put in, left out, or doubled, anywhere."""
    raw = draw(whole)
    if draw(st.integers(1, one_in)) != (one_in + 1) // 2:
        return raw
    at = draw(st.integers(0, len(raw)))
    kind = draw(st.sampled_from(["put in", "a line put in", "left out", "doubled"]))
    if kind == "put in":
        return raw[:at] + draw(_GARBAGE) + raw[at:]
    if kind == "a line put in":
        at = raw.find(b"\r\n", at) + 2
        return raw[:at] + draw(_FIELD) + b"\r\n" + raw[at:]
    if kind == "left out":
        return raw[:at] + raw[at + 1 :]
    return raw[:at] + raw[max(0, at - 7) : at] + raw[at:]


# What follows shows whether both sides agree on where the last one ended.
_NEXT = b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n"


def requests() -> st.SearchStrategy[bytes]:
    """One to three requests in a row, and one more that is as it should be."""
    return _mutated(st.lists(_request(), min_size=1, max_size=3).map(b"".join)).map(lambda raw: raw + _NEXT)


@st.composite
def repeated_requests(draw: st.DrawFn) -> list[bytes]:
    """One request several times, each a read of its own, and then one that is nearly the same."""
    request = draw(_request())
    return [request] * draw(st.integers(2, 4)) + [draw(_mutated(st.just(request), one_in=1)), request + _NEXT]


# --- responses

_STATUS_LINE = _mostly(
    [b"HTTP/1.1 200 OK", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 204 No Content", b"HTTP/1.0 200 OK"],
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK",
        b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 304 Not Modified",
        b"HTTP/1.1 200",
        b"HTTP/1.1  200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 000 OK",
        b"HTTP/1.1 999 OK",
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 200 O\rK",
        b"HTTP/1.1 200 O\0K",
        b"ICY 200 OK",
        b"",
    ],
)
_RESPONSE_FIELD = _mostly(
    [
        b"Server: llama.cpp",
        b"Content-Type: application/json",
        b"Content-Type: text/event-stream",
        b"Keep-Alive: timeout=5, max=100",
        b"X-A: b",
        b"Access-Control-Allow-Origin: *",
    ],
    [
        b"Connection: close",
        b"Connection: X-A",
        b"X-Request-Id: theirs",
        b"X: a\r\n b",
        b"X: a\rb",
        b"X: a\nSet-Cookie: b",
        b"X : y",
        b": y",
        b"X\0: y",
        b"X: \0",
        b"Content-Length: 1",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Upgrade: x\r\nConnection: upgrade",
    ],
)


@st.composite
def _response(draw: st.DrawFn) -> bytes:
    lines = [draw(_STATUS_LINE)]
    lines += draw(st.lists(_RESPONSE_FIELD, max_size=3))
    body = draw(_BODY)
    framing = draw(st.sampled_from([b"length", b"chunked", b"close"] * 4 + [b"both"]))
    after = body
    if framing in (b"length", b"both"):
        lines.append(b"Content-Length: " + _with_number(draw(_LENGTH), len(body)))
    if framing in (b"chunked", b"both"):
        lines.append(b"Transfer-Encoding: " + draw(_CODING))
        after = _chunks(draw, body)
    lines[1:] = draw(st.permutations(lines[1:]))
    ends = [draw(_END) if draw(_mostly([b""], [b"x"])) else b"\r\n" for _ in lines]
    return b"".join(line + end for line, end in zip(lines, ends, strict=True)) + draw(_END) + after


def responses() -> st.SearchStrategy[bytes]:
    """One response, sometimes with something behind it that nobody asked for."""
    behind = st.sampled_from([b""] * 8 + [b"\r\n", b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
    return st.tuples(_mutated(_response()), behind).map(b"".join)


@st.composite
def repeated_responses(draw: st.DrawFn) -> list[bytes]:
    """One response several times, and then one that is nearly the same."""
    response = draw(_response())
    return [response] * draw(st.integers(2, 3)) + [draw(_mutated(st.just(response), one_in=1)), response]


_BODILESS_STATUS_LINE = st.sampled_from(
    [
        b"HTTP/1.1 204 No Content",
        b"HTTP/1.1 205 Reset Content",
        b"HTTP/1.1 304 Not Modified",
        b"HTTP/1.1 304",
        b"HTTP/1.0 204 No Content",
    ]
)
_INTERIM_STATUS_LINE = st.sampled_from(
    [b"HTTP/1.1 100 Continue", b"HTTP/1.1 101 Switching Protocols", b"HTTP/1.1 103 Early Hints"]
)
_STRAY = st.one_of(_BODY, st.just(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"))


@st.composite
def bodiless_responses(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A response that ends with its head and announces a body, and perhaps the bytes of this body.

    The method that it answers, and the response in two reads.
    """
    kind = draw(st.sampled_from(["final", "final", "interim", "HEAD"]))
    lines = [
        draw({"final": _BODILESS_STATUS_LINE, "interim": _INTERIM_STATUS_LINE, "HEAD": _STATUS_LINE}[kind]),
        *draw(st.lists(_RESPONSE_FIELD, max_size=2)),
    ]
    body = draw(_STRAY)
    framing = draw(st.sampled_from([b"length", b"chunked", b"both"]))
    after = draw(st.sampled_from([b"", body]))
    if framing in (b"length", b"both"):
        lines.append(b"Content-Length: " + _with_number(draw(_LENGTH), len(body)))
    if framing in (b"chunked", b"both"):
        lines.append(b"Transfer-Encoding: " + draw(_CODING))
        after = draw(st.sampled_from([b"", _chunks(draw, body)]))
    raw = b"\r\n".join((*lines, b"", after))
    if kind == "interim":
        raw += b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    at = draw(st.one_of(st.just(len(raw) - len(after)), st.integers(0, len(raw))))
    return b"HEAD" if kind == "HEAD" else b"GET", raw[:at], raw[at:]


@st.composite
def cut(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """``raw`` in a few pieces, as reads may find it."""
    ends = sorted(set(draw(st.lists(st.integers(0, len(raw)), max_size=4))) | {len(raw)})
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


# --- paths

_PATHS = st.sampled_from(
    [
        *(b"/completion", b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"),
        *(b"/infill", b"/v1/embeddings", b"/rerank", b"/v1/audio/transcriptions", b"/v1/systemone"),
        *(b"/tokenize", b"/props", b"/slots/0", b"/lora-adapters", b"/v1/models/a", b"/tools", b"/"),
    ]
)
_DETOURS = _mostly([b""], [b"/", b"/.", b"/x/..", b"/%2e", b"/x/%2E%2e", b"/models/..", b"/slots/..", b"\\"])
_TAILS = _mostly([b""], [b"/", b"/.", b";a=b", b"%20", b"%09", b"%00", b"?a=b", b"%3Fa", b"/x/..", b"%"])


@st.composite
def _letter(draw: st.DrawFn, code: int) -> bytes:
    """One byte of a path as it is, or as some server could read it."""
    plain = bytes([code])
    kind = draw(_mostly([b"plain"], [b"hex", b"HEX", b"%u", b"%U", b"case", b"twice", b"u twice", b"half"]))
    spelled = {
        b"hex": b"%%%02x" % code,
        b"HEX": b"%%%02X" % code,
        b"%u": b"%%u%04x" % code,
        b"%U": b"%%U%04X" % code,
        b"case": plain.swapcase(),
        b"twice": b"%%25%02x" % code,
        b"u twice": b"%%25u%04x" % code,
        b"half": b"%%%x" % code,
    }
    return spelled.get(kind, plain)


@st.composite
def spelled_paths(draw: st.DrawFn, paths: st.SearchStrategy[bytes] = _PATHS) -> bytes:
    """A path of llama-server's in any spelling, the plain one included."""
    letters = b"".join(draw(_letter(code)) for code in draw(paths)[1:])
    return (
        draw(_DETOURS) + draw(_mostly([b"/"], [b"//", b"/%2f", b"/%u002f", b"%2f/"])) + letters + draw(_TAILS)
    )


_CONTROL_PATHS = st.sampled_from(
    [
        b"/llamasup/v1/" + path
        for path in (
            *(b"upgrade", b"upgrade", b"config", b"config/check", b"reload", b"shutdown", b"plan", b"pull"),
            *(b"status", b"requests/r-1", b"models/tiny/load", b"models/a%2Fb/remove", b"models/tiny/logs"),
            *(b"console/token", b"console/session", b"batches/b/cancel", b"nosuch"),
        )
    ]
)
_CONTROL_BYTES = st.integers(0, 0x20).map(lambda code: b"%%%02x" % code) | st.just(b"%7f")


@st.composite
def control_requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Method and path of a request to the control API, in any spelling, also with control characters."""
    path = draw(st.one_of(_CONTROL_PATHS, spelled_paths(_CONTROL_PATHS)))
    if draw(st.integers(0, 2)) == 0:
        at = draw(st.integers(0, len(path)))
        path = path[:at] + draw(_CONTROL_BYTES) + path[at:]
    return draw(st.sampled_from([b"POST", b"POST", b"GET", b"PUT", b"DELETE"])), path
