"""A request in Ollama's API → the request for llama-server, or the reason why not (pure).

Each field of docs/ollama.md is honoured or refused here, never ignored in silence. llama-server's API is that
of build b11434.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

import msgspec

from llamasup.ollama.fields import (
    Refused,
    boolean,
    decoded,
    integer,
    items,
    keep_alive,
    object_of,
    refusal,
    text,
)
from llamasup.ollama.options import asked_context, parameters

__all__ = ["PATHS", "Asked", "Features", "Kind", "asked_of"]

MAX_TOP_LOGPROBS: Final = 20


class Kind(Enum):
    """The form of an answer."""

    CHAT = auto()
    GENERATE = auto()  # by /v1/chat/completions
    RAW = auto()  # of /api/generate, by /completion and /infill
    EMBED = auto()
    EMBEDDINGS = auto()  # of /api/embeddings, which takes one text
    LOAD_CHAT = auto()
    LOAD_GENERATE = auto()
    LOAD_EMBED = auto()
    LOAD_EMBEDDINGS = auto()


LOADS: Final = frozenset({Kind.LOAD_CHAT, Kind.LOAD_GENERATE, Kind.LOAD_EMBED, Kind.LOAD_EMBEDDINGS})


class Features(msgspec.Struct, frozen=True):
    """What a model can do, as far as its file says it. None: not known."""

    reasons: bool | None = None
    calls_tools: bool | None = None


class Asked(msgspec.Struct, frozen=True):
    """A translated request. ``name``: the model as the client wrote it. ``body``: without the model.

    ``n_ctx``: the smallest context that is asked for. ``keep_s``: how long the model stays loaded after the
    request; None: not said. ``dimensions``: of the embeddings; None: all. ``alternatives``: each token of the
    answer has its ``top_logprobs``.
    """

    kind: Kind
    name: str
    path: bytes
    body: dict[str, Any]
    streams: bool = False
    keep_s: float | None = None
    n_ctx: int | None = None
    dimensions: int | None = None
    alternatives: bool = False

    @property
    def loads(self) -> bool:
        """Whether it only loads the model."""
        return self.kind in LOADS


_Look = Callable[[str], Features]
"""The features of the model of this name."""


def asked_of(path: bytes, body: bytes, look: _Look) -> Asked:
    """The request in the body of a POST to ``path``, one of ``PATHS``. Raises Refused."""
    fields = decoded(body)
    name = model_of(fields)
    return PATHS[path](name, fields, look)


def model_of(fields: Mapping[str, Any]) -> str:
    """``model``, or ``name`` of older clients."""
    name = text(fields, "model") or text(fields, "name")
    if not name:
        raise refusal("model is required", "GET /api/tags lists the models")
    return name


def _asked(kind: Kind, name: str, path: bytes, body: dict[str, Any], fields: Mapping[str, Any]) -> Asked:
    return Asked(
        kind,
        name,
        path,
        body,
        streams=boolean(fields, "stream", default=True),
        keep_s=keep_alive(fields),
        n_ctx=asked_context(fields),
        alternatives=bool(fields.get("top_logprobs")),
    )


def _load(kind: Kind, name: str, fields: Mapping[str, Any]) -> Asked:
    """A request without a prompt loads the model. The tokens of no text take no time of the model."""
    parameters(fields, samples=kind in (Kind.LOAD_CHAT, Kind.LOAD_GENERATE))  # refuses what is not an option
    asked = _asked(kind, name, b"/tokenize", {"content": ""}, fields)
    return msgspec.structs.replace(asked, streams=False)


# --- chat ------------------------------------------------------------------------------------------


def _chat(name: str, fields: Mapping[str, Any], look: _Look) -> Asked:
    _refuse_unsupported(fields)
    messages = items(fields, "messages")
    if not messages:
        return _load(Kind.LOAD_CHAT, name, fields)
    body: dict[str, Any] = {
        "messages": _messages(messages),
        **_shared(name, fields, look),
    }
    if tools := items(fields, "tools"):
        body["tools"] = _tools(name, tools, look)
    return _asked(Kind.CHAT, name, b"/v1/chat/completions", _streamed(body, fields), fields)


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # the ids and names of calls without a result
    for at, message in enumerate(messages):
        try:
            own = _message(message, at, pending)
        except Refused as refused:
            raise refused.within(f"messages[{at}]") from None
        if "tool_calls" in own:
            pending = [(call["id"], call["function"]["name"]) for call in own["tool_calls"]]
        found.append(own)
    return found


def _message(message: Any, at: int, pending: list[tuple[str, str]]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refusal("a message is no object", "use objects with role and content")
    role = text(message, "role").lower()
    if role not in ("system", "user", "assistant", "tool"):
        raise refusal(f"role is {role[:40]!r}", "use system, user, assistant or tool")
    content = text(message, "content")
    own: dict[str, Any] = {"role": role, "content": content}
    if images := items(message, "images"):
        own["content"] = _with_images(content, images)
    if thinking := text(message, "thinking"):
        own["reasoning_content"] = thinking
    if calls := items(message, "tool_calls"):
        own["tool_calls"] = [_tool_call(call, f"call_{at}_{number}") for number, call in enumerate(calls)]
    return own | _result_of(message, pending) if role == "tool" else own


def _tool_call(call: Any, id_: str) -> dict[str, Any]:
    """``id_``: for a call without one."""
    if not isinstance(call, dict):
        raise refusal("an item of tool_calls is no object", "use objects with function")
    function = object_of(call, "function")
    called = text(function, "name")
    if not called:
        raise refusal("an item of tool_calls names no function", "set function.name")
    arguments = msgspec.json.encode(object_of(function, "arguments")).decode()
    return {
        "id": text(call, "id") or id_,
        "type": "function",
        "function": {"name": called, "arguments": arguments},
    }


def _result_of(message: Mapping[str, Any], pending: list[tuple[str, str]]) -> dict[str, str]:
    """The call that a result belongs to: that of its id, else the first of its name, else the first."""
    called, id_ = text(message, "tool_name"), text(message, "tool_call_id")
    fitting = [call for call in pending if (call[0] == id_ if id_ else call[1] == called)] or pending
    if fitting and not id_:
        id_ = fitting[0][0]
    if fitting:
        called = called or fitting[0][1]
        pending.remove(fitting[0])
    return {"tool_call_id": id_ or "call", **({"name": called} if called else {})}


def _tools(name: str, tools: Sequence[Any], look: _Look) -> list[Any]:
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or not text(object_of(tool, "function"), "name"):
            raise refusal(
                f"tools[{at}] has no function with a name", 'use {"type": "function", "function": …}'
            )
    if look(name).calls_tools is False:
        raise refusal(f"{name[:80]!r} does not support tools: its chat template has none", "leave tools out")
    return [{"type": "function", **tool} for tool in tools]


# --- generate --------------------------------------------------------------------------------------


def _generate(name: str, fields: Mapping[str, Any], look: _Look) -> Asked:
    _refuse_unsupported(fields)
    if text(fields, "template"):
        raise refusal("template is not supported", "leave it out for the template of the model, or use raw")
    if items(fields, "context"):
        raise refusal("context is not supported", "send the conversation with /api/chat")
    prompt, system, suffix = text(fields, "prompt"), text(fields, "system"), text(fields, "suffix")
    raw = boolean(fields, "raw")
    images = items(fields, "images")
    if not prompt and not suffix and not images:
        return _load(Kind.LOAD_GENERATE, name, fields)
    if raw or suffix:
        return _generate_raw(
            name, fields, prompt, suffix, other="system" if system else "images" if images else ""
        )
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    content = _with_images(prompt, images) if images else prompt
    messages.append({"role": "user", "content": content})
    body = {"messages": messages, **_shared(name, fields, look)}
    return _asked(Kind.GENERATE, name, b"/v1/chat/completions", _streamed(body, fields), fields)


def _generate_raw(name: str, fields: Mapping[str, Any], prompt: str, suffix: str, *, other: str) -> Asked:
    """Without a chat template: the prompt as it is, or the text around the place that the model fills in."""
    what = "suffix" if suffix else "raw"
    for field in ("think", "format", "logprobs"):
        if fields.get(field) not in (None, False, ""):
            other = other or field
    if other:
        raise refusal(f"{other} is not supported together with {what}", f"leave {other} or {what} out")
    body = parameters(fields)
    if suffix:
        body |= {"input_prefix": prompt, "input_suffix": suffix}
    else:
        body["prompt"] = prompt
    if boolean(fields, "stream", default=True):
        body["stream"] = True
    path = b"/infill" if suffix else b"/completion"
    return _asked(Kind.RAW, name, path, body, fields)


# --- chat and generate -----------------------------------------------------------------------------


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if boolean(fields, "_debug_render_only"):
        raise refusal("_debug_render_only is not supported", "leave it out")
    if boolean(fields, "shift"):
        raise refusal("shift is not supported: llamasup drops no part of a conversation", "leave it out")
    boolean(fields, "truncate")


def _streamed(body: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if boolean(fields, "stream", default=True):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _shared(name: str, fields: Mapping[str, Any], look: _Look) -> dict[str, Any]:
    """The parameters of /v1/chat/completions that both paths have."""
    return {**parameters(fields), **_format(fields), **_think(name, fields, look), **_logprobs(fields)}


def _format(fields: Mapping[str, Any]) -> dict[str, Any]:
    wanted = fields.get("format")
    match wanted:
        case None | "":
            return {}
        case "json":
            return {"response_format": {"type": "json_object"}}
        case dict():
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted}}}
        case _:
            raise refusal("format is neither json nor a JSON schema", 'use "json" or an object')


_EFFORTS: Final = ("low", "medium", "high", "max")


def _think(name: str, fields: Mapping[str, Any], look: _Look) -> dict[str, Any]:
    wanted = fields.get("think")
    if wanted is None:
        return {}
    if not isinstance(wanted, bool) and wanted not in _EFFORTS:
        raise refusal("think is neither true, false nor a level", f"use true, false, {', '.join(_EFFORTS)}")
    reasons = look(name).reasons
    if wanted is False:
        # A template without the switch ignores it; with a budget of 0, its model ends its thoughts at once.
        off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_budget_tokens": 0}
        return {} if reasons is False else off
    if reasons is False:
        raise refusal(f"{name[:80]!r} does not support thinking", "leave think out")
    effort = {} if wanted is True else {"reasoning_effort": wanted}
    return {"chat_template_kwargs": {"enable_thinking": True, **effort}}


def _logprobs(fields: Mapping[str, Any]) -> dict[str, Any]:
    most = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not boolean(fields, "logprobs"):
        if most:
            raise refusal("top_logprobs is set without logprobs", "set logprobs to true")
        return {}
    return {"logprobs": True, "top_logprobs": most or 1}  # with 0, llama-server gives none


# --- images ----------------------------------------------------------------------------------------

_STARTS: Final = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
)
_START_LETTERS: Final = 24  # of base64: 18 bytes


def _with_images(content: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if content else []
    for at, image in enumerate(images):
        media = _media_of(image)
        if media is None:
            raise refusal(f"images[{at}] is no image", "use base64 of a PNG, JPEG, GIF, BMP or WebP file")
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/{media};base64,{image}"}})
    return parts


def _media_of(image: object) -> str | None:
    if not isinstance(image, str):
        return None
    try:
        start = base64.b64decode(image[:_START_LETTERS], validate=True)
    except (binascii.Error, ValueError):
        return None
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "webp"
    return next((media for magic, media in _STARTS if start.startswith(magic)), None)


# --- embeddings ------------------------------------------------------------------------------------


def _embed(name: str, fields: Mapping[str, Any], look: _Look) -> Asked:
    boolean(fields, "truncate")  # a text that does not fit is refused, whatever it says
    wanted = fields.get("input")
    texts = [wanted] if isinstance(wanted, str) else list(items(fields, "input"))
    for at, item in enumerate(texts):
        if not isinstance(item, str):
            raise refusal(f"input[{at}] is not a string", "use a string or an array of strings")
    dimensions = integer(fields, "dimensions", 0)
    if not texts or texts == [""]:
        return _load(Kind.LOAD_EMBED, name, fields)
    body = {"input": texts, **parameters(fields, samples=False)}
    asked = _asked(Kind.EMBED, name, b"/v1/embeddings", body, fields)
    return msgspec.structs.replace(asked, streams=False, dimensions=dimensions or None)


def _embeddings(name: str, fields: Mapping[str, Any], look: _Look) -> Asked:
    prompt = text(fields, "prompt")
    if not prompt:
        return _load(Kind.LOAD_EMBEDDINGS, name, fields)
    # Ollama does not normalize these.
    body = {"input": prompt, "embd_normalize": -1, **parameters(fields, samples=False)}
    asked = _asked(Kind.EMBEDDINGS, name, b"/v1/embeddings", body, fields)
    return msgspec.structs.replace(asked, streams=False)


PATHS: Final[Mapping[bytes, Callable[[str, Mapping[str, Any], _Look], Asked]]] = {
    b"/api/chat": _chat,
    b"/api/generate": _generate,
    b"/api/embed": _embed,
    b"/api/embeddings": _embeddings,
}
"""The paths that run a model."""
