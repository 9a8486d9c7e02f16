"""Routes of paths, and paths that stay closed in every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.routes import Work, canonical_path, closed_by_default, misspelled, route_of


def test_routes_have_bounded_labels() -> None:
    assert route_of(b"/v1/chat/completions").label == "/v1/chat/completions"
    assert not route_of(b"/tokenize").infers
    assert route_of(b"/llamasup/v1/status").label == "/llamasup"
    assert {route_of(b"/%d" % n).label for n in range(100)} == {"other"}


def test_a_post_to_an_unknown_path_is_work_for_the_model() -> None:
    for path in (b"/v1/newer", b"/v1/%63ompletions", b"//completion", b"/completion/"):
        route = route_of(path)
        assert (route.label, route.infers, route.waits, route.streams) == ("other", True, True, False)
    no_work = [b"/slots/0", b"/tools", b"/cors-proxy", b"/props", b"/lora-adapters", b"/v1/streams/lookup"]
    no_work += [b"/tokenize", b"/apply-template", b"/v1/chat/completions/control", b"/models/load"]
    no_work += [b"/v1/responses/input_tokens", b"/llamasup/v1/reload"]
    assert [path for path in no_work if route_of(path).infers] == []


def test_decisions_are_work_that_is_counted_under_its_own_label() -> None:
    route = route_of(b"/v1/systemone")
    assert (route.label, route.work) == ("/v1/systemone", Work.DECISIONS)
    assert (route.infers, route.waits, route.repeats, route.streams) == (True, True, True, False)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        (b"/v1/%63ompletions", "/v1/completions"),
        (b"/v1/%u0063ompletions", "/v1/completions"),
        (b"/v1//chat/completions", "/v1/chat/completions"),
        (b"/v1/chat/completions/", "/v1/chat/completions"),
        (b"/V1/Embeddings", "/v1/embeddings"),
        (b"/%2e/completion", "/completion"),
        (b"//", "/"),
        (b"/v1/%6dodels/tiny", "/v1/models"),
        (b"/models/x/../../v1/completions", "/v1/completions"),
        (b"/v1/models/%2e%2e/completions", "/v1/completions"),
        (b"/slots/%2e%2e/completion", "/completion"),
        (b"/v1/completions", None),
        (b"/v1/systemone", None),
        (b"/v1/%73ystemone", "/v1/systemone"),
        (b"/v1/models/org%2Frepo%3AQ4_K_M", None),
        (b"/models/Org/Repo", None),
        (b"/index.html", None),
        (b"/tools", None),
        (b"*", None),
    ],
)
def test_a_known_path_has_one_spelling(path: bytes, route: str | None) -> None:
    found = misspelled(path)
    assert (found and found.label) == route


def test_behind_a_prefix_a_known_path_has_one_spelling_too() -> None:
    for path in (b"/%61pi/v1/completions", b"/api/v1/%63ompletions", b"/API/v1/completions"):
        found = misspelled(path, b"/api")
        assert (found and found.label) == "/v1/completions"
    for path in (b"/api/v1/completions", b"/v1/completions", b"/api/v1/models/a%2Fb", b"/api/x"):
        assert misspelled(path, b"/api") is None


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
        (b"GET", b"/lora-adapters", False),
        (b"POST", b"/lora-adapters", True),
        (b"PUT", b"/lora%2dadapters/", True),
        (b"GET", b"/slots", False),
        (b"GET", b"/slots/1", False),
        (b"POST", b"/slots/1", True),
        (b"POST", b"/v1/chat/completions", False),
        (b"POST", b"/%6clamasup/v1", True),
        (b"POST", b"/unknown", False),
    ],
)
def test_closed_paths(method: bytes, path: bytes, closed: bool) -> None:
    assert closed_by_default(method, path) is closed
