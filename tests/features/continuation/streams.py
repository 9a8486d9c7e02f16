"""Streams as llama-server b11434 sends them, of the demo model, and those that continue them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from llamasup.core.http.chunks import LAST_CHUNK, chunk

PIECES = ("Once", " there", " lived", " a", " sm", "ä", "ll", " \U0001f98a")
WHOLE = "".join(PIECES)


def framed(events: Sequence[str]) -> list[bytes]:
    """Each event in a chunk, as llama-server sends them, without the last chunk."""
    return [chunk(event.encode()) for event in events]


def complete(events: Sequence[str]) -> list[bytes]:
    return [*framed(events), LAST_CHUNK]


def data(value: Any, name: str = "") -> str:
    named = f"event: {name}\n" if name else ""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return f"{named}data: {text}\n\n"


def timings_of(prompt: int, new: int) -> dict[str, Any]:
    return {"cache_n": 0, "prompt_n": prompt, "predicted_n": new, "predicted_per_second": 9.5}


class ChatServer:
    """The streams of one server: each has its own identity."""

    route = "/v1/chat/completions"
    body: ClassVar = {"messages": [{"role": "user", "content": "Tell me"}], "stream": True, "max_tokens": 8}

    def __init__(self, identity: str) -> None:
        self._own = {
            "created": len(identity),
            "id": identity,
            "model": "demo",
            "object": "chat.completion.chunk",
        }

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> str:
        return data({"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], **self._own})

    def stream(self, pieces: Sequence[str], *, prompt: int = 17, prefix: str = "") -> list[str]:
        first, *rest = pieces
        usage = {
            "completion_tokens": len(pieces),
            "prompt_tokens": prompt,
            "total_tokens": prompt + len(pieces),
        }
        timings = timings_of(prompt, len(pieces))
        return [
            self._chunk({"role": "assistant", "content": None}),
            self._chunk({"content": prefix + first}),
            *(self._chunk({"content": piece}) for piece in rest),
            self._chunk({}, "length"),
            data({"choices": [], **self._own, "usage": usage, "timings": timings}),
            data("[DONE]"),
        ]


class TextServer:
    route = "/v1/completions"
    body: ClassVar = {"prompt": "Tell me", "stream": True, "max_tokens": 8}

    def __init__(self, identity: str) -> None:
        self._own = {"created": len(identity), "model": "demo", "object": "text_completion", "id": identity}

    def _chunk(self, text: str, finish: str | None = None, **more: Any) -> str:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        return data({"choices": [choice], **self._own, **more})

    def stream(self, pieces: Sequence[str], *, prompt: int = 17, prefix: str = "") -> list[str]:
        usage = {
            "completion_tokens": len(pieces),
            "prompt_tokens": prompt,
            "total_tokens": prompt + len(pieces),
        }
        return [
            *(self._chunk(piece) for piece in pieces),
            self._chunk("", "length", usage=usage),
            data("[DONE]"),
        ]


class CompletionServer:
    route = "/completion"
    body: ClassVar = {"prompt": "Tell me", "stream": True, "n_predict": 8}

    def __init__(self, identity: str) -> None:
        self._slot = len(identity)

    def stream(self, pieces: Sequence[str], *, prompt: int = 17, prefix: str = "") -> list[str]:
        events = [
            data(
                {
                    "index": 0,
                    "content": piece,
                    "tokens": [100 + PIECES.index(piece)],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": number,
                    "tokens_evaluated": prompt,
                }
            )
            for number, piece in enumerate(pieces, 1)
        ]
        end = {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": self._slot,
            "stop": True,
            "tokens_predicted": len(pieces),
            "tokens_evaluated": prompt,
            "generation_settings": {"n_predict": len(pieces), "max_tokens": len(pieces)},
            "prompt": f"<s>Tell me{prefix}",
            "has_new_line": False,
            "stop_type": "limit",
            "stopping_word": "",
            "timings": timings_of(prompt, len(pieces)),
        }
        return [*events, data(end)]


class MessagesServer:
    route = "/v1/messages"
    body: ClassVar = {"messages": [{"role": "user", "content": "Tell me"}], "stream": True, "max_tokens": 8}

    def __init__(self, identity: str) -> None:
        self._id = identity

    def _event(self, type_: str, **fields: Any) -> str:
        return data({"type": type_, **fields}, type_)

    def stream(self, pieces: Sequence[str], *, prompt: int = 17, prefix: str = "") -> list[str]:
        first, *rest = pieces
        message = {"id": self._id, "type": "message", "usage": {"input_tokens": prompt, "output_tokens": 0}}
        return [
            self._event("message_start", message=message),
            self._event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            *(
                self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
                for piece in (prefix + first, *rest)
            ),
            self._event("content_block_stop", index=0),
            self._event(
                "message_delta",
                delta={"stop_reason": "max_tokens", "stop_sequence": None},
                usage={"output_tokens": len(pieces)},
            ),
            self._event("message_stop"),
        ]


class ResponsesServer:
    route = "/v1/responses"
    body: ClassVar = {"input": "Tell me", "stream": True, "max_output_tokens": 8}

    def __init__(self, identity: str) -> None:
        self._id, self._item = f"resp_{identity}", f"msg_{identity}"

    def _event(self, type_: str, **fields: Any) -> str:
        return data({"type": type_, **fields}, type_)

    def stream(self, pieces: Sequence[str], *, prompt: int = 17, prefix: str = "") -> list[str]:
        first, *rest = pieces
        begun = {"id": self._id, "object": "response", "status": "in_progress"}
        text = prefix + "".join(pieces)
        part = {"type": "output_text", "text": text}
        item = {"type": "message", "status": "completed", "id": self._item, "content": [part]}
        usage = {"input_tokens": prompt, "output_tokens": len(pieces), "total_tokens": prompt + len(pieces)}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", item={"id": self._item, "type": "message"}),
            self._event("response.content_part.added", item_id=self._item, part={"type": "output_text"}),
            *(
                self._event("response.output_text.delta", item_id=self._item, delta=piece)
                for piece in (prefix + first, *rest)
            ),
            self._event("response.output_text.done", item_id=self._item, text=text),
            self._event("response.output_item.done", item=item),
            self._event(
                "response.completed",
                response={"id": self._id, "output": [item], "usage": usage},
                timings=timings_of(prompt, len(pieces)),
            ),
        ]


SERVERS = (ChatServer, TextServer, CompletionServer, MessagesServer, ResponsesServer)
