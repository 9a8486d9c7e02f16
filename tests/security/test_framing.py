"""Where one request ends and the next begins (X9), after bytes that readers differ on.

Each is followed by a request that must not be taken for a part of it, nor a part of it for a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from llamasup.core.proxy import ProxyConfig
from tests.security.circuit import Circuit, Outcome

_HOST = b"Host: localhost\r\n"
_NEXT = b"GET /next HTTP/1.1\r\n" + _HOST + b"\r\n"
_SMUGGLED = b"POST /tools HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
_POST = b"POST /a HTTP/1.1\r\n" + _HOST
_GET = b"GET /a HTTP/1.1\r\n" + _HOST
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_OF_CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def circuit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Circuit]:
    made = Circuit(tmp_path_factory.mktemp("circuit"), ProxyConfig())
    yield made
    made.close()


def _coded(coding: bytes, version: bytes = b"1.1") -> bytes:
    return b"POST /a HTTP/%b\r\n%bTransfer-Encoding:%b\r\n\r\n" % (version, _HOST, coding) + _OF_CHUNKS


def _long(length: bytes) -> bytes:
    return _POST + b"Content-Length:" + length + b"\r\n\r\nabc"


REFUSED = {
    "chunked twice": _coded(b" chunked, chunked"),
    "chunked and a comma": _coded(b" chunked,"),
    "a comma and chunked": _coded(b" ,chunked"),
    "chunked with a parameter": _coded(b" chunked;q=1"),
    "chunked in quotes": _coded(b' "chunked"'),
    "chunked behind a vertical tab": _coded(b" \x0bchunked"),
    "chunked before a vertical tab": _coded(b" chunked\x0b"),
    "chunked behind a no-break space": _coded(b" \xa0chunked"),
    "chunked before a tab": _coded(b" chunked\t"),
    "chunked and then gzip": _coded(b" chunked, gzip"),
    "an empty coding": _coded(b""),
    "an empty coding beside a length": _POST + b"Transfer-Encoding:\r\nContent-Length: 3\r\n\r\nabc",
    "chunked in a folded line": _coded(b"\r\n chunked"),
    "chunked in HTTP/1.0": _coded(b" chunked", b"1.0"),
    "chunked in HTTP/1.0 with a length": _POST.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"
    + _OF_CHUNKS,
    "identity beside a length": _POST + b"Transfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
    "a length beside chunked, upgrade offered": _POST
    + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    + _OF_CHUNKS,
    "a length with a point": _long(b" 3.0"),
    "a length in quotes": _long(b' "3"'),
    "two lengths in a line": _long(b" 3 3"),
    "a length behind a vertical tab": _long(b" \x0b3"),
    "a length before a form feed": _long(b" 3\x0c"),
    "a length with an underscore": _long(b" 3_0"),
    "a length in other digits": _long(" ٣".encode()),
    "a length of 2 to the 64th": _long(b" 18446744073709551616"),
    "a length with five thousand zeros": _long(b" " + b"0" * 5000 + b"3"),
    "two lengths, one of nothing": _POST + b"Content-Length: 3\r\nContent-Length:\r\n\r\nabc",
    "a length and a space before its colon": _POST + b"Content-Length : 3\r\n\r\nabc",
    "a length and a NUL before its colon": _POST + b"Content-Length\0: 3\r\n\r\nabc",
    "a length behind a bare CR": _POST + b"X: y\rContent-Length: 3\r\n\r\nabc",
    "a header that ends in two CRs": _GET + b"X: y\r\r\n\r\n",
    "a head that ends in two CRs": _GET + b"\r\r\n",
    "a header without a colon": _GET + b"X\r\n\r\n",
    "a name in quotes": _GET + b'"X": y\r\n\r\n',
    "a name with a high byte": _GET + b"X\xe9: y\r\n\r\n",
    "a name with a control character": _GET + b"X\x01: y\r\n\r\n",
    "a value with DEL": _GET + b"X: \x7f\r\n\r\n",
    "a chunk size before a space": _CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "a chunk size with an underscore": _CHUNKED + b"0_3\r\nabc\r\n0\r\n\r\n",
    "a chunk size below zero at the end": _CHUNKED + b"3\r\nabc\r\n-0\r\n\r\n",
    "a chunk without its CRLF": _CHUNKED + b"3\r\nabc0\r\n\r\n",
    "a chunk with CR alone": _CHUNKED + b"3\r\nabc\r0\r\n\r\n",
    "an extension without a name": _CHUNKED + b"3;\r\nabc\r\n0\r\n\r\n",
    "an extension with a NUL": _CHUNKED + b"3;\0\r\nabc\r\n0\r\n\r\n",
    "an extension in open quotes": _CHUNKED + b'3;a="\r\nabc\r\n0\r\n\r\n',
    "an extension with a bare LF in quotes": _CHUNKED + b'3;a="\n"\r\nabc\r\n0\r\n\r\n',
    "an extension behind a comma": _CHUNKED + b"3,a\r\nabc\r\n0\r\n\r\n",
    "a last chunk without an empty line": _CHUNKED + b"0\r\n",
    "a last chunk and a bare LF": _CHUNKED + b"0\r\n\n",
    "a trailer that is a length": _CHUNKED + b"0\r\nContent-Length: 80\r\n\r\n",
    "a trailer that is a coding": _CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folded trailer": _CHUNKED + b"0\r\nX: y\r\n z\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "HTTP/0.9": b"GET /a\r\n\r\n",
    "HTTP/0.9 by name": b"GET /a HTTP/0.9\r\n\r\n",
    "a version in lower case": b"GET /a http/1.1\r\n" + _HOST + b"\r\n",
    "a version behind a zero": b"GET /a HTTP/01.1\r\n" + _HOST + b"\r\n",
    "a tab in the request line": b"GET\t/a HTTP/1.1\r\n" + _HOST + b"\r\n",
    "a CR in the target": b"GET /a\rX HTTP/1.1\r\n" + _HOST + b"\r\n",
    "a NUL in the target": b"GET /a\0 HTTP/1.1\r\n" + _HOST + b"\r\n",
    "a TLS hello": bytes.fromhex("16030100a1010000"),
}


def _refusal(outcome: Outcome) -> tuple[int, str]:
    head, _, body = outcome.told.partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    assert head.count(b"HTTP/1.1 ") == 1, "answered more than once"
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]["message"]


@pytest.mark.check("X9", "400 or 505, closed")
@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_framing_that_readers_differ_on_is_refused_with_all_that_follows(
    circuit: Circuit, raw: bytes
) -> None:
    outcome = circuit.send([raw + _SMUGGLED + _NEXT])
    assert outcome.asked == ()
    assert circuit.malformed == []
    assert outcome.closed
    code, message = _refusal(outcome)
    assert code in (400, 505)
    assert "failed" not in message, "an error of ours, not a verdict"


BODY_IS_A_REQUEST = _SMUGGLED + _NEXT
READ = {
    "chunked behind a tab": (_coded(b"\tchunked"), b"abc"),
    "chunked before a space": (_coded(b" chunked "), b"abc"),
    "chunked in capitals": (_coded(b" CHUNKED"), b"abc"),
    "sizes behind zeros": (_CHUNKED + b"0" * 40 + b"3\r\nabc\r\n000\r\n\r\n", b"abc"),
    "extensions": (_CHUNKED + b'2;a=b;c="d;\\" 3\t"\r\nab\r\n1;e\r\nc\r\n0;f=g\r\n\r\n', b"abc"),
    "trailers": (_CHUNKED + b"3\r\nabc\r\n0\r\nHost: evil\r\nX-Api-Key: k\r\nX: y\r\n\r\n", b"abc"),
    "a length behind zeros": (_long(b" 003"), b"abc"),
    "a length between blanks": (_long(b"\t 3 \t"), b"abc"),
    "a body that is a request": (
        _POST + b"Content-Length: %d\r\n\r\n" % len(BODY_IS_A_REQUEST) + BODY_IS_A_REQUEST,
        BODY_IS_A_REQUEST,
    ),
    "a chunk that is a request": (
        _CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY_IS_A_REQUEST), BODY_IS_A_REQUEST),
        BODY_IS_A_REQUEST,
    ),
    "a chunk that is a last chunk": (_CHUNKED + b"5\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n"),
    "a GET with a body": (_GET + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    "a body behind an offered upgrade": (
        _POST + b"Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        b"Content-Length: %d\r\n\r\n" % len(BODY_IS_A_REQUEST) + BODY_IS_A_REQUEST,
        BODY_IS_A_REQUEST,
    ),
    "chunks behind an offered upgrade": (
        _POST
        + b"Connection: upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n\r\n"
        + _OF_CHUNKS,
        b"abc",
    ),
    "empty lines before it": (b"\r\n\r\n" + _POST + b"Content-Length: 3\r\n\r\nabc", b"abc"),
}


@pytest.mark.check("X9", "framed by its length")
@pytest.mark.parametrize(("raw", "body"), READ.values(), ids=READ)
def test_framing_that_all_read_alike_is_written_afresh(circuit: Circuit, raw: bytes, body: bytes) -> None:
    outcome = circuit.send([raw + _NEXT])
    assert [(request.target, request.body) for request in outcome.asked] == [(b"/a", body), (b"/next", b"")]
    for request in outcome.asked:
        assert request.headers == ((b"host", b"localhost"), (b"authorization", b"Bearer own-key"))
    assert circuit.malformed == []
    assert not outcome.closed


@pytest.mark.check("X9")
@pytest.mark.parametrize(
    "names",
    [
        b"host, authorization, content-length, transfer-encoding",
        b"x-api-key, x-request-id, Pragma",
        b"HOST,,\t,pragma , close",
    ],
)
def test_connection_takes_nothing_away_that_is_ours(circuit: Circuit, names: bytes) -> None:
    lines = b"Connection: " + names + b"\r\nPragma: y\r\nX-Api-Key: k\r\nX-Request-Id: r-1\r\n"
    outcome = circuit.send([_POST + lines + b"Content-Length: 3\r\n\r\nabc"])
    (asked,) = outcome.asked
    named = {name.strip().lower() for name in names.split(b",")}
    kept = () if b"pragma" in named else ((b"pragma", b"y"),)
    assert asked.headers == ((b"host", b"localhost"), *kept, (b"authorization", b"Bearer own-key"))
    assert asked.body == b"abc"
    assert b"\r\nX-Request-Id: r-1\r\n" in outcome.told


DROPPED = [
    b"Keep-Alive: 1",
    b"Proxy-Connection: keep-alive",
    b"Proxy-Authorization: Basic x",
    b"Proxy-Authenticate: Basic",
    b"TE: trailers",
    b"Trailer: X",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AA",
    b"Forwarded: for=1.2.3.4",
    b"X-Forwarded-For: 1.2.3.4",
    b"X-FORWARDED-HOST: evil",
    b"x-forwarded-anything: x",
    b"X-Real-IP: 1.2.3.4",
    b"X-Conversation-Id: c",
    b"Authorization: Bearer k",
    b"X-Api-Key: k",
    b"Expect: 100-continue",
]


@pytest.mark.check("X9")
@pytest.mark.parametrize("line", DROPPED, ids=[line.decode() for line in DROPPED])
def test_hop_by_hop_and_uncheckable_headers_are_not_passed_on(circuit: Circuit, line: bytes) -> None:
    (asked,) = circuit.send([_GET + line + b"\r\n\r\n"]).asked
    assert asked.headers == ((b"host", b"localhost"), (b"authorization", b"Bearer own-key"))


@pytest.mark.check("X9")
@pytest.mark.parametrize(
    "identity", [b"a b", b"a\tb", b'"a"', b"a;b", b"<script>", b"\xff", b"a" * 129, b"a%0d%0aSet-Cookie:b"]
)
def test_invalid_request_id_is_not_repeated(circuit: Circuit, identity: bytes) -> None:
    told = circuit.send([_GET + b"X-Request-Id: " + identity + b"\r\n\r\n"]).told
    assert identity not in told
    assert told.count(b"\r\nX-Request-Id: ") == 1
