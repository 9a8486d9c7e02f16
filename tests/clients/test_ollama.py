"""Ollama's API, with the client of Ollama and that of LangChain, unchanged, against a real llama-server."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from ollama import AsyncClient, Client, ResponseError

from tests.clients.conftest import KEY, LONG, PATIENCE_S, OllamaJs, Served, frees_slot
from tests.clients.models import fill_in, tool_caller
from tests.clients.prompts import QUESTION, WEATHER_PARAMETERS, Reading, is_weather
from tests.e2e.driver import started
from tests.kit.models import tiny_decoder, tiny_encoder
from tests.kit.patience import eventually
from tests.kit.ports import free_port
from tests.real.remains import folders_of

pytestmark = [
    # Of the client, whose own types are older than the fields.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

HI: list[Any] = [{"role": "user", "content": QUESTION}]
KEYED = {"Authorization": f"Bearer {KEY}"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER_PARAMETERS},
}
CONTEXT = 4096
MODELS: dict[str, Callable[[], bytes]] = {
    "tiny": tiny_decoder,
    "caller": tool_caller,
    "encoder": tiny_encoder,
    "coder": fill_in,
    "long": tiny_decoder,
}


@pytest.fixture(scope="module")
def service(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """Three models, and the address of Ollama's API."""
    home = tmp_path_factory.mktemp("o")  # short: sockets lie below it
    (home / "keys").write_text(f"{KEY}\n")
    (home / "keys").chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "ollama": {"listen": address},
        "runtime": runtime,
        "auth": {"api_key_file": str(home / "keys")},
        "defaults": {"ctx_size": CONTEXT},
        "models": {},
        # Ollama's API has no tool_choice, without which this model calls nothing.
        "virtual_models": {
            "must-call": {"model": "caller", "set": {"tool_choice": "required"}},
            "endless": {"model": "long", "set": {"ignore_eos": True}},
        },
    }
    for name, make in MODELS.items():
        path = home / f"{name}.gguf"
        path.write_bytes(make())
        config["models"][name] = {"path": str(path)}
    config["models"]["long"]["ctx_size"] = 32_768
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    env = {**os.environ, **folders_of(home), **cache}
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        yield Served(running, running.url), f"http://{address}"
        assert running.stop() == 0


@pytest.fixture
def url(service: tuple[Served, str]) -> str:
    return service[1]


Connect = Callable[..., Client]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def connect(opened: ExitStack) -> Connect:
    """Makes clients that are closed after the test."""

    def connect(url: str, headers: dict[str, str] = KEYED) -> Client:
        client = Client(url, headers=headers, timeout=PATIENCE_S)
        opened.enter_context(client)
        return client

    return connect


@pytest.fixture
def client(url: str, connect: Connect) -> Client:
    return connect(url)


def refused(call: Callable[[], Any], status: int = 400) -> str:
    with pytest.raises(ResponseError) as caught:
        found = call()
        if isinstance(found, Iterator):
            list(found)
    assert caught.value.status_code == status
    return str(caught.value.error)


def few(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "num_predict": 8, **more}


def test_streamed_and_plain_chat_are_equal(client: Client) -> None:
    plain = client.chat("tiny", HI, options=few())
    pieces = list(client.chat("tiny", HI, options=few(), stream=True))
    assert plain.message.content
    assert "".join(piece.message.content or "" for piece in pieces) == plain.message.content
    assert len(pieces) > 5
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    last = pieces[-1]
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == (
        "length",
        8,
        plain.prompt_eval_count,
    )
    assert last.total_duration is not None
    assert last.eval_duration is not None
    assert last.total_duration >= last.eval_duration > 0


def test_answer_equals_that_of_the_untouched_api(service: tuple[Served, str], client: Client) -> None:
    body = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 8}
    own = httpx.post(f"{service[0].url}/v1/chat/completions", json=body, headers=KEYED, timeout=PATIENCE_S)
    expected = own.json()["choices"][0]["message"]["content"]
    assert client.chat("tiny:latest", HI, options=few()).message.content == expected
    assert client.generate("tiny", QUESTION, options=few()).response == expected


def test_raw_prompt_and_prompt_with_a_system(client: Client) -> None:
    raw = client.generate("tiny", "Once", raw=True, options=few())
    streamed = list(client.generate("tiny", "Once", raw=True, options=few(), stream=True))
    assert "".join(piece.response or "" for piece in streamed) == raw.response
    assert client.generate("tiny", "Once", system="Be brief.", options=few()).prompt_eval_count != (
        raw.prompt_eval_count
    )


