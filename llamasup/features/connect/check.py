"""Makes one request as a client sends it, and reads the stream of its answer (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.system.text import INVALID_JSON
from llamasup.features.connect.clients import ANSWER_TOKENS, Api, Client, Connection

PATHS: Final[Mapping[Api, str]] = {
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "chat": "/v1/chat/completions",
}
_MAX_TEXT: Final = 200  # characters of an answer that are shown
_PROMPT: Final = "Say hi."
_PARAMETERS: Final = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOL: Final = {"name": "read_file", "description": "Read a file."}


def request_body(api: Api, model: str) -> dict[str, Any]:
    """Return a short request with a tool, streamed."""
    function = {**_TOOL, "parameters": _PARAMETERS}
    common: dict[str, Any] = {"model": model, "stream": True}
    messages = [{"role": "user", "content": _PROMPT}]
    match api:
        case "messages":
            tool = {**_TOOL, "input_schema": _PARAMETERS}
            return {**common, "max_tokens": 64, "messages": messages, "tools": [tool]}
        case "responses":
            tool = {"type": "function", **function}
            return {**common, "max_output_tokens": 64, "input": messages, "tools": [tool]}
        case _:  # "chat"
            tools = [{"type": "function", "function": function}]
            options = {"include_usage": True}
            return {
                **common,
                "max_tokens": 64,
                "messages": messages,
                "tools": tools,
                "stream_options": options,
            }


class Reply(Struct, frozen=True):
    """A stream as far as it has been read. ``error``: the object of an error, if one came."""

    text: str = ""
    tool_call: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: Mapping[str, Any] | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self.text or self.tool_call)

    def after(self, line: str) -> Reply:
        """The reply after one more line, of any of the APIs; their fields do not collide."""
        try:
            event = json.loads(line.removeprefix("data:"))
        except INVALID_JSON:  # [DONE], comments, names of events
            return self
        if not isinstance(event, dict):
            return self
        text, call = _said(event)
        prompt, cached = _used(event)
        return replace(
            self,
            text=(self.text + text)[:_MAX_TEXT],
            tool_call=self.tool_call or call,
            prompt_tokens=self.prompt_tokens if prompt is None else prompt,
            cached_tokens=self.cached_tokens if cached is None else cached,
            error=self.error or _mapping(event, "error") or _mapping(event, "response", "error") or None,
        )


def _said(event: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text and the name of a called tool in an event."""
    delta, item = event.get("delta"), event.get("item") or event.get("content_block")
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        delta = _mapping(choices[0], "delta")
        calls = delta.get("tool_calls")
        if isinstance(calls, list) and calls:
            return "", _mapping(calls[0], "function").get("name")
    if isinstance(delta, str):  # of /v1/responses: a delta of the arguments of a call is not its text
        return (delta if str(event.get("type")).endswith("text.delta") else ""), None
    if isinstance(item, Mapping) and item.get("type") in ("tool_use", "function_call"):
        return "", item.get("name")
    said = delta if isinstance(delta, Mapping) else {}
    parts = (said.get(name) for name in ("text", "thinking", "content", "reasoning_content"))
    return "".join(part for part in parts if isinstance(part, str)), None


def _used(event: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The tokens of the prompt, and those of them that were in the cache."""
    usage = event.get("usage")
    if not isinstance(usage, Mapping):
        usage = _mapping(event, "message", "usage") or _mapping(event, "response", "usage")
    cached = usage.get("cache_read_input_tokens")
    if isinstance(cached, int):  # Anthropic counts the others only
        return (usage.get("input_tokens") or 0) + cached, cached
    prompt = usage.get("input_tokens", usage.get("prompt_tokens"))
    details = _mapping(usage, "input_tokens_details") or _mapping(usage, "prompt_tokens_details")
    return prompt, details.get("cached_tokens")


def _mapping(value: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


class Warned(Struct, frozen=True):
    """A warning about the settings."""

    message: str
    remedy: str


def context_warning(client: Client, to: Connection) -> Warned | None:
    """Return a warning if the first prompt of the client and an answer exceed the context of a request."""
    needed = client.first_prompt + ANSWER_TOKENS
    if not client.first_prompt or to.context is None or to.context >= needed:
        return None
    size = 1 << (2 * needed - 1).bit_length()  # with as much again for the conversation
    return Warned(
        f"{client.title} begins with a prompt of about {client.first_prompt:,} tokens; a request of "
        f"{to.model!r} has room for {to.context:,}.",
        f"Start llamasup with `--ctx-size {size} --parallel 1`; in a config: `ctx_size: {size}` and "
        "`parallel: 1`.",
    )
