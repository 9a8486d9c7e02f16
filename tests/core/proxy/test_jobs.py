"""Requests with several jobs: their permits, and the limits of a key (X8)."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from llamasup.core.http.heads import HeadRules
from llamasup.core.proxy import Limits, ProxyConfig
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.generations import await_queued
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import Rig, answer, chunk, error_of, eventually, get, post, status

COMPLETION = b"/completion"
BIG = "a" * (128 << 10)


def prompts(count: int, **more: object) -> bytes:
    return json.dumps({"prompt": ["a"] * count, **more}).encode()


def keyed(key: bytes, body: bytes, path: bytes = COMPLETION) -> bytes:
    return post(path, body, b"Authorization: Bearer " + key)


def busy(rig: Rig) -> int:
    return rig.call(lambda: rig.endpoint.busy)


def config(keys: str = "", **options: object) -> ProxyConfig:
    return ProxyConfig(
        key_file=keys_of(keys) if keys else None,
        limits=Limits(sweep_s=0.02),
        **options,  # type: ignore[arg-type]
    )


WEIGHTS = {
    "prompts": (COMPLETION, {"prompt": ["a", "b", "c"]}, 3),
    "prompts of ids": (COMPLETION, {"prompt": [[1, 2], [3]]}, 2),
    "one prompt of ids": (COMPLETION, {"prompt": [1, 2, 3]}, 1),
    "n": (b"/v1/chat/completions", {"messages": [], "n": 3}, 3),
    "prompts and n": (b"/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
    "texts": (b"/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
    "contents": (b"/embedding", {"content": ["a", "b"]}, 2),
    "documents": (b"/v1/rerank", {"query": "a", "documents": ["a", "b", "c"]}, 3),
    "more than all": (COMPLETION, {"prompt": ["a"] * 3000}, 4),
    "a response's items": (b"/v1/responses", {"input": [{"role": "user"}] * 5}, 1),
}


@pytest.mark.parametrize("route_by_model", [True, False])
@pytest.mark.parametrize(("path", "body", "weight"), WEIGHTS.values(), ids=WEIGHTS)
def test_request_holds_a_permit_for_each_of_its_jobs(
    make_rig: MakeRig, path: bytes, body: object, weight: int, *, route_by_model: bool
) -> None:
    rig = make_rig(config(route_by_model=route_by_model), max_concurrent=4)
    client, child = rig.begin(post(path, json.dumps(body).encode()))
    assert busy(rig) == weight
    child.send(answer())
    client.message()
    eventually(lambda: busy(rig) == 0)


@pytest.mark.check("X8")
def test_no_other_request_is_sent_while_one_with_many_jobs_holds_all_permits(make_rig: MakeRig) -> None:
    rig = make_rig(config(), max_concurrent=4)
    many, one = rig.connect(), rig.connect()
    many.send(post(COMPLETION, prompts(3000)))
    first = rig.accept()
    first.message()
    one.send(post(COMPLETION, b'{"prompt":"one"}'))
    await_queued(rig, 1)
    assert first.is_quiet()
    first.send(answer(b"many"))
    assert many.message()[1] == b"many"
    assert first.message()[1] == b'{"prompt":"one"}'
    first.send(answer(b"one"))
    assert one.message()[1] == b"one"


def test_request_with_many_jobs_is_served_once_one_permit_is_free(make_rig: MakeRig) -> None:
    rig = make_rig(config(), max_concurrent=2)
    one, many = rig.connect(), rig.connect()
    one.send(post(COMPLETION, b"{}"))
    child = rig.accept()
    child.message()
    many.send(post(COMPLETION, prompts(3)))
    other = rig.accept()
    other.message()
    assert busy(rig) == 3
    other.send(answer())
    many.message()
    eventually(lambda: busy(rig) == 1)
    child.send(answer())
    one.message()


def test_queued_request_with_many_jobs_holds_its_permits(make_rig: MakeRig) -> None:
    rig = make_rig(config(), max_concurrent=2)
    one, many = rig.connect(), rig.connect()
    one.send(post(COMPLETION, prompts(2)))
    child = rig.accept()
    child.message()
    many.send(post(COMPLETION, prompts(5)))
    await_queued(rig, 1)
    child.send(answer())
    one.message()
    child.message()
    assert busy(rig) == 2
    child.send(answer())
    many.message()


# --- keys


@pytest.mark.check("X8", "400 too_many_jobs")
@pytest.mark.parametrize("route_by_model", [True, False])
def test_one_request_cannot_have_more_jobs_than_its_keys_concurrent_limit(
    make_rig: MakeRig, *, route_by_model: bool
) -> None:
    rig = make_rig(config("k name=app concurrent=2", route_by_model=route_by_model))
    client = rig.send(keyed(b"k", prompts(3000)))
    error = error_of(client, 400)
    assert (error["cause"], error["type"]) == ("too_many_jobs", "invalid_request_error")
    assert "3000 jobs" in str(error["message"])
    assert "2 at the same time" in str(error["message"])
    assert rig.backend.requested_models == []
    client.send(keyed(b"k", prompts(2)))  # it has its whole quota again
    child = rig.accept()
    child.message()
    child.send(answer())
    assert status(client.message()[0]) == 200


REFUSED = {
    "too many jobs": (prompts(3), b"", 400),
    "too many jobs, in pieces": (prompts(3, x=BIG), b"", 400),
    "a remote image": (b'{"messages":[{"content":[{"image_url":{"url":"http://a.example"}}]}]}', b"", 400),
    "compressed": (b"\x1f\x8b", b"Content-Encoding: gzip", 415),
}


@pytest.mark.check("X8")
@pytest.mark.parametrize(("body", "line", "code"), REFUSED.values(), ids=REFUSED)
def test_refused_request_does_not_count_towards_rpm(
    make_rig: MakeRig, body: bytes, line: bytes, code: int
) -> None:
    rig = make_rig(config("k name=app rpm=1 concurrent=2", route_by_model=False))
    lines = [b"Authorization: Bearer k", *([line] if line else [])]
    for _ in range(3):  # if one counted, the next would be a 429
        client = rig.send(post(COMPLETION, body, *lines))
        assert status(client.message()[0]) == code


def test_jobs_in_flight_count_against_a_keys_concurrent(make_rig: MakeRig) -> None:
    rig = make_rig(config("k name=app concurrent=4\nother name=other concurrent=4"))
    first, second, other = rig.connect(), rig.connect(), rig.connect()
    first.send(keyed(b"k", prompts(3)))
    child = rig.accept()
    child.message()
    second.send(keyed(b"k", prompts(1, n=2)))
    error = error_of(second, 429)
    assert error["cause"] == "key_concurrent"
    other.send(keyed(b"other", prompts(4)))  # each key has its own limit
    theirs = rig.accept()
    theirs.message()
    child.send(answer())
    first.message()
    second.send(keyed(b"k", prompts(2, n=2)))
    child.message()
    first.close()
    child.send(answer())
    assert status(second.message()[0]) == 200
    theirs.send(answer())
    other.message()


def test_body_nested_too_deep_to_count_has_the_maximum_of_jobs(make_rig: MakeRig) -> None:
    rig = make_rig(config("k name=app concurrent=9\nfree name=free", route_by_model=False), max_concurrent=4)
    client = rig.connect()
    deep = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"
    client.send(keyed(b"k", deep))
    assert error_of(client, 400)["cause"] == "too_many_jobs"
    client.send(keyed(b"free", deep))
    child = rig.accept()
    assert child.message()[1] == deep
    assert busy(rig) == 4
    child.send(answer())
    client.message()


def test_disconnect_releases_all_jobs(make_rig: MakeRig) -> None:
    rig = make_rig(config("k name=app concurrent=4"), max_concurrent=4)
    client, child = rig.begin(keyed(b"k", prompts(4)))
    client.close()
    assert child.sees_the_end()
    assert busy(rig) == 4
    child.close()
    eventually(lambda: busy(rig) == 0)
    client, child = rig.begin(keyed(b"k", prompts(4)))
    child.send(answer())
    assert status(client.message()[0]) == 200


@pytest.mark.parametrize("route_by_model", [True, False])
def test_chat_with_many_messages_is_one_job(make_rig: MakeRig, *, route_by_model: bool) -> None:
    rig = make_rig(config("k name=app concurrent=1", route_by_model=route_by_model))
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    client, child = rig.begin(
        keyed(b"k", json.dumps({"messages": [message] * 9000}).encode(), b"/v1/chat/completions")
    )
    assert busy(rig) == 1
    child.send(answer())
    assert status(client.message()[0]) == 200


AUDIO = b"RIFF" + bytes(range(256)) * 1000


@pytest.mark.parametrize("path", [b"/v1/audio/transcriptions", b"/any"])
@pytest.mark.parametrize("route_by_model", [True, False])  # False: the body is forwarded
def test_form_with_a_file_is_one_job(make_rig: MakeRig, path: bytes, *, route_by_model: bool) -> None:
    rig = make_rig(config("k name=app concurrent=1", route_by_model=route_by_model))
    fields = [("model", b"m"), ("n", b"2"), ("max_tokens", b"2"), ('file"; filename="a.wav', AUDIO)]
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields
    )
    client, child = rig.begin(keyed(b"k", body + b"--b--\r\n", path))
    assert busy(rig) == 1
    child.send(answer())
    assert status(client.message()[0]) == 200


# --- forwarded bodies


def uploaded(body: bytes, key: bytes = b"k") -> tuple[bytes, bytes]:
    head = get(COMPLETION, b"Authorization: Bearer " + key, b"Content-Length: %d" % len(body), method=b"POST")
    return head, body


@pytest.mark.check("X8", "400; llama-server never gets the last byte")
@pytest.mark.parametrize("chunked", [False, True])
def test_jobs_of_a_forwarded_body_are_checked_before_its_last_byte(
    make_rig: MakeRig, *, chunked: bool
) -> None:
    rig = make_rig(config("k name=app concurrent=2", route_by_model=False))
    client = rig.connect()
    body = json.dumps({"prompt": ["a", BIG, "b"]}).encode()
    head, body = uploaded(body)
    if chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    begun, rest = body[:-20], body[-20:]
    client.send(head, chunk(begun) if chunked else begun)
    child = rig.accept()
    child.until(b'{"prompt"')
    client.send(chunk(rest) + b"0\r\n\r\n" if chunked else rest)
    assert error_of(client, 400)["cause"] == "too_many_jobs"
    try:
        received = child.rest()
    except ConnectionResetError:
        received = b""
    assert rest not in received
    assert not received.endswith(b"0\r\n\r\n")
    assert busy(rig) == 0


def test_forwarded_body_takes_its_permits_when_it_is_complete(make_rig: MakeRig) -> None:
    rig = make_rig(config("k name=app concurrent=3", route_by_model=False), max_concurrent=4)
    client = rig.connect()
    head, body = uploaded(json.dumps({"prompt": ["a", BIG, "b"]}).encode())
    client.send(head, body[:-1])
    child = rig.accept()
    child.head()
    child.receive(len(body) - 1)
    assert busy(rig) == 0
    client.send(body[-1:])
    assert child.receive(1) == body[-1:]
    eventually(lambda: busy(rig) == 3)
    second = rig.send(keyed(b"k", b"{}"))
    assert error_of(second, 429)["cause"] == "key_concurrent"
    child.send(answer())
    assert status(client.message()[0]) == 200
    assert busy(rig) == 0


@pytest.mark.parametrize("complex_part", [b"[" * 600 + b"]" * 600, b"[" + b"0,[]," * 110_000 + b"0]"])
@pytest.mark.parametrize(
    ("route_by_model", "size", "code"), [(True, 2 << 20, 200), (False, 100, 200), (False, 2 << 20, 400)]
)
def test_complex_forwarded_body_is_decoded_if_kept(
    make_rig: MakeRig, complex_part: bytes, size: int, code: int, *, route_by_model: bool
) -> None:
    rig = make_rig(config("k name=app concurrent=1", route_by_model=route_by_model), max_concurrent=4)
    client = rig.connect()
    body = b'{"x":%b,"y":"%b","prompt":"a"}' % (complex_part, b"a" * size)
    client.send(*uploaded(body))
    child = rig.accept()
    if code == 400:
        with suppress(ConnectionResetError):
            child.rest()
        assert error_of(client, 400)["cause"] == "too_many_jobs"
        return
    assert child.message()[1] == body
    assert busy(rig) == 1
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_request_without_inference_has_no_jobs(make_rig: MakeRig) -> None:
    rig = make_rig(config("k name=app concurrent=1", route_by_model=False), max_concurrent=1)
    client = rig.connect()
    small, large = b'{"content": ["a", "b"], "n": 7}', json.dumps({"content": ["a", BIG]}).encode()
    client.send(keyed(b"k", small, b"/tokenize"))
    child = rig.accept()
    child.message()
    child.send(answer())
    assert status(client.message()[0]) == 200
    client.send(keyed(b"k", large, b"/tokenize"))
    child.message()
    assert busy(rig) == 0
    child.send(answer())
    assert status(client.message()[0]) == 200


def test_transparent_proxy_applies_no_limits(make_rig: MakeRig) -> None:
    rules = HeadRules(transparent=True, credentials=True)
    rig = make_rig(config(route_by_model=False, rules=rules), max_concurrent=4)
    client, child = rig.begin(post(COMPLETION, prompts(3000)))
    assert busy(rig) == 1
    child.send(answer())
    client.message()


@pytest.mark.check("X8", "415")
def test_compressed_body_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(config(route_by_model=False))
    for body in (b"\x1f\x8b\x08", b"\x1f\x8b" + BIG.encode()):
        client = rig.send(post(COMPLETION, body, b"content-Encoding: GZIP"))
        assert error_of(client, 415)["cause"] == "content_encoding"


def test_body_with_identity_encoding_is_forwarded(rig: Rig) -> None:
    client = rig.send(post(COMPLETION, b"{}", b"Content-Encoding: identity"))
    child = rig.accept()
    assert child.message()[1] == b"{}"
    child.send(answer())
    assert status(client.message()[0]) == 200