def test_tool_is_called_and_its_result_is_taken(client: Client) -> None:
    for stream in (False, True):
        found: Any = client.chat(
            "must-call", HI, tools=[WEATHER], options=few(num_predict=300), stream=stream
        )
        answers = list(found) if stream else [found]
        (call,) = [call for piece in answers for call in piece.message.tool_calls or ()]
        assert call.function.name == "get_weather"
        assert is_weather(dict(call.function.arguments))
    history = [
        *HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "tool_name": "get_weather", "content": "sun"},
    ]
    assert client.chat("caller", history, options=few()).done
    assert "does not support tools" in refused(lambda: client.chat("tiny", HI, tools=[WEATHER]))


def test_format_is_a_schema(client: Client) -> None:
    schema = Reading.model_json_schema()
    answer = client.chat("caller", HI, format=schema, options=few(num_predict=300))
    Reading.model_validate_json(answer.message.content or "")
    assert client.generate("caller", QUESTION, format=schema, options=few(num_predict=300)).response
    outside = {"$ref": "http://example.com/schema.json"}
    said = refused(lambda: client.chat("tiny", HI, format=outside))
    assert "$ref" in said or outside["$ref"] in said  # b10068 names only the address


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_does_not_fit_is_a_400_with_the_numbers(client: Any, stream: bool) -> None:
    long: list[Any] = [{"role": "user", "content": "hello " * 160_000}]
    said = refused(lambda: client.chat("tiny", long, stream=stream))
    assert str(CONTEXT) in said
    assert "token" in said


def test_options_of_a_load_are_accepted(client: Client) -> None:
    for n_ctx in (1, CONTEXT, 2 * CONTEXT):
        given = few(num_ctx=n_ctx, use_mlock=True, use_mmap=False, num_thread=4, num_gpu=99, num_batch=16)
        assert client.chat("tiny", HI, options=given).done


def test_think_images_and_suffix_are_refused_for_a_model_without_them(client: Client) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(64)
    with_image = [{"role": "user", "content": "look", "images": [png]}]
    assert "does not support thinking" in refused(lambda: client.chat("tiny", HI, think=True))
    assert "image input is not supported" in refused(lambda: client.chat("tiny", with_image))
    assert "does not support suffix" in refused(lambda: client.generate("tiny", "a", suffix="b"))
    assert client.chat("tiny", HI, think=False, options=few()).done


def test_model_fills_in_the_middle_of_a_text_that_fits(client: Client) -> None:
    around = client.generate("coder", "Once upon ", suffix=" the end.", options=few())
    assert around.response
    assert around.prompt_eval_count is not None
    # llama-server's /infill keeps 1,536 tokens of a prefix, and 510 of a suffix.
    prefix, suffix = "hello " * 290, " world" * 100
    long = client.generate("coder", prefix, suffix=suffix, options=few())
    alone = client.generate("coder", prefix, suffix="x", options=few())
    assert long.prompt_eval_count is not None
    assert alone.prompt_eval_count is not None
    assert alone.prompt_eval_count > 1536
    assert long.prompt_eval_count - alone.prompt_eval_count > 510
    for prompt, after in ((prefix * 30, "x"), ("x", suffix * 30)):
        said = refused(lambda prompt=prompt, after=after: client.generate("coder", prompt, suffix=after))  # type: ignore[misc]
        assert str(CONTEXT) in said
        assert "token" in said
    pieces = list(client.generate("coder", "Once ", suffix=" end", options=few(), stream=True))
    assert pieces[-1].done


def test_logprobs(client: Client) -> None:
    answer = client.chat("tiny", HI, logprobs=True, top_logprobs=2, options=few())
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 8
    assert all(len(token.top_logprobs or ()) == 2 for token in answer.logprobs)


def test_texts_are_embedded(client: Client) -> None:
    cat, same, other = client.embed("encoder", ["cat", "cat", "hello world"]).embeddings
    assert math.dist(cat, same) < 1e-4 < math.dist(cat, other)
    assert math.hypot(*cat) == pytest.approx(1)
    (short,) = client.embed("encoder", "cat", dimensions=8).embeddings
    assert len(short) == 8
    assert math.hypot(*short) == pytest.approx(1)
    assert len(client.embeddings("encoder", "cat").embedding) == 64
    assert "too large" in refused(lambda: client.embed("encoder", "cat " * 20_000))
    assert "gives no embeddings" in refused(lambda: client.embed("tiny", "cat"))


