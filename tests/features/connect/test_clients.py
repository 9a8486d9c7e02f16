"""The settings of each client."""

from __future__ import annotations

import json
import tomllib
from pathlib import PurePosixPath

import pytest
import yaml
from msgspec import structs

from llamasup.features.connect.clients import CLIENTS, Connection, Settings
from llamasup.features.connect.overrides import Overrides, overrides

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
        "model_context_window": 32768,
        "model_auto_compact_token_limit": 24576,
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
    assert opencode["limit"] == {"context": 32768, "output": 8192}
    assert settings("opencode").values["small_model"] == "llamasup/qwen:high"
    environment = settings("claude-code").values["env"]
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    (model,) = settings("continue").values["models"]
    assert model["defaultCompletionOptions"] == {"contextLength": 32768, "maxTokens": 8192}
    assert "Context window size: 32768" in settings("cline").steps
    (model,) = settings("zed", OPEN).values["language_models"]["openai_compatible"]["llamasup"][
        "available_models"
    ]
    assert model["max_tokens"] == 8192
    assert "limit" not in settings("opencode", OPEN).values["provider"]["llamasup"]["models"]["qwen"]


def test_a_long_context_does_not_give_all_its_quarter_to_an_answer() -> None:
    assert structs.replace(TO, context=1_000_000).output == 32_000
    assert OPEN.output == 2048


def test_claude_code_gets_nothing_that_changes_its_prompt_with_each_request() -> None:
    environment = settings("claude-code", OPEN).values["env"]
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert environment["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert not [name for name in environment if "CONTEXT" in name or "OUTPUT" in name]


def test_aider_learns_the_context() -> None:
    (limits,) = settings("aider").values.values()
    assert (limits["max_input_tokens"], limits["max_output_tokens"]) == (32768, 8192)
    assert settings("aider").environment["AIDER_MODEL"] == next(iter(settings("aider").values))
    assert settings("aider", OPEN).values == {}
    made = for_process("aider", own='{"openai/x": {"mode": "chat"}}')
    assert list(json.loads(made.file_content or "")) == ["openai/x", "openai/qwen:high"]
    assert made.environment["AIDER_MODEL_METADATA_FILE"] == str(FILE)


# --- for one process -----------------------------------------------------------------------------------

FILE = PurePosixPath("/run/settings")


def for_process(client: str, *given: str, own: str = "") -> Overrides:
    return overrides(CLIENTS[client], settings(client), given, FILE, own)


@pytest.mark.parametrize("client", [name for name, client in CLIENTS.items() if client.program])
def test_process_gets_address_key_and_model_but_no_key_in_its_arguments(client: str) -> None:
    made = for_process(client, "-p", "a b")
    everything = json.dumps([made.arguments, made.environment, made.file_content])
    assert "http://127.0.0.1:8080" in everything
    assert "qwen:high" in everything
    assert "sk-1" in everything
    assert "sk-1" not in json.dumps(made.arguments)
    assert made.arguments[-2:] == ("-p", "a b")


def test_settings_of_codex_are_arguments_in_toml() -> None:
    model = 'a "b" = [c]'
    made = overrides(
        CLIENTS["codex"], settings("codex", structs.replace(TO, model=model)), ("exec",), FILE, ""
    )
    assert made.arguments[::2] == ("-c",) * (len(made.arguments) // 2) + ("exec",)
    read = tomllib.loads("\n".join(made.arguments[1::2]))
    assert read["model"] == model
    assert read["model_providers"]["llamasup"]["wire_api"] == "responses"
    assert made.environment == {"LLAMASUP_API_KEY": "sk-1"}


def test_settings_of_the_user_stay_where_the_client_would_not_read_its_own_file() -> None:
    own = "name: Mine\nrules: [short]\nmodels:\n  - name: x\n    provider: ollama\n"
    read = yaml.safe_load(for_process("continue", own=own).file_content or "")
    assert read["rules"] == ["short"]
    assert [model["name"] for model in read["models"]] == ["qwen:high (llamasup)", "x"]
    cline = for_process("cline", own='{"modes": {"a": 1}}')
    assert json.loads(cline.file_content or "")["modes"] == {"a": 1}
    assert cline.environment == {"CLINE_PROVIDER_SETTINGS_PATH": "/run/settings"}


@pytest.mark.parametrize("given", [("--settings", "mine.json"), ("--settings=mine.json",)])
def test_settings_file_of_the_command_line_is_that_of_the_user(given: tuple[str, ...]) -> None:
    made = for_process("claude-code", *given)
    assert made.arguments == given
    assert made.file_content is None
    assert made.environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert made.environment["ANTHROPIC_API_KEY"] == ""
