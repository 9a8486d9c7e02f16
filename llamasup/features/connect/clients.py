"""The settings of each client, as data (pure).

The formats are those of the clients' own documentation (docs/connect.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

__all__ = ["CLIENTS", "KEY_VARIABLE", "Client", "Connection", "Settings"]

Format = Literal["json", "toml", "yaml"]

KEY_VARIABLE: Final = "LLAMASUP_API_KEY"
_NAME: Final = "llamasup"
_NO_KEY: Final = "none"  # for clients that send one in any case; a server without keys ignores it
_DEFAULT_CONTEXT: Final = 8192  # tokens, if the server does not say


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
    """

    title: str
    settings: Callable[[Connection], Settings]
    file: str | None = None
    format: Format = "json"
    folder: str = ""
    folder_variable: str = ""


def _claude_code(to: Connection) -> Settings:
    environment = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key or _NO_KEY,
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
    }
    return Settings({"env": environment})


def _codex(to: Connection) -> Settings:
    provider = {"name": _NAME, "base_url": to.v1, "wire_api": "responses"}
    if to.key:
        provider["env_key"] = KEY_VARIABLE
    values = {"model": to.model, "model_provider": _NAME, "model_providers": {_NAME: provider}}
    return Settings(values, _key_variable(to))


def _opencode(to: Connection) -> Settings:
    model: dict[str, Any] = {"name": to.model}
    if to.context is not None:
        model["limit"] = {"context": to.context, "output": to.context // 2}
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
        "provider": {_NAME: provider},
    }
    return Settings(values, _key_variable(to))


def _continue(to: Connection) -> Settings:
    model = {
        "name": f"{to.model} ({_NAME})",
        "provider": "openai",
        "model": to.model,
        "apiBase": to.v1,
        "apiKey": to.key or _NO_KEY,
        "roles": ["chat", "edit", "apply"],
    }
    return Settings({"name": "Local models", "version": "1.0.0", "schema": "v1", "models": [model]})


def _cline(to: Connection) -> Settings:
    return Settings(
        steps=(
            "Open the settings of Cline, and choose the API provider `OpenAI Compatible`.",
            f"Base URL: {to.v1}",
            f"API key: {to.key or _NO_KEY}",
            f"Model ID: {to.model}",
            *_context_step(to, "Context window size"),
        )
    )


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
    ),
    "codex": Client("Codex", _codex, "config.toml", "toml", folder=".codex", folder_variable="CODEX_HOME"),
    "opencode": Client("opencode", _opencode, "opencode.json", folder=".config/opencode"),
    "continue": Client("Continue", _continue, "config.yaml", "yaml", folder=".continue"),
    "cline": Client("Cline", _cline),
    "zed": Client("Zed", _zed, "settings.json", folder=".config/zed"),
    "open-webui": Client("Open WebUI", _open_webui),
    "home-assistant": Client("Home Assistant", _home_assistant),
    "openai": Client("the libraries of OpenAI, and programs that use them", _openai),
}
