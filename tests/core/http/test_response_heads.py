"""Headers of servers: which reach a client, and what a browser may make of an answer."""

from __future__ import annotations

import pytest

from llamasup.core.http.heads import HeadRules, RawHeaders
from llamasup.core.http.response_heads import is_shown_or_run, read_response_headers

DATA, PAGES, TRANSPARENT = HeadRules(data_only=True), HeadRules(), HeadRules(transparent=True)
AS_DATA = b"Content-Security-Policy: sandbox; default-src 'none'\r\nX-Content-Type-Options: nosniff\r\n"


def lines_of(headers: RawHeaders, rules: HeadRules) -> bytes:
    return read_response_headers(headers, rules)[0]


def test_hop_by_hop_headers_are_dropped() -> None:
    headers: RawHeaders = [
        (b"Server", b"llama.cpp"),
        (b"Connection", b"ETag"),
        (b"ETag", b"1"),
        (b"Content-Length", b"2"),
        (b"Content-Type", b"text/event-stream"),
    ]
    kept = b"Server: llama.cpp\r\nContent-Type: text/event-stream\r\n"
    assert read_response_headers(headers, TRANSPARENT) == (kept, True)
    assert read_response_headers(headers, DATA) == (kept + AS_DATA, True)
    assert read_response_headers([(b"Content-Type", b"text/plain")]) == (
        b"Content-Type: text/plain\r\n" + AS_DATA,
        False,
    )


RULING = [
    (b"Set-Cookie", b"llamasup_session=1; Path=/"),
    (b"Service-Worker-Allowed", b"/"),
    (b"Clear-Site-Data", b'"*"'),
    (b"Link", b"</x.js>; rel=preload; as=script"),
    (b"Refresh", b"0; url=http://evil.example"),
    (b"Alt-Svc", b'h2="evil.example:443"'),
    (b"Report-To", b"{}"),
    (b"SourceMap", b"/x"),
    (b"Access-Control-Allow-Origin", b"*"),
    (b"X-Unknown", b"1"),
]


@pytest.mark.check("X16", "headers for a whole address are dropped")
@pytest.mark.parametrize("header", RULING, ids=lambda header: header[0].decode())
def test_header_that_rules_an_address_reaches_no_browser(header: tuple[bytes, bytes]) -> None:
    for headers in ([header], [(header[0].upper(), header[1])]):
        assert lines_of(headers, DATA) == lines_of(headers, PAGES) == AS_DATA
        assert lines_of(headers, TRANSPARENT) != b""


@pytest.mark.check("X16", "only JSON, events, plain text and audio keep their type")
@pytest.mark.parametrize(
    ("kind", "is_data"),
    [
        (b"application/json", True),
        (b"application/json; charset=utf-8", True),
        (b"Application/Problem+JSON", True),
        (b"text/event-stream", True),
        (b"text/plain; charset=utf-8", True),
        (b"audio/wav", True),
        (b"application/octet-stream", True),
        (b"text/html", False),
        (b"text/html; charset=application/json", False),
        (b"application/json, text/html", False),
        (b"application/json; a=b, text/html", False),
        (b'audio/wav; a="b,", text/html', False),
        (b"application/jsonp", False),
        (b"application/xhtml+xml", False),
        (b"image/svg+xml", False),
        (b"text/javascript", False),
        (b"text/css", False),
        (b"multipart/x-mixed-replace", False),
        (b"application/pdf", False),
        (b"audio", False),
        (b"", False),
    ],
)
def test_answer_that_is_no_data_has_no_type(kind: bytes, is_data: bool) -> None:
    headers = [(b"content-type", kind)]
    own = b"content-type: " + kind + b"\r\n"
    unknown = b"content-type: application/octet-stream\r\n"
    assert lines_of(headers, DATA) == (own if is_data else unknown) + AS_DATA
    assert lines_of(headers, PAGES) == (own + AS_DATA if is_data else own)
    assert lines_of(headers, TRANSPARENT) == own


def test_page_of_llama_server_keeps_what_isolates_it() -> None:
    headers: RawHeaders = [
        (b"Content-Type", b"text/html"),
        (b"Content-Type", b"application/json"),
        (b"Cross-Origin-Opener-Policy", b"same-origin"),
        (b"Location", b"/v1/"),
    ]
    assert lines_of(headers, PAGES) == b"".join(b"%b: %b\r\n" % header for header in headers)
    assert lines_of(headers, DATA) == (
        b"Content-Type: application/octet-stream\r\nContent-Type: application/json\r\n" + AS_DATA
    )


@pytest.mark.parametrize(
    ("destination", "as_data", "as_page"),
    [
        (b"", False, False),
        (b"empty", False, False),
        (b"audio", False, False),
        (b"document", True, False),
        (b"iframe", True, False),
        (b"script", True, False),
        (b"worker", True, False),
        (b"style", True, False),
        (b"a new one", True, False),
        (b"serviceworker", True, True),
    ],
)
def test_browser_shows_and_runs_no_data(destination: bytes, as_data: bool, as_page: bool) -> None:
    assert is_shown_or_run(destination, DATA) == as_data
    assert is_shown_or_run(destination, PAGES) == as_page
