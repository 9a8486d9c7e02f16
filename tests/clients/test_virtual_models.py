"""Virtual models as OpenAI's and Anthropic's clients see them, in front of real llama-servers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.clients.conftest import KEY, PATIENCE_S, Served
from tests.clients.prompts import QUESTION
from tests.e2e.driver import run_to_end, started
from tests.kit import models
from tests.real.remains import folders_of

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SYSTEM = "Answer like a fox."
VIRTUAL: dict[str, Any] = {
    "here:short": {"model": "here", "set": {"max_tokens": 3}, "default": {"temperature": 0, "seed": 7}},
    "here:fox": {"model": "here:short", "system": SYSTEM},
    "either": {"any": ["away", "here:short"]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v")  # short: sockets lie below it


def write(home: Path, runtime: str, virtual: dict[str, Any]) -> None:
    config = {
        "listen": "127.0.0.1:0",
        "runtime": runtime,
        "auth": {"api_key_file": str(home / "keys")},
        "models": {
            name: {"path": str(home / f"{name}.gguf"), "preload": name == "here"} for name in ("here", "away")
        },
        "virtual_models": virtual,
    }
    (home / "config.yaml").write_text(json.dumps(config))  # which is YAML


@pytest.fixture(scope="module")
def env(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    return {**os.environ, **folders_of(home), **cache}


@pytest.fixture(scope="module")
def served(runtime: str, home: Path, env: dict[str, str]) -> Iterator[Served]:
    (home / "keys").write_text(f"{KEY} name=all rights=inference,control\n")
    (home / "keys").chmod(0o600)
    for name in ("here", "away"):
        (home / f"{name}.gguf").write_bytes(models.tiny_decoder())
    write(home, runtime, VIRTUAL)
    with started("serve", "--config", str(home / "config.yaml"), env=env) as running:
        yield Served(running, running.url)
        assert running.stop() == 0


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        yield client


def test_parameters_of_the_name_have_the_effect_of_parameters_of_the_client(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="here", messages=MESSAGES, max_tokens=3, temperature=0, seed=7
    )
    named = client.chat.completions.create(model="here:short", messages=MESSAGES, max_tokens=99)
    assert named.choices[0].message.content == plain.choices[0].message.content
    assert named.usage
    assert named.usage.completion_tokens == 3
    assert (named.choices[0].finish_reason, named.model) == ("length", "here")


def test_system_prompt_of_the_name_has_the_effect_of_one_of_the_client(client: openai.OpenAI) -> None:
    with_system: list[Any] = [{"role": "system", "content": SYSTEM}, *MESSAGES]
    plain = client.chat.completions.create(model="here:short", messages=with_system)
    named = client.chat.completions.create(model="here:fox", messages=MESSAGES)
    assert named.usage
    assert plain.usage
    assert named.usage.prompt_tokens == plain.usage.prompt_tokens
    assert named.choices[0].message.content == plain.choices[0].message.content


def test_stream_of_a_virtual_model_is_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="here:fox", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *_, last = list(stream)
    assert last.usage
    assert last.usage.completion_tokens == 3


def test_responses_and_messages_take_the_same_names(served: Served, client: openai.OpenAI) -> None:
    response = client.responses.create(model="here:fox", input=QUESTION)
    assert response.usage
    assert response.usage.output_tokens == 3
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as claude:
        counted = [
            claude.messages.count_tokens(model=name, messages=MESSAGES).input_tokens
            for name in ("here", "here:fox")
        ]
        assert counted[1] > counted[0]
        message = claude.messages.create(model="here:fox", messages=MESSAGES, max_tokens=99)
        assert message.usage.output_tokens == 3


def test_completion_has_no_place_for_a_system_prompt(client: openai.OpenAI) -> None:
    text = client.completions.create(model="here:short", prompt="Once")
    assert text.usage
    assert text.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="has a system prompt, for which /v1/completions"):
        client.completions.create(model="here:fox", prompt="Once")


def test_any_takes_the_loaded_model_and_why_says_so(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="either", messages=MESSAGES)
    assert answer.model == "here"
    found = served.get("/llamasup/v1/models/either/why").json()
    assert found["model"] == "either"
    said = " ".join(found["sentences"])
    assert "away is not loaded. here is loaded:" in said
    assert "A request now takes here, because it is the first that is loaded and has a free slot." in said


def test_virtual_models_are_listed_with_what_they_are(client: openai.OpenAI) -> None:
    listed: dict[str, Any] = {model.id: model.model_dump() for model in client.models.list()}
    assert list(listed) == ["here", "away", *VIRTUAL]
    assert listed["here:fox"]["llamasup"]["virtual"] == {
        "model": "here:short",
        "any": [],
        "takes": "here",
        "set": {},
        "default": {},
        "remove": [],
        "system": True,
    }
    assert client.models.retrieve("either").id == "either"


def test_virtual_models_count_by_their_own_name(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="here:fox", messages=MESSAGES)
    lines = served.get("/metrics").text.splitlines()
    (count,) = [
        line
        for line in lines
        if line.startswith("llamasup_requests_total{")
        and all(label in line for label in ('model="here:fox"', 'route="/v1/chat/completions"', 'code="200"'))
    ]
    assert float(count.rpartition(" ")[2]) >= 1
    tokens = [line for line in lines if line.startswith("llamasup_tokens_total") and '"here:fox"' in line]
    assert tokens


def test_commands_refuse_a_virtual_model_with_a_remedy(served: Served, env: dict[str, str]) -> None:
    ended = run_to_end("load", "here:fox", env=env)
    assert ended.returncode != 0
    assert "'here:fox' is a virtual model, which has no process of its own" in ended.stderr
    explained = run_to_end("why", "either", env=env)
    assert "either is a virtual model, for one of away, here." in explained.stdout


def test_reload_applies_new_virtual_models(
    served: Served, client: openai.OpenAI, runtime: str, home: Path
) -> None:
    write(home, runtime, {**VIRTUAL, "new": {"model": "here", "set": {"max_tokens": 2}}})
    served.running.send_signal(signal.SIGHUP)
    changed = served.running.wait_for("models", settings=["virtual_models"])
    assert changed["unchanged"] == ["here", "away"]
    answer = client.chat.completions.create(model="new", messages=MESSAGES)
    assert answer.usage
    assert answer.usage.completion_tokens == 2
    write(home, runtime, {**VIRTUAL, "new": {"model": "new"}})
    served.running.send_signal(signal.SIGHUP)
    rejected = served.running.wait_for("config")
    assert "the virtual models go round in a circle (new → new)" in json.dumps(rejected, ensure_ascii=False)
    assert client.chat.completions.create(model="new", messages=MESSAGES).usage
    write(home, runtime, VIRTUAL)
    served.running.send_signal(signal.SIGHUP)
    served.running.wait_for("models", settings=["virtual_models"], times=2)


def test_body_that_cannot_be_changed_gets_a_sentence(served: Served) -> None:
    refused = httpx.post(
        f"{served.url}/v1/audio/transcriptions",
        files={"file": ("a.wav", b"RIFF")},
        data={"model": "here:fox"},
        headers={"x-api-key": KEY},
        timeout=PATIENCE_S,
    )
    assert (refused.status_code, refused.json()["error"]["cause"]) == (400, "virtual_model_body")
