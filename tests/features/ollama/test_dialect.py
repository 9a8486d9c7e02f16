"""Ollama's API through the proxy: a client and a llama-server that both send raw bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamasup.core.gguf.facts import ChatTemplate, ModelFacts
from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Work
from llamasup.core.models.access import ResolvedModel, unknown_model
from llamasup.core.models.spec import KeepResult, ModelSpec
from llamasup.core.pool.eviction_policy import Phase
from llamasup.core.pool.model_info import ModelInfo
from llamasup.core.proxy import ProxyConfig
from llamasup.core.proxy.settings import Limits
from llamasup.core.settings.model import Repairs
from llamasup.features.ollama import answer_format, model_answer
from llamasup.features.ollama.dialect import OllamaDialect
from tests.core.planning.plans import model
from tests.core.proxy.generations import await_queued, end_generation, make_unavailable, start_generation
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.rig import (
    CHAT,
    STREAM_HEAD,
    Rig,
    Wire,
    answer,
    chunk,
    field,
    get,
    post,
    status,
    streaming,
)
from tests.core.proxy.test_nodes import Two
from tests.core.proxy.test_virtual_models import QWEN, WithCold
from tests.kit.patience import eventually

MakeRig = Callable[..., Rig]
NO_MODELS: dict[str, ModelInfo] = {}
HI = [{"role": "user", "content": "hi"}]
TIMINGS = {"cache_n": 20, "prompt_n": 2, "prompt_ms": 1.0, "predicted_n": 1, "predicted_ms": 2.0}
LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"timings":' + json.dumps(TIMINGS).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
)


class KeepCalls:
    """The calls of ``Pool.keep``, and its answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float | None, int]] = []
        self.answer: KeepResult = "kept"

    def __call__(self, id_: str, ttl_s: float | None, own: int) -> KeepResult:
        self.calls.append((id_, ttl_s, own))
        return self.answer


@pytest.fixture
def kept() -> KeepCalls:
    return KeepCalls()


def listed(facts: ModelFacts | None = None, phase: Phase = Phase.RESIDENT) -> ModelInfo:
    return ModelInfo(ModelSpec("tiny", "/tiny.gguf"), phase=phase, facts=facts)


@pytest.fixture
def models() -> dict[str, ModelInfo]:
    """The models of the list, which a test may change."""
    return {"tiny": listed(model())}


@pytest.fixture
def make(make_rig: MakeRig, kept: KeepCalls, models: dict[str, ModelInfo]) -> MakeRig:
    """Makes a proxy that speaks Ollama's API."""

    def make(config: ProxyConfig | None = None, **more: Any) -> Rig:
        rig = make_rig(config, dialect=OllamaDialect(kept), **more)
        rig.backend.infos = models
        return rig

    return make


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make()


def ask(path: str, **fields: Any) -> bytes:
    return post(f"/api/{path}".encode(), json.dumps({"model": "tiny", **fields}).encode())


def sent(child: Wire) -> tuple[bytes, Any]:
    """The head and the body that llama-server got."""
    head, body = child.message()
    return head, json.loads(body)


def error_of(client: Wire, code: int) -> str:
    head, body = client.message()
    assert status(head) == code, body
    error = json.loads(body)
    assert list(error) == ["error"]
    return str(error["error"])


def line(client: Wire) -> Any:
    """The next line of a stream, which is a chunk of its own."""
    size = int(client.until(b"\r\n"), 16)
    found = client.receive(size)
    client.receive(2)
    assert found.endswith(b"\n")
    return json.loads(found)


def token(text: str) -> bytes:
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode())


# --- streams ---------------------------------------------------------------------------------------


