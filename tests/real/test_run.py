"""``llamasup run`` of a real model on a real llama-server, on both runtimes, as a client sees it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.driver import Llamasup, llamasup

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def module_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("module-home")
    return {
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache"),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "PATH": "/usr/bin:/bin",
    }


@pytest.fixture(scope="module")
def server(runtime: str, tiny_model: Path, module_folders: dict[str, str]) -> Iterator[Llamasup]:
    """One server for the whole module, because no test changes it."""
    Path(module_folders["XDG_RUNTIME_DIR"]).mkdir(mode=0o700, exist_ok=True)
    with llamasup(tiny_model, "--runtime", runtime, env=module_folders) as running:
        running.wait_for("ready")
        yield running
        assert running.stop() == 0


@pytest.fixture
def client(server: Llamasup) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.contract
def test_streamed_and_plain_chat_are_equal_at_temperature_0(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=40, seed=1
    )
    stream = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=40, seed=1, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

    assert plain.choices[0].message.content
    assert "".join(pieces) == plain.choices[0].message.content
    assert len(pieces) > 10
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 40


@pytest.mark.contract
def test_completions_tokenize_props_and_models_answer(server: Llamasup) -> None:
    with httpx.Client(base_url=server.url) as http:
        completion = http.post(
            "/v1/completions", json={"prompt": "Once", "max_tokens": 5, "temperature": 0}
        ).json()
        tokens = http.post("/tokenize", json={"content": "hello world"}).json()["tokens"]
        props = http.get("/props").json()
        models = http.get("/v1/models").json()

    assert completion["usage"]["completion_tokens"] == 5
    assert len(tokens) > 1
    assert props["total_slots"] == 4
    assert models["data"][0]["id"] == "tiny"


@pytest.mark.contract
def test_metrics_contain_those_of_llamasup_and_llama_server_by_model(server: Llamasup) -> None:
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 5})
        text = http.get("/metrics").text

    assert re.search(r'^llamasup_requests_total\{.*model="tiny".*\} \d', text, re.M)
    assert re.search(r'^llamasup_instance_state\{model="tiny",state="ready"\} 1\.0$', text, re.M)
    assert re.search(r'^llamasup_tokens_total\{kind="completion",model="tiny"\} \d', text, re.M)
    assert re.search(r'^llamacpp:tokens_predicted_total\{model="tiny"\} \d', text, re.M)


@pytest.mark.contract
def test_health_and_readiness_endpoints_answer_200(server: Llamasup) -> None:
    with httpx.Client(base_url=server.url) as http:
        health, ready, alive = http.get("/health"), http.get("/readyz"), http.get("/livez")

    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (ready.status_code, alive.status_code) == (200, 200)


@pytest.mark.contract
def test_answers_of_llama_server_pass_unchanged(server: Llamasup) -> None:
    """Only ids and times may differ between the child's own socket and the proxy."""
    (child,) = [process for process in server.children() if "--host" in process.cmdline()]
    arguments = child.cmdline()
    socket_path = arguments[arguments.index("--host") + 1]
    requests = [
        ("/v1/chat/completions", {"messages": QUESTION, "temperature": 0, "max_tokens": 20, "seed": 1}),
        (
            "/v1/chat/completions",
            {"messages": QUESTION, "temperature": 0, "max_tokens": 20, "seed": 1, "stream": True},
        ),
        ("/completion", {"prompt": "Once", "n_predict": 10, "temperature": 0, "stream": True}),
        ("/tokenize", {"content": "byte for byte ✓"}),
        ("/v1/embeddings", {"input": "not enabled: an error comes through too"}),
        ("/v1/chat/completions", {"messages": "not a list"}),
    ]

    # llama-server closes a connection after an error (b11434), perhaps while the next request arrives on it.
    transport = httpx.HTTPTransport(uds=socket_path, limits=httpx.Limits(max_keepalive_connections=0))
    with (
        httpx.Client(transport=transport, base_url="http://localhost") as straight,
        httpx.Client(base_url=server.url) as through,
    ):
        for path, body in requests:
            straight.post(path, json=body)  # caches the prompt for both of the next requests
            direct, proxied = straight.post(path, json=body), through.post(path, json=body)
            assert proxied.status_code == direct.status_code, path
            assert proxied.headers["content-type"] == direct.headers["content-type"], path
            assert without_ids_and_times(proxied.text) == without_ids_and_times(direct.text), path


