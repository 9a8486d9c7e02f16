"""Several models behind one address: the model of a request, and the list of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.proxy import ProxyConfig
from llamasup.core.queueing.endpoint import generation_ended
from tests.core.http.test_requested_model import form, part
from tests.core.planning.plans import bert, model
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.many import ManyModels
from tests.core.proxy.rig import CHAT, Rig, Wire, answer, eventually, field, get, post, status

ABSENT = HttpError(
    503, "The model is not loaded", cause="not_loaded", retry_after_s=1.0, queueable=True, absent=True
)
CHATTY = ModelSpec("org/chat:Q4_K_M", "/chat.gguf", aliases=("gpt-4o-mini",), listed=model())
OTHER = ModelSpec("other", "/other.gguf", listed=model())
EMBEDDER = ModelSpec("bge", "/bge.gguf", listed=bert())

MakeMany = Callable[..., tuple[Rig, ManyModels]]


@pytest.fixture
def make_many(make_rig: MakeRig, tmp_path: Path) -> Iterator[MakeMany]:
    made: list[ManyModels] = []

    def make(config: ProxyConfig | None = None, *, default: str | None = None) -> tuple[Rig, ManyModels]:
        rig = make_rig(config or ProxyConfig())
        many = rig.call(lambda: ManyModels(tmp_path, [CHATTY, OTHER, EMBEDDER], default))
        rig.proxy.backend = many
        made.append(many)
        return rig, many

    yield make
    for many in made:
        many.close()


def reaches(rig: Rig, many: ManyModels, name: str, request: bytes) -> None:
    """Check that this model answers the request."""
    client = rig.send(request)
    child = many.accept(name, rig)
    child.message()
    child.send(answer(name.encode(), b"Connection: close"))
    assert client.message()[1] == name.encode()
    assert rig.record().model == name


def error_of(answered: tuple[bytes, bytes], code: int) -> dict[str, Any]:
    head, body = answered
    assert status(head) == code, body
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["code"] == code
    return error


def json_post(path: bytes, *lines: bytes, **body: Any) -> bytes:
    return post(path, json.dumps(body).encode(), *lines)


# --- the model of a request


def test_request_gets_the_model_that_it_names(make_many: MakeMany) -> None:
    rig, many = make_many()
    chat, other = CHATTY.id, OTHER.id
    reaches(rig, many, chat, json_post(CHAT, model=chat, messages=[]))
    reaches(rig, many, chat, json_post(CHAT, messages=[], model="gpt-4o-mini"))
    reaches(rig, many, other, json_post(b"/tokenize", content="a", model="other"))
    reaches(rig, many, other, json_post(CHAT + b"?model=bge", model="other"))
    reaches(rig, many, other, json_post(CHAT + b"?model=other"))
    upload = form(part("file", bytes(100_000), 'filename="a.wav"'), part("model", b"other"))
    reaches(rig, many, other, post(b"/v1/audio/transcriptions", upload))
    for path in (b"/props", b"/slots", b"/lora-adapters"):
        reaches(rig, many, other, get(path + b"?model=other&autoload=false"))
        reaches(rig, many, chat, get(path + b"?model=org%2Fchat%3AQ4_K_M"))


def test_one_connection_can_use_several_models(make_many: MakeMany) -> None:
    rig, many = make_many()
    client = rig.connect()
    children: dict[str, Wire] = {}
    for name in ("other", CHATTY.id, "other", "other", CHATTY.id):
        client.send(json_post(CHAT, model=name))
        child = children[name] = children.get(name) or many.accept(name, rig)
        child.message()
        child.send(answer(name.encode()))
        assert client.message()[1] == name.encode()


def test_request_without_model_gets_the_default(make_many: MakeMany) -> None:
    rig, many = make_many(default="other")
    for request in (post(CHAT, b"no JSON"), json_post(CHAT, model=7), get(b"/"), get(b"/props?model=")):
        reaches(rig, many, "other", request)


def test_without_default_model_error_lists_the_models(make_many: MakeMany) -> None:
    rig, _ = make_many()
    for request in (json_post(CHAT, messages=[]), get(b"/slots")):
        error = error_of(rig.ask(request), 400)
        assert error["cause"] == "model_unnamed"
        assert error["remedy"] == 'Set "model" to org/chat:Q4_K_M, other or bge.'


@pytest.mark.parametrize("body", [b"{bad", b"{model: other}", b'{"model": "other"', b"[" * 2000])
def test_body_that_is_no_json_names_no_model_for_that_reason(make_many: MakeMany, body: bytes) -> None:
    """curl in a shell that took the quotes."""
    rig, _ = make_many()
    error = error_of(rig.ask(post(CHAT, body)), 400)
    assert error["cause"] in ("body_not_json", "body_too_deep")
    assert "names no model" not in error["message"]


def test_unknown_model_is_a_404_and_no_label_of_a_metric(make_many: MakeMany) -> None:
    rig, _ = make_many(default="other")
    answered = rig.ask(json_post(CHAT, model="othre"))
    error = error_of(answered, 404)
    assert field(answered[0], b"retry-after") is None
    assert (error["cause"], error["type"]) == ("model_not_found", "invalid_request_error")
    assert "'othre'" in error["message"]
    assert error["remedy"] == "Did you mean other?"
    record = rig.record()
    assert (record.model, record.outcome, record.generation) == ("", "refused", 0)
    rig.ask(get(b"/props?model=made%20up"))
    rig.record()
    assert {name for name, _, _ in rig.call(lambda: dict(rig.proxy.metrics.requests))} == {""}
    assert rig.call(lambda: dict(rig.proxy.metrics.models)) == {}


def test_model_name_of_megabytes_is_a_short_404(make_many: MakeMany) -> None:
    rig, _ = make_many()
    head, body = rig.ask(json_post(CHAT, model="x" * 5_000_000))
    assert status(head) == 404
    assert len(body) < 1000


# --- a model that is not loaded


def test_requests_wait_for_their_own_model_and_count_for_it(make_many: MakeMany) -> None:
    rig, many = make_many()
    other = many.by_id["other"]
    other.unavailable = ABSENT
    waiting, leaving = rig.connect(), rig.connect()
    for client in (waiting, leaving):
        client.send(json_post(CHAT, model="other"))
    eventually(lambda: rig.call(lambda: len(other.queue)) == 2)
    assert other.waits == 2
    reaches(rig, many, CHATTY.id, json_post(CHAT, model="gpt-4o-mini"))
    leaving.close()
    record = rig.record()
    assert (record.model, record.outcome, record.generation) == ("other", "client_gone", 0)
    rig.call(other.loaded)
    child = many.accept("other", rig)
    child.message()
    child.send(answer(b"late"))
    assert waiting.message()[1] == b"late"
    assert rig.record().model == "other"
    counted = rig.call(lambda: dict(rig.proxy.metrics.requests))
    assert counted["other", "/v1/chat/completions", 499] == 1
    assert (
        sum(rig.call(lambda: rig.proxy.metrics.models["other"].request_s.counts)) == 1
    )  # the time of a request without a server does not count


def test_request_about_a_model_does_not_load_it(make_many: MakeMany) -> None:
    rig, many = make_many(default="other")
    other = many.by_id["other"]
    other.unavailable = ABSENT
    for path in (b"/props", b"/slots?model=other"):
        error = error_of(rig.ask(get(path)), 503)
        assert error["cause"] == "not_loaded"
        assert rig.record().model == "other"
    assert other.waits == 0


def test_model_unfit_for_the_request_is_not_loaded(make_many: MakeMany) -> None:
    rig, many = make_many()
    bge, chat = many.by_id["bge"], many.by_id[CHATTY.id]
    bge.unavailable = chat.unavailable = ABSENT
    error = error_of(rig.ask(json_post(CHAT, model="bge")), 400)
    assert error["cause"] == "model_purpose"
    assert error["message"] == "The model 'bge' generates no text"
    assert "is for embeddings" in error["remedy"]
    error = error_of(rig.ask(json_post(b"/v1/embeddings", model="gpt-4o-mini")), 400)
    assert error["message"] == "The model 'org/chat:Q4_K_M' gives no embeddings"
    assert (bge.waits, chat.waits) == (0, 0)
    for _ in range(2):
        assert rig.record().outcome == "refused"
    bge.unavailable = None
    reaches(rig, many, "bge", json_post(b"/v1/embeddings", model="bge"))
    reaches(rig, many, "bge", json_post(b"/tokenize", model="bge"))


def test_removal_of_model_ends_its_request(make_many: MakeMany) -> None:
    rig, many = make_many()
    client = rig.send(json_post(CHAT, model="other"))
    many.accept("other", rig).message()
    gone = many.by_id.pop("other")
    gone.listener.close()
    rig.call(lambda: gone.endpoint.close(generation_ended("it was taken out of the configuration")))
    error_of(client.message(), 503)
    assert rig.record().outcome == "revoked"


# --- the list of models


def test_llamasup_lists_its_models(make_many: MakeMany) -> None:
    rig, many = make_many(default="other")
    many.by_id["bge"].unavailable = ABSENT
    for path in (b"/v1/models", b"/models"):
        head, body = rig.ask(get(path))
        assert status(head) == 200
        assert field(head, b"content-type") == b"application/json; charset=utf-8"
        listed = json.loads(body)["data"]
        assert [model["id"] for model in listed] == ["other", CHATTY.id, "bge"]  # the default comes first
        assert [model["status"]["value"] for model in listed] == ["loaded", "loaded", "unloaded"]
        record = rig.record()
        assert (record.route, record.outcome) == (path.decode(), "local")
    client = rig.send(get(b"/v1/models", method=b"HEAD"))
    head = client.head()
    assert int(field(head, b"content-length") or b"0") == len(body)
    client.send(get(b"/v1/models"))  # the connection is fit for the next one
    assert client.message()[1] == body


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/models/org/chat:Q4_K_M",
        b"/v1/models/org%2Fchat%3aQ4_K_M",
        b"/v1/models/gpt-4o-mini",
        b"/models/ORG/chat",
    ],
)
def test_model_is_shown_under_each_of_its_names(make_many: MakeMany, path: bytes) -> None:
    rig, _ = make_many()
    head, body = rig.ask(get(path))
    assert status(head) == 200
    shown = json.loads(body)
    assert (shown["id"], shown["object"], shown["aliases"]) == (CHATTY.id, "model", ["gpt-4o-mini"])


def test_unknown_model_in_path_is_a_404_with_similar_names(make_many: MakeMany) -> None:
    rig, _ = make_many()
    for name in (b"othre", b"..%2f..%2fetc%2fpasswd", b"%00", b"x" * 10_000):
        error = error_of(rig.ask(get(b"/v1/models/" + name)), 404)
        assert error["cause"] == "model_not_found"
    assert error_of(rig.ask(get(b"/v1/models/othre")), 404)["remedy"] == "Did you mean other?"


def test_model_list_accepts_only_get_and_head(make_many: MakeMany) -> None:
    rig, _ = make_many()
    for method, path in ((b"POST", b"/v1/models"), (b"DELETE", b"/v1/models/other")):
        head, _ = rig.ask(get(path, method=method))
        assert status(head) == 405
        assert field(head, b"allow") == b"GET, HEAD"


def test_with_one_model_llama_server_answers_the_list(rig: Rig) -> None:
    for path in (b"/v1/models", b"/models", b"/v1/models/tiny"):
        client, child = rig.begin(get(path))
        child.send(answer(b'{"object":"list"}', b"Connection: close"))
        assert client.message()[1] == b'{"object":"list"}'


# --- keys for certain models

KEYS = "all name=all\nsome name=some models=gpt-4o*,BGE\nops name=ops rights=control"


def bearer(key: str) -> bytes:
    return f"Authorization: Bearer {key}".encode()


@pytest.mark.check("X4", "403 by body, query and path")
def test_key_for_certain_models_gets_no_other(make_many: MakeMany) -> None:
    rig, many = make_many(ProxyConfig(key_file=keys_of(KEYS)), default="other")
    reaches(rig, many, CHATTY.id, json_post(CHAT, bearer("some"), model=CHATTY.id))
    reaches(rig, many, "other", json_post(CHAT, bearer("all"), model="other"))
    for request in (
        json_post(CHAT, bearer("some"), model="other"),
        json_post(CHAT, bearer("some")),  # the default
        post(CHAT, b"no JSON", bearer("some")),
        get(b"/props?model=other", bearer("some")),
        get(b"/v1/models/other", bearer("some")),
        get(b"/", bearer("some")),
    ):
        error = error_of(rig.ask(request), 403)
        assert (error["type"], error["cause"]) == ("permission_error", "key_models")
        assert error["remedy"] == "Use a model that the key allows: gpt-4o* or BGE."


@pytest.mark.check("X4", "403 for both")
def test_key_cannot_distinguish_a_forbidden_model_from_an_unknown_one(make_many: MakeMany) -> None:
    rig, _ = make_many(ProxyConfig(key_file=keys_of(KEYS)))
    for path in (CHAT, b"/v1/models/"):
        answered = []
        for name in ("other", "nothing"):
            request = (
                json_post(CHAT, bearer("some"), model=name)
                if path == CHAT
                else get(path + name.encode(), bearer("some"))
            )
            answered.append(json.dumps(error_of(rig.ask(request), 403)).replace(name, "NAME"))
        assert answered[0] == answered[1]
    error = error_of(rig.ask(json_post(CHAT, bearer("some"))), 400)
    assert error["remedy"] == 'Set "model" to gpt-4o* or BGE.'


@pytest.mark.check("X4")
def test_key_for_certain_models_sees_only_them_in_the_list(make_many: MakeMany) -> None:
    rig, _ = make_many(ProxyConfig(key_file=keys_of(KEYS)))

    def ids(key: str) -> list[str]:
        _, body = rig.ask(get(b"/v1/models", bearer(key)))
        return [model["id"] for model in json.loads(body)["data"]]

    assert ids("some") == [CHATTY.id, "bge"]
    assert ids("all") == ids("ops") == [CHATTY.id, "other", "bge"]
    assert json.loads(rig.ask(get(b"/v1/models/bge", bearer("ops")))[1])["id"] == "bge"
    assert status(rig.ask(get(b"/v1/models"))[0]) == 401
    assert status(rig.ask(get(b"/v1/models", bearer("ops"), method=b"POST"))[0]) == 403


@pytest.mark.parametrize(("models", "code"), [("ti*", 200), ("other", 403)])
def test_with_one_model_the_key_must_allow_it(make_rig: MakeRig, models: str, code: int) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of(f"KEY models={models}"), route_by_model=False))
    client = rig.send(json_post(CHAT, bearer("KEY"), model="whatever"))
    if code == 200:
        child = rig.accept()
        child.message()
        child.send(answer())
    assert status(client.message()[0]) == code


def test_large_body_of_key_for_other_models_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(ProxyConfig(key_file=keys_of("KEY models=other"), route_by_model=False))
    body = json.dumps({"prompt": "x" * 200_000}).encode()
    assert error_of(rig.ask(post(b"/completion", body, bearer("KEY"))), 403)["cause"] == "key_models"