def test_models_are_listed_shown_loaded_and_unloaded(client: Client) -> None:
    def running() -> set[str | None]:
        return {model.name for model in client.ps().models}

    names = {model.model for model in client.list().models}
    assert names == {f"{name}:latest" for name in (*MODELS, "must-call", "endless")}
    assert client.show("encoder").capabilities == ["embedding"]
    assert client.show("caller:latest").capabilities == ["completion", "tools"]
    assert client.generate("tiny").done_reason == "load"
    assert "tiny:latest" in running()
    assert client.chat("tiny", HI, options=few(), keep_alive="1h").done
    (expiry,) = [model.expires_at for model in client.ps().models if model.name == "tiny:latest"]
    assert expiry is not None
    assert expiry.year < 9999
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    eventually(lambda: "tiny:latest" not in running())
    client.chat("tiny", HI, options=few(), keep_alive=0)
    eventually(lambda: "tiny:latest" not in running())


def test_model_that_another_client_uses_is_not_unloaded(client: Client, connect: Connect, url: str) -> None:
    stream: Any = client.chat("endless", HI, options={"num_predict": LONG}, stream=True)
    next(stream)
    assert connect(url).generate("long", keep_alive=0).done_reason == "stop"
    assert next(stream).message.content is not None
    assert "long:latest" in {model.name for model in client.ps().models}
    stream.close()


def test_unknown_models_and_paths_without_a_service(client: Client) -> None:
    for name in ("nope", "nope:7b", "../tiny", ".."):
        assert "does not exist" in refused(lambda name=name: client.chat(name, HI), 404)  # type: ignore[misc]
        assert "does not exist" in refused(lambda name=name: client.show(name), 404)  # type: ignore[misc]
    assert refused(lambda: client.create("a", from_="tiny"), 501)
    assert refused(lambda: client.copy("tiny", "b"), 501)
    assert refused(lambda: client.push("a"), 501)


def test_key_is_required(url: str, connect: Connect) -> None:
    assert "API key" in refused(lambda: connect(url, {}).chat("tiny", HI), 401)


def test_client_that_leaves_frees_the_slot(chat_with_ollama: tuple[Served, str], connect: Connect) -> None:
    served, address = chat_with_ollama
    client = connect(address)
    with frees_slot(served):
        stream: Any = client.chat("any", HI, options={"num_predict": LONG}, stream=True)
        next(stream)
        stream.close()


def test_only_model_of_run_has_the_same_api(chat_with_ollama: tuple[Served, str], connect: Connect) -> None:
    client = connect(chat_with_ollama[1])
    (listed,) = client.list().models
    assert listed.model is not None
    assert client.chat(listed.model, HI, options=few()).message.content
    assert [model.name for model in client.ps().models] == [listed.model]
    assert "stays loaded" in refused(lambda: client.generate(listed.model or "", keep_alive=0))


@pytest.fixture(scope="module")
def chat_with_ollama(serve: Any, tiny_model: Path) -> tuple[Served, str]:
    address = f"127.0.0.1:{free_port()}"
    served = serve(tiny_model, f"--ollama={address}", "--ctx-size", "32768", "--parallel", "2")
    return served, f"http://{address}"


def test_asynchronous_client_and_many_at_once(url: str) -> None:

    async def ask_all() -> list[str | None]:
        async with AsyncClient(url, headers=KEYED, timeout=PATIENCE_S) as client:
            answers = await asyncio.gather(*(client.chat("tiny", HI, options=few()) for _ in range(8)))
        return [answer.message.content for answer in answers]

    assert len(set(asyncio.run(ask_all()))) == 1


# --- langchain-ollama ------------------------------------------------------------------------------


Langchain = Callable[..., ChatOllama]


@pytest.fixture
def langchain(url: str, opened: ExitStack) -> Langchain:
    """Makes models that are closed after the test."""

    def make(model: str = "tiny", **options: Any) -> ChatOllama:
        given = {"num_predict": 8, "temperature": 0, "client_kwargs": {"headers": KEYED}, **options}
        made = ChatOllama(base_url=url, model=model, **given)
        opened.enter_context(made._client)
        return made

    return make


def test_langchain_streams_and_invokes(langchain: Langchain) -> None:
    plain = langchain().invoke(QUESTION)
    pieces = list(langchain().stream(QUESTION))
    assert plain.text
    assert "".join(piece.text for piece in pieces) == plain.text
    assert plain.usage_metadata is not None
    assert plain.usage_metadata["output_tokens"] == 8


def test_langchain_gets_a_structured_answer(langchain: Langchain) -> None:
    model = langchain("caller", num_predict=300)
    assert isinstance(model.with_structured_output(Reading).invoke(QUESTION), Reading)


