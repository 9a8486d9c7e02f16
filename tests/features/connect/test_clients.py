"""The settings of each client."""

from __future__ import annotations

import json

import pytest

from llamasup.features.connect.clients import CLIENTS, Connection, Settings

TO = Connection("http://127.0.0.1:8080", "qwen:high", "sk-1", 32768)
OPEN = Connection("http://127.0.0.1:8080", "qwen")


def settings(client: str, to: Connection = TO) -> Settings:
    return CLIENTS[client].settings(to)


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_gets_the_address_the_key_and_the_model(client: str) -> None:
    found = json.dumps([settings(client).values, settings(client).environment, settings(client).steps])
    assert "http://127.0.0.1:8080" in found
    assert "sk-1" in found
    # The libraries of OpenAI and Open WebUI take the model from the program or the user.
    assert ("qwen:high" in found) == (client not in ("openai", "open-webui"))
    assert bool(settings(client).values) == (CLIENTS[client].file is not None)


@pytest.mark.parametrize("client", CLIENTS)
def test_without_a_key_no_client_gets_an_empty_one(client: str) -> None:
    found = settings(client, OPEN)
    assert '""' not in json.dumps([found.values, found.environment, found.steps])
    assert "" not in found.environment.values()


def test_key_is_not_in_a_file_where_the_client_reads_a_variable() -> None:
    for client in ("codex", "opencode", "zed"):
        found = settings(client)
        assert "sk-1" not in json.dumps(found.values)
        assert found.environment == {"LLAMASUP_API_KEY": "sk-1"}


def test_connection_does_not_show_its_key() -> None:
    assert "sk-1" not in repr(TO)


def test_codex_uses_the_api_of_responses() -> None:
    assert settings("codex").values == {
        "model": "qwen:high",
        "model_provider": "llamasup",
        "model_providers": {
            "llamasup": {
                "name": "llamasup",
                "base_url": "http://127.0.0.1:8080/v1",
                "wire_api": "responses",
                "env_key": "LLAMASUP_API_KEY",
            }
        },
    }
    assert "env_key" not in settings("codex", OPEN).values["model_providers"]["llamasup"]


def test_context_is_told_where_the_client_needs_it() -> None:
    (model,) = settings("zed").values["language_models"]["openai_compatible"]["llamasup"]["available_models"]
    assert model["max_tokens"] == 32768
    opencode = settings("opencode").values["provider"]["llamasup"]["models"]["qwen:high"]
    assert opencode["limit"] == {"context": 32768, "output": 16384}
    assert "Context window size: 32768" in settings("cline").steps
    (model,) = settings("zed", OPEN).values["language_models"]["openai_compatible"]["llamasup"][
        "available_models"
    ]
    assert model["max_tokens"] == 8192
    assert "limit" not in settings("opencode", OPEN).values["provider"]["llamasup"]["models"]["qwen"]