def test_stream_of_a_chat(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI, options={"top_k": 1})), rig.accept()
    head, body = sent(child)
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert field(head, b"content-type") == b"application/json"
    assert (body["model"], body["messages"], body["top_k"]) == ("tiny", HI, 1)
    child.send(STREAM_HEAD, token("a"))
    answered = client.head()
    assert status(answered) == 200
    assert field(answered, b"content-type") == b"application/x-ndjson"
    assert field(answered, b"x-request-id")
    assert line(client)["message"] == {"role": "assistant", "content": "a"}
    child.send(*map(chunk, LAST), b"0\r\n\r\n")
    last = line(client)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 1)
    assert client.receive(5) == b"0\r\n\r\n"
    record = rig.record()
    assert (record.path, record.model, record.status) == ("/api/chat", "tiny", 200)
    assert (record.tokens_prompt, record.tokens_completion) == (22, 1)


def test_connection_is_used_for_the_next_request(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, *map(chunk, LAST), b"0\r\n\r\n")
    client.head()
    assert line(client)["done"]
    client.receive(5)
    client.send(ask("chat", messages=HI, stream=False))
    child.message()
    child.send(answer(b'{"choices":[{"message":{"content":"b"},"finish_reason":"stop"}]}'))
    _, body = client.message()
    assert json.loads(body)["message"]["content"] == "b"


def test_events_in_any_pieces(rig: Rig) -> None:
    client, child = rig.send(ask("generate", prompt="hi")), rig.accept()
    child.message()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    child.send(STREAM_HEAD, chunk(event[:10]), chunk(event[10:] + event[:20]))
    client.head()
    assert line(client)["response"] == "a"
    child.send(chunk(event[20:]), chunk(b": a comment\n\n"))
    assert line(client)["response"] == "a"
    child.send(chunk(b"".join(LAST)), b"0\r\n\r\n")
    assert line(client)["done"]


def test_http_1_0_client_gets_lines_without_chunks(rig: Rig) -> None:
    request = ask("chat", messages=HI).replace(b"HTTP/1.1", b"HTTP/1.0")
    client, child = rig.send(request), rig.accept()
    child.message()
    child.send(STREAM_HEAD, token("a"), *map(chunk, LAST), b"0\r\n\r\n")
    head, _, lines = client.rest().partition(b"\r\n\r\n")
    assert field(head, b"transfer-encoding") is None
    assert [json.loads(each)["done"] for each in lines.splitlines()] == [False, True]


def test_client_that_leaves_frees_the_slot_at_once(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, token("a"))
    client.head()
    assert line(client)
    client.close()
    assert child.sees_the_end()
    assert rig.record().outcome == "client_gone"
    assert rig.in_flight() == 0


def test_error_event_ends_the_stream(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    error = b'data: {"error":{"code":500,"message":"out of memory"}}\n\n'
    child.send(STREAM_HEAD, chunk(error), token("never shown"), b"0\r\n\r\n")
    client.head()
    assert line(client) == {"error": "out of memory"}
    assert client.sees_the_end()  # without the last chunk
    record = rig.record()
    assert (record.status, record.outcome) == (200, "translation_failed")


def test_server_stops_once_the_stream_has_ended_with_an_error(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, token("a"), chunk(b"data: {\n\n"))
    client.head()
    assert line(client)["message"]["content"] == "a"
    assert "not the JSON of its API" in line(client)["error"]
    assert client.sees_the_end()
    assert child.sees_the_end()
    assert rig.record().outcome == "translation_failed"
    child.close()
    eventually(lambda: rig.in_flight() == 0)


@pytest.mark.usefixtures("no_cause")
def test_stream_that_breaks_off_ends_with_an_error_and_without_its_last_chunk(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, token("a"))
    client.head()
    assert line(client)
    child.close()
    assert "error" in line(client)
    assert client.sees_the_end()


def test_stream_without_its_last_event_is_an_error(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, token("a"), b"0\r\n\r\n")
    client.head()
    assert line(client)
    assert "broke off" in line(client)["error"]
    assert client.sees_the_end()
    assert rig.record().outcome == "translation_failed"


def test_event_without_an_end_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_format, "MAX_EVENT", 1000)
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, chunk(b"data: " + b"x" * 600))
    client.head()
    child.send(chunk(b"x" * 600))
    assert "more than 1000 bytes" in line(client)["error"]
    child.send(token("never shown"), b"0\r\n\r\n")
    assert client.sees_the_end()


