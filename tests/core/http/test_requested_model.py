"""Which model a request names, wherever it says so. llama.cpp's router is asked the same in tests/real."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.requested_model import (
    LISTS,
    MAX_NAME,
    MAX_PARTS,
    BodyTooDeep,
    autoload_of,
    lists_of,
    named_in_path,
    read_body,
    renamed_query,
)


def requested_model(body: bytes, query: bytes) -> str | None:
    return read_body(body, query, "other")[0]


WAV = b"RIFF" + bytes(range(256)) * 1000


def part(name: str, value: bytes, *more: str, quoted: bool = True) -> bytes:
    said = f'name="{name}"' if quoted else f"name={name}"
    return f"Content-Disposition: form-data; {'; '.join((said, *more))}\r\n\r\n".encode() + value


def form(*parts: bytes, boundary: bytes = b"------------------------d74496d66958873e") -> bytes:
    opening = b"".join(b"--%b\r\n%b\r\n" % (boundary, each) for each in parts)
    return opening + b"--" + boundary + b"--\r\n"


# --- JSON


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"model":"tiny"}', "tiny"),
        (b'{"messages":[{"model":"within"}],"model":"org/repo:Q4_K_M","stream":true}', "org/repo:Q4_K_M"),
        (b' \n{ "model" : "t\\u0069ny" } ', "tiny"),
        (b'\xef\xbb\xbf{"model":"marked"}', "marked"),
        (b'{"model":"first","model":"last"}', "last"),
        (b'{"model":true,"model":"tiny"}', "tiny"),
        (b'{"model":"tiny","model":7}', None),
        (b'{"model":7}', None),
        (b'{"model":["tiny"]}', None),
        (b'{"model":{"name":"tiny"}}', None),
        (b'{"model":null}', None),
        (b'{"model":""}', None),
        (b'{"Model":"tiny"}', None),
        (b"{}", None),
        (b'["model","tiny"]', None),
        (b'"tiny"', None),
        (b'{"model":"tiny"', None),
        (b'{"model":"tiny"}}', None),
        (b"model=tiny", None),
        (b"\xff\xfe{}", None),
        (b"[" * 100_000, None),
        (b'{"model":"tiny"}\0', "tiny"),
        (b'{"model":"tiny"}\0{"model":"other"}', None),
        (b"", None),
    ],
    ids=lambda value: repr(value[:32]) if isinstance(value, bytes) else None,
)
def test_a_json_body_names_a_model_with_its_last_string(body: bytes, named: str | None) -> None:
    assert requested_model(body, b"") == named


@pytest.mark.parametrize(
    "body", [b'{"model":' + b"[" * 100_000, b'{"model":"b","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_body_nested_too_deep_is_an_error_and_not_a_body_without_a_model(body: bytes) -> None:
    with pytest.raises(BodyTooDeep):
        requested_model(body, b"model=tiny")


@given(st.binary())
def test_no_body_makes_trouble(body: bytes) -> None:
    for each in (body, b"--" + body, b"--b\r\n" + body + b"\r\n--b--", b'{"model":' + body + b"}"):
        assert requested_model(each, body) != ""


@given(st.text(min_size=1).filter(lambda name: name.isprintable()))
def test_any_written_name_is_read_back(name: str) -> None:
    assert requested_model(json.dumps({"model": name}).encode(), b"") == name
    assert requested_model(json.dumps({"model": name}, ensure_ascii=False).encode(), b"") == name


# --- forms


def test_a_form_names_a_model_before_or_behind_its_file() -> None:
    file = part("file", WAV, 'filename="a.wav"')
    model = part("model", b"whisper")
    assert requested_model(form(file, model), b"") == "whisper"
    assert requested_model(form(model, file), b"") == "whisper"
    assert requested_model(form(part("language", b"en"), model), b"") == "whisper"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (form(part("model", b"plain", quoted=False)), "plain"),
        (
            form(part("model", b"typed").replace(b"\r\n\r\n", b"\r\nContent-Type: text/plain\r\n\r\n")),
            "typed",
        ),
        (form(part("model", b"lower").replace(b"Content-Disposition", b"content-disposition")), "lower"),
        (form(part("model", b"first"), part("model", b"second")), "first"),
        (form(part("model", b" spaced ")), " spaced "),
        (form(part("model", b"short"), boundary=b"x"), "short"),
        (form(part("model", b"a file", 'filename="model"')), None),
        (form(part("file", b"x", 'filename="; name=model"')), None),
        (form(part("models", b"x"), part("filename", b"model")), None),
        (form(part("model", b"")), None),
        (form(part("model", b"x" * (MAX_NAME + 1))), None),
        (form(*[part("field", b"")] * MAX_PARTS, part("model", b"late")), None),
        (form(part("model", b"x")).replace(b"\r\n", b"\n"), None),
        (form(part("model", b"unfinished"))[:-50], None),
        (form(part("file", WAV))[:-100], None),
        (form(), None),
        (b"--", None),
        (b"--\r\n", None),
        (b"--x", None),
        (b"--" + b"x" * 100_000 + b"\r\n", None),
        (b"--x\r\nContent-Disposition: " + b"form-data; " * 100_000, None),
    ],
    ids=lambda value: None if value is None or isinstance(value, str) else repr(value[-40:]),
)
def test_a_form_names_a_model_in_a_field_of_its_own(body: bytes, named: str | None) -> None:
    assert requested_model(body, b"") == named


# --- targets


@pytest.mark.parametrize(
    ("query", "named"),
    [
        (b"model=tiny", "tiny"),
        (b"autoload=false&model=org%2Frepo%3AQ4_K_M", "org/repo:Q4_K_M"),
        (b"model=a&model=b", "b"),
        (b"model=a+b%20c", "a b c"),
        (b"model=", None),
        (b"model", None),
        (b"models=x&xmodel=y", None),
        (b"", None),
    ],
)
def test_a_query_names_a_model(query: bytes, named: str | None) -> None:
    assert requested_model(b"", query) == named


def test_the_body_counts_before_the_query() -> None:
    assert requested_model(b'{"model":"body"}', b"model=query") == "body"
    assert requested_model(b'{"model":null}', b"model=query") == "query"
    assert requested_model(form(part("model", b"form")), b"model=query") == "form"
    assert requested_model(b"no JSON", b"model=query") == "query"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (b"/v1/models/tiny", "tiny"),
        (b"/models/tiny", "tiny"),
        (b"/v1/models/org/repo:Q4_K_M", "org/repo:Q4_K_M"),
        (b"/v1/models/org%2Frepo%3aQ4_K_M", "org/repo:Q4_K_M"),
        (b"/v1/models/a+b", "a+b"),
        (b"/v1/models/models/x", "models/x"),
        (b"/v1/models/%ff", "\ufffd"),
        (b"/v1/models/", None),
        (b"/v1/models", None),
        (b"/models", None),
    ],
)
def test_a_path_names_a_model(path: bytes, named: str | None) -> None:
    assert named_in_path(path) == named


# --- jobs


@pytest.mark.parametrize(
    ("label", "body", "jobs"),
    [
        ("/completion", b'{"prompt": ["a", "b"], "n": 2, "n_cmpl": 3}', 6),
        ("/completion", b'{"prompt": ["a", "b"], "n": "x"}', 2),
        ("/completion", b'{"prompt": ["a", -1]}', 1),
        ("/completion", b'{"prompt": [ 1, "a"]}', 1),
        ("/completion", b'{"prompt": []}', 1),
        ("/completion", b'{"prompt": ["a"], "prompt": ["a", "b", "c"]}', 3),
        ("/completion", b'{"input": ["a", "b"]}', 1),
        ("/completion", b'{"prompt": [' + b'"a,b",' * 300 + b'"a"]}', 301),
        ("/completion", b'{"prompt": [' + b'"a",' * 255 + b'"a"]}', 256),
        ("/completion", b'{"model": 7, "prompt": ["a", "b"]}', 2),
        ("/completion", b'\xef\xbb\xbf{"prompt": ["a", "b"]}', 2),
        ("/completion", b'{"prompt": ["a", "b"]}\0', 2),
        ("/completion", b'\xef\xbb\xbf{"prompt": ["a", "b"]', 2),
        ("/completion", b'{"prompt": ["a", "b"]]]', 2),  # no JSON: what it could be for a laxer reader
        ("/completion", form(part("prompt", b"one"), part("prompt", b"two"), part("n", b"3")), 2),
        ("/completion", form(part("prompt", b"one"), part("file", WAV, 'filename="a.wav"')), 1),
        ("/v1/audio/transcriptions", form(part("file", WAV * 3, 'filename="a.wav"'), part("n", b"2")), 1),
        ("/v1/audio/transcriptions", b"a preamble\r\n" + form(part("file", b"[" * 999)), 1),
        ("/v1/embeddings", b'{"input": ["a", "b", "c"]}', 3),
        ("/embedding", b'{"content": ["a", "b", "c"]}', 3),
        ("/v1/rerank", b'{"documents": ["a", "b"], "query": "a"}', 2),
        ("/rerank", b'{"texts": ["a", "b"], "query": "a"}', 2),
        ("/v1/chat/completions", b'{"messages": [], "prompt": ["a", "b"], "n": 4}', 4),
        ("/v1/responses", b'{"input": [{"role": "user"}, {"role": "user"}]}', 1),
        ("other", b'{"questions": {"a": {}, "b": {}, "c": {}}}', 3),
        ("other", b'{"questions": {"a": {}, "b": {}, "c": {}}, "input": [1]}', 3),
    ],
)
def test_model_and_jobs_of_a_body_on_a_route(label: str, body: bytes, jobs: int) -> None:
    assert read_body(body, b"", label)[1] == jobs


def test_an_unknown_route_may_take_every_list() -> None:
    assert lists_of("/v1/embeddings") == ("input", "content")
    assert lists_of("other") == LISTS


@pytest.mark.parametrize(
    ("query", "after"),
    [
        (b"model=v", b"model=m%2B1/x:y"),
        (b"a=model=v&model=v&xmodel=v&model=", b"a=model=v&model=m%2B1/x:y&xmodel=v&model=m%2B1/x:y"),
        (b"a&b=%20", b"a&b=%20"),
    ],
)
def test_query_with_another_model(query: bytes, after: bytes) -> None:
    assert renamed_query(query, "m+1/x:y") == after
    if b"&model=" in query or query.startswith(b"model="):
        assert requested_model(b"", after) == "m+1/x:y"


@pytest.mark.parametrize(
    ("query", "loads"),
    [
        (b"", None),
        (b"model=m&x", None),
        (b"autoload=", None),
        (b"xautoload=false", None),
        (b"autoload=true", True),
        (b"model=m&autoload=1", True),
        (b"autoload=false", False),
        (b"autoload=TRUE", False),
        (b"autoload=0&autoload=true", False),
    ],
)
def test_autoload_is_read_as_llama_cpps_router_reads_it(query: bytes, loads: bool | None) -> None:
    assert autoload_of(query) is loads
