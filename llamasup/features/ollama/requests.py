"""A request in Ollama's API → the request for llama-server, or the reason why not (pure).

Each field of docs/ollama.md is honoured or refused here, never ignored in silence. llama-server's API is as
in build b11434.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from llamasup.features.ollama.fields import (
    Fields,
    Refused,
    boolean,
    decoded,
    integer,
    is_given,
    is_object,
    is_text,
    keep_alive,
    object_of,
    objects,
    parameters,
    refusal,
    source,
    text,
    texts,
    without_effect,
)

__all__ = ["PATHS", "Features", "Kind", "OllamaRequest", "check_features", "model_of", "read_request"]

MAX_TOP_LOGPROBS: Final = 20


class Kind(Enum):
    """The form of an answer."""

    CHAT = auto()
    GENERATE = auto()  # by /v1/chat/completions
    RAW = auto()  # of /api/generate, by /completion
    EMBED = auto()
    EMBEDDINGS = auto()  # of /api/embeddings, which takes one text


EMBEDS: Final = frozenset({Kind.EMBED, Kind.EMBEDDINGS})


class Features(msgspec.Struct, frozen=True):
    """The abilities of a model, from its file. None means unknown.

    ``insert``: the ids of its tokens for filling in the middle (prefix, suffix, middle); empty: it has none.
    """

    reasons: bool | None = None
    calls_tools: bool | None = None
    insert: tuple[int, ...] | None = None


class OllamaRequest(msgspec.Struct, frozen=True):
    """A translated request. ``name``: the model as the client wrote it. ``body``: without the model.
    ``loads``: it has no prompt, and only loads the model.

    ``keep_s``: how long the model stays loaded after the request; None: not set. ``idle``: the options that
    have no effect. ``has_webp``: an image is WebP. ``thinks``, ``calls_tools``: it needs a model that can.
    ``dimensions``: of the embeddings; None: all. ``alternatives``: each token of the answer has its
    ``top_logprobs``.
    """

    kind: Kind
    name: str
    path: bytes
    body: dict[str, Any]
    keep_s: float | None = None
    idle: tuple[str, ...] = ()
    has_webp: bool = False
    thinks: bool = False
    calls_tools: bool = False
    dimensions: int | None = None
    alternatives: bool = False
    loads: bool = False

    @property
    def embeds(self) -> bool:
        """Whether its model must be one for embeddings."""
        return self.kind in EMBEDS


_FEATURES: Final = ("think", "tools", "suffix")
"""Fields for which a model needs a feature."""


def read_request(path: bytes, body: bytes, features_of: Callable[[str], Features]) -> OllamaRequest:
    """Read the request in the body of a POST to ``path``, one of ``PATHS``. Raises Refused.

    ``features_of``: the features of the model of a name.
    """
    fields = decoded(body)
    name = model_of(fields)
    features = features_of(name) if any(is_given(fields, field) for field in _FEATURES) else Features()
    request = PATHS[path](name, fields, features)
    check_features(request, features)
    return request


def check_features(request: OllamaRequest, features: Features) -> None:
    """Raises Refused if the model lacks a feature that the request needs."""
    if request.calls_tools and features.calls_tools is False:
        raise refusal(
            f"{request.name[:80]!r} does not support tools: its chat template has none", "leave tools out"
        )
    if request.thinks and features.reasons is False:
        raise refusal(f"{request.name[:80]!r} does not support thinking", "leave think out")


def model_of(fields: Fields) -> str:
    """Return the field ``model``, or ``name`` of older clients."""
    name = text(fields, "model") or text(fields, "name")
    if not name:
        raise refusal("model is required", "GET /api/tags lists the models")
    return name


def _request(
    kind: Kind, name: str, path: bytes, body: dict[str, Any], fields: Fields, dimensions: int | None = None
) -> OllamaRequest:
    tools, thinks = "tools" in body, body.get("chat_template_kwargs", {}).get("enable_thinking") is True
    return OllamaRequest(
        kind,
        name,
        path,
        body,
        keep_s=keep_alive(fields),
        idle=without_effect(fields, samples=kind not in EMBEDS),
        has_webp=_has_webp(body.get("messages", ())),
        thinks=thinks,
        calls_tools=tools,
        dimensions=dimensions,
        alternatives="logprobs" in body and bool(integer(fields, "top_logprobs")),
    )


def _load(kind: Kind, name: str, fields: Fields) -> OllamaRequest:
    """A request without a prompt loads the model. The tokens of no text take no time of the model."""
    return replace(_request(kind, name, b"/tokenize", {"content": ""}, fields), loads=True)


# --- chat ------------------------------------------------------------------------------------------


def _chat(name: str, fields: Fields, features: Features) -> OllamaRequest:
    _refuse_unsupported(fields)
    messages, tools = objects(fields, "messages"), objects(fields, "tools")
    body = {"messages": _messages(messages), **_shared(fields, features)}
    if tools:
        body["tools"] = _tools(tools)
    if not messages:
        return _load(Kind.CHAT, name, fields)
    return _request(Kind.CHAT, name, b"/v1/chat/completions", body, fields)


def _messages(messages: Sequence[Fields]) -> list[dict[str, Any]]:
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


def _message(message: Fields, at: int, pending: list[tuple[str, str]]) -> dict[str, Any]:
    role = text(message, "role").lower()
    if role not in ("system", "user", "assistant", "tool"):
        raise refusal(f"role is {role[:40]!r}", "use system, user, assistant or tool")
    content = text(message, "content")
    own: dict[str, Any] = {"role": role, "content": content}
    if images := texts(message, "images"):
        own["content"] = _with_images(content, images)
    if thinking := text(message, "thinking"):
        own["reasoning_content"] = thinking
    if calls := objects(message, "tool_calls"):
        own["tool_calls"] = [_tool_call(call, f"call_{at}_{number}") for number, call in enumerate(calls)]
    return own | _result_of(message, pending) if role == "tool" else own


def _tool_call(call: Fields, id_: str) -> dict[str, Any]:
    """Read a call. ``id_`` is the id of a call without one."""
    function = object_of(call, "function")
    called = text(function, "name")
    if not called:
        raise refusal("an item of tool_calls names no function", "set function.name")
    object_of(function, "arguments")  # refuses what is not an object
    return {
        "id": text(call, "id") or id_,
        "type": "function",
        "function": {
            "name": called,
            "arguments": source(function, "arguments") if is_object(function, "arguments") else "{}",
        },
    }


def _result_of(message: Fields, pending: list[tuple[str, str]]) -> dict[str, str]:
    """The call of a result: that of its id; without an id the first of its name, else the first."""
    called, id_ = text(message, "tool_name"), text(message, "tool_call_id")
    if id_:
        fitting = [call for call in pending if call[0] == id_]
    else:
        fitting = [call for call in pending if call[1] == called] or pending
    if fitting:
        id_, name = fitting[0]
        called = called or name
        pending.remove(fitting[0])
    return {"tool_call_id": id_ or "call", **({"name": called} if called else {})}


def _tools(tools: Sequence[Fields]) -> list[Any]:
    for at, tool in enumerate(tools):
        try:
            called = text(object_of(tool, "function"), "name")
        except Refused as refused:
            raise refused.within(f"tools[{at}]") from None
        if not called:
            raise refusal(
                f"tools[{at}] has no function with a name", 'use {"type": "function", "function": …}'
            )
    return [{"type": "function", **tool} for tool in tools]


# --- generate --------------------------------------------------------------------------------------


def _generate(name: str, fields: Fields, features: Features) -> OllamaRequest:
    _refuse_unsupported(fields)
    if text(fields, "template"):
        raise refusal("template is not supported", "leave it out for the template of the model, or use raw")
    if is_given(fields, "context") and source(fields, "context").strip("[ \t\r\n]"):
        raise refusal("context is not supported", "send the conversation with /api/chat")
    prompt, system, suffix = text(fields, "prompt"), text(fields, "system"), text(fields, "suffix")
    raw = boolean(fields, "raw")
    images = texts(fields, "images")
    shared = _shared(fields, features)
    if not prompt and not suffix and not images:
        return _load(Kind.GENERATE, name, fields)
    if raw or suffix:
        others = {
            "system": bool(system),
            "images": bool(images),
            "think": is_given(fields, "think") and fields["think"] != _FALSE,
            "format": "response_format" in shared,
            "logprobs": "logprobs" in shared,
        }
        what = "suffix" if suffix else "raw"
        for field, is_set in others.items():
            if is_set:
                raise refusal(
                    f"{field} is not supported together with {what}", f"leave {field} or {what} out"
                )
        body = {**parameters(fields), "prompt": _insert(name, prompt, suffix, features) if suffix else prompt}
        if "stream" in shared:
            body["stream"] = True
        return _request(Kind.RAW, name, b"/completion", body, fields)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    content = _with_images(prompt, images) if images else prompt
    messages.append({"role": "user", "content": content})
    return _request(Kind.GENERATE, name, b"/v1/chat/completions", {"messages": messages, **shared}, fields)


def _insert(name: str, prompt: str, suffix: str, features: Features) -> list[str | int]:
    """The prompt that lets a model fill in the middle, as Ollama makes it.

    llama-server's /infill (b11434) also makes it, but cuts a prefix of more than 3/4 of a batch, and a
    suffix of more than 1/4, without a word. Of the empty text, it makes the token that begins a prompt.
    """
    if features.insert is None:
        raise refusal(
            f"it is not known yet whether {name[:80]!r} can fill in the middle (suffix)",
            "load the model first",
        )
    if not features.insert:
        raise refusal(
            f"{name[:80]!r} does not support suffix: its file names no tokens for filling in the middle",
            "leave suffix out",
        )
    before, after, middle = features.insert
    return ["", before, prompt, after, suffix, middle]


# --- chat and generate -----------------------------------------------------------------------------


def _refuse_unsupported(fields: Fields) -> None:
    if boolean(fields, "_debug_render_only"):
        raise refusal("_debug_render_only is not supported", "leave it out")
    if boolean(fields, "shift"):
        raise refusal("shift is not supported: llamasup drops no part of a conversation", "leave it out")
    boolean(fields, "truncate")


def _shared(fields: Fields, features: Features) -> dict[str, Any]:
    """The parameters of /v1/chat/completions that both paths have."""
    found = {**parameters(fields), **_format(fields), **_think(fields, features), **_logprobs(fields)}
    if boolean(fields, "stream", default=True):
        found |= {"stream": True, "stream_options": {"include_usage": True}}
    return found


def _format(fields: Fields) -> dict[str, Any]:
    if is_object(fields, "format"):
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": fields["format"]}}}
    wanted = text(fields, "format") if is_text(fields, "format") or not is_given(fields, "format") else None
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if wanted != "":
        raise refusal("format is neither json nor a JSON schema", 'use "json" or an object')
    return {}


_EFFORTS: Final = ("low", "medium", "high", "max")
_FALSE: Final = msgspec.Raw(b"false")
_TRUE: Final = msgspec.Raw(b"true")


def _think(fields: Fields, features: Features) -> dict[str, Any]:
    if not is_given(fields, "think"):
        return {}
    if fields["think"] == _FALSE:
        # A template without the switch ignores it; with a budget of 0, its model ends its thoughts at once.
        off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_budget_tokens": 0}
        return {} if features.reasons is False else off
    if fields["think"] == _TRUE:
        return {"chat_template_kwargs": {"enable_thinking": True}}
    effort = text(fields, "think") if is_text(fields, "think") else ""
    if effort not in _EFFORTS:
        raise refusal("think is neither true, false nor a level", f"use true, false, {', '.join(_EFFORTS)}")
    return {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": effort}}


def _logprobs(fields: Fields) -> dict[str, Any]:
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


def _with_images(content: str, images: Sequence[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if content else []
    for at, image in enumerate(images):
        media = _media_of(image)
        if media is None:
            raise refusal(
                f"images[{at}] is not a valid image", "use base64 of a PNG, JPEG, GIF, BMP or WebP file"
            )
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/{media};base64,{image}"}})
    return parts


def _has_webp(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    urls = (part["image_url"]["url"] for content in contents for part in content if "image_url" in part)
    return any(url.startswith("data:image/webp") for url in urls)


def _media_of(image: str) -> str | None:
    try:
        start = base64.b64decode(image[:_START_LETTERS], validate=True)
    except (binascii.Error, ValueError):
        return None
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "webp"
    return next((media for magic, media in _STARTS if start.startswith(magic)), None)


# --- embeddings ------------------------------------------------------------------------------------


def _embed(name: str, fields: Fields, features: Features) -> OllamaRequest:
    boolean(fields, "truncate")  # a text that does not fit is refused, whatever it says
    inputs = [text(fields, "input")] if is_text(fields, "input") else list(texts(fields, "input"))
    dimensions = integer(fields, "dimensions", 0)
    body = {"input": inputs, **parameters(fields, samples=False)}
    if not inputs or inputs == [""]:
        return _load(Kind.EMBED, name, fields)
    return _request(Kind.EMBED, name, b"/v1/embeddings", body, fields, dimensions or None)


def _embeddings(name: str, fields: Fields, features: Features) -> OllamaRequest:
    prompt = text(fields, "prompt")
    # Ollama does not normalize these.
    body = {"input": prompt, "embd_normalize": -1, **parameters(fields, samples=False)}
    if not prompt:
        return _load(Kind.EMBEDDINGS, name, fields)
    return _request(Kind.EMBEDDINGS, name, b"/v1/embeddings", body, fields)


PATHS: Final[Mapping[bytes, Callable[[str, Fields, Features], OllamaRequest]]] = {
    b"/api/chat": _chat,
    b"/api/generate": _generate,
    b"/api/embed": _embed,
    b"/api/embeddings": _embeddings,
}
"""The paths that run a model."""