def test_event_whose_end_arrives_in_two_pieces(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n'
    child.send(STREAM_HEAD, chunk(event))
    client.head()
    child.send(chunk(b"\n" + event[:9]))
    assert line(client)["message"]["content"] == "a"
    child.send(chunk(event[9:] + b"\n"))
    assert line(client)["message"]["content"] == "a"


def test_error_after_a_broken_event_is_reported_once(rig: Rig) -> None:
    client, child = rig.send(ask("chat", messages=HI)), rig.accept()
    child.message()
    child.send(STREAM_HEAD, chunk(b"data: {\n\n"))
    client.head()
    assert "not the JSON of its API" in line(client)["error"]
    child.close()
    assert client.sees_the_end()


# --- whole answers ---------------------------------------------------------------------------------


def test_error_of_llama_server_has_the_form_of_ollama(rig: Rig) -> None:
    too_long = b'{"error":{"code":400,"message":"request (5000 tokens) exceeds the context size (1024)"}}'
    client, child = rig.begin(ask("chat", messages=HI))
    child.send(answer(too_long, code=b"400 Bad Request"))
    assert "5000 tokens" in error_of(client, 400)
    client, child = rig.begin(ask("embed", input="hi"))
    child.send(answer(b'{"error":{"message":"input (9 tokens) is too large to process"}}', code=b"500 X"))
    assert "9 tokens" in error_of(client, 400)
    assert [rig.record().status for _ in range(2)] == [400, 400]


def test_refused_webp_image_has_a_remedy(rig: Rig) -> None:
    failed = b'{"error":{"code":400,"message":"Failed to load image or audio file"}}'
    for start, has_remedy in ((b"RIFF\0\0\0\0WEBP", True), (b"\x89PNG\r\n\x1a\n", False)):
        image = base64.b64encode(start + bytes(20)).decode()
        message = {"role": "user", "content": "look", "images": [image]}
        client, child = rig.begin(ask("chat", messages=[*HI, message]))
        child.send(answer(failed, code=b"400 Bad Request"))
        assert ("install it there" in error_of(client, 400)) is has_remedy


def test_broken_answer_of_llama_server_is_an_error(rig: Rig) -> None:
    client, child = rig.begin(ask("chat", messages=HI, stream=False))
    child.send(answer(b"nothing"))
    assert "not the JSON of its API" in error_of(client, 500)
    record = rig.record()
    assert (record.status, record.outcome) == (500, "translation_failed")
    client.send(ask("chat", messages=HI, stream=False))  # the answer was complete, so the connection stays
    assert sent(child)[1]["messages"] == HI


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_an_answer_that_becomes_an_error_are_counted(make: MakeRig, stream: bool) -> None:
    rig = make(ProxyConfig(key_file=keys_of("sk-1 name=a tpm=2\n")))
    request = with_key(ask("chat", messages=HI, stream=stream), b"sk-1")
    client, child = rig.begin(request)
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}
    usage = {"prompt_tokens": 22, "completion_tokens": 30, "total_tokens": 52}
    if stream:
        choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        end = {"choices": [], "usage": usage, "timings": TIMINGS}
        events = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in ({"choices": [choice]}, end)]
        child.send(STREAM_HEAD, *map(chunk, events), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
        client.head()
        assert "not a JSON object" in line(client)["error"]
    else:
        choice = {"index": 0, "message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        child.send(answer(json.dumps({"choices": [choice], "usage": usage, "timings": TIMINGS}).encode()))
        assert "not a JSON object" in error_of(client, 500)
    record = rig.record()
    assert (record.outcome, record.tokens_prompt) == ("translation_failed", 22)
    assert record.tokens_completion
    assert status(rig.ask(request)[0]) == 429  # the quota of the key counts them too


@pytest.mark.usefixtures("no_cause")
def test_server_that_ends_within_a_whole_answer_is_an_error(rig: Rig) -> None:
    client, child = rig.begin(ask("chat", messages=HI, stream=False))
    child.send(answer(b"x" * 50)[:-20])
    child.close()
    assert error_of(client, 502)


def test_chunked_whole_answer(rig: Rig) -> None:
    client, child = rig.begin(ask("embeddings", prompt="hi"))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    child.send(head, chunk(b'{"data":[{"emb'), chunk(b'edding":[1.5]}]}'), b"0\r\n\r\n")
    assert json.loads(client.message()[1]) == {"embedding": [1.5]}


def test_answer_that_is_too_large_to_hold_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_answer, "MAX_BYTES", 10)
    client, child = rig.begin(ask("embed", input="hi"))
    child.send(answer(b"x" * 11))
    assert "request less at once" in error_of(client, 502)


def test_request_is_sent_again_after_a_crash(rig: Rig) -> None:
    client, child = rig.begin(ask("chat", messages=HI, stream=False))
    end_generation(rig)
    child.close()
    await_queued(rig, 1)
    start_generation(rig)
    child = rig.accept()
    assert sent(child)[1]["messages"] == HI
    child.send(answer(b'{"choices":[{"message":{"content":"b"},"finish_reason":"stop"}]}'))
    assert json.loads(client.message()[1])["message"]["content"] == "b"


# --- loads, context and keep_alive -----------------------------------------------------------------


def test_request_without_a_prompt_loads_the_model(rig: Rig, kept: KeepCalls) -> None:
    client, child = rig.send(ask("chat", keep_alive="5m")), rig.accept()
    head, body = sent(child)
    assert head.startswith(b"POST /tokenize ")
    assert body == {"model": "tiny", "content": ""}
    child.send(answer(b'{"tokens":[]}'))
    assert json.loads(client.message()[1])["done_reason"] == "load"
    assert kept.calls == [("tiny", 300.0, 1)]


def test_load_waits_for_the_model(rig: Rig) -> None:
    make_unavailable(rig, HttpError(503, "loading", queueable=True))
    client = rig.send(ask("generate"))
    await_queued(rig, 1)
    start_generation(rig)
    child = rig.accept()
    child.message()
    child.send(answer(b'{"tokens":[]}'))
    assert json.loads(client.message()[1])["done_reason"] == "load"


def test_keep_alive_of_zero_without_a_prompt_unloads(rig: Rig, kept: KeepCalls) -> None:
    _, body = rig.ask(ask("generate", keep_alive=0))
    assert json.loads(body)["done_reason"] == "unload"
    assert kept.calls == [("tiny", 0.0, 0)]
    kept.answer = "in_use"
    assert json.loads(rig.ask(ask("generate", keep_alive=0))[1])["done_reason"] == "stop"
    kept.answer = "fixed"
    assert "stays loaded" in error_of(rig.send(ask("generate", keep_alive=0)), 400)


def test_model_for_text_is_not_loaded_for_embeddings(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for_text = ResolvedModel(("tiny",), (Work.TEXT,))
    monkeypatch.setattr(type(rig.backend), "model", property(lambda _: for_text))
    assert "gives no embeddings" in error_of(rig.send(ask("embed")), 400)
    assert "gives no embeddings" in error_of(rig.send(ask("embeddings", prompt="")), 400)


def test_request_without_keep_alive_returns_to_the_ttl_of_the_model(rig: Rig, kept: KeepCalls) -> None:
    rig.begin(ask("chat", messages=HI))
    assert kept.calls == [("tiny", None, 1)]


def test_options_that_change_no_text_are_served_and_named_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"num_ctx": 1_000_000, "use_mlock": True, "num_gpu": 99, "temperature": 0.5}
    for _ in range(2):
        client = rig.send(ask("chat", messages=HI, stream=False, options=given))
        child = rig.accept()
        body = json.loads(child.message()[1])
        assert body["temperature"] == 0.5
        assert not given.keys() - {"temperature"} & body.keys()
        child.send(answer(b"{}", b"Connection: close"))
        client.message()
    named = [record.getMessage() for record in caplog.records if record.name == "llamasup.ollama"]
    sentence = "The option {} of requests to Ollama's API has no effect; set {} of the model "
    sentence += "in llamasup's config."
    settings = {"num_ctx": "ctx_size", "use_mlock": "extra", "num_gpu": "gpu_layers"}
    assert named == [sentence.format(*each) for each in settings.items()]


def test_pipelined_requests_that_are_all_refused_get_their_answers(
    rig: Rig, models: dict[str, ModelInfo]
) -> None:
    models["tiny"] = listed(model(chat_template=ChatTemplate(present=True)))
    client = rig.send(ask("chat", messages=HI, think=True) * 300)
    for _ in range(300):
        assert "does not support" in error_of(client, 400)
    client.send(ask("chat", messages=HI))
    rig.accept().message()
    assert rig.in_flight() == 1


@pytest.mark.parametrize("field", [{"think": True}, {"tools": [{"function": {"name": "f"}}]}])
def test_feature_is_judged_again_once_the_file_is_there(
    rig: Rig, models: dict[str, ModelInfo], field: dict[str, Any]
) -> None:
    models["tiny"] = listed()
    make_unavailable(rig, HttpError(503, "loading", queueable=True))
    client = rig.send(ask("chat", messages=HI, **field))
    await_queued(rig, 1)
    models["tiny"] = listed(model(chat_template=ChatTemplate(present=True)))
    start_generation(rig)
    assert "does not support" in error_of(client, 400)
    record = rig.record()
    assert (record.status, record.outcome, record.model) == (400, "refused", "tiny")
    assert rig.in_flight() == 0


# --- what llamasup answers -------------------------------------------------------------------------


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_root_says_that_ollama_is_running(rig: Rig, method: bytes) -> None:
    client = rig.send(get(b"/", method=method))
    head = client.head()
    assert (status(head), field(head, b"content-length")) == (200, b"17")
    if method == b"GET":
        assert client.receive(17) == b"Ollama is running"


def test_version_tags_ps_and_show(rig: Rig) -> None:
    def read(request: bytes) -> Any:
        head, body = rig.ask(request)
        assert status(head) == 200
        return json.loads(body)

    assert read(get(b"/api/version"))["version"]
    assert [each["name"] for each in read(get(b"/api/tags"))["models"]] == ["tiny:latest"]
    assert [each["name"] for each in read(get(b"/api/ps"))["models"]] == ["tiny:latest"]
    assert read(ask("show", verbose=True))["details"]["family"] == "llama"
    assert rig.record().outcome == "local"


@pytest.mark.parametrize("path", ["create", "copy", "push", "blobs/sha256:5"])
def test_path_that_is_not_served_is_a_501_with_a_sentence(rig: Rig, path: str) -> None:
    assert "llamasup" in error_of(rig.send(ask(path, source="a")), 501)


def test_unknown_path_is_a_404_and_a_wrong_method_a_405(rig: Rig) -> None:
    assert "/api/tagz" in error_of(rig.send(get(b"/api/tagz")), 404)
    for request, allowed in ((get(b"/api/chat"), b"POST"), (ask("tags"), b"GET, HEAD")):
        head, body = rig.ask(request)
        assert (status(head), field(head, b"allow")) == (405, allowed)
        assert json.loads(body)["error"].startswith("use ")


def test_other_paths_are_those_of_llama_server(rig: Rig) -> None:
    client, child = streaming(rig, CHAT)
    child.send(b"0\r\n\r\n")
    assert client.receive(5) == b"0\r\n\r\n"


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'{"model":5}', b'{"options":{"top_p":NaN}}', b"[" * 9999),
        b'{"model":"tiny","x":[' + b"[]," * 150_000 + b"1]}",
        b'{"model":"tiny","images":[' + b'"/9j/",' * 150_000 + b'""]}',
    ],
)
def test_wrong_body_is_a_400(rig: Rig, body: bytes) -> None:
    for path in (b"/api/chat", b"/api/generate", b"/api/embed", b"/api/embeddings", b"/api/show"):
        assert error_of(rig.send(post(path, body)), 400)