def without_ids_and_times(text: str) -> str:
    text = re.sub(r'"id":"[^"]+"|"created":\d+|"id_slot":\d+', "_", text)
    text = re.sub(r'"(\w+_(ms|second|per_token_ms))":[\d.e+-]+', "_", text)
    return re.sub(r'"(tokens_cached|cache_n|prompt_n|tokens_evaluated)":\d+', "_", text)


@pytest.mark.contract
def test_draft_model_is_used(runtime: str, tiny_model: Path, module_folders: dict[str, str]) -> None:
    with llamasup(
        tiny_model, "--runtime", runtime, "--draft-model", str(tiny_model), env=module_folders
    ) as running:
        answer = httpx.post(
            f"{running.url}/completion",
            json={"prompt": "Once upon a time", "n_predict": 40, "temperature": 0},
        ).json()
        assert running.stop() == 0

    timings = answer["timings"]
    print(f"draft_n {timings['draft_n']} of {timings['predicted_n']} tokens")
    assert timings["draft_n"] > 0
    assert timings["draft_n_accepted"] > 0


@pytest.mark.contract
def test_q8_0_halves_the_kv_cache(
    runtime: str, tiny_model: Path, module_folders: dict[str, str], tmp_path: Path
) -> None:
    """By the server's own log: 32 values take 34 bytes in q8_0, and 64 in f16."""
    sizes = {}
    env = module_folders | {"XDG_STATE_HOME": str(tmp_path)}  # a folder without logs of other servers
    for kv_type in ("f16", "q8_0"):
        with llamasup(
            tiny_model, "--runtime", runtime, "--kv-type", kv_type, "--", "-lv", "4", env=env
        ) as running:
            running.wait_for("ready")
            assert running.stop() == 0
        log = (tmp_path / "llamasup/logs/tiny.log").read_text("utf-8")
        found = re.findall(r"llama_kv_cache: size = +([\d.]+) MiB.*K \((\w+)\)", log)
        assert found[-1][1] == kv_type
        sizes[kv_type] = float(found[-1][0])

    print(f"KV cache: f16 {sizes['f16']} MiB, q8_0 {sizes['q8_0']} MiB")
    assert sizes["q8_0"] / sizes["f16"] == pytest.approx(34 / 64, abs=0.02)


def test_request_is_logged_as_one_line_with_tokens_and_speed(
    runtime: str, tiny_model: Path, module_folders: dict[str, str]
) -> None:
    with llamasup(tiny_model, "--runtime", runtime, env=module_folders) as running:
        httpx.post(f"{running.url}/v1/completions", json={"prompt": "my secret", "max_tokens": 7})
        assert running.stop() == 0
        (line,) = [line for line in running.stderr_text.splitlines() if line.startswith("POST")]
        assert re.fullmatch(r"POST  /v1/completions  200  \d+\+7 tokens  [\d.]+ tok/s  [\d.]+ m?s", line), (
            line
        )
        assert "secret" not in running.stderr_text


@pytest.mark.contract
def test_errors_of_llama_server_keep_their_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 20_000}])
    error = json.loads(caught.value.response.text)["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0


def test_server_runs_with_the_nice_value(runtime: str, tiny_model: Path) -> None:
    with llamasup(tiny_model, "--runtime", runtime, "--nice", "7") as running:
        running.wait_for("ready")
        (server,) = running.children()
        threads = [thread.id for thread in server.threads()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {7}
        assert psutil.Process(running.pid).nice() == 0
