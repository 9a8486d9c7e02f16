"""The settings of each client, as data (pure).

The formats are those of the clients' own documentation (docs/connect.md). Names that are not documented were
read in the programs: Claude Code 2.1.197, Codex 0.171.0, opencode 1.18.33, Continue 1.5.47, Cline 3.0.65.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

__all__ = ["ALIASES", "ANSWER_TOKENS", "CLIENTS", "KEY_VARIABLE", "Client", "Connection", "Settings"]

Format = Literal["json", "toml", "yaml"]
Api = Literal["messages", "responses", "chat"]

KEY_VARIABLE: Final = "LLAMASUP_API_KEY"
_NAME: Final = "llamasup"
_NO_KEY: Final = "none"  # for clients that send one in any case; a server without keys ignores it
_DEFAULT_CONTEXT: Final = 8192  # tokens, if the server does not say
ANSWER_TOKENS: Final = 4096
"""The least room for an answer: a file of 300 lines that an agent writes in one call."""
_CLINE: Final = "openai-compatible"
_MOST_OUTPUT: Final = 32_000  # what Claude Code and opencode themselves give most models
_PATIENCE_MS: Final = 3_600_000  # a long prompt on a CPU takes longer than the ten minutes of Claude Code


class Connection(Struct, frozen=True):
    """A llamasup as a client reaches it. ``url`` has no path. ``key`` is empty if none is needed.
    ``context``: tokens of one request.
    """

    url: str
    model: str
    key: str = ""
    context: int | None = None

    def __repr__(self) -> str:
        return f"Connection({self.url!r}, {self.model!r})"  # without the key

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        """The most tokens of an answer: a quarter of the context, so that the conversation has the rest."""
        return min((self.context or _DEFAULT_CONTEXT) // 4, _MOST_OUTPUT)


class Settings(Struct, frozen=True):
    """The settings for a client. ``values`` belong into its settings file. ``environment``: variables that
    the client has to see. ``steps``: what to do in its user interface.
    """

    values: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    steps: tuple[str, ...] = ()


class Client(Struct, frozen=True):
    """A client program. ``file``: its settings, below the home folder; or below the folder in
    ``folder_variable``. None: it has no file that other programs may write.

    ``first_prompt``: tokens of the first request of an agent without files of the user, such as CLAUDE.md:
    system prompt, tools and "say hi". Measured as the bytes of the body that the real program sent (Claude
    Code 75,825; Codex 40,402; opencode 30,671; Continue 5,517; Cline 21,732), divided by four. 0: unknown.

    ``program`` is its command, which ``install`` installs. Either ``file_option`` or ``file_variable`` names
    a settings file for one process. ``inline`` gives the settings as arguments and variables.

    ``catalog`` is the setting that names a file with the metadata of models.
    """

    title: str
    settings: Callable[[Connection], Settings]
    file: str | None = None
    format: Format = "json"
    folder: str = ""
    folder_variable: str = ""
    api: Api = "chat"
    first_prompt: int = 0
    program: str = ""
    install: str = ""
    file_option: str = ""
    file_variable: str = ""
    inline: Callable[[Settings], tuple[Sequence[str], Mapping[str, str]]] | None = None
    catalog: str = ""


def _claude_code(to: Connection) -> Settings:
    environment = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key or _NO_KEY,
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
        # Both texts change with each request, so the cache of the prompt would end before the conversation.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Its tool Workflow has a string of at most 524,288 letters. b10068 makes no grammar of that, and
        # answers 400; b10434 does.
        "CLAUDE_CODE_DISABLE_WORKFLOWS": "1",
        "API_TIMEOUT_MS": str(_PATIENCE_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_MS),
    }
    if to.context is not None:
        environment |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context),  # not for names that begin with claude-
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(to.context),  # from 100,000; below, the line above decides
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.output),
        }
    return Settings({"env": environment})


def _claude_code_inline(settings: Settings) -> tuple[Sequence[str], Mapping[str, str]]:
    """The variables hold where the user gives another ``--settings``. A key of Anthropic is not sent."""
    return (), {**settings.values["env"], "ANTHROPIC_API_KEY": ""}


def _codex(to: Connection) -> Settings:
    provider = {"name": _NAME, "base_url": to.v1, "wire_api": "responses"}
    if to.key:
        provider["env_key"] = KEY_VARIABLE
    values: dict[str, Any] = {"model": to.model, "model_provider": _NAME}
    if to.context is not None:  # there is no limit of the output (0.171)
        values["model_context_window"] = to.context
        values["model_auto_compact_token_limit"] = to.context - to.output
    return Settings({**values, "model_providers": {_NAME: provider}}, _key_variable(to))


def _codex_inline(settings: Settings) -> tuple[Sequence[str], Mapping[str, str]]:
    """``-c key=value``; the key stays a variable, as the list of processes shows arguments."""
    return [word for pair in _toml_pairs(settings.values) for word in ("-c", pair)], settings.environment


def _toml_pairs(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_pairs(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value, ensure_ascii=False)}"


def _opencode(to: Connection) -> Settings:
    model: dict[str, Any] = {"name": to.model}
    if to.context is not None:
        model["limit"] = {"context": to.context, "output": to.output}
    options = {"baseURL": to.v1}
    if to.key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _NAME,
        "options": options,
        "models": {to.model: model},
    }
    values = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{_NAME}/{to.model}",
        "small_model": f"{_NAME}/{to.model}",  # for titles; it would be one of a service
        "provider": {_NAME: provider},
    }
    return Settings(values, _key_variable(to))


def _opencode_inline(settings: Settings) -> tuple[Sequence[str], Mapping[str, str]]:
    return (), {**settings.environment, "OPENCODE_CONFIG_CONTENT": json.dumps(settings.values)}


def _continue(to: Connection) -> Settings:
    model: dict[str, Any] = {
        "name": f"{to.model} ({_NAME})",
        "provider": "openai",
        "model": to.model,
        "apiBase": to.v1,
        "apiKey": to.key or _NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],  # without it, Continue guesses from the name of the model
    }
    if to.context is not None:
        model["defaultCompletionOptions"] = {"contextLength": to.context, "maxTokens": to.output}
    return Settings({"name": "Local models", "version": "1.0.0", "schema": "v1", "models": [model]})


def _cline(to: Connection) -> Settings:
    """The file is that of the command line. The extension of an editor keeps its settings in the editor."""
    settings = {
        "provider": _CLINE,
        "apiKey": to.key or _NO_KEY,
        "model": to.model,
        "baseUrl": to.v1,
    }
    # Without the time, Cline 3.0.65 drops the entry.
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    steps = (
        "In an editor, open the settings of Cline, and choose the API provider `OpenAI Compatible`.",
        f"Base URL: {to.v1}",
        "API key: the one above" if to.key else f"API key: {_NO_KEY}",
        f"Model ID: {to.model}",
        *_context_step(to, "Context window size"),
    )
    return Settings({"version": 1, "lastUsedProvider": _CLINE, "providers": {_CLINE: entry}}, steps=steps)


def _zed(to: Connection) -> Settings:
    model = {
        "name": to.model,
        "display_name": to.model,
        "max_tokens": to.context or _DEFAULT_CONTEXT,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": False},
    }
    provider = {"api_url": to.v1, "available_models": [model]}
    values = {
        "language_models": {"openai_compatible": {_NAME: provider}},
        "agent": {"default_model": {"provider": _NAME, "model": to.model}},
    }
    return Settings(values, {KEY_VARIABLE: to.key or _NO_KEY})  # Zed derives it from the provider's name


def _open_webui(to: Connection) -> Settings:
    return Settings(
        environment={
            "OPENAI_API_BASE_URL": to.v1,
            "OPENAI_API_KEY": to.key or _NO_KEY,
            "ENABLE_OLLAMA_API": "false",
        },
        steps=(
            "Start Open WebUI with these variables. Later it reads them from its own database: then change "
            "them under Admin Settings → Connections.",
        ),
    )


def _home_assistant(to: Connection) -> Settings:
    return Settings(
        steps=(
            "Home Assistant's own integration for OpenAI has no field for an address. Install one from HACS "
            "that has, such as `Extended OpenAI Conversation`.",
            f"Base URL: {to.v1}",
            f"API key: {to.key or _NO_KEY}",
            f"Model: {to.model}",
            "The address has to be reachable from Home Assistant: start llamasup with --host, and a key.",
        )
    )


def _aider(to: Connection) -> Settings:
    """aider reads the variables after its own settings. Its file of metadata has the context."""
    name = f"openai/{to.model}"
    environment = {
        "OPENAI_API_BASE": to.v1,
        "OPENAI_API_KEY": to.key or _NO_KEY,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # that it has no prices for the model
    }
    if to.context is None:
        return Settings(environment=environment)
    limits = {"max_input_tokens": to.context, "max_output_tokens": to.output, "max_tokens": to.output}
    return Settings({name: {**limits, "litellm_provider": "openai", "mode": "chat"}}, environment)


def _openai(to: Connection) -> Settings:
    return Settings(environment={"OPENAI_BASE_URL": to.v1, "OPENAI_API_KEY": to.key or _NO_KEY})


def _key_variable(to: Connection) -> Mapping[str, str]:
    return {KEY_VARIABLE: to.key} if to.key else {}


def _context_step(to: Connection, name: str) -> tuple[str, ...]:
    return () if to.context is None else (f"{name}: {to.context}",)


CLIENTS: Final[Mapping[str, Client]] = {
    "claude-code": Client(
        "Claude Code",
        _claude_code,
        "settings.json",
        folder=".claude",
        folder_variable="CLAUDE_CONFIG_DIR",
        api="messages",
        first_prompt=19_000,
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        file_option="--settings",
        inline=_claude_code_inline,
    ),
    "codex": Client(
        "Codex",
        _codex,
        "config.toml",
        "toml",
        folder=".codex",
        folder_variable="CODEX_HOME",
        api="responses",
        first_prompt=10_100,
        program="codex",
        install="npm install -g @openai/codex",
        inline=_codex_inline,
        catalog="model_catalog_json",
    ),
    "opencode": Client(
        "opencode",
        _opencode,
        "opencode.json",
        folder=".config/opencode",
        first_prompt=7_700,
        program="opencode",
        install="npm install -g opencode-ai",
        inline=_opencode_inline,
    ),
    "continue": Client(
        "Continue",
        _continue,
        "config.yaml",
        "yaml",
        folder=".continue",
        folder_variable="CONTINUE_GLOBAL_DIR",
        first_prompt=1_400,
        program="cn",
        install="npm install -g @continuedev/cli",
        file_option="--config",
    ),
    "cline": Client(
        "Cline",
        _cline,
        "settings/providers.json",
        folder=".cline/data",
        folder_variable="CLINE_DATA_DIR",
        first_prompt=5_400,
        program="cline",
        install="npm install -g cline",
        file_variable="CLINE_PROVIDER_SETTINGS_PATH",
    ),
    "aider": Client(
        "aider",
        _aider,
        ".aider.model.metadata.json",
        program="aider",
        install="uv tool install aider-chat",
        file_variable="AIDER_MODEL_METADATA_FILE",
    ),
    "zed": Client("Zed", _zed, "settings.json", folder=".config/zed"),
    "open-webui": Client("Open WebUI", _open_webui),
    "home-assistant": Client("Home Assistant", _home_assistant),
    "openai": Client("the libraries of OpenAI, and programs that use them", _openai),
}

ALIASES: Final[Mapping[str, str]] = {"claude": "claude-code", "cn": "continue"}
"""Other names of clients: those of their commands."""