def test_compressed_body_is_a_415(rig: Rig) -> None:
    for path in (b"/api/chat", b"/api/show"):
        assert "compressed" in error_of(rig.send(post(path, b"{}", b"Content-Encoding: gzip")), 415)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((b"tcontent-type: 1", b"ransfer-encoding: chunked"), b"transfer-encoding"),
        ((b"x-content-type: q", b"conversation-id: a"), b"x-conversation-id"),
        ((b"x-content-type: q", b"llamasup-priority: high"), b"x-llamasup-priority"),
        ((b"x-content-type: q", b"api-key: k"), b"x-api-key"),
    ],
)
def test_no_two_headers_of_a_client_become_one(rig: Rig, lines: tuple[bytes, bytes], name: bytes) -> None:
    request = post(b"/api/chat", json.dumps({"model": "tiny", "messages": HI}).encode(), *lines)
    rig.send(request)
    head, _ = sent(rig.accept())
    assert field(head, name) is None
    assert not any(each in head for each in lines)


def test_headers_about_bodies_are_those_of_the_translated_ones(rig: Rig) -> None:
    own = (b"Content-Type: text/plain", b"Accept: application/x-ndjson", b"Accept-Encoding: gzip")
    rig.send(post(b"/api/chat", json.dumps({"model": "tiny", "messages": HI}).encode(), *own))
    head, _ = sent(rig.accept())
    assert field(head, b"content-type") == b"application/json"
    assert head.lower().count(b"content-type:") == 1
    assert (field(head, b"accept"), field(head, b"accept-encoding")) == (None, None)


