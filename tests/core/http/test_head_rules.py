"""The headers that a transparent proxy forwards, and those that it never forwards."""

from __future__ import annotations

import pytest

from llamasup.core.http.heads import Head, HeadRules, HttpError, RawHeaders, read_head
from llamasup.core.http.routes import closed_by_default

TRANSPARENT = HeadRules(transparent=True, credentials=True)
HEADERS: RawHeaders = [
    (b"host", b"rebound.example"),
    (b"origin", b"null"),
    (b"authorization", b"Basic a2V5"),
    (b"x-api-key", b"k"),
    (b"x-forwarded-for", b"10.0.0.1"),
    (b"x-real-ip", b"10.0.0.1"),
    (b"forwarded", b"for=10.0.0.1"),
    (b"x-conversation-id", b"c"),
    (b"accept", b"*/*"),
]
# Framing and persistence are between us and each side.
HOP_BY_HOP: RawHeaders = [
    (b"connection", b"keep-alive, x-mine"),
    (b"x-mine", b"1"),
    (b"keep-alive", b"timeout=5"),
    (b"te", b"trailers"),
    (b"transfer-encoding", b"chunked"),
    (b"expect", b"100-continue"),
]


def opening(rules: HeadRules, headers: RawHeaders) -> list[bytes]:
    head = read_head(b"POST", b"/p?q=1", "1.1", headers, rules)
    assert isinstance(head, Head), head
    return head.opening.split(b"\r\n")[:-1]


def test_transparent_head_is_forwarded_without_hop_by_hop_headers() -> None:
    lines = opening(TRANSPARENT, [*HEADERS, *HOP_BY_HOP])
    assert lines == [b"POST /p?q=1 HTTP/1.1", *(name + b": " + value for name, value in HEADERS)]


def test_by_default_neither_keys_nor_origins_go_on() -> None:
    assert opening(HeadRules(), [*HEADERS, *HOP_BY_HOP]) == [
        b"POST /p?q=1 HTTP/1.1",
        b"Host: localhost",
        b"accept: */*",
    ]


def test_only_keys_can_be_forwarded() -> None:
    assert opening(HeadRules(credentials=True), HEADERS) == [
        b"POST /p?q=1 HTTP/1.1",
        b"Host: localhost",
        b"authorization: Basic a2V5",
        b"x-api-key: k",
        b"accept: */*",
    ]


def test_two_hosts_are_always_refused_and_a_missing_host_unless_transparent() -> None:
    twice = [(b"host", b"a"), (b"host", b"b")]
    for rules in (HeadRules(), TRANSPARENT):
        assert isinstance(read_head(b"GET", b"/", "1.1", twice, rules), HttpError)
    assert isinstance(read_head(b"GET", b"/", "1.1", [], HeadRules()), HttpError)
    assert opening(TRANSPARENT, []) == [b"POST /p?q=1 HTTP/1.1", b"Host: localhost"]


@pytest.mark.parametrize(
    ("path", "label"),
    [(b"/x/v1/chat/completions", "/v1/chat/completions"), (b"/v1/completions", "/v1/completions")],
)
def test_a_route_is_known_behind_the_prefix(path: bytes, label: str) -> None:
    head = read_head(b"POST", path, "1.1", [(b"host", b"a")], HeadRules(prefix=b"/x"))
    assert isinstance(head, Head)
    assert head.route.label == label


@pytest.mark.parametrize(
    "path", [b"/x/props", b"/%78/props", b"/X//props", b"/x/./slots/0", b"/x/cors-proxy", b"/props"]
)
def test_closed_paths_are_closed_after_the_prefix_too(path: bytes) -> None:
    assert closed_by_default(b"POST", path, b"/x")
    assert not closed_by_default(b"POST", b"/x/v1/chat/completions", b"/x")
