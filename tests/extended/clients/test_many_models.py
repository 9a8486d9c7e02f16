"""``llamasup serve`` as clients see it: models are listed, shown, and selected by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import KEY, PATIENCE_S, Served
from tests.clients.prompts import QUESTION
from tests.e2e.driver import started
from tests.kit import models
from tests.real.remains import folders_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),  # litellm's own
]

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CHATS = "sk-for-chats"

CHAT, EMBEDDER, RERANKER, NOT_PRELOADED = "tiny-chat", "org/embedder:F32", "ranker", "sleeper"
MODELS: dict[str, Callable[[], bytes]] = {
    CHAT: models.tiny_decoder,
    EMBEDDER: models.tiny_encoder,
    RERANKER: models.tiny_reranker,
    NOT_PRELOADED: models.tiny_decoder,
}


@pytest.fixture(scope="module")
def many(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A llamasup with all models loaded but one. Requests without a name go to the chat model."""
    home = tmp_path_factory.mktemp("m")  # short: sockets lie below it
    (home / "keys").write_text(f"{KEY} name=all\n{CHATS} name=chats models=tiny*\n")
    (home / "keys").chmod(0o600)
    config: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "runtime": runtime,
        "default_model": CHAT,
        "auth": {"api_key_file": str(home / "keys")},
        "models": {},
    }
    for number, (name, make) in enumerate(MODELS.items()):
        path = home / f"{number}.gguf"
        path.write_bytes(make())
        config["models"][name] = {"path": str(path), "preload": name != NOT_PRELOADED}
    config["models"][CHAT]["aliases"] = ["gpt-4o-mini"]
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    env = {**os.environ, **folders_of(home), **cache}
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        yield Served(running, running.url)
        assert running.stop() == 0


def direct(many: Served, model: str) -> httpx.Client:
    """A client of the server with this model."""
    (words,) = [
        words
        for child in many.running.children()
        if "--alias" in (words := child.cmdline()) and model in words
    ]
    transport = httpx.HTTPTransport(uds=words[words.index("--host") + 1])
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S)


def post(many: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(many.url + path, json=body, headers={"x-api-key": KEY}, timeout=PATIENCE_S)


@pytest.fixture
def client(many: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=many.v1, api_key=KEY, max_retries=0) as client:
        yield client


def test_models_are_listed_and_can_be_retrieved_by_every_name(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert sorted(model.id for model in listed) == sorted(MODELS)
    assert listed[0].id == CHAT  # the default
    assert {(model.object, model.owned_by) for model in listed} == {("model", "llamasup")}
    for name in MODELS:
        assert client.models.retrieve(name).id == name
    assert client.models.retrieve("gpt-4o-mini").id == CHAT


@pytest.mark.parametrize("model", [CHAT, EMBEDDER, RERANKER])
def test_listed_model_facts_equal_those_of_its_server(
    many: Served, client: openai.OpenAI, model: str
) -> None:
    with direct(many, model) as server:
        (own,) = server.get("/v1/models").json()["data"]
    ours: Any = client.models.retrieve(model).model_dump()
    for field in ("n_ctx", "n_ctx_train", "n_embd", "n_params", "n_vocab", "size"):
        assert ours["meta"][field] == own["meta"][field], field
    assert ours["architecture"]["input_modalities"] == own["architecture"]["input_modalities"]
    assert set(ours) >= set(own)


def test_request_is_answered_by_the_model_that_it_names(client: openai.OpenAI) -> None:
    for name in (CHAT, "gpt-4o-mini"):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=3)
        assert answer.model == CHAT
    vector = client.embeddings.create(model=EMBEDDER, input="hello")
    assert vector.model == EMBEDDER
    assert math.isfinite(sum(vector.data[0].embedding))
    stream = client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, max_tokens=3, stream=True)
    assert {chunk.model for chunk in stream} == {CHAT}