def test_memory_of_a_translated_body_is_counted(rig: Rig) -> None:
    images = ["/9j/"] * 8000  # 60 KB, which become 800 KB
    rig.send(ask("generate", images=images))
    child = rig.accept()
    head = child.head()
    size = int(field(head, b"content-length") or b"0")
    assert rig.call(lambda: rig.proxy.bodies.held_bytes) == size
    child.receive(size)
    child.send(STREAM_HEAD, token("a"))
    eventually(lambda: rig.call(lambda: rig.proxy.bodies.held_bytes) == 0)


def test_translated_body_beyond_the_memory_of_a_client_is_refused(make: MakeRig) -> None:
    rig = make(ProxyConfig(limits=Limits(bodies_per_client_bytes=100_000, bodies_bytes=100_000)))
    assert "request bodies hold" in error_of(rig.send(ask("generate", images=["/9j/"] * 8000)), 429)
    assert rig.call(lambda: rig.proxy.bodies.held_bytes) == 0


def test_large_body_is_buffered_and_translated(make: MakeRig) -> None:
    rig = make(ProxyConfig(route_by_model=False))
    long = [{"role": "user", "content": "x" * 300_000}]
    request = ask("chat", messages=long)
    client = rig.send(request[:200_000])
    client.send(request[200_000:])
    assert sent(rig.accept())[1]["messages"] == long


