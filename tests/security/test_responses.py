"""What a child sends is passed on as what it is, or not at all (X9, S12)."""

from __future__ import annotations

import json

import pytest

from tests.core.proxy.rig import Rig, field, get, status

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n"


def answered(rig: Rig, raw: bytes) -> tuple[bytes, bytes]:
    """The child answers with ``raw`` and closes: head and rest of what the client gets."""
    client = rig.connect()
    client.send(get(b"/props", b"Connection: close"))
    child = rig.accept()
    child.head()
    child.send(raw)
    child.close()
    return client.head(), client.rest()


@pytest.mark.check("X9")
@pytest.mark.parametrize("line", [b"Set-Cookie: a=b", b"Location: http://evil.example/", b"X-Any: y"])
def test_a_trailer_of_the_child_never_becomes_a_header(rig: Rig, line: bytes) -> None:
    head, rest = answered(rig, _CHUNKED + b"\r\n2\r\nhi\r\n0\r\n" + line + b"\r\n\r\n")
    assert status(head) == 200
    assert line not in head
    assert rest == b"2\r\nhi\r\n0\r\n" + line + b"\r\n\r\n"


ODD = {
    "a coding before chunked in a line of its own": _OK
    + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked before a tab, which is no chunked to the parser": _OK
    + b"Transfer-Encoding: chunked\t\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "chunked before another coding": _OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a length with more zeros than a number may have": _OK
    + b"Content-Length: "
    + b"0" * 5000
    + b"2\r\n\r\nhi",
    "a signed length": _OK + b"Content-Length: +2\r\n\r\nhi",
    "a list of lengths": _OK + b"Content-Length: 2, 2\r\n\r\nhi",
    "a length below zero": _OK + b"Content-Length: -1\r\n\r\nhi",
    "a length in a trailer": _CHUNKED + b"\r\n2\r\nhi\r\n0\r\nContent-Length: 2\r\n\r\n",
    "a folded header": _OK + b"X: a\r\n Set-Cookie: b\r\nContent-Length: 2\r\n\r\nhi",
    "a bare CR in a header": _OK + b"X: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\nhi",
    "a bare LF in a header": _OK + b"X: a\nSet-Cookie: b\r\nContent-Length: 2\r\n\r\nhi",
    "a NUL in a header": _OK + b"X: a\0b\r\nContent-Length: 2\r\n\r\nhi",
    "a space before the colon": _OK + b"Content-Length : 2\r\n\r\nhi",
    "HTTP/0.9": b"hi, this is all",
    "HTTP/2": b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nhi",
    "a status below 100": b"HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\nhi",
    "an interim response and no other": b"HTTP/1.0 100 Continue\r\n\r\n",
    "a chunk size behind a space": _CHUNKED + b"\r\n 2\r\nhi\r\n0\r\n\r\n",
    "a chunk longer than it says": _CHUNKED + b"\r\n2\r\nhi!\r\n0\r\n\r\n",
    "another response for the next request": _OK + b"Content-Length: 2\r\n\r\nhi" + _OK + b"\r\n",
}


@pytest.mark.usefixtures("no_cause")
@pytest.mark.check("X9", "502, or a broken connection")
@pytest.mark.parametrize("raw", ODD.values(), ids=ODD)
def test_a_response_that_readers_differ_on_is_not_passed_on(rig: Rig, raw: bytes) -> None:
    head, rest = answered(rig, raw)
    assert status(head) == 502
    assert json.loads(rest)["error"]["cause"] == "upstream_broke"
    assert field(head, b"set-cookie") is None
