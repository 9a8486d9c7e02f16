"""Several models behind one address, as clients see them: listed, shown, chosen by name, refused by name.

The servers are real, and the proxy is; which of them is loaded is not what this is about.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from llamasup.core.model_spec import ModelSpec
from llamasup.effects.model_file import read_model
from llamasup.proxy import ProxyConfig
from llamasup.testing import models
from tests.clients.asked import QUESTION
from tests.proxy.key_files import keys_of
from tests.proxy.many import ManyModels, Model
from tests.proxy.rig import Rig
from tests.real.bare_server import bare_server

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),  # litellm's own
]

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
KEYS = "all name=all\nchats name=chats models=tiny*"

CHAT, EMBEDDER, RERANKER = "tiny-chat", "org/embedder:F32", "ranker"
FILES: dict[str, tuple[Callable[[], bytes], tuple[str, ...], tuple[str, ...]]] = {
    CHAT: (models.tiny_decoder, ("gpt-4o-mini",), ()),
    EMBEDDER: (models.tiny_encoder, (), ("--embedding",)),
    RERANKER: (models.tiny_reranker, (), ("--rerank",)),
}


@pytest.fixture(scope="module")
def many(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("many")
    specs = []
    with ExitStack() as opened:
        for number, (name, (written, aliases, options)) in enumerate(FILES.items()):
            path = folder / f"{number}.gguf"
            path.write_bytes(written())
            words = ("--model", str(path), "--alias", name, *options)
            opened.enter_context(bare_server(runtime, folder / f"{number}.sock", *words))
            specs.append(ModelSpec(name, str(path), aliases, listed=read_model(path)))
        rig = Rig(folder, "uvloop", ProxyConfig(key_file=keys_of(KEYS)))
        opened.callback(rig.close)
        rig.proxy.backend = rig.call(lambda: ManyModels(folder, specs, default=CHAT, plays_them=False))
        yield rig


def url_of(rig: Rig) -> str:
    return f"http://127.0.0.1:{rig.address[1]}"


@pytest.fixture
def client(many: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url_of(many)}/v1", api_key="all", max_retries=0) as client:
        yield client


def test_each_model_is_listed_and_can_be_retrieved_by_every_name(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [each.id for each in listed] == list(FILES)
    assert {(each.object, each.owned_by) for each in listed} == {("model", "llamasup")}
    for model, (_, aliases, _) in FILES.items():
        for name in (model, *aliases):
            assert client.models.retrieve(name).id == model


def test_what_the_servers_list_of_themselves_is_listed_the_same(many: Rig, client: openai.OpenAI) -> None:
    """``meta`` is read from the file, before any server has it."""
    assert isinstance(many.proxy.backend, ManyModels)
    for shown in client.models.list():
        model: Model = many.proxy.backend.models[shown.id]
        transport = httpx.HTTPTransport(uds=model.endpoint.address.path)  # type: ignore[union-attr]
        with httpx.Client(transport=transport, base_url="http://localhost") as straight:
            (own,) = straight.get("/v1/models").json()["data"]
        ours: Any = shown.model_dump()
        for field in ("n_ctx_train", "n_embd", "n_params", "n_vocab", "size"):
            assert ours["meta"][field] == own["meta"][field], (shown.id, field)
        assert ours["architecture"]["input_modalities"] == own["architecture"]["input_modalities"]
        assert set(ours) >= set(own) - {"vocab_type"}


def test_each_request_gets_the_model_that_it_names(client: openai.OpenAI) -> None:
    for name in (CHAT, "gpt-4o-mini"):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=3)
        assert answer.model == CHAT
    vector = client.embeddings.create(model=EMBEDDER, input="hello")
    assert vector.model == EMBEDDER
    assert math.isfinite(sum(vector.data[0].embedding))
    stream = client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, max_tokens=3, stream=True)
    assert {chunk.model for chunk in stream} == {CHAT}


def test_an_unknown_model_is_the_clients_own_not_found(client: openai.OpenAI) -> None:
    for asks in (
        lambda: client.chat.completions.create(model="tiny-chta", messages=MESSAGES),
        lambda: client.models.retrieve("tiny-chta"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            asks()
        error: Any = caught.value.body
        assert error["cause"] == "model_not_found"
        assert error["remedy"] == "did you mean tiny-chat?"
        assert "'tiny-chta' does not exist" in caught.value.message


def test_what_a_model_cannot_do_is_a_bad_request_and_no_failure_of_the_server(
    many: Rig, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="'org/embedder:F32' generates no text"):
        client.chat.completions.create(model=EMBEDDER, messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="'tiny-chat' gives no embeddings"):
        client.embeddings.create(model=CHAT, input="hello")
    assert isinstance(many.proxy.backend, ManyModels)
    assert [each.endpoint.failures for each in many.proxy.backend.models.values()] == [0, 0, 0]


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
def test_only_what_the_server_itself_refuses_is_refused(
    many: Rig, model: str, path: str, body: dict[str, Any], refuses: int
) -> None:
    """``refuses``: the server's own status; 0: it answers."""
    assert isinstance(many.proxy.backend, ManyModels)
    transport = httpx.HTTPTransport(uds=many.proxy.backend.models[model].endpoint.address.path)  # type: ignore[union-attr]
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=30.0) as straight:
        assert straight.post(path, json=body).status_code == (refuses or 200)
    through = httpx.post(
        url_of(many) + path, json={"model": model, **body}, headers={"x-api-key": "all"}, timeout=30.0
    )
    assert through.status_code == (400 if refuses else 200), through.text
    if refuses:
        assert through.json()["error"]["cause"] == "model_purpose"


def test_a_key_for_certain_models_is_a_permission_denied_for_others(many: Rig) -> None:
    with openai.OpenAI(base_url=f"{url_of(many)}/v1", api_key="chats", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [CHAT]
        assert (
            client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, max_tokens=1).model == CHAT
        )
        with pytest.raises(openai.PermissionDeniedError, match="may not use the model 'ranker'"):
            client.chat.completions.create(model=RERANKER, messages=MESSAGES)


def test_litellm_finds_models_and_misses_those_that_there_are_not(
    many: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = importlib.import_module("litellm")

    def ask(model: str) -> Any:
        return litellm.completion(
            model=f"openai/{model}",
            api_base=f"{url_of(many)}/v1",
            api_key="all",
            max_retries=0,
            messages=MESSAGES,
            max_tokens=2,
        )

    assert ask("gpt-4o-mini").model.endswith(CHAT)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        ask("nothing")
    with pytest.raises(litellm.BadRequestError, match="generates no text"):
        ask(EMBEDDER)


def test_a_server_is_asked_about_itself_by_its_name(many: Rig) -> None:
    for model in (CHAT, EMBEDDER):
        answer = httpx.get(
            f"{url_of(many)}/props",
            params={"model": model, "autoload": "false"},
            headers={"x-api-key": "all"},
        )
        assert answer.json()["model_alias"] == model
    nameless = httpx.get(f"{url_of(many)}/props", headers={"x-api-key": "all"})
    assert nameless.json()["model_alias"] == CHAT