def test_langchain_sends_the_result_of_a_tool(langchain: Langchain) -> None:
    call = {"name": "get_weather", "args": {"city": "Rome", "celsius": True}, "id": "c1"}
    history = [HumanMessage("hi"), AIMessage("", tool_calls=[call]), ToolMessage("sun", tool_call_id="c1")]
    bound = langchain("must-call", num_predict=300).bind_tools([WEATHER])
    (found,) = bound.invoke(history).tool_calls
    assert (found["name"], is_weather(found["args"])) == ("get_weather", True)


def test_langchain_embeds_texts(url: str, opened: ExitStack) -> None:
    model = OllamaEmbeddings(base_url=url, model="encoder", client_kwargs={"headers": KEYED})
    assert model._client is not None
    opened.enter_context(model._client)
    cat, other = model.embed_documents(["cat", "hello world"])
    assert len(cat) == 64
    assert math.dist(model.embed_query("cat"), cat) < 1e-4 < math.dist(cat, other)


# --- the npm package -------------------------------------------------------------------------------


def test_package_of_npm_chats_and_generates(ollama_js: OllamaJs, url: str, client: Client) -> None:
    chat = {"model": "tiny", "messages": HI, "options": few()}
    generate = {"model": "tiny", "prompt": QUESTION, "options": few()}
    schema = Reading.model_json_schema()
    plain, streamed, generated, formatted = ollama_js(
        url,
        KEY,
        ["chat", chat],
        ["chat", {**chat, "stream": True}],
        ["generate", {**generate, "stream": True}],
        ["chat", {"model": "caller", "messages": HI, "format": schema, "options": few(num_predict=300)}],
    )
    expected = client.chat("tiny", HI, options=few()).message.content
    assert plain["answer"]["message"]["content"] == expected
    assert "".join(piece["message"]["content"] for piece in streamed["pieces"]) == expected
    assert "".join(piece["response"] for piece in generated["pieces"]) == expected
    last = streamed["pieces"][-1]
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 8)
    Reading.model_validate_json(formatted["answer"]["message"]["content"])


def test_package_of_npm_calls_a_tool_and_embeds(ollama_js: OllamaJs, url: str) -> None:
    called, embedded, older = ollama_js(
        url,
        KEY,
        ["chat", {"model": "must-call", "messages": HI, "tools": [WEATHER], "options": few(num_predict=300)}],
        ["embed", {"model": "encoder", "input": ["cat", "hello world"]}],
        ["embeddings", {"model": "encoder", "prompt": "cat"}],
    )
    (call,) = called["answer"]["message"]["tool_calls"]
    assert is_weather(call["function"]["arguments"])
    assert [len(vector) for vector in embedded["answer"]["embeddings"]] == [64, 64]
    assert len(older["answer"]["embedding"]) == 64


def test_package_of_npm_lists_and_shows_models(ollama_js: OllamaJs, url: str) -> None:
    loaded, listed, running, shown, version = ollama_js(
        url,
        KEY,
        ["generate", {"model": "tiny"}],
        ["list"],
        ["ps"],
        ["show", {"model": "caller:latest"}],
        ["version"],
    )
    assert loaded["answer"]["done_reason"] == "load"
    assert {model["model"] for model in listed["answer"]["models"]} >= {"tiny:latest", "caller:latest"}
    assert "tiny:latest" in {model["model"] for model in running["answer"]["models"]}
    assert shown["answer"]["capabilities"] == ["completion", "tools"]
    assert version["answer"]["version"]


def test_package_of_npm_throws_the_errors(ollama_js: OllamaJs, url: str) -> None:
    chat = {"model": "tiny", "messages": HI}
    unknown, removed, copied = ollama_js(
        url,
        KEY,
        ["chat", {**chat, "model": "nope", "stream": True}],
        ["chat", {**chat, "options": {"tfs_z": 0.5}}],
        ["copy", {"source": "tiny", "destination": "b"}],
    )
    (keyless,) = ollama_js(url, "another", ["chat", chat])
    found = [(each["error"], each["status"]) for each in (unknown, removed, copied, keyless)]
    assert found == [("ResponseError", status) for status in (404, 400, 501, 401)]
    assert "tfs_z" in removed["message"]


def test_aborted_stream_of_the_package_of_npm_frees_the_slot(
    ollama_js: OllamaJs, chat_with_ollama: tuple[Served, str]
) -> None:
    served, address = chat_with_ollama
    request = {"model": "any", "messages": HI, "options": {"num_predict": LONG}, "stream": True}
    with frees_slot(served):
        (aborted,) = ollama_js(address, KEY, ["chat", request, 3])
    assert aborted["error"] == "AbortError"
    assert len(aborted["pieces"]) >= 3