def test_body_that_is_too_large_is_a_413(make: MakeRig) -> None:
    rig = make(ProxyConfig(limits=Limits(body_bytes=1000)))
    client = rig.send(ask("chat", messages=HI, padding="x" * 2000))
    assert "larger than 1000 bytes" in error_of(client, 413)


def test_unreadable_request_gets_the_error_of_every_listener(rig: Rig) -> None:
    head, body = rig.ask(b"GARBAGE\r\n\r\n")
    assert (status(head), next(iter(json.loads(body)["error"]))) == (400, "message")


def test_bug_is_a_500(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(OllamaDialect, "translate", fail)
    assert "failed to serve" in error_of(rig.send(ask("chat", messages=HI)), 500)


# --- access ----------------------------------------------------------------------------------------


def with_key(request: bytes, key: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nAuthorization: Bearer " + key + b"\r\n", 1)


def test_key_is_required_where_it_is_required_elsewhere(make: MakeRig) -> None:
    rig = make(ProxyConfig(api_keys=("sk-1",)))
    for request in (get(b"/"), get(b"/api/tags"), ask("chat", messages=HI)):
        client = rig.send(request)
        head, body = client.message()
        assert (status(head), field(head, b"www-authenticate")) == (401, b"Bearer")
        assert "an API key is required" in json.loads(body)["error"]
    assert status(rig.ask(with_key(get(b"/api/tags"), b"sk-1"))[0]) == 200
    rig.begin(with_key(ask("chat", messages=HI), b"sk-1"))


def test_key_sees_only_the_models_that_it_may_use(make: MakeRig) -> None:
    rig = make(ProxyConfig(key_file=keys_of("sk-1 name=a models=other\nsk-2 name=b models=t*\n")))
    assert json.loads(rig.ask(with_key(get(b"/api/tags"), b"sk-1"))[1]) == {"models": []}
    assert json.loads(rig.ask(with_key(get(b"/api/ps"), b"sk-1"))[1]) == {"models": []}
    assert "may not use" in error_of(rig.send(with_key(ask("show"), b"sk-1")), 403)
    assert "may not use" in error_of(rig.send(with_key(ask("chat", messages=HI, think=True), b"sk-1")), 403)
    assert len(json.loads(rig.ask(with_key(get(b"/api/tags"), b"sk-2"))[1])["models"]) == 1


def test_limit_of_a_key_counts_these_requests(make: MakeRig) -> None:
    rig = make(ProxyConfig(key_file=keys_of("sk-1 name=a rpm=1\n")))
    rig.begin(with_key(ask("chat", messages=HI), b"sk-1"))
    client = rig.send(with_key(ask("chat", messages=HI), b"sk-1"))
    head, _ = client.message()
    assert (status(head), field(head, b"retry-after") is not None) == (429, True)


def test_foreign_host_and_origin_are_refused(rig: Rig) -> None:
    foreign = get(b"/api/tags").replace(b"Host: localhost", b"Host: evil.example")
    assert "evil.example" in error_of(rig.send(foreign), 403)
    assert "evil.example" in error_of(rig.send(get(b"/api/tags", b"Origin: http://evil.example")), 403)
    assert "localhost:1" in error_of(rig.send(get(b"/api/tags", b"Origin: http://localhost:1")), 403)


@pytest.mark.parametrize("path", [b"/", b"/api/chat", b"/api/tags"])
def test_page_of_a_configured_origin_may_ask_first(make: MakeRig, path: bytes) -> None:
    rig = make(ProxyConfig(origins=("https://app.example",)))
    origin = b"Origin: https://app.example"
    preflight = get(path, origin, b"Access-Control-Request-Method: POST", method=b"OPTIONS")
    head = rig.send(preflight).head()
    assert (status(head), field(head, b"access-control-allow-origin")) == (204, b"https://app.example")
    answered, _ = rig.ask(get(b"/api/tags", origin))
    assert field(answered, b"access-control-allow-origin") == b"https://app.example"


def test_options_without_an_origin_is_a_405(rig: Rig) -> None:
    assert status(rig.ask(get(b"/api/chat", method=b"OPTIONS"))[0]) == 405


# --- names -----------------------------------------------------------------------------------------


def test_name_is_resolved_with_and_without_its_tag(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rig.backend.resolve

    def resolve(name: str | None, **more: Any) -> Any:
        return real(name, **more) if name == "tiny" else unknown_model(str(name))

    monkeypatch.setattr(rig.backend, "resolve", resolve)
    _, child = rig.send(ask("chat", messages=HI)), rig.accept()
    assert sent(child)[1]["model"] == "tiny"
    request = post(b"/api/chat", json.dumps({"model": "tiny:latest", "messages": HI}).encode())
    client, child = rig.send(request), rig.accept()
    assert sent(child)[1]["model"] == "tiny"
    child.send(STREAM_HEAD, token("a"))
    client.head()
    assert line(client)["model"] == "tiny:latest"
    for name in ("nope", "nope:latest", "..", "../tiny", "tiny:7b"):
        for path in (b"/api/show", b"/api/chat"):
            body = json.dumps({"model": name, "messages": HI, "think": True}).encode()
            assert "does not exist" in error_of(rig.send(post(path, body)), 404)


def test_name_with_the_tag_of_the_list_is_preferred(rig: Rig) -> None:
    _, child = (
        rig.send(post(b"/api/chat", b'{"model":"tiny:latest","messages":[{"role":"user"}]}')),
        rig.accept(),
    )
    assert sent(child)[1]["model"] == "tiny:latest"


# --- other nodes and virtual models ----------------------------------------------------------------


def test_node_gets_the_translated_request(rig: Rig, kept: KeepCalls, tmp_path: Path) -> None:
    two = Two(rig, tmp_path)
    client = rig.send(ask("chat", messages=HI, options={"num_ctx": 1024}, keep_alive=0))
    node = two.accept("desk")
    head, body = sent(node)
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert (field(head, b"authorization"), body["messages"]) == (b"Bearer key of desk", HI)
    assert kept.calls == []  # the node decides how long the model stays
    node.send(STREAM_HEAD, token("a"), *map(chunk, LAST), b"0\r\n\r\n")
    client.head()
    assert line(client)["message"]["content"] == "a"
    for sock in two.sockets.values():
        sock.close()


def test_virtual_model_changes_the_translated_request(rig: Rig, kept: KeepCalls, tmp_path: Path) -> None:
    many = rig.call(lambda: WithCold(tmp_path, [QWEN]))
    rig.proxy.backend = many
    body = {"model": "qwen:cold", "messages": HI, "options": {"temperature": 1}, "keep_alive": "5m"}
    client = rig.send(post(b"/api/chat", json.dumps(body).encode()))
    child = many.accept("qwen", rig)
    _, received = sent(child)
    assert (received["model"], received["temperature"]) == ("qwen", 0)
    assert received["messages"] == [{"role": "system", "content": "Be brief."}, *HI]
    assert kept.calls == [("qwen", 300.0, 1)]
    child.send(STREAM_HEAD, *map(chunk, LAST), b"0\r\n\r\n")
    client.head()
    assert line(client)["model"] == "qwen:cold"
    assert rig.record().model == "qwen:cold"
    many.close()


def test_format_is_checked_by_a_model_that_repairs_json(make: MakeRig) -> None:
    rig = make()
    rig.call(lambda: setattr(rig.backend, "repairs", Repairs(json=True)))
    schema = {"type": "integer", "minimum": 3}
    asked = {"model": "tiny", "messages": HI, "format": schema, "stream": False}
    client = rig.send(post(b"/api/chat", json.dumps(asked).encode()))
    child = rig.accept()
    for content in ("1", "4"):
        child.message()
        message = {"role": "assistant", "content": content}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        child.send(answer(json.dumps({"choices": choices, "timings": TIMINGS}).encode()))
    head, body = client.message()
    assert (status(head), field(head, b"x-llamasup-repaired")) == (200, b"json")
    assert json.loads(body)["message"]["content"] == "4"
    assert rig.record().tokens_prompt == 44
