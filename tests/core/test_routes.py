"""Paths: whose they are, and which stay closed however they are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.routes import canonical_path, closed_by_default, route_of


def test_routes_have_bounded_labels() -> None:
    assert route_of(b"/v1/chat/completions").label == "/v1/chat/completions"
    assert not route_of(b"/tokenize").infers
    assert route_of(b"/llamasup/v1/status").label == "/llamasup"
    assert {route_of(b"/%d" % n).label for n in range(100)} == {"other"}


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        (b"/tools", b"/tools"),
        (b"//Tools/", b"/tools"),
        (b"/%74ools", b"/tools"),
        (b"/%252574ools", b"/tools"),
        (b"/a/../tools", b"/tools"),
        (b"/../../tools", b"/tools"),
        (b"/./a/%2e%2e/tools", b"/tools"),
        (b"\\tools", b"/tools"),
        (b"/tools;x=y", b"/tools"),
        (b"/tools%20", b"/tools"),
        (b"/%u0074ools", b"/tools"),  # llama-server serves /tools for this (b11434)
        (b"/%25u0074%U006Fols", b"/tools"),
        (b"/%uD800%u00e9", b"/\xed\xa0\x80\xc3\xa9"),
        (b"/%u007", b"/%u007"),
        (b"/%25252525252574ools", b"/%252574ools"),  # more layers than any server takes off
        (b"/", b"/"),
        (b"*", b"/*"),
    ],
)
def test_a_path_is_seen_through(path: bytes, canonical: bytes) -> None:
    assert canonical_path(path) == canonical


@given(st.binary(max_size=60))
def test_seeing_through_a_path_is_final(path: bytes) -> None:
    seen = canonical_path(b"/" + path)
    assert seen.startswith(b"/")
    assert b"//" not in seen
    assert seen == seen.lower()


@pytest.mark.parametrize(
    ("method", "path", "closed"),
    [
        (b"GET", b"/tools", True),
        (b"GET", b"/tools/x", True),
        (b"GET", b"/toolsx", False),
        (b"GET", b"/cors-proxy", True),
        (b"GET", b"/props", False),
        (b"POST", b"/props", True),
        (b"GET", b"/slots", False),
        (b"GET", b"/slots/1", False),
        (b"POST", b"/slots/1", True),
        (b"POST", b"/v1/chat/completions", False),
        (b"POST", b"/%6clamasup/v1", True),
        (b"POST", b"/unknown", False),
    ],
)
def test_what_stays_closed(method: bytes, path: bytes, closed: bool) -> None:
    assert closed_by_default(method, path) is closed
