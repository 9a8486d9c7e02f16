"""``/api/pull`` and ``/api/delete`` through the proxy: who may ask, what the control API gets and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from llamasup.core.gguf.facts import ModelFacts
from llamasup.core.models.spec import ModelSpec
from llamasup.core.proxy import ProxyConfig
from llamasup.features.ollama.dialect import OllamaDialect
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.many import ManyModels
from tests.core.proxy.rig import STREAM_HEAD, Rig, Wire, answer, chunk, field, post, status
from tests.features.ollama.test_dialect import MakeRig, error_of, line, listed, with_key
from tests.kit.patience import eventually

KEYS = ProxyConfig(key_file=keys_of("any\nfew models=tiny\nops rights=inference,control"))
FAR = "hf.co/org/far:Q8_0"
NAMES = ("tiny", "foo", "foo:latest", "q-4b")


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return made(make_rig, KEYS)


def made(make_rig: Callable[..., Rig], config: ProxyConfig, facts: ModelFacts | None = None) -> Rig:
    rig = make_rig(config, dialect=OllamaDialect(lambda *_: "kept"), control=True)
    rig.backend.infos = {"tiny": listed(facts)}
    return rig


def pull(key: str = "any", **fields: Any) -> bytes:
    body = json.dumps({"model": FAR, **fields}).encode()
    return with_key(post(b"/api/pull", body), key.encode())


def delete(key: str, name: str = "tiny:latest") -> bytes:
    request = post(b"/api/delete", json.dumps({"name": name}).encode())
    return with_key(request.replace(b"POST", b"DELETE", 1), key.encode())


def event(name: str, **fields: Any) -> bytes:
    return chunk(b"data: " + json.dumps({"event": name, **fields}).encode() + b"\n\n")


def failure(message: str, code: int = 503) -> dict[str, Any]:
    return {"error": {"message": message, "remedy": "Try again.", "code": code}}


def begin(rig: Rig, request: bytes) -> tuple[Wire, Wire]:
    client = rig.send(request)
    return client, rig.accept_control()


def test_download_is_a_stream_of_lines(rig: Rig) -> None:
    client, control = begin(rig, pull())
    head, body = control.message()
    assert head.startswith(b"POST /llamasup/v1/pull HTTP/1.1\r\n")
    assert json.loads(body) == {"model": FAR, "client": "key-1"}
    control.send(STREAM_HEAD, event("progress", done_bytes=5, total_bytes=10, bytes_per_s=1))
    assert field(client.head(), b"content-type") == b"application/x-ndjson"
    assert line(client) == {"status": "pulling manifest"}
    shown = line(client)
    assert shown.pop("digest").startswith("sha256:")
    assert shown == {"status": f"pulling {FAR}", "completed": 5, "total": 10}
    control.send(chunk(b": keepalive\n\n"), event("progress", done_bytes=6, total_bytes=None, bytes_per_s=1))
    assert "total" not in line(client)
    control.send(event("done"), b"0\r\n\r\n")
    assert line(client) == {"status": "success"}
    assert client.receive(5) == b"0\r\n\r\n"
    record = rig.record()
    assert (record.path, record.status, record.outcome) == ("/api/pull", 200, "ok")


def test_failed_download_ends_with_an_error(rig: Rig) -> None:
    client, control = begin(rig, pull())
    control.message()
    control.send(STREAM_HEAD, event("error", **failure("The hub is away.")), b"0\r\n\r\n")
    client.head()
    assert line(client)["status"] == "pulling manifest"
    assert line(client) == {"error": "The hub is away. Try again."}
    assert client.receive(5) == b"0\r\n\r\n"
    client.send(pull(stream=False))  # the connections stay
    control.message()
    control.send(STREAM_HEAD, event("progress"), event("error", **failure("The hub is away.")), b"0\r\n\r\n")
    assert error_of(client, 503) == "The hub is away. Try again."


def test_download_without_a_stream_is_one_object(rig: Rig) -> None:
    client, control = begin(rig, pull(stream=False))
    control.message()
    control.send(STREAM_HEAD, event("progress"), event("done"), b"0\r\n\r\n")
    head, body = client.message()
    assert status(head) == 200
    assert json.loads(body) == {"status": "success"}


@pytest.mark.usefixtures("no_cause")
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_download_that_breaks_off_is_an_error(rig: Rig, stream: bool, ends: bool) -> None:
    client, control = begin(rig, pull(stream=stream))
    control.message()
    control.send(STREAM_HEAD, event("progress"), *([b"0\r\n\r\n"] if ends else []))
    if not ends:
        control.close()
    if stream:
        client.head()
        assert "error" in [line(client) for _ in range(3)][-1]
    else:
        assert error_of(client, 502)


def test_download_for_a_client_of_http_1_0(rig: Rig) -> None:
    client, control = begin(rig, pull().replace(b"HTTP/1.1", b"HTTP/1.0"))
    control.message()
    control.send(STREAM_HEAD, event("done"), b"0\r\n\r\n")
    _, _, lines = client.rest().partition(b"\r\n\r\n")
    assert [json.loads(each)["status"] for each in lines.splitlines()] == ["pulling manifest", "success"]


def test_control_api_learns_that_the_client_has_left(rig: Rig) -> None:
    client, control = begin(rig, pull())
    control.message()
    control.send(STREAM_HEAD, event("progress"))
    client.head()
    client.close()
    assert control.sees_the_end()
    assert rig.record().outcome == "client_gone"


def test_refusal_of_the_control_api_keeps_its_status(rig: Rig) -> None:
    client, control = begin(rig, pull())
    control.message()
    body = json.dumps(failure("No model.", 404)).encode()
    control.send(answer(body, code=b"404 Not Found"))
    assert error_of(client, 404) == "No model. Try again."


@pytest.mark.parametrize(
    ("key", "shown"),
    [("any", "it failed: llamasup's log says why"), ("ops", "/srv/my models cannot be written. Try again.")],
)
def test_only_keys_with_the_right_control_learn_folders(rig: Rig, key: str, shown: str) -> None:
    client, control = begin(rig, pull(key, stream=False))
    control.message()
    error = failure("/srv/my models cannot be written.")
    control.send(STREAM_HEAD, event("error", **error), b"0\r\n\r\n")
    assert error_of(client, 503) == shown


@pytest.fixture
def many(rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    models = rig.call(lambda: ManyModels(tmp_path, [ModelSpec(name, name) for name in NAMES]))
    rig.proxy.backend = models
    yield rig
    models.close()


def test_key_pulls_only_models_that_it_may_use(many: Rig) -> None:
    for name in (FAR, "foo", "nope"):
        assert "may not use" in error_of(many.send(pull("few", model=name)), 403)
    _, control = begin(many, pull("few", model="tiny"))
    assert json.loads(control.message()[1]) == {"model": "tiny", "client": "key-2"}


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("foo", "foo"),
        ("foo:latest", "foo:latest"),
        (f"{FAR}:latest", FAR),
        ("q:4b", "q-4b"),
        ("tiny:latest", "tiny"),
    ],
)
def test_exact_name_comes_first(many: Rig, name: str, sent: str) -> None:
    """Otherwise the removal of ``foo:latest`` would remove ``foo``."""
    client, control = begin(many, pull("ops", model=name))
    assert json.loads(control.message()[1]) == {"model": sent, "client": "key-3"}
    control.send(answer(b"{}"))
    client.message()
    client.send(delete("ops", name))
    path = quote(sent, safe="").encode()
    assert control.head().startswith(b"POST /llamasup/v1/models/%b/remove HTTP/1.1\r\n" % path)


def test_wrong_fields_and_methods_are_refused(rig: Rig) -> None:
    for request, code, said in (
        (pull(insecure=True), 400, "insecure"),
        (pull(stream=3), 400, "stream"),
        (pull(model=""), 400, "model is required"),
        (pull().replace(b"POST", b"PUT", 1), 405, "use POST"),
        (delete("ops").replace(b"DELETE", b"POST", 1), 405, "use DELETE"),
        (delete("any"), 403, "right `control`"),
        (delete("ops", ""), 400, "model is required"),
    ):
        assert said in error_of(rig.send(request), code)


def test_deletion_needs_a_key(make_rig: MakeRig) -> None:
    rig = made(make_rig, ProxyConfig())
    request = post(b"/api/delete", b'{"model": "tiny"}').replace(b"POST", b"DELETE", 1)
    assert "rights=inference,control" in error_of(rig.send(request), 403)


def test_deletion_answers_nothing_but_its_status(rig: Rig) -> None:
    client, control = begin(rig, delete("ops", "org/far:Q8_0"))
    head = control.head()
    assert head.startswith(b"POST /llamasup/v1/models/org%2Ffar%3AQ8_0/remove HTTP/1.1\r\n")
    control.send(answer(b'{"removed":[],"freed_bytes":0}'))
    answered, body = client.message()
    assert (status(answered), body) == (200, b"")
    client.send(delete("ops"))
    control.head()
    control.send(answer(json.dumps(failure("It stays.", 409)).encode(), code=b"409 Conflict"))
    assert error_of(client, 409) == "It stays. Try again."
    eventually(lambda: rig.in_flight() == 0)
