"""Requests long answers as streams, and reassembles the complete answer (pure).

llama-server (b11434) notices within a token that the client of a stream has gone. Without a stream, it
continues while other requests produce tokens: a batch could not yield. A short answer needs no stream, which
costs more.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llamasup.core.system.text import INVALID_JSON

STREAM_ABOVE_S: Final = 0.3
"""Longer answers are requested as streams, so another client waits at most this long for a slot."""
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
# Their streams do not have all that the complete answer has, or have several answers.
_UNSTREAMED: Final = (
    "logprobs",
    "top_logprobs",
    "n",
    "best_of",
    "echo",
    "n_probs",
    "return_tokens",
    "suffix",
)
_TEXTS: Final = ("content", "reasoning_content", "refusal")


def streamed(url: str, body: bytes) -> bytes | None:
    """Return the body that requests the same answer as a stream; None if it must be requested whole."""
    if url not in (_CHAT, _COMPLETIONS):
        return None
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except INVALID_JSON:
        return None  # the server reports what is wrong
    if any(asked.get(name) not in (None, False, 0, 1) or asked.get(name) is True for name in _UNSTREAMED):
        return None
    if url == _COMPLETIONS and not isinstance(asked.get("prompt"), str):
        return None
    options = asked.get("stream_options")
    options = options if isinstance(options, dict) else {}
    return msgspec.json.encode(
        {**asked, "stream": True, "stream_options": {**options, "include_usage": True}}
    )


class Assembly:
    """Takes the data of each event. ``error`` is that of an error event."""

    def __init__(self, url: str) -> None:
        self._is_chat = url == _CHAT
        self._head: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._is_done = False
        self.events = 0
        self.error: bytes | None = None

    def add(self, data: bytes) -> None:
        """Raises ValueError if the event is invalid."""
        if data.strip() == b"[DONE]":
            self._is_done = True
            return
        event = msgspec.json.decode(data)
        if not isinstance(event, dict) or "error" in event:
            self.error = data
            return
        self.events += 1
        for choice in event.get("choices") or ():
            self._finish = choice.get("finish_reason") or self._finish
            if self._is_chat:
                self._add_delta(choice.get("delta") or {})
            else:
                self._texts.setdefault("text", []).append(choice.get("text") or "")
        self._head |= {name: value for name, value in event.items() if name != "choices"}

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for name in _TEXTS:
            if isinstance(text := delta.get(name), str):
                self._texts.setdefault(name, []).append(text)
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(part.get("index", 0), {"type": "function", "function": {}})
            function = part.get("function") or {}
            call |= {name: part[name] for name in ("id", "type") if part.get(name)}
            if function.get("name"):
                call["function"]["name"] = function["name"]
            before = call["function"].get("arguments", "")
            call["function"]["arguments"] = before + (function.get("arguments") or "")

    def answer(self) -> bytes | None:
        """Return the complete answer; None if the stream has not ended in order."""
        if not self._is_done or self._finish is None:
            return None
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        choice: dict[str, Any] = {"finish_reason": self._finish, "index": 0}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": None, **texts}
            if self._calls:
                choice["message"]["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        else:
            choice |= {"text": texts.get("text", ""), "logprobs": None}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return msgspec.json.encode({"choices": [choice], **self._head, "object": kind})