def test_unknown_model_raises_not_found_in_the_client(client: openai.OpenAI) -> None:
    for request in (
        lambda: client.chat.completions.create(model="tiny-chta", messages=MESSAGES),
        lambda: client.models.retrieve("tiny-chta"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            request()
        error: Any = caught.value.body
        assert error["cause"] == "model_not_found"
        assert error["remedy"] == "Did you mean tiny-chat?"
        assert "'tiny-chta' does not exist" in caught.value.message


def test_model_is_loaded_only_for_requests_it_can_serve(client: openai.OpenAI) -> None:
    def status() -> str:
        shown: Any = client.models.retrieve(NOT_PRELOADED).model_dump()
        return str(shown["status"]["value"])

    assert status() == "unloaded"
    with pytest.raises(openai.BadRequestError, match="'sleeper' gives no embeddings"):
        client.embeddings.create(model=NOT_PRELOADED, input="hello")
    with pytest.raises(openai.NotFoundError, match="no known llama-server has the path '/v1/props'"):
        client.get("/props", cast_to=httpx.Response, options={"params": {"model": NOT_PRELOADED}})
    assert status() == "unloaded"
    answer = client.chat.completions.create(model=NOT_PRELOADED, messages=MESSAGES, max_tokens=1)
    assert (answer.model, status()) == (NOT_PRELOADED, "loaded")


@pytest.mark.parametrize(
    ("model", "path", "body", "refuses"),
    [
        (EMBEDDER, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, 500),
        (RERANKER, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, 500),
        (EMBEDDER, "/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, 500),
        (EMBEDDER, "/v1/completions", {"prompt": "a", "max_tokens": 1}, 500),
        (EMBEDDER, "/infill", {"input_prefix": "a", "input_suffix": "b"}, 501),
        (CHAT, "/v1/embeddings", {"input": "a"}, 501),
        (CHAT, "/embedding", {"content": "a"}, 501),
        (CHAT, "/v1/rerank", {"query": "a", "documents": ["b"]}, 501),
        (EMBEDDER, "/v1/rerank", {"query": "a", "documents": ["b"]}, 501),
        (RERANKER, "/v1/rerank", {"query": "a", "documents": ["b"]}, 0),
        (RERANKER, "/v1/embeddings", {"input": "a"}, 0),
        (EMBEDDER, "/embedding", {"content": "a"}, 0),
        (CHAT, "/v1/responses", {"input": "a", "max_output_tokens": 1}, 0),
    ],
)
def test_only_requests_that_the_server_refuses_are_refused(
    many: Served, model: str, path: str, body: dict[str, Any], refuses: int
) -> None:
    """``refuses``: the server's own status; 0: it answers."""
    with direct(many, model) as server:
        assert server.post(path, json=body).status_code == (refuses or 200)
    through = post(many, path, model=model, **body)
    assert through.status_code == (400 if refuses else 200), through.text
    if refuses:
        assert through.json()["error"]["cause"] == "model_purpose"


def test_key_limited_to_some_models_gets_permission_denied_for_others(many: Served) -> None:
    with openai.OpenAI(base_url=many.v1, api_key=CHATS, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [CHAT]
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, max_tokens=1)
        assert answer.model == CHAT
        with pytest.raises(openai.PermissionDeniedError, match="may not use the model 'ranker'"):
            client.chat.completions.create(model=RERANKER, messages=MESSAGES)


def test_litellm_reaches_models_by_name_and_gets_errors_for_others(many: Served, litellm: Any) -> None:
    def ask(model: str) -> Any:
        return litellm.completion(
            model=f"openai/{model}",
            api_base=many.v1,
            api_key=KEY,
            max_retries=0,
            messages=MESSAGES,
            max_tokens=2,
        )

    assert ask("gpt-4o-mini").model.endswith(CHAT)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        ask("nothing")
    with pytest.raises(litellm.BadRequestError, match="generates no text"):
        ask(EMBEDDER)


def test_props_are_those_of_the_named_model(many: Served) -> None:
    for model in (CHAT, EMBEDDER):
        path = f"/props?model={model}&autoload=false"  # as llama-server's web interface asks
        assert many.get(path).json()["model_alias"] == model
    nameless = many.get("/props")
    assert nameless.json()["model_alias"] == CHAT


def test_web_interface_comes_from_the_server_of_the_default_model(many: Served) -> None:
    with direct(many, CHAT) as server:
        own = server.get("/")
    through = many.get("/")
    assert (through.status_code, through.content) == (own.status_code, own.content)


def test_requests_are_counted_by_model(many: Served) -> None:
    post(many, "/v1/chat/completions", model="gpt-4o-mini", messages=MESSAGES, max_tokens=1)
    post(many, "/v1/chat/completions", model="made up", messages=MESSAGES)
    lines = many.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("llamasup_requests_total{")]
    named = {line.partition('model="')[2].partition('"')[0] for line in counted}
    assert {CHAT, ""} <= named <= {*MODELS, ""}
    assert f'llamasup_loads_total{{model="{CHAT}"}} 1.0' in lines
    assert f'llamasup_instance_state{{model="{CHAT}",state="ready"}} 1.0' in lines
