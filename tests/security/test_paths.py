"""Paths as they can be spelled: none of them opens what is closed (X7) or needs a key (X4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamasup.core.http.heads import DEFAULT_RULES, HeadRules
from llamasup.core.proxy import ProxyConfig
from tests.security.circuit import Circuit, Outcome
from tests.security.control_paths import KEYS, reaches_no_more_than_its_right
from tests.security.grammar import control_requests, spelled_paths
from tests.security.limited_key import circuit_of_a_used_up_key, gets_past_no_limit

MakeCircuit = Callable[[ProxyConfig], Circuit]


@pytest.fixture(scope="module")
def make_circuit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCircuit]:
    """One circuit for each configuration, however many tests ask for it."""
    made: dict[str, Circuit] = {}

    def make(config: ProxyConfig) -> Circuit:
        name = repr(config)
        if name not in made:
            made[name] = Circuit(tmp_path_factory.mktemp("circuit"), config)
        return made[name]

    yield make
    for value in made.values():
        value.close()


@pytest.fixture(scope="module")
def used_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Circuit]:
    made = circuit_of_a_used_up_key(tmp_path_factory.mktemp("circuit"))
    yield made
    made.close()


def ask(circuit: Circuit, method: bytes, target: bytes, *lines: bytes) -> Outcome:
    head = (method + b" " + target + b" HTTP/1.1", b"Host: localhost", b"Content-Length: 0", *lines, b"", b"")
    return circuit.send([b"\r\n".join(head)])


def cause(outcome: Outcome) -> str:
    head, _, body = outcome.told.partition(b"\r\n\r\n")
    return f"{head[9:12].decode()} {json.loads(body)['error']['cause']}"


def spellings(path: bytes) -> dict[str, bytes]:
    """Of one path: what some server, old or odd, might take for it."""
    first, rest = path[1:2], path[2:]
    code = first[0]
    return {
        "plain": path,
        "with a query": path + b"?a=b",
        "in capitals": path.upper(),
        "a letter in %XX": b"/%%%02x" % code + rest,
        "a letter in %XX, twice": b"/%%25%02x" % code + rest,
        "a letter in %uXXXX": b"/%%u%04x" % code + rest,
        "a letter in %UXXXX": b"/%%U%04X" % code + rest,
        "a letter in %uXXXX in %XX": b"/%%25u%04x" % code + rest,
        "all letters in %XX": b"/" + b"".join(b"%%%02X" % letter for letter in path[1:]),
        "two slashes": b"/" + path,
        "a slash in %2f": b"/%2f" + path[1:],
        "a slash in %u002f": b"/%u002f" + path[1:],
        "a backslash": b"/\\" + path[1:],
        "a backslash in %5c": b"/%5c" + path[1:],
        "a slash at the end": path + b"/",
        "a dot": b"/." + path,
        "a dot in %2e": b"/%2e" + path,
        "a detour": b"/x/.." + path,
        "a detour in %2e": b"/x/%2e%2E" + path,
        "a detour in %u002e": b"/x/%u002e%u002e" + path,
        "a detour with a parameter": b"/x/..;a=b" + path,
        "a detour with %2f": b"/x%2f..%2f" + path[1:],
        "a detour above the root": b"/../.." + path,
        "a parameter": path + b";a=b",
        "a blank in %20": path + b"%20",
        "a tab in %09": path + b"%09",
        "an absolute target": b"http://localhost" + path,
        "an absolute target with a port": b"HTTP://127.0.0.1:1" + path,
    }


PLAIN = frozenset({"plain", "with a query", "an absolute target", "an absolute target with a port"})
SERVED = PLAIN | {"two slashes", "a slash at the end"}  # as the plain spelling, for every check and the child

CLOSED = [
    *((b"GET", path) for path in (b"/tools", b"/cors-proxy", b"/mcp", b"/models/load", b"/models/unload")),
    *((b"POST", path) for path in (b"/tools", b"/cors-proxy", b"/props", b"/slots/0", b"/models/load")),
    (b"POST", b"/lora-adapters"),
]


@pytest.mark.check("X7", "403 for each of 28 spellings")
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_a_closed_path_is_closed_however_it_is_spelled(
    make_circuit: MakeCircuit, method: bytes, path: bytes
) -> None:
    circuit = make_circuit(ProxyConfig())
    for how, spelled in spellings(path).items():
        outcome = ask(circuit, method, spelled)
        assert (how, outcome.asked) == (how, ())
        assert (how, cause(outcome)) == (how, "403 closed_path")


@pytest.mark.check("X7")
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_behind_a_prefix_the_same_is_closed(make_circuit: MakeCircuit, method: bytes, path: bytes) -> None:
    circuit = make_circuit(ProxyConfig(rules=HeadRules(credentials=True, prefix=b"/api")))
    for how, spelled in spellings(b"/api" + path).items():
        outcome = ask(circuit, method, spelled)
        assert (how, outcome.asked) == (how, ())
        assert (how, cause(outcome)) == (how, "403 closed_path")
    assert ask(circuit, b"GET", b"/api/props").asked[0].target == b"/api/props"


@pytest.mark.check("X7", "403")
@pytest.mark.parametrize(
    "query", [b"?action=save", b"?action=restore", b"?ACTION=erase", b"?a=b&action=save", b""]
)
def test_a_slots_file_cannot_be_written_or_read(make_circuit: MakeCircuit, query: bytes) -> None:
    for method in (b"POST", b"PUT", b"PATCH", b"DELETE"):
        outcome = ask(make_circuit(ProxyConfig()), method, b"/slots/0" + query)
        assert outcome.asked == ()
        assert cause(outcome) == "403 closed_path"


@pytest.mark.check("X7", "404 path_spelling for 22 of 28 spellings")
@pytest.mark.parametrize("prefix", [b"", b"/api"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/completion", b"/v1/embeddings", b"/tokenize"])
def test_a_known_path_is_served_only_in_its_plain_spelling(
    make_circuit: MakeCircuit, path: bytes, prefix: bytes
) -> None:
    rules = HeadRules(credentials=True, prefix=prefix) if prefix else DEFAULT_RULES
    circuit = make_circuit(ProxyConfig(rules=rules))
    for how, spelled in spellings(prefix + path).items():
        head = (b"POST " + spelled + b" HTTP/1.1", b"Host: localhost", b"Content-Length: 9", b"", b"")
        outcome = circuit.send([b"\r\n".join(head)])
        if how in SERVED:  # it waits for the body
            assert (how, outcome.told) == (how, b"")
            continue
        assert (how, outcome.asked, cause(outcome)) == (how, (), "404 path_spelling")
        remedy = json.loads(outcome.told.partition(b"\r\n\r\n")[2])["error"]["remedy"]
        assert remedy == f"Use the path {(prefix + path).decode()}."


@pytest.mark.check("X7")
@pytest.mark.parametrize("key", [b"", b"k", b"wrong"])
def test_further_slashes_change_no_right(make_circuit: MakeCircuit, key: bytes) -> None:
    circuit = make_circuit(ProxyConfig(api_keys=("k",)))
    plain = [b"/", b"/props", b"/livez", b"/metrics", b"/v1/models", b"/v1/models/a", b"/v1/completions"]
    plain += [b"/tools", b"/models/load", b"/slots", b"/lora-adapters", b"/llamasup/v1/status"]
    for path in plain:
        for method in (b"GET", b"POST", b"DELETE"):
            expected = ask(circuit, method, path, b"X-Api-Key: " + key)
            for spelled in (b"/" + path, b"///" + path + b"//", path + b"/", path.replace(b"/", b"//")):
                found = ask(circuit, method, spelled, b"X-Api-Key: " + key)
                refused = found.told[9:12] in (b"401", b"403", b"404") and not found.asked
                targets = [request.target for request in found.asked]
                assert refused or targets == [request.target for request in expected.asked], spelled
                assert found.told[9:12] == expected.told[9:12] or refused, spelled


@pytest.mark.check("X7")
def test_an_id_below_models_may_contain_escapes(make_circuit: MakeCircuit) -> None:
    for path in (
        b"/v1/models/org%2Frepo",
        b"/models/org%2frepo%3Aq4",
        b"/v1/models/a/b",
        b"/v1/models/a%20b",
    ):
        outcome = ask(make_circuit(ProxyConfig()), b"GET", path)
        assert [request.target for request in outcome.asked] == [path]


@pytest.mark.check("X8")
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(spelled=spelled_paths())
def test_no_spelling_bypasses_the_limits_of_a_key(used_up: Circuit, spelled: bytes) -> None:
    gets_past_no_limit(used_up, spelled)


@pytest.mark.check("X4", "401 for 22 of 28 spellings")
@pytest.mark.parametrize("path", [b"/health", b"/v1/health", b"/livez", b"/readyz"])
def test_only_the_plain_spelling_of_a_public_path_needs_no_key(
    make_circuit: MakeCircuit, path: bytes
) -> None:
    circuit = make_circuit(ProxyConfig(api_keys=("k",)))
    for how, spelled in spellings(path).items():
        outcome = ask(circuit, b"GET", spelled)
        assert outcome.asked == ()
        found = "open" if outcome.told.startswith(b"HTTP/1.1 200 ") else cause(outcome)
        assert (how, found) == (how, "open" if how in SERVED else "401 api_key")


@pytest.mark.check("X4", "401")
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"])
def test_every_path_needs_a_key_by_default(make_circuit: MakeCircuit, method: bytes) -> None:
    circuit = make_circuit(ProxyConfig(api_keys=("k",)))
    paths = [
        b"/",
        b"/index.html",
        b"/props",
        b"/slots",
        b"/metrics",
        b"/models",
        b"/v1/models",
        b"/lora-adapters",
    ]
    paths += [
        b"/v1/chat/completions",
        b"/completion",
        b"/embedding",
        b"/tokenize",
        b"/tools",
        b"/x",
        b"/v1/stream",
    ]
    for path in paths:
        outcome = ask(circuit, method, path)
        assert outcome.asked == ()
        assert outcome.told.startswith(b"HTTP/1.1 401 "), path


@pytest.mark.check("X4", "401")
@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: k",
        b"Authorization: Basic k",
        b"Authorization: Bearer",
        b"Authorization: Bearer ",
        b"Authorization: Bearer k2",
        b"Authorization: Bearer K",
        b"Authorization: Bearer k, Bearer k",
        b"Authorization: Bearer k\tx",
        b"Authorization: Bearer=k",
        b"X-Api-Key: Bearer k",
        b"X-Api-Key:",
        b"X-Api-Key: k,k",
        b"X-Api-Key: \xe2\x80\x8bk",
        b"X_Api_Key: k",
        b"Api-Key: k",
        b"Cookie: key=k; x-api-key=k",
        b"Proxy-Authorization: Bearer k",
    ],
)
def test_strings_similar_to_a_key_admit_no_client(make_circuit: MakeCircuit, line: bytes) -> None:
    outcome = ask(make_circuit(ProxyConfig(api_keys=("k",))), b"GET", b"/props", line)
    assert outcome.asked == ()
    assert cause(outcome) == "401 api_key"


@pytest.mark.check("X4", "401")
def test_key_in_the_query_is_ignored(make_circuit: MakeCircuit) -> None:
    for query in (b"api_key=k", b"key=k", b"access_token=k", b"Authorization=Bearer%20k"):
        outcome = ask(make_circuit(ProxyConfig(api_keys=("k",))), b"GET", b"/props?" + query)
        assert outcome.asked == ()
        assert cause(outcome) == "401 api_key"


@pytest.mark.check("X7")
def test_no_request_reaches_routes_that_take_flags(make_circuit: MakeCircuit, tmp_path: Path) -> None:
    body = b'{"model":"tiny","args":["--tools","all"]}'
    for path in (b"/models/load", b"/models/unload", b"/props", b"/llamasup"):
        raw = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
        outcome = make_circuit(ProxyConfig()).send([raw])
        assert outcome.asked == ()
        assert cause(outcome) == "403 closed_path"


@pytest.mark.check("X4")
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(request=control_requests(), key=st.sampled_from(KEYS))
def test_no_spelling_of_a_control_path_reaches_more(request: tuple[bytes, bytes], key: bytes) -> None:
    reaches_no_more_than_its_right(*request, key)
